//! `Budgets`: the descriptors that the supervisor keeps for sessions, by device and by domain.

use super::journal_store::JournalStore;
use manyring_engine::Surplus;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The reserves of devices, and the surplus of each domain beyond the reserves of its devices.
#[derive(Debug, Default)]
pub(super) struct Budgets {
    /// The stores of devices that are not served yet. A store reserves the descriptors of its
    /// device when it is created, before sessions of other devices can use them up.
    stores: Mutex<HashMap<String, Arc<JournalStore>>>,
    /// A domain has one surplus for all its devices, sessions and device processes, also for those
    /// that an earlier supervisor handed over.
    surpluses: Mutex<HashMap<String, Surplus>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Budgets {
    /// Reserves the descriptors of a device with this many queues.
    pub(super) fn set_apart(&self, device: &str, queues: usize) {
        lock(&self.stores).insert(device.to_owned(), JournalStore::new(device, queues));
    }

    /// Returns the journal store of a device that is about to be served.
    pub(super) fn store(&self, device: &str, queues: usize) -> Arc<JournalStore> {
        let store = lock(&self.stores).remove(device);
        let store = store.filter(|store| store.queues() == queues);
        store.unwrap_or_else(|| JournalStore::new(device, queues))
    }

    /// Returns the surplus of descriptors of a domain.
    pub(super) fn surplus(&self, domain: &str) -> Surplus {
        let mut surpluses = lock(&self.surpluses);
        if let Some(surplus) = surpluses.get(domain) {
            return surplus.clone();
        }
        // Each boot of a Xen guest is a domain with a new number: drop the surpluses of old
        // domains.
        surpluses.retain(|_, surplus| surplus.is_used());
        surpluses.entry(domain.to_owned()).or_default().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::handoff::AdoptedSession;

    fn session(entries: u64) -> AdoptedSession {
        let fd = || std::fs::File::open("/dev/null").unwrap().into();
        let named = (1..=entries).map(|name| (name, vec![fd(), fd()])).collect();
        AdoptedSession { domain: "bad".to_owned(), socket: fd(), journal: Some(fd()), named }
    }

    #[test]
    fn what_a_domain_had_before_a_takeover_counts_against_it_after_that() {
        let budgets = Budgets::default();
        // Each has eight descriptors and three for each queue.
        ["a", "b"].iter().for_each(|device| budgets.set_apart(device, 2));
        let stores = ["a", "b"].map(|device| budgets.store(device, 2));
        for store in &stores {
            store.inherit(session(10), &budgets.surplus("bad"));
        }
        assert_eq!(budgets.surplus("bad").taken(), 2 * (2 + 20 - 14));
        assert_eq!(budgets.surplus("good").taken(), 0);
    }

    #[test]
    fn a_device_that_waits_to_be_served_has_its_part_already() {
        let budgets = Budgets::default();
        budgets.set_apart("a", 2);
        let (kept, other) = (budgets.store("a", 2), budgets.store("a", 2));
        assert_eq!((kept.part(), other.part()), (14, 14), "both have one");
        drop(kept);
        budgets.set_apart("a", 4);
        assert_eq!(budgets.store("a", 2).part(), 14, "the device came again with other queues");
    }
}

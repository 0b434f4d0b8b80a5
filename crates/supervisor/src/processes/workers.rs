//! How many workers the device process of a domain has: as many as its devices need.

use super::{Processes, Registered};
use manyring_config::plan::DevicePlan;
use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

/// Returns the least number of workers that a process needs for the device's `queue_workers`.
pub(crate) fn workers_of(device: &DevicePlan) -> usize {
    device.queue_workers.iter().max().map_or(0, |last| last + 1)
}

impl Processes {
    /// Records that the process of `domain` is to have a device, because its user has connected.
    pub(super) fn assign(&self, device: &str, domain: &str) {
        let mut fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(front) = fronts.get_mut(device).filter(|front| front.domain != domain) {
            front.domain = domain.to_owned();
        }
    }

    /// Returns the least number of workers with which a process of `domain` can serve the
    /// `queue_workers` of all its devices. A device that any user may have counts for the domain
    /// that has it.
    pub(super) fn workers_for(&self, domain: &str) -> usize {
        let fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
        let is_its = |of: &&Registered| of.domain == domain && !of.asks.is_closed();
        let here = fronts.values().filter(is_its).map(|of| of.workers).max();
        let adopted = self.adopted_workers();
        let follows = adopted.values().filter(|(of, _)| of == domain).map(|(_, workers)| *workers);
        here.into_iter().chain(follows).max().unwrap_or(0)
    }

    pub(super) fn adopted_workers(&self) -> MutexGuard<'_, HashMap<String, (String, usize)>> {
        self.adopted_workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::{Asked, Handoff};
    use manyring_config::plan::ANY_USER;
    use manyring_serve::assemble::Switches;
    use tokio::sync::mpsc;

    /// A device that waits for front-ends, and needs so many workers.
    fn registers(
        processes: &Processes,
        name: &str,
        domain: &str,
        workers: usize,
    ) -> mpsc::Receiver<Asked> {
        let (asks, asked) = mpsc::channel(1);
        let registered = Registered { asks, domain: domain.to_owned(), workers };
        processes.fronts.lock().unwrap().insert(name.to_owned(), registered);
        asked
    }

    #[test]
    fn a_process_has_the_workers_of_its_own_devices_and_of_no_others() {
        let processes = Processes::new(Vec::new(), &mut Handoff::default(), Switches::default());
        let usual = registers(&processes, "usual", ANY_USER, 0);
        let wide = registers(&processes, "wide", ANY_USER, 256);
        let _named = registers(&processes, "named", "b", 20);
        let (first, second) = (format!("{ANY_USER}1000"), format!("{ANY_USER}1001"));
        let of = |domain: &str| processes.workers_for(domain);
        processes.assign("usual", &first);
        assert_eq!([of(&first), of(&second), of("b"), of("c")], [0, 0, 20, 0]);
        // Its user connects, and then another one.
        processes.assign("wide", &first);
        assert_eq!([of(&first), of(&second)], [256, 0]);
        processes.assign("wide", &second);
        assert_eq!([of(&first), of(&second)], [0, 256]);
        drop((usual, wide));
        assert_eq!(of(&second), 0, "the device is gone");
    }

    #[test]
    fn the_first_process_after_a_takeover_has_the_workers_of_all_devices_that_were_handed_over() {
        let processes = Processes::new(Vec::new(), &mut Handoff::default(), Switches::default());
        let domain = format!("{ANY_USER}1000");
        let adopted = (domain.clone(), 40);
        processes.adopted_workers().insert("wide".to_owned(), adopted);
        let _usual = registers(&processes, "usual", &domain, 0);
        assert_eq!(processes.workers_for(&domain), 40);
        assert_eq!(processes.workers_for("other"), 0);
    }
}

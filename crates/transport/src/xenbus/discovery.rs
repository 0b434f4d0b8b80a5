//! Finds the devices: watches the folders that appear and vanish below `backend/KIND` of the
//! domain's home.

use super::DeviceId;
use super::store::{Changed, Store, StoreError, Watch};
use std::collections::BTreeSet;
use std::time::Duration;

/// The most devices, of all kinds together, that are known at a time; further ones are ignored.
pub const DEVICES_MAX: usize = 4096;
/// Pause before a request is repeated, if xenstore did not answer or had no room.
const PASSING_RETRY_DELAY: Duration = Duration::from_millis(200);

/// A device that is new, or that is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The device's back-end folder exists now. Some of its nodes may not be written yet.
    Appeared(DeviceId),
    /// The folder was removed.
    Vanished(DeviceId),
}

/// The known devices. Pure: the caller passes the listings of xenstore in.
#[derive(Debug, Default)]
pub struct Known {
    devices: BTreeSet<DeviceId>,
}

impl Known {
    /// Returns the known devices.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceId> {
        self.devices.iter()
    }

    /// Compares a listing of all devices of one kind with the known ones. Returns the devices that
    /// have vanished, then those that are new.
    pub fn look(&mut self, kind: &str, listing: BTreeSet<DeviceId>) -> Vec<Presence> {
        let of_kind = |id: &&DeviceId| id.kind == kind;
        let gone = self.devices.iter().filter(of_kind).filter(|id| !listing.contains(*id));
        let mut changes: Vec<_> = gone.cloned().map(Presence::Vanished).collect();
        self.devices.retain(|id| id.kind != kind || listing.contains(id));
        for id in listing.into_iter().filter(|id| id.kind == kind) {
            if self.devices.len() >= DEVICES_MAX {
                break;
            }
            if self.devices.insert(id.clone()) {
                changes.push(Presence::Appeared(id));
            }
        }
        changes
    }
}

/// Returns the devices in a domain's folder. Names that are no numbers are ignored.
#[must_use]
pub fn listing(kind: &str, domain: &str, children: &[String]) -> Vec<DeviceId> {
    let Some(domain) = number(domain).and_then(|n| u16::try_from(n).ok()) else {
        return Vec::new();
    };
    let devices = children.iter().filter_map(|name| number(name));
    devices.map(|device| DeviceId { kind: kind.to_owned(), domain, device }).collect()
}

/// Parses the name of a folder as a number. `None` for another spelling, like `01`: that is another
/// folder than `1`.
fn number(name: &str) -> Option<u32> {
    let number: u32 = name.parse().ok()?;
    (number.to_string() == name).then_some(number)
}

/// True if a change of this path can mean that a device of the kind appeared or vanished. Changes
/// below a device's folder do not: they concern that device only.
fn concerns(kind: &str, path: &str) -> bool {
    let folder = format!("backend/{kind}");
    let Some(at) = path.find(&folder) else { return !path.contains("backend/") };
    path[at + folder.len()..].split('/').filter(|name| !name.is_empty()).count() <= 2
}

/// Reports the devices of some kinds that appear and vanish.
#[derive(Debug)]
pub struct Discovery {
    store: Store,
    kinds: Vec<String>,
    watch: Watch,
    known: Known,
    /// True once all kinds have been listed.
    is_whole: bool,
}

impl Discovery {
    /// Watches the kinds.
    ///
    /// # Errors
    /// [`StoreError`]: xenstore refuses a watch, does not answer, or is lost.
    pub async fn new(store: Store, kinds: Vec<String>) -> Result<Self, StoreError> {
        let mut watch = store.watch();
        for kind in &kinds {
            watch.add(&format!("backend/{kind}")).await?;
        }
        Ok(Self { store, kinds, watch, known: Known::default(), is_whole: false })
    }

    /// Waits until devices have appeared or vanished. The first call returns all devices. Any call
    /// may return an empty list. May be cancelled only while it waits for a change.
    ///
    /// # Errors
    /// [`StoreError`]: the connection is over, or xenstore refuses to list a folder.
    pub async fn next(&mut self) -> Result<Vec<Presence>, StoreError> {
        let changed = self.watch.changed().await?;
        let mut presences = Vec::new();
        for kind in &self.kinds {
            let is_concerned = match &changed {
                Changed::Many => true,
                // At first each watch sends an event of its own: list all kinds at the first one.
                Changed::Paths(_) if !self.is_whole => true,
                Changed::Paths(paths) => paths.iter().any(|path| concerns(kind, path)),
            };
            if is_concerned {
                let listing = list_patiently(&self.store, kind).await?;
                presences.extend(self.known.look(kind, listing));
            }
        }
        self.is_whole = true;
        Ok(presences)
    }
}

/// Lists all devices of a kind. Retries while xenstore does not answer or has no room.
async fn list_patiently(store: &Store, kind: &str) -> Result<BTreeSet<DeviceId>, StoreError> {
    let mut is_told = false;
    loop {
        match list(store, kind).await {
            Err(error) if error.is_passing() => {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!(kind, %error, "xenstore request failed; retrying");
                }
                tokio::time::sleep(PASSING_RETRY_DELAY).await;
            }
            result => return result,
        }
    }
}

/// Lists all devices of a kind.
async fn list(store: &Store, kind: &str) -> Result<BTreeSet<DeviceId>, StoreError> {
    let mut devices = BTreeSet::new();
    let folder = format!("backend/{kind}");
    for domain in store.children(&folder).await?.unwrap_or_default() {
        let Some(children) = store.children(&format!("{folder}/{domain}")).await? else { continue };
        devices.extend(listing(kind, &domain, &children));
    }
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(kind: &str, domain: u16, device: u32) -> DeviceId {
        DeviceId { kind: kind.to_owned(), domain, device }
    }

    #[test]
    fn listing_with_new_and_missing_devices_is_told_as_what_appeared_and_vanished() {
        let mut known = Known::default();
        let set = |ids: &[DeviceId]| ids.iter().cloned().collect::<BTreeSet<_>>();
        let (a, b, c) = (id("vbd", 1, 51712), id("vbd", 1, 51728), id("vbd", 2, 51712));
        let appeared = known.look("vbd", set(&[a.clone(), b.clone()]));
        assert_eq!(appeared, [Presence::Appeared(a.clone()), Presence::Appeared(b.clone())]);
        assert_eq!(known.look("vbd", set(&[a.clone(), b.clone()])), []);
        let changed = known.look("vbd", set(&[b.clone(), c.clone()]));
        assert_eq!(changed, [Presence::Vanished(a), Presence::Appeared(c.clone())]);
        // Another kind's listing leaves these alone.
        let other = id("manyring", 1, 51712);
        let changed = known.look("manyring", set(std::slice::from_ref(&other)));
        assert_eq!(changed, [Presence::Appeared(other)]);
        assert_eq!(known.look("manyring", set(&[])).len(), 1);
        assert_eq!(known.devices().cloned().collect::<Vec<_>>(), [b, c]);
    }

    #[test]
    fn more_devices_than_the_bound_are_not_looked_at() {
        let mut known = Known::default();
        let many = (0..5000).map(|device| id("vbd", 1, device)).collect::<BTreeSet<_>>();
        assert_eq!(known.look("vbd", many.clone()).len(), DEVICES_MAX);
        assert_eq!(known.look("vbd", many), []);
        assert_eq!(known.look("vbd", BTreeSet::new()).len(), DEVICES_MAX);
    }

    #[test]
    fn folder_whose_name_is_no_plain_number_is_no_device() {
        let children = ["51712", "051712", "+1", "xvda", "-1", "4294967296"].map(str::to_owned);
        assert_eq!(listing("vbd", "7", &children), [id("vbd", 7, 51712)]);
        assert_eq!(listing("vbd", "70000", &children), []);
        assert_eq!(listing("vbd", "x", &children), []);
    }

    #[test]
    fn change_below_a_devices_folder_is_no_reason_to_list_devices() {
        for (path, expected) in [
            ("backend/vbd", true),
            ("backend/vbd/7", true),
            ("backend/vbd/7/51712", true),
            ("backend/vbd/7/51712/state", false),
            ("/local/domain/0/backend/vbd/7/51712", true),
            ("/local/domain/0/backend/vbd/7/51712/state", false),
            ("/local/domain/0/backend", true),
            ("backend/qdisk/7/51712", false),
        ] {
            assert_eq!(concerns("vbd", path), expected, "{path}");
        }
    }
}

//! `Registry`: the devices that the control API shows and changes, with the disks of Xen guests.

use super::events::Events;
use manyring_engine::aside_for;
use manyring_serve::view::DeviceView;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::Semaphore;

/// A device that is served.
#[derive(Debug)]
pub struct Controlled {
    /// The view of the device that the API shows: its state, settings and counters.
    pub view: DeviceView,
    /// Permits one change at a time: while the host hangs, each further change would block a
    /// thread.
    pub changing: Arc<Semaphore>,
    /// Keys whose new values wait for the end of the session.
    pending: Mutex<Vec<String>>,
}

impl Controlled {
    /// Shows that new values of these keys wait for the end of the session.
    pub(crate) fn put_off(&self, keys: Vec<String>) {
        *self.pending.lock().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    /// Returns the keys whose new values wait for the end of the session.
    pub fn pending_keys(&self) -> Vec<String> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A device that is not served, because another process holds a resource of the device, or because
/// opening the device failed.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// The device's name in the configuration.
    pub name: String,
    /// `blk` or `net`.
    pub kind: &'static str,
    /// The path or descriptor of the device's socket, as text.
    pub socket: String,
    /// The key of the configuration that names the missing resource.
    pub key: &'static str,
    /// One sentence: which process holds the missing resource, if the system tells that, or which
    /// error occurred.
    pub reason: String,
    /// True if opening failed for another reason than a resource that is in use. The device is
    /// retried in both cases.
    pub(crate) is_failed: bool,
    /// The origin of the device ([`manyring_config::plan::Place::origin`]).
    pub origin: &'static str,
}

impl Waiting {
    /// Returns the device's state, as the API shows it.
    pub fn state(&self) -> &'static str {
        if self.is_failed { "failed" } else { "waiting" }
    }
}

/// A device of the configuration, or a disk of a Xen guest.
#[derive(Clone, Debug)]
pub enum Entry {
    /// The device is served.
    Served(Arc<Controlled>),
    /// The device waits for a resource, or could not be opened.
    Waiting(Arc<Waiting>),
}

impl Entry {
    fn name(&self) -> &str {
        match self {
            Self::Served(controlled) => controlled.view.name(),
            Self::Waiting(waiting) => &waiting.name,
        }
    }
}

/// The devices, in the order in which they were added. Clones share the list.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    entries: Arc<RwLock<Vec<Entry>>>,
    events: Events,
}

impl Registry {
    fn read(&self) -> RwLockReadGuard<'_, Vec<Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Entry>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all devices, as they are at this moment.
    pub fn all(&self) -> Vec<Entry> {
        self.read().clone()
    }

    /// Takes all devices out of the registry, because the process ends.
    pub fn take(&self) -> Vec<Entry> {
        std::mem::take(&mut *self.write())
    }

    /// Returns the numbers of devices that are served and that wait, as a sentence.
    pub fn in_words(&self) -> String {
        let (all, served) = (self.read().len(), self.served().len());
        match all - served.min(all) {
            0 => format!("serving {served} devices"),
            waiting => format!("serving {served} devices, {waiting} wait"),
        }
    }

    /// Returns the devices that are served at this moment.
    pub fn served(&self) -> Vec<Arc<Controlled>> {
        let of = |entry: &Entry| match entry {
            Entry::Served(controlled) => Some(controlled.clone()),
            Entry::Waiting(_) => None,
        };
        self.read().iter().filter_map(of).collect()
    }

    /// Returns the entry of the device with this name.
    pub fn find(&self, name: &str) -> Option<Entry> {
        self.read().iter().find(|entry| entry.name() == name).cloned()
    }

    /// Adds a device that is served. It replaces the entry of the same name, if there is one.
    pub(crate) fn add(&self, view: DeviceView) {
        let changing = Arc::new(Semaphore::new(1));
        let controlled = Arc::new(Controlled { view, changing, pending: Mutex::default() });
        self.tell_of_sessions(&controlled);
        release(self.put(Entry::Served(controlled)));
    }

    /// Returns the latest events of devices.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Records an event for each front-end of a device that connects or leaves, until the device
    /// is removed or shown as waiting.
    fn tell_of_sessions(&self, device: &Arc<Controlled>) {
        let (events, name) = (self.events.clone(), device.view.name().to_owned());
        let (mut connected, shown) = (device.view.connected.subscribe(), Arc::downgrade(device));
        tokio::spawn(async move {
            while connected.changed().await.is_ok() && shown.strong_count() > 0 {
                let is_connected = *connected.borrow_and_update();
                events.tell(&name, if is_connected { "connected" } else { "left" }, None);
            }
        });
    }

    /// Adds a device that waits. It replaces the entry of the same name, if there is one.
    pub(crate) fn wait(&self, waiting: Waiting) {
        release(self.put(Entry::Waiting(Arc::new(waiting))));
    }

    /// Shows a device that was served as failed, for this reason.
    pub(crate) fn fail(&self, name: &str, reason: String) {
        release(self.end(name, reason, true));
    }

    /// Shows a device as being replaced by another one of its name. The caller drops the former
    /// entry with [`closed`].
    #[must_use]
    pub(crate) fn make_way(&self, name: &str) -> Option<Entry> {
        self.end(name, "the device is being replaced".to_owned(), false)
    }

    fn end(&self, name: &str, reason: String, is_failed: bool) -> Option<Entry> {
        let Entry::Served(controlled) = self.find(name)? else { return None };
        let view = &controlled.view;
        let kind = if view.side.as_net().is_some() { "net" } else { "blk" };
        let (socket, origin) = (view.socket.clone(), view.origin);
        let (name, key) = (name.to_owned(), "socket_path");
        let waiting = Waiting { name, kind, socket, key, reason, is_failed, origin };
        self.put(Entry::Waiting(Arc::new(waiting)))
    }

    /// Adds an entry; returns the entry of the same name that it replaces.
    fn put(&self, entry: Entry) -> Option<Entry> {
        let mut devices = self.write();
        match &entry {
            Entry::Served(_) => self.events.tell(entry.name(), "serving", None),
            Entry::Waiting(waiting) => {
                let event = if waiting.is_failed { "failed" } else { "waiting" };
                self.events.tell(&waiting.name, event, Some(waiting.reason.clone()));
            }
        }
        match devices.iter_mut().find(|former| former.name() == entry.name()) {
            Some(former) => Some(std::mem::replace(former, entry)),
            None => {
                devices.push(entry);
                None
            }
        }
    }

    /// Removes a device. The caller drops its entry with [`closed`].
    #[must_use]
    pub(crate) fn remove(&self, name: &str) -> Option<Entry> {
        let mut devices = self.write();
        let at = devices.iter().position(|entry| entry.name() == name)?;
        self.events.tell(name, "removed", None);
        Some(devices.remove(at))
    }
}

/// Drops an entry on another thread: it may be the last owner of the device, and closing an image
/// or a block device blocks as long as the host takes.
pub async fn closed(entry: Entry) {
    let name = entry.name().to_owned();
    aside_for(&name, move || drop(entry)).await;
}

/// Drops an entry as [`closed`] does, and does not wait for it.
fn release(entry: Option<Entry>) {
    if let Some(entry @ Entry::Served(_)) = entry {
        tokio::spawn(closed(entry));
    }
}

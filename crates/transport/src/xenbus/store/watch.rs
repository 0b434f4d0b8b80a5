//! Watches: they collect the paths that have changed, until their owner asks for these.

use super::{Store, StoreError};
use manyring_wire::xen::path::Watched;
use manyring_wire::xen::store::Request;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;

/// The most changed paths that are collected; if there are more, [`Changed::Many`] is reported.
const PATHS_MAX: usize = 256;

/// The changes since the last call of [`Watch::changed`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// These paths changed. They are absolute.
    Paths(BTreeSet<String>),
    /// More paths changed than are collected.
    Many,
}

/// The changes that the owner of the watches has not taken yet.
#[derive(Debug, Default)]
struct PendingChanges {
    paths: BTreeSet<String>,
    many: bool,
}

/// The state that the owner of some watches shares with the connection's task.
#[derive(Debug, Default)]
pub(super) struct WatchState {
    pending: Mutex<PendingChanges>,
    pub(super) fired: Notify,
}

impl WatchState {
    pub(super) fn note(&self, path: &str) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.many || pending.paths.len() >= PATHS_MAX && !pending.paths.contains(path) {
            pending.many = true;
            pending.paths.clear();
        } else {
            pending.paths.insert(path.to_owned());
        }
        self.fired.notify_one();
    }

    fn take(&self) -> Option<Changed> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let PendingChanges { paths, many } = std::mem::take(&mut *pending);
        match many {
            true => Some(Changed::Many),
            false => (!paths.is_empty()).then_some(Changed::Paths(paths)),
        }
    }
}

/// A set of watches on nodes and everything below them, whose events are collected together. Each
/// watch fires once when it is set. Dropping this removes the watches.
#[derive(Debug)]
pub struct Watch {
    store: Store,
    /// The watched paths, by the tokens of their watches.
    paths: BTreeMap<u32, String>,
    state: Arc<WatchState>,
}

impl Watch {
    pub(super) fn new(store: Store) -> Self {
        Self { store, paths: BTreeMap::new(), state: Arc::default() }
    }

    /// Waits until something has changed since the last call. May be cancelled.
    ///
    /// # Errors
    /// [`StoreError::Lost`]: the connection is over, and with it all watches.
    pub async fn changed(&self) -> Result<Changed, StoreError> {
        loop {
            if let Some(changed) = self.state.take() {
                return Ok(changed);
            }
            if let Some(reason) = self.store.table.end() {
                return Err(StoreError::Lost(reason));
            }
            self.state.fired.notified().await;
        }
    }

    /// Watches one more node, whether or not it exists.
    ///
    /// # Errors
    /// [`StoreError`]: the path is wrong; or xenstore refuses, does not answer, or is lost.
    pub async fn add(&mut self, path: &str) -> Result<(), StoreError> {
        let path = &self.store.absolute(path);
        let wrong = |error| StoreError::Path { path: path.to_owned(), error };
        let watched = Watched::parse(path.as_bytes()).map_err(wrong)?;
        let token = self.store.table.add_watch(self.state.clone());
        self.paths.insert(token, path.to_owned());
        let name = token.to_string();
        let request = Request::Watch { watched, token: name.as_bytes(), depth: None };
        let result = self.store.ask(&request, 0).await.map(drop);
        // A server that did not answer in time may still set the watch later: remove it.
        if result.is_err() && self.paths.remove(&token).is_some() {
            self.store.unwatch(token, path);
        }
        result
    }

    /// Removes the watch of a node.
    pub fn remove(&mut self, path: &str) {
        let (store, path) = (&self.store, self.store.absolute(path));
        self.paths.retain(|token, watched| {
            let stays = *watched != path;
            if !stays {
                store.unwatch(*token, watched);
            }
            stays
        });
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        for (token, path) in &self.paths {
            self.store.unwatch(*token, path);
        }
    }
}

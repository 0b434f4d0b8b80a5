//! Watches: what has changed, until somebody looks.

use super::{Store, StoreError};
use manyring_wire::xen::path::Watched;
use manyring_wire::xen::store::Request;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;

/// Paths that a watch remembers; of more, it says that there were many.
const PATHS_MAX: usize = 256;

/// What a watch saw since it was asked last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// These paths changed. They are absolute.
    Paths(BTreeSet<String>),
    /// More paths than a watch remembers.
    Many,
}

/// What a watch has seen and nobody has taken yet.
#[derive(Debug, Default)]
struct Pending {
    paths: BTreeSet<String>,
    many: bool,
}

/// A watch's end in the client, shared by its owner and the connection.
#[derive(Debug, Default)]
pub(super) struct WatchState {
    pending: Mutex<Pending>,
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
        let Pending { paths, many } = std::mem::take(&mut *pending);
        match many {
            true => Some(Changed::Many),
            false => (!paths.is_empty()).then_some(Changed::Paths(paths)),
        }
    }
}

/// Watches on nodes and everything below them, heard together. Each fires once when it is set.
/// Dropped, they are removed.
#[derive(Debug)]
pub struct Watch {
    store: Store,
    /// By their tokens.
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
    /// [`StoreError::Lost`]: the watch is over.
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
    /// [`StoreError`]
    pub async fn add(&mut self, path: &str) -> Result<(), StoreError> {
        let path = &self.store.absolute(path);
        let wrong = |error| StoreError::Path { path: path.to_owned(), error };
        let watched = Watched::parse(path.as_bytes()).map_err(wrong)?;
        let token = self.store.table.add_watch(self.state.clone());
        self.paths.insert(token, path.to_owned());
        let name = token.to_string();
        let request = Request::Watch { watched, token: name.as_bytes(), depth: None };
        let result = self.store.ask(&request, 0).await.map(drop);
        // A server that is slow may set it all the same.
        if result.is_err() && self.paths.remove(&token).is_some() {
            self.store.unwatch(token, path);
        }
        result
    }

    /// Watches a node no more.
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

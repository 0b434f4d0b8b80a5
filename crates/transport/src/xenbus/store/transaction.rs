//! Transactions: reads and writes that take effect together, and are retried if other clients write
//! the same nodes before the commit.

use super::{ORDERS_MAX, Store, StoreError, TRIES_MAX, TRY_DELAY, parse};
use manyring_wire::xen::store::Request;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;

/// Counts the attempts of a transaction, which is retried if other clients change its nodes.
///
/// ```text
/// loop { begin a transaction; read and write in it; end it; leave unless it must be tried again }
/// ```
#[derive(Debug)]
pub struct Tries {
    pub(super) left: u32,
    pause: Duration,
}

impl Default for Tries {
    fn default() -> Self {
        Self { left: TRIES_MAX, pause: TRY_DELAY }
    }
}

impl Tries {
    /// Commits the transaction if `result` is `Ok`, and drops it otherwise. `None`: other clients
    /// have changed its nodes. The caller must retry it now; this function has paused already.
    ///
    /// # Errors
    /// The error of `result`, or of the commit. [`StoreError::Contended`]: this was the last
    /// attempt, the 16th.
    pub async fn end<T>(
        &mut self,
        mut transaction: Transaction,
        result: Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        let result = match result {
            Ok(value) => transaction.commit().await.map(|()| value),
            Err(error) => Err(error),
        };
        drop(transaction);
        match result {
            Err(error) if error.is_conflict() => {}
            result => return result.map(Some),
        }
        self.pause().await;
        if self.left == 0 { Err(StoreError::Contended) } else { Ok(None) }
    }

    pub(super) async fn pause(&mut self) {
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            tokio::time::sleep(self.pause).await;
            self.pause = (self.pause * 2).min(32 * TRY_DELAY);
        }
    }
}

/// An open transaction. If it is dropped without a commit, it changes nothing.
#[derive(Debug)]
pub struct Transaction {
    pub(super) store: Store,
    pub(super) id: u32,
    pub(super) is_open: bool,
    pub(super) _permit: OwnedSemaphorePermit,
}

impl Transaction {
    /// Reads a node; `None`: there is no such node.
    ///
    /// # Errors
    /// As for [`Store::read`].
    pub async fn read(&self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.read_in(path, self.id).await
    }

    /// Reads many nodes. Sends many requests before it waits for replies.
    ///
    /// # Errors
    /// As for [`Store::read`].
    pub async fn read_all(&self, paths: &[String]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let mut values = Vec::with_capacity(paths.len());
        let paths: Vec<_> = paths.iter().map(|path| self.store.absolute(path)).collect();
        for burst in paths.chunks(ORDERS_MAX / 2) {
            let mut replies = Vec::with_capacity(burst.len());
            for path in burst {
                let request = Request::Read(parse(path)?);
                replies.push((self.store.send(&request, self.id).await?, request));
            }
            for (reply, request) in replies {
                match self.store.wait(&request, reply).await {
                    Ok(value) => values.push(Some(value)),
                    Err(error) if error.is_missing() => values.push(None),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(values)
    }

    /// Writes a node.
    ///
    /// # Errors
    /// As for [`Store::read`]; [`StoreError::TooLong`]: the value does not fit into a message.
    pub async fn write(&self, path: &str, value: &[u8]) -> Result<(), StoreError> {
        let path = self.store.absolute(path);
        let request = Request::Write { path: parse(&path)?, value };
        self.store.ask(&request, self.id).await.map(drop)
    }

    /// Removes a node and everything below it, if it exists.
    ///
    /// # Errors
    /// As for [`Store::read`].
    pub async fn remove(&self, path: &str) -> Result<(), StoreError> {
        let path = self.store.absolute(path);
        match self.store.ask(&Request::Rm(parse(&path)?), self.id).await {
            Err(error) if !error.is_missing() => Err(error),
            _ => Ok(()),
        }
    }

    async fn commit(&mut self) -> Result<(), StoreError> {
        let request = Request::TransactionEnd { commit: true };
        let reply = self.store.send(&request, self.id).await?;
        self.is_open = false;
        self.store.wait(&request, reply).await.map(drop)
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if self.is_open {
            self.store.forget(&Request::TransactionEnd { commit: false }, self.id);
        }
    }
}

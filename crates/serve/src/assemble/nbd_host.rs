//! `Remote`: the supervisor's object for an NBD disk that a device process serves.
//!
//! The supervisor makes the connections: only to the address in the plan, and no more often than
//! one reconnecting disk needs. It never reads bytes of the server: a device process negotiates on
//! the connected socket, also when the size of the disk is asked for ([`Measurer`]).

use crate::times::{NBD_CONNECT, NBD_CONNECT_EACH};
use manyring_backend::blk::{Connection, Disk, DiskQueue, Geometry};
use manyring_engine::{Rate, aside_for};
use manyring_nbd::{
    Address, BLOCK_MAX, Blocks, Connected, Export, JoinError, Server, Target, Uri, fits, geometry,
    queues_max,
};
use manyring_protocol::nbd::{ExportSpec, NbdFailure, NbdTarget};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Longest error text about a server that is accepted from another process, in characters.
const TEXT_MAX: usize = 512;
/// Connections that a disk may make at once, and have open, beyond one for each queue.
const CONNECTS_MORE: u32 = 16;
/// The size of a disk in bytes is below this number.
const SIZE_END: u64 = 1 << 63;

/// Asks an NBD server for the properties of its export, in another process.
pub trait Measurer: Debug + Send + Sync {
    /// Returns the export of the server to which `connected` leads. Blocks.
    ///
    /// # Errors
    /// The reason, in a text of the other process, which may contain anything.
    fn measure(
        &self,
        device: &str,
        connected: Connected,
        target: NbdTarget,
    ) -> Result<ExportSpec, NbdFailure>;
}

/// How the supervisor learns the size of a disk that a device process serves, and the number of
/// queues for which it makes connections.
#[derive(Clone, Debug)]
pub struct Remotely {
    pub(crate) measurer: Arc<dyn Measurer>,
    pub(crate) queues: usize,
    /// From the former supervisor: the target (the export's name that it asked the server for), and
    /// the export (size and flags) that the guest was told.
    pub(crate) told: Option<(NbdTarget, ExportSpec)>,
}

/// By device: the export that the former supervisor handed over. Clones share the table.
#[derive(Clone, Debug, Default)]
pub struct AdoptedExports(Arc<Mutex<HashMap<String, (NbdTarget, ExportSpec)>>>);

impl AdoptedExports {
    /// Makes the table of what the former supervisor handed over, by device.
    pub fn new(all: HashMap<String, (NbdTarget, ExportSpec)>) -> Self {
        Self(Arc::new(Mutex::new(all)))
    }

    /// Removes and returns the export of a device. So, if the disk is opened once more later, it is
    /// measured.
    pub(super) fn take(&self, device: &str) -> Option<(NbdTarget, ExportSpec)> {
        lock(&self.0).remove(device)
    }
}

/// The disk of an NBD server, to which a device process connects.
#[derive(Debug)]
pub struct Remote {
    device: String,
    address: Address,
    target: NbdTarget,
    read_only: bool,
    measurer: Arc<dyn Measurer>,
    told: Mutex<Export>,
    /// The counters of the connections, as the device process reported them.
    connections: Mutex<Vec<Connection>>,
    connections_max: usize,
    pace: Mutex<Rate>,
    /// Locked while a thread connects, which may take long (DNS): one connection at a time.
    connecting: Arc<tokio::sync::Mutex<()>>,
}

impl Remote {
    /// Opens the disk at `uri`, and has it measured. If the former supervisor handed over an export
    /// of the same target, that export is used instead. May block for some seconds.
    ///
    /// # Errors
    /// [`JoinError`].
    pub(super) fn open(
        device: &str,
        uri: &Uri,
        read_only: bool,
        Remotely { measurer, queues, told }: Remotely,
    ) -> Result<Arc<Self>, JoinError> {
        let Target { export, tls } = Target::of(uri);
        let (device, address) = (device.to_owned(), Address::of(uri));
        let target = NbdTarget { export, tls };
        let told = told.filter(|(asked, _)| *asked == target).and_then(|(_, told)| export_of(told));
        let told = match told {
            Some(told) => told,
            None => measured(&*measurer, &device, &address, &target)?,
        };
        let queues = u32::try_from(queues).unwrap_or(u32::MAX);
        let at_once = queues.saturating_add(CONNECTS_MORE);
        let connections_max = at_once as usize;
        let pace = pace(at_once, Instant::now());
        let (connections, connecting) = Default::default();
        let (told, pace) = (Mutex::new(told), Mutex::new(pace));
        Ok(Arc::new(Self {
            device,
            address,
            target,
            read_only,
            measurer,
            told,
            connections,
            connections_max,
            pace,
            connecting,
        }))
    }

    /// Returns the export with the size and flags that the guest has read.
    pub fn told(&self) -> ExportSpec {
        spec_of(&lock(&self.told))
    }

    /// Returns the maximum number of connections that may be open at once.
    pub fn connections_max(&self) -> usize {
        self.connections_max
    }

    /// Returns the target and the export for the next supervisor, which then need not ask the
    /// server again.
    pub fn left(&self) -> (NbdTarget, ExportSpec) {
        (self.target.clone(), self.told())
    }

    /// Connects for the device process, once the earlier connects have ended and the pace allows
    /// it. Gives up after `limit`.
    pub async fn connect(self: Arc<Self>, limit: Duration) -> Result<Connected, NbdFailure> {
        let turn = self.connecting.clone().lock_owned().await;
        let at = turn_of(&mut lock(&self.pace), Instant::now());
        sleep_until(at).await;
        let (device, limit) = (self.device.clone(), limit.min(NBD_CONNECT));
        let connected = aside_for(&device, move || {
            let _turn = turn;
            self.address.connect(limit)
        });
        let connected = connected.await.unwrap_or_else(|| Err(failed("internal error")));
        connected.map_err(|error| failure_of(&error))
    }

    /// Stores the connections' counters, which the API and the metrics show.
    pub(crate) fn show(&self, connections: Vec<Connection>) {
        *lock(&self.connections) = connections;
    }

    fn measured(&self) -> Result<Export, Errno> {
        let Self { device, address, target, measurer, .. } = self;
        measured(&**measurer, device, address, target).map_err(|error| self.unmeasured(&error))
    }

    fn unmeasured(&self, error: &JoinError) -> Errno {
        let device = &self.device;
        tracing::warn!(device, "cannot measure the NBD server's disk: {error}");
        Errno::IO
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(text: &str) -> JoinError {
    JoinError::Elsewhere { text: text.to_owned(), is_limit: false, passes: true }
}

fn measured(
    measurer: &dyn Measurer,
    device: &str,
    address: &Address,
    target: &NbdTarget,
) -> Result<Export, JoinError> {
    let connected = address.connect(NBD_CONNECT)?;
    let found = measurer.measure(device, connected, target.clone()).map_err(error_of)?;
    export_of(found).ok_or_else(|| JoinError::Disk("has an impossible disk".to_owned()))
}

/// Turns a failure that another process reported into an error of this process. The text may come
/// from a server, so control characters are replaced and the text is cut.
pub(crate) fn error_of(failure: NbdFailure) -> JoinError {
    let NbdFailure { text, is_limit, passes } = failure;
    let shown = |c: char| if c.is_control() { '?' } else { c };
    let text = text.chars().take(TEXT_MAX).map(shown).collect();
    JoinError::Elsewhere { text, is_limit, passes }
}

/// Converts an error for the message to another process.
pub(crate) fn failure_of(error: &JoinError) -> NbdFailure {
    let text = match error {
        JoinError::Tls(error) => error.without_folder(),
        error => error.to_string(),
    };
    let text = text.chars().take(TEXT_MAX).collect();
    NbdFailure { text, is_limit: error.is_limit(), passes: error.passes() }
}

/// Converts an export for the message to another process.
pub(crate) fn spec_of(export: &Export) -> ExportSpec {
    let Export { size, flags, blocks: Blocks { min, preferred, max }, structured } = *export;
    let (block_min, block_preferred, block_max) = (min, preferred, max);
    ExportSpec { size, flags, block_min, block_preferred, block_max, structured }
}

/// Converts the export in a message of another process; `None`: no server can have such an export.
pub(crate) fn export_of(spec: ExportSpec) -> Option<Export> {
    let ExportSpec { size, flags, block_min, block_preferred, block_max, structured } = spec;
    let blocks = Blocks { min: block_min, preferred: block_preferred, max: block_max };
    // The same limits as in the NBD handshake, and as for values in a guest's config space.
    let is_possible = block_min.is_power_of_two()
        && block_min <= BLOCK_MAX
        && block_preferred.is_power_of_two()
        && block_preferred >= block_min.max(512)
        && block_max >= block_preferred;
    (is_possible && size < SIZE_END).then_some(Export { size, flags, blocks, structured })
}

impl Disk for Remote {
    fn geometry(&self) -> Geometry {
        geometry(&lock(&self.told), self.read_only)
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        // Only the device process opens queues.
        Err(Errno::OPNOTSUPP)
    }

    fn queues_max(&self) -> usize {
        queues_max(&lock(&self.told))
    }

    fn connections(&self) -> Vec<Connection> {
        lock(&self.connections).clone()
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        if size.is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        let found = self.measured()?;
        let mut told = lock(&self.told);
        fits(&Export { size: 0, ..*told }, &found, self.read_only)
            .map_err(|error| self.unmeasured(&error))?;
        // The guest keeps the features that it has negotiated.
        told.size = found.size;
        Ok(geometry(&told, self.read_only))
    }

    fn measure(&self) -> Result<u64, Errno> {
        Ok(geometry(&self.measured()?, self.read_only).size)
    }

    fn kind(&self) -> &'static str {
        "nbd"
    }
}

/// Returns the rate at which connections to a server may be made: `more` + 1 at once, then one each
/// [`NBD_CONNECT_EACH`].
fn pace(more: u32, now: Instant) -> Rate {
    Rate::of(more.saturating_add(1), NBD_CONNECT_EACH, now)
}

/// Charges one connection to `pace`; returns the time from which it may be made.
fn turn_of(pace: &mut Rate, now: Instant) -> Instant {
    let due = pace.due().max(now);
    pace.charge(NBD_CONNECT_EACH, now);
    due
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_all_queues_come_at_once_and_others_one_by_one() {
        let now = Instant::now();
        let mut pace = pace(4, now);
        assert!((0..5).all(|_| turn_of(&mut pace, now) == now));
        for nth in 1..4 {
            assert_eq!(turn_of(&mut pace, now), now + NBD_CONNECT_EACH * nth);
        }
        // After a minute without connections the whole burst is allowed again.
        let later = now + Duration::from_secs(60);
        assert!((0..5).all(|_| turn_of(&mut pace, later) == later));
        assert_eq!(turn_of(&mut pace, later), later + NBD_CONNECT_EACH);
    }

    #[test]
    fn what_another_process_says_of_a_server_is_checked() {
        let good = ExportSpec {
            size: 1 << 20,
            flags: 3,
            block_min: 1,
            block_preferred: 4096,
            block_max: 1 << 20,
            structured: true,
        };
        assert_eq!(export_of(good).map(|export| spec_of(&export)), Some(good));
        for bad in [
            ExportSpec { size: u64::MAX, ..good },
            ExportSpec { block_min: 0, ..good },
            ExportSpec { block_min: 3, ..good },
            ExportSpec { block_min: 8192, block_preferred: 8192, ..good },
            ExportSpec { block_preferred: 0, ..good },
            ExportSpec { block_preferred: 256, ..good },
            ExportSpec { block_max: 2048, ..good },
            ExportSpec { block_max: 0, ..good },
        ] {
            assert_eq!(export_of(bad), None, "{bad:?}");
        }
        let text = "\u{1b}[2J\n".repeat(1000);
        let error = error_of(NbdFailure { text, is_limit: true, passes: true });
        let said = error.to_string();
        assert!(said.len() == TEXT_MAX && said.starts_with("?[2J??[2J"), "{said}");
        assert!(error.is_limit() && error.passes());
    }
}

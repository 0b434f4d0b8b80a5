//! `Remote`: the disk of an NBD server that a device process serves, as the supervisor has it.
//!
//! The supervisor connects, at the pace that one reconnecting disk needs, and to the address of the
//! plan alone. It never reads what the server sends: another process negotiates, also to find out
//! how large the disk is ([`Measurer`]).

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

/// Longest text of another process about a server, in characters.
const TEXT_MAX: usize = 512;
/// Connections that a disk may make at once, and have open, in addition to one for each queue.
const CONNECTS_MORE: u32 = 16;
/// The size of a disk ends below this.
const SIZE_END: u64 = 1 << 63;

/// Asks a server for its export, in another process.
pub trait Measurer: Debug + Send + Sync {
    /// The export that a socket leads to. Blocks.
    ///
    /// # Errors
    /// The reason, as the other process gives it: any text.
    fn measure(
        &self,
        device: &str,
        connected: Connected,
        target: NbdTarget,
    ) -> Result<ExportSpec, NbdFailure>;
}

/// How the supervisor gets to know the size of a disk that it does not serve, and for how many
/// queues it connects.
#[derive(Clone, Debug)]
pub struct Remotely {
    pub(crate) measurer: Arc<dyn Measurer>,
    pub(crate) queues: usize,
    /// The target and the export that the former supervisor handed over: the name that it asked the
    /// server for, and the size and flags that it told the guest.
    pub(crate) told: Option<(NbdTarget, ExportSpec)>,
}

/// The exports that the supervisor before this one has told guests of, by device. Clones share
/// them.
#[derive(Clone, Debug, Default)]
pub struct AdoptedExports(Arc<Mutex<HashMap<String, (NbdTarget, ExportSpec)>>>);

impl AdoptedExports {
    /// The exports that the former supervisor handed over, by device.
    pub fn new(all: HashMap<String, (NbdTarget, ExportSpec)>) -> Self {
        Self(Arc::new(Mutex::new(all)))
    }

    /// Takes the export of a device. If the disk is opened again later, it is measured.
    pub(super) fn take(&self, device: &str) -> Option<(NbdTarget, ExportSpec)> {
        lock(&self.0).remove(device)
    }
}

/// The disk of a server.
#[derive(Debug)]
pub struct Remote {
    device: String,
    address: Address,
    target: NbdTarget,
    read_only: bool,
    measurer: Arc<dyn Measurer>,
    told: Mutex<Export>,
    /// The counters of the connections, as the device process shows them.
    connections: Mutex<Vec<Connection>>,
    connections_max: usize,
    pace: Mutex<Rate>,
    /// Held while the host connects: to resolve a name may take long.
    connecting: Arc<tokio::sync::Mutex<()>>,
}

impl Remote {
    /// The disk of `uri`. It is measured, unless an earlier supervisor told its guest of the same
    /// target. May block for some seconds.
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

    /// The export that the guest is told of.
    pub fn told(&self) -> ExportSpec {
        spec_of(&lock(&self.told))
    }

    /// Connections that may be open at once.
    pub fn connections_max(&self) -> usize {
        self.connections_max
    }

    /// The target and the export for the next supervisor, which serves the disk by them without
    /// asking the server again.
    pub fn left(&self) -> (NbdTarget, ExportSpec) {
        (self.target.clone(), self.told())
    }

    /// Connects for the device process, when it is its turn; gives up after `limit`.
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

    /// Shows counters of connections.
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

/// The failure that the other process reported, as an error of this one. The text may come from a
/// server, so it is escaped and cut.
pub(crate) fn error_of(failure: NbdFailure) -> JoinError {
    let NbdFailure { text, is_limit, passes } = failure;
    let shown = |c: char| if c.is_control() { '?' } else { c };
    let text = text.chars().take(TEXT_MAX).map(shown).collect();
    JoinError::Elsewhere { text, is_limit, passes }
}

/// An error for the other process.
pub(crate) fn failure_of(error: &JoinError) -> NbdFailure {
    let text = match error {
        JoinError::Tls(error) => error.without_folder(),
        error => error.to_string(),
    };
    let text = text.chars().take(TEXT_MAX).collect();
    NbdFailure { text, is_limit: error.is_limit(), passes: error.passes() }
}

/// An export for another process.
pub(crate) fn spec_of(export: &Export) -> ExportSpec {
    let Export { size, flags, blocks: Blocks { min, preferred, max }, structured } = *export;
    let (block_min, block_preferred, block_max) = (min, preferred, max);
    ExportSpec { size, flags, block_min, block_preferred, block_max, structured }
}

/// The export that another process names; `None`: a server cannot have it.
pub(crate) fn export_of(spec: ExportSpec) -> Option<Export> {
    let ExportSpec { size, flags, block_min, block_preferred, block_max, structured } = spec;
    let blocks = Blocks { min: block_min, preferred: block_preferred, max: block_max };
    // The limits of the handshake, and of the values that a guest can be told.
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

/// The pace at which a disk is connected to its server: one connection, `more` at once, and one in
/// each [`NBD_CONNECT_EACH`] after that.
fn pace(more: u32, now: Instant) -> Rate {
    Rate::of(more.saturating_add(1), NBD_CONNECT_EACH, now)
}

/// Charges one connection; returns when it may be made.
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

//! A `DeviceProcess` without a running process. The fuzz target `supervisor` and tests send
//! reports to it.

use super::domain_members::{AssignedDevice, DomainMembers};
use super::journal_store::JournalStore;
use super::process::DeviceProcess;
use super::xen_line::XenLine;
use manyring_backend::net::null::NullPort;
use manyring_device::Owned;
use manyring_device::net::{NetOptions, OwnedPort};
use manyring_engine::{Janitor, Surplus};
use manyring_protocol::message::{self, Command, FDS_MAX, Report, SIZE_MAX};
use manyring_protocol::spec::{DeviceSpec, FrontEndSpec, KindSpec, NetSpec, PortSpec};
use manyring_serve::assemble::Part;
use manyring_serve::channel::Brought;
use manyring_serve::counts::Counts;
use manyring_serve::view::DeviceView;
use rustix::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};

/// The network devices that the device process was given, with two queue pairs each.
pub const DEVICES: [&str; 2] = ["a", "b"];
const PAIRS: usize = 2;

/// Makes a network device of this name, with a port that drops every frame.
pub(super) fn network(name: &str) -> Part {
    let options = NetOptions {
        name: name.to_owned(),
        queue_pairs: PAIRS,
        mac: [2, 0, 0, 0, 0, 9],
        hash_report: true,
        ..NetOptions::default()
    };
    let port = OwnedPort::new(options, Arc::new(NullPort::new(PAIRS, 0)));
    let owned = Owned::Port(Arc::new(port));
    let side = owned.side(name, 2 * PAIRS + 1);
    let view = DeviceView::new(side, (String::new(), "taken"), Some("taken".to_owned()));
    Part { owned, view, remote: None, capture: None }
}

/// Makes the spec of a network device whose port drops every frame.
fn null_network(queue_pairs: usize) -> DeviceSpec {
    let front_end = FrontEndSpec { handshake_timeout: 10, memory_on_disk: false, memory_max: None };
    let options = NetOptions { queue_pairs, hash_report: true, ..NetOptions::default() };
    let mac = [2, 0, 0, 0, 0, 9];
    let port = PortSpec::Null { generate: 0 };
    let kind = KindSpec::Net(NetSpec { port, captures: false, mac, options, fault: None });
    DeviceSpec { front_end, queue_workers: Vec::new(), kind }
}

/// A device process that a guest controls, with the records that the supervisor keeps of it.
#[derive(Debug)]
pub struct CompromisedProcess {
    process: Arc<DeviceProcess>,
    journals: Vec<Arc<JournalStore>>,
    counts: Vec<(Arc<Counts>, OwnedFd)>,
    janitor: Arc<Janitor>,
    runtime: Runtime,
}

impl CompromisedProcess {
    /// Returns `None` if the system has no file descriptor free.
    #[must_use]
    pub fn new() -> Option<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        let guard = runtime.enter();
        let members = DomainMembers::of("taken", Surplus::default());
        let janitor = members.janitor.clone();
        // Nobody polls the task that would start the process.
        let process = DeviceProcess::start("taken", Arc::new([]), members, None);
        let (mut journals, mut counts) = (Vec::new(), Vec::new());
        for name in DEVICES {
            let Part { owned, view, .. } = network(name);
            let counted = Arc::new(Counts::new(view.side.stats, None).ok()?);
            counts.push((counted.clone(), counted.begin().ok()?));
            let kept = JournalStore::new(name, 2 * PAIRS + 1);
            journals.push(kept.clone());
            let order =
                Command::Device { device: name.to_owned(), spec: null_network(PAIRS), port: None };
            let connected = watch::Sender::new(false);
            let (asks, _) = mpsc::channel(1);
            // The second device has the connection of a Xen disk, which is being made, and no
            // sessions.
            let line = (name == DEVICES[1]).then(|| Arc::new(XenLine::default()));
            line.iter().for_each(|line| drop(line.connects(1)));
            let (net, journals, xen) = (owned.as_port().cloned(), kept, line);
            let given = AssignedDevice { connected, counts: counted, net, asks, journals, xen };
            runtime.block_on(process.give(order, Vec::new(), Vec::new(), given)).ok()?;
        }
        drop(guard);
        Some(Self { process, journals, counts, janitor, runtime })
    }

    /// Returns the device process, and the runtime that would start its process if it were run.
    #[cfg(test)]
    pub(super) fn parts(&self) -> (&Arc<DeviceProcess>, &Runtime) {
        (&self.process, &self.runtime)
    }

    /// Handles a report with this number of file descriptors. False: the supervisor kills the
    /// device process for this report.
    pub fn hears(&self, bytes: &[u8], fds: usize) -> bool {
        let _guard = self.runtime.enter();
        let fds = (0..fds).filter_map(|_| Some(std::fs::File::open("/dev/null").ok()?.into()));
        let brought = Brought::of(fds.collect(), self.janitor.clone());
        message::parse::<Report>(bytes)
            .is_ok_and(|report| self.process.handle(report, brought).is_ok())
    }

    /// Connects a front-end to a device; returns its number.
    pub fn connects(&self, device: usize) -> Option<u64> {
        let socket = std::fs::File::open("/dev/null").ok()?;
        let journals = &self.journals[device % DEVICES.len()];
        journals.add(journals.hold(socket.into()), &Surplus::default()).ok()
    }

    /// Takes a device away, and reports for the process that the device has stopped. False: the
    /// report was invalid, and the device process is killed.
    pub fn removes(&self, device: usize) -> bool {
        let _guard = self.runtime.enter();
        let name = DEVICES[device % DEVICES.len()];
        // Polled by hand: the runtime would start the process.
        let (mut removal, mut context) =
            (pin!(self.process.remove(name)), Context::from_waker(Waker::noop()));
        if removal.as_mut().poll(&mut context).is_ready() {
            // The device was taken away before.
            return true;
        }
        let removed = message::emit(&Report::Removed { device: name.to_owned() });
        let is_heard = removed.is_ok_and(|bytes| self.hears(&bytes, 0));
        is_heard && removal.poll(&mut context).is_ready()
    }

    /// Writes these bytes into the counters of a device, and reads the counters: any bytes are
    /// valid.
    pub fn counts(&self, device: usize, bytes: &[u8]) {
        let (counts, file) = &self.counts[device % DEVICES.len()];
        let _ = rustix::io::pwrite(file, bytes, 0);
        counts.read();
    }

    /// Ends the device process, and asserts that the messages to the next one keep the limits of a
    /// message.
    pub fn dies(&self) {
        for journals in &self.journals {
            journals.orphan();
            for (command, fds) in journals.handings() {
                let bytes = message::emit(&command);
                assert!(bytes.is_ok_and(|bytes| bytes.len() <= SIZE_MAX), "{command:?}");
                assert!(fds.len() <= FDS_MAX, "{} descriptors", fds.len());
            }
        }
    }
}

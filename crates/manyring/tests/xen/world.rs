//! A simulated Xen, its tool stack, and a daemon that serves its disks.

use crate::support::process::{Daemon, TIMEOUT, apart, is_isolated};
use manyring_driver::{
    Blkfront, BlkfrontOptions, BlkfrontQueue, SimXen, XEN_PAGE_SIZE, XenCalls, XenDisk, XenDomain,
    XenStore,
};
use manyring_memory::GrantRef;
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// The number of xvda.
pub(crate) const XVDA: u32 = 51712;
/// Size of the disks' files.
pub(crate) const DISK_SIZE: u64 = 8 << 20;
/// Entries of a domain's grant table.
const ENTRIES: u32 = 32_768;

/// The Xen and its tool stack.
pub(crate) struct World {
    pub(crate) toolstack: XenStore,
    xen: SimXen,
    folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let xen = SimXen::start(&folder.path().join("xenstored")).unwrap();
        let toolstack = XenStore::connect(xen.socket(), TIMEOUT).unwrap();
        Self { toolstack, xen, folder }
    }

    /// The Xen ends with all that it knows, and begins anew under the same name.
    pub(crate) fn begin_anew(self) -> Self {
        let Self { toolstack, xen, folder } = self;
        drop((toolstack, xen));
        let xen = SimXen::start(&folder.path().join("xenstored")).unwrap();
        let toolstack = XenStore::connect(xen.socket(), TIMEOUT).unwrap();
        Self { toolstack, xen, folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A file of zeroes for a disk.
    pub(crate) fn image(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().set_len(DISK_SIZE).unwrap();
        path
    }

    /// A daemon that serves disks of the kinds `vbd` and `manyring`; it listens for control.
    pub(crate) fn daemon(&self, arguments: &[&str]) -> Daemon {
        let processes = is_isolated().then_some("--isolate");
        self.daemon_of(&[arguments, processes.as_slice()].concat())
    }

    /// A daemon that serves them itself: a simulated domain lends its pages to four connections at
    /// most, and a disk in a device process has one of its own.
    pub(crate) fn daemon_of(&self, arguments: &[&str]) -> Daemon {
        let control = self.path("control");
        let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
        command.args(["xen-blk", "--kind", "vbd", "--kind", "manyring", "--simulated"]);
        command.arg(self.xen.socket()).arg("--control").arg(&control);
        command.arg("--state-dir").arg(self.path("state")).args(arguments);
        Daemon::start(command, tempfile::tempdir().unwrap(), &[control])
    }

    /// A daemon of this configuration, in which `@` stands for the folder of files here.
    pub(crate) fn run(&self, configuration: &str) -> Daemon {
        self.run_at(configuration, "control")
    }

    /// A daemon of this configuration, as [`Self::run`], whose control socket is named `control`.
    pub(crate) fn run_at(&self, configuration: &str, control: &str) -> Daemon {
        let folder = self.folder.path().display().to_string();
        let file = self.path("manyring.toml");
        std::fs::write(&file, apart(configuration).replace('@', &folder)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
        command.arg("run").arg("--config").arg(file);
        Daemon::start(command, tempfile::tempdir().unwrap(), &[self.path(control)])
    }

    /// Kills a daemon, so that another one can have its socket for control.
    pub(crate) fn kill(&self, daemon: &mut Daemon) {
        daemon.send(Signal::KILL);
        daemon.wait();
        std::fs::remove_file(self.path("control")).unwrap();
    }

    pub(crate) fn domain(&self, number: u16) -> Arc<XenDomain> {
        self.domain_of(number, 8 * BlkfrontQueue::pages(&options(1)) + 64)
    }

    /// A domain with `pages` pages.
    pub(crate) fn domain_of(&self, number: u16, pages: u32) -> Arc<XenDomain> {
        Arc::new(XenDomain::create(self.xen.socket(), number, pages, ENTRIES).unwrap())
    }

    /// Another program's connection for calls, as domain 0.
    pub(crate) fn calls(&self) -> XenCalls {
        XenCalls::connect(self.xen.socket()).unwrap()
    }

    /// A disk of kind `vbd` on this file, announced.
    pub(crate) fn announce(&mut self, domain: u16, device: u32, file: &Path) -> XenDisk {
        let disk = XenDisk::new("vbd", domain, device, file.to_str().unwrap());
        disk.announce(&mut self.toolstack).unwrap();
        disk
    }

    /// A domain whose disk `xvda` lies in a new image and is connected by `queues` queues.
    pub(crate) fn guest(
        &mut self,
        number: u16,
        image: &str,
        queues: u32,
    ) -> (Arc<XenDomain>, XenDisk, Blkfront) {
        let (domain, image) = (self.domain(number), self.image(image));
        let disk = self.announce(number, XVDA, &image);
        let front = connect(&domain, &disk, queues);
        (domain, disk, front)
    }

    /// Waits until a node of the back-end's folder has this value.
    pub(crate) fn await_node(&mut self, disk: &XenDisk, name: &str, value: &str) {
        let is_right = |found: Option<&[u8]>| found == Some(value.as_bytes());
        let path = format!("{}/{name}", disk.back());
        let there = self.toolstack.await_value(&path, is_right);
        there.unwrap_or_else(|error| panic!("{path} is not {value}: {error}"));
    }

    /// Why the disk was closed, as the tool stack is told.
    pub(crate) fn error_of(&mut self, disk: &XenDisk) -> String {
        let node = disk.back().replace("/backend/", "/error/backend/") + "/error";
        let error = self.toolstack.read(&node).unwrap().unwrap_or_default();
        String::from_utf8(error).unwrap()
    }

    /// The answer of `manyring stats --json`.
    pub(crate) fn stats(&self) -> serde_json::Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
        command.args(["stats", "--json", "--control"]).arg(self.path("control"));
        serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
    }

    /// `manyring resize` of a device.
    pub(crate) fn resize(&self, device: &str, size: &str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
        command.args(["resize", "--control"]).arg(self.path("control")).args([device, size]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

/// The options of a front-end with `queues` queues.
pub(crate) fn options(queues: u32) -> BlkfrontOptions {
    BlkfrontOptions { queues, max_wait: TIMEOUT, ..BlkfrontOptions::default() }
}

/// Connects a guest to its disk.
pub(crate) fn connect(domain: &Arc<XenDomain>, disk: &XenDisk, queues: u32) -> Blkfront {
    Blkfront::connect(domain, &disk.folder(), &options(queues)).unwrap()
}

/// A guest counts more requests than its ring has room for.
pub(crate) fn break_ring(domain: &XenDomain, queue: &BlkfrontQueue) {
    let ring = queue.nodes().ring_refs[0];
    let entry = domain.table().entry(GrantRef(ring)).unwrap();
    let at = usize::try_from(entry.page()).unwrap() * XEN_PAGE_SIZE;
    domain.memory().slice(at, 4).unwrap().write_from(&1000_u32.to_le_bytes());
    queue.channel().notify();
}

/// Options for one queue and requests of a page, so that a guest has memory for many disks.
pub(crate) fn small() -> BlkfrontOptions {
    BlkfrontOptions { indirect_segments: 0, buffer_size: 4096, ..options(1) }
}

/// True when the daemon shows one disk only, that of domain 3.
pub(crate) fn is_alone(world: &World) -> bool {
    let stats = world.stats();
    let devices = stats["devices"].as_array().unwrap().iter();
    devices.map(|device| device["name"].as_str().unwrap()).eq(["xen-vbd-3-51712"])
}

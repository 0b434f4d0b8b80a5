//! The rig that all cases share: the machine, the back-end, and the guests, created when needed.

use super::domain::{Domain, DomainOptions};
use super::machine::{Machine, MachineOptions};
use super::parts::Parts;
use super::serve::{self, Server};
use super::stages::Stages;
use crate::daemon::{Counters, queues_of};
use crate::{Outcome, check};
use serde_json::Value;

/// A guest that cases use. Its first disk is `xvda`, of 128 MiB.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who {
    pub(super) name: &'static str,
    kind: &'static str,
    cpus: u32,
}

/// The PV guest, which has four queues for each disk.
pub(super) const U: Who = Who { name: "u", kind: "pv", cpus: 4 };
/// The PVH guest, with two.
pub(super) const V: Who = Who { name: "v", kind: "pvh", cpus: 2 };

/// The number of the disk `xvdb` in xenstore; `xvda` has 51712.
pub(super) const XVDB: u32 = 51728;

/// A running Xen on which cases are played.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) machine: Machine,
    pub(super) server: Server,
    stages: Stages,
    guests: Vec<Domain>,
}

impl Rig {
    /// Boots Xen, and starts who serves.
    pub(super) fn boot(
        parts: &Parts,
        options: &MachineOptions<'_>,
        server: Server,
        mut stages: Stages,
    ) -> Outcome<Self> {
        let mut machine = Machine::boot(parts, options, &mut stages)?;
        server.start(&mut machine)?;
        stages.end(&format!("{} serves", server.name()));
        Ok(Self { machine, server, stages, guests: Vec::new() })
    }

    /// Whether Manyring serves.
    pub(super) fn is_manyring(&self) -> bool {
        self.server == Server::Manyring
    }

    /// Runs a script in dom0; gives what it said.
    pub(super) fn dom0(&mut self, script: &str) -> Outcome<String> {
        self.machine.run(script)
    }

    /// Creates a guest if it is not there, with one disk.
    pub(super) fn need(&mut self, who: &Who) -> Outcome {
        if self.guests.iter().any(|guest| guest.name() == who.name) {
            return Ok(());
        }
        self.stages.again();
        let file = format!("/tmp/disk-{}", who.name);
        self.dom0(&format!("must truncate -s 128M {file}"))?;
        let disk = self.server.disk(&file, "xvda", "rw");
        let options = DomainOptions { name: who.name, kind: who.kind, cpus: who.cpus, disk: &disk };
        let mut guest = Domain::create(&mut self.machine, &options, &mut self.stages)?;
        guest.run(&mut self.machine, "until_is [ -b /dev/xvda ]")?;
        self.stages.end(&format!("{}'s disk", who.name));
        self.guests.push(guest);
        Ok(())
    }

    fn guest(&mut self, who: &Who) -> Outcome<(&mut Domain, &mut Machine)> {
        self.need(who)?;
        let guest = self.guests.iter_mut().find(|guest| guest.name() == who.name);
        Ok((guest.ok_or("no such guest")?, &mut self.machine))
    }

    /// Runs a script in a guest; gives what it said.
    pub(super) fn inside(&mut self, who: &Who, script: &str) -> Outcome<String> {
        let (guest, machine) = self.guest(who)?;
        guest.run(machine, script)
    }

    /// Has a guest begin a script that ends, or reboots it, while other things happen.
    pub(super) fn begin(&mut self, who: &Who, script: &str) -> Outcome<u32> {
        let (guest, machine) = self.guest(who)?;
        guest.begin(machine, script)
    }

    /// Waits until a guest has come up `times` times.
    pub(super) fn is_up(&mut self, who: &Who, times: usize) -> Outcome {
        let (guest, machine) = self.guest(who)?;
        guest.is_up(machine, times)
    }

    /// Destroys a guest.
    pub(super) fn destroy(&mut self, who: &Who) -> Outcome {
        self.guests.retain(|guest| guest.name() != who.name);
        let console = self.machine.file(&format!("console-{}", who.name));
        self.dom0(&format!("must xl destroy {}", who.name))?;
        // Another one of this name speaks on a console of its own.
        let _ = std::fs::rename(&console, console.with_extension("before"));
        Ok(())
    }

    /// Hands a guest a disk of 64 MiB as `xvdb`, by `xl`.
    pub(super) fn attach(&mut self, who: &Who, mode: &str) -> Outcome {
        self.need(who)?;
        let disk = self.server.disk("/tmp/disk-b", "xvdb", mode);
        let name = who.name;
        self.dom0(&format!(
            "[ -e /tmp/disk-b ] || must truncate -s 64M /tmp/disk-b\n\
             must xl block-attach {name} '{disk}'"
        ))?;
        self.inside(who, "until_is [ -b /dev/xvdb ]").map(|_| ())
    }

    /// Takes it back, and its file with it.
    pub(super) fn detach(&mut self, who: &Who) -> Outcome {
        let back = self.back(who, XVDB)?;
        self.dom0(&format!("detach {} xvdb {back}", who.name))?;
        self.inside(who, "until_is absent [ -b /dev/xvdb ]")?;
        self.dom0(&format!("until_is absent xenstore-exists {back}; must rm /tmp/disk-b"))?;
        Ok(())
    }

    /// The back-end's folder of a guest's disk.
    pub(super) fn back(&mut self, who: &Who, number: u32) -> Outcome<String> {
        let kind = self.server.kind();
        let domain = self.domain(who)?;
        Ok(format!("/local/domain/0/backend/{kind}/{domain}/{number}"))
    }

    /// The front-end's folder of a guest's disk.
    pub(super) fn front(&mut self, who: &Who, number: u32) -> Outcome<String> {
        Ok(format!("/local/domain/{}/device/vbd/{number}", self.domain(who)?))
    }

    fn domain(&mut self, who: &Who) -> Outcome<String> {
        self.need(who)?;
        Ok(self.dom0(&format!("must xl domid {}", who.name))?.trim().to_owned())
    }

    /// The device of a guest's disk, as `manyring stats --json` shows it.
    pub(super) fn device(&mut self, who: &Who, number: u32) -> Outcome<Value> {
        let domain = self.domain(who)?;
        let stats = serve::stats(&mut self.machine)?;
        let ending = format!("{domain}/{number}");
        let is_it = |device: &&Value| {
            let name = device.get("name").and_then(Value::as_str).unwrap_or_default();
            name.replace('-', "/").ends_with(&ending)
        };
        let devices = stats.get("devices").and_then(Value::as_array);
        let device = devices.and_then(|devices| devices.iter().find(is_it)).cloned();
        device.ok_or_else(|| format!("manyring stats --json: no device {ending} in {stats}"))
    }

    /// The counters of the queues of a guest's disk.
    pub(super) fn queues(&mut self, who: &Who, number: u32) -> Outcome<Vec<Counters>> {
        let device = self.device(who, number)?;
        queues_of(&device).ok_or(format!("manyring stats --json: no queues in {device}"))
    }

    /// One counter of a guest's disk, of all queues.
    pub(super) fn counted(&mut self, who: &Who, number: u32, counter: &str) -> Outcome<u64> {
        self.queues(who, number)?.iter().map(|queue| queue.value(counter)).sum()
    }

    /// A counter of Manyring has grown since it was `before`.
    pub(super) fn has_counted(&mut self, who: &Who, counter: &str, before: u64) -> Outcome {
        if !self.is_manyring() {
            return Ok(());
        }
        let now = self.counted(who, 51712, counter)?;
        check(now > before, || format!("{counter} of {}'s disk: still {now}", who.name))
    }
}

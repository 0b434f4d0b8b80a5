//! Open vSwitch in a namespace, with its userspace datapath: it needs no module of the kernel.

use super::{Namespace, Service};
use crate::command::{output, text, wait_for};
use crate::{Context, Outcome, packages};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
const START: Duration = Duration::from_secs(30);

/// A database and a switch daemon; dropped, they are gone.
#[derive(Debug)]
pub struct Ovs<'a> {
    namespace: &'a Namespace,
    folder: PathBuf,
    _services: [Service; 2],
}

impl<'a> Ovs<'a> {
    /// Starts both; what they keep lies in `folder`.
    ///
    /// # Errors
    /// They do not start.
    pub fn start(namespace: &'a Namespace, folder: &Path) -> Outcome<Self> {
        packages::need("the test of OVS", &["openvswitch-switch"])?;
        std::fs::create_dir_all(folder).context(folder.display())?;
        let database = folder.join("conf.db");
        let folders = |mut command: Command| {
            for name in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"] {
                command.env(name, folder);
            }
            command
        };
        let mut create = folders(namespace.command("ovsdb-tool"));
        output(create.arg("create").arg(&database).arg(SCHEMA))?;
        let socket = folder.join("db.sock");
        let mut command = folders(namespace.child("ovsdb-server"));
        command.arg(&database).arg(format!("--remote=punix:{}", socket.display()));
        command.arg(format!("--unixctl={}", folder.join("db.ctl").display()));
        let server = Service::silent(command, &folder.join("db.log"))?;
        wait_for("OVS's database", START, || Ok(socket.exists().then_some(())))?;
        let mut command = folders(namespace.child("ovs-vswitchd"));
        command.arg(format!("unix:{}", socket.display()));
        command.arg(format!("--unixctl={}", folder.join("switch.ctl").display()));
        let switch = Service::silent(command, &folder.join("switch.log"))?;
        let ovs = Self { namespace, folder: folder.to_owned(), _services: [server, switch] };
        ovs.set("--no-wait init")?;
        Ok(ovs)
    }

    /// Runs ovs-vsctl with these words: it ends when the switch has done it.
    ///
    /// # Errors
    /// It fails, or is not done within 30 s.
    pub fn set(&self, words: &str) -> Outcome<String> {
        let socket = self.folder.join("db.sock");
        let mut command = self.namespace.command("ovs-vsctl");
        command.arg(format!("--db=unix:{}", socket.display())).arg("--timeout=30");
        text(command.args(words.split_whitespace()))
    }
}

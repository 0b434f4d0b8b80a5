//! A network namespace of our own: what is made in it cannot disturb the host, and ends with us.

use super::service::Service;
use crate::command::{child, command, find, output, text, wait_for};
use crate::{Context, Outcome, check, packages};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Its own /sys shows its interfaces. It lives while this waits for the end of its input.
const SETUP: &str = "mount -t sysfs sysfs /sys && ip link set lo up && echo ready && exec cat";

/// A network namespace, held by a process that ends when this is dropped, or when we end.
#[derive(Debug)]
pub struct Namespace {
    holder: Service,
}

impl Namespace {
    /// A new one, with its loopback up. As root or, with a user namespace, as anybody.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new() -> Outcome<Self> {
        packages::need("a network", &super::PACKAGES)?;
        let log = tempfile::NamedTempFile::new().context("a log")?;
        let mut command = child("unshare");
        if !is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--net", "--mount", "--", "sh", "-c", SETUP]).stdin(Stdio::piped());
        command.env("PATH", path());
        let mut namespace = Self { holder: Service::start(command, log.path())? };
        namespace.holder.until_says("ready", log.path())?;
        Ok(namespace)
    }

    /// Another one of the same owner, so that interfaces can move from one to the other.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn beside(&self) -> Outcome<Self> {
        let log = tempfile::NamedTempFile::new().context("a log")?;
        let mut command = self.child("unshare");
        command.args(["--net", "--mount", "--", "sh", "-c", SETUP]).stdin(Stdio::piped());
        let mut namespace = Self { holder: Service::start(command, log.path())? };
        namespace.holder.until_says("ready", log.path())?;
        Ok(namespace)
    }

    /// The command, with its arguments, that runs a program in the namespace.
    #[must_use]
    pub fn wrapper(&self) -> Vec<String> {
        let target = self.holder.pid().to_string();
        let mut words = vec!["nsenter", "--target", &target, "--net", "--mount"];
        if !is_root() {
            words.extend(["--user", "--preserve-credentials"]);
        }
        // Entering may change credentials, which forgets the signal at our death: ask once more.
        words.extend(["--", "setpriv", "--pdeathsig", "KILL", "--"]);
        words.into_iter().map(str::to_owned).collect()
    }

    /// A command that runs in it.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let wrapper = self.wrapper();
        inside(command(&wrapper[0]), &wrapper[1..], program)
    }

    /// A command that runs in it and dies with us.
    #[must_use]
    pub fn child(&self, program: &str) -> Command {
        let wrapper = self.wrapper();
        inside(child(&wrapper[0]), &wrapper[1..], program)
    }

    /// Runs a program of words with a space between, in it, to its end; gives what it said.
    ///
    /// # Errors
    /// It fails.
    pub fn run(&self, words: &str) -> Outcome<String> {
        let mut all = words.split_whitespace();
        let mut command = self.command(all.next().unwrap_or_default());
        text(command.args(all)).context(format!("in the namespace: {words}"))
    }

    /// Gives an interface the far end's addresses, and brings it up.
    ///
    /// # Errors
    /// No interface has this name.
    pub fn address(&self, interface: &str) -> Outcome {
        // No search for duplicates: the addresses must serve at once.
        self.run(&format!("ip link set {interface} addrgenmode none up"))?;
        for address in super::HOST {
            let nodad = if address.contains(':') { "nodad" } else { "" };
            self.run(&format!("ip address add {address} dev {interface} {nodad}"))?;
        }
        Ok(())
    }

    /// Makes a tap that stays without a daemon, with its addresses. Every tap of that name has the
    /// same link address: a guest whose link was down for less than a second may not have noticed,
    /// and goes on sending to the address that it knows.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn lasting_tap(&self, name: &str) -> Outcome {
        self.run(&format!("ip tuntap add dev {name} mode tap multi_queue vnet_hdr"))?;
        self.run(&format!("ip link set {name} address 02:00:c0:00:02:01"))?;
        self.address(name)
    }

    /// Makes a bridge `br0`, and a veth whose end `far0` has the addresses. Frames to `far0` come
    /// out with every checksum complete and every segment cut, as on a cable.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn bridge(&self, mtu: u32) -> Outcome {
        self.cable(mtu)?;
        self.address("far0")
    }

    /// As [`Namespace::bridge`], with `far0` in another namespace, one that is [`beside`] this.
    ///
    /// [`beside`]: Namespace::beside
    ///
    /// # Errors
    /// They cannot be made.
    pub fn bridge_to(&self, far: &Self, mtu: u32) -> Outcome {
        self.cable(mtu)?;
        self.run(&format!("ip link set far0 netns {}", far.holder.pid()))?;
        far.address("far0")
    }

    /// Moves an interface here out of another namespace, one that is [`beside`] this.
    ///
    /// [`beside`]: Namespace::beside
    ///
    /// # Errors
    /// The other namespace has no interface of that name, or the host refuses to move it.
    pub fn take_over(&self, other: &Self, interface: &str) -> Outcome {
        other.run(&format!("ip link set {interface} netns {}", self.holder.pid())).map(drop)
    }

    /// A cable to another one that is [`beside`] this: its ends are called so here and there.
    ///
    /// [`beside`]: Namespace::beside
    ///
    /// # Errors
    /// It cannot be made.
    pub fn cable_to(&self, far: &Self, [own, theirs]: [&str; 2], mtu: u32) -> Outcome {
        let pid = far.holder.pid();
        self.run(&format!(
            "ip link add {own} mtu {mtu} type veth peer name {theirs} mtu {mtu} netns {pid}"
        ))?;
        for (namespace, name) in [(self, own), (far, theirs)] {
            namespace.run(&format!("ip link set {name} addrgenmode none up"))?;
        }
        Ok(())
    }

    fn cable(&self, mtu: u32) -> Outcome {
        for words in [
            "ip link add br0 type bridge mcast_snooping 0".to_owned(),
            format!("ip link add port0 mtu {mtu} type veth peer name far0 mtu {mtu}"),
            "ip link set port0 master br0 addrgenmode none up".into(),
            format!("ip link set br0 mtu {mtu} addrgenmode none up"),
            "ethtool -K port0 tx off tso off gso off".into(),
            // Else the bridge answers, too, for an address of another interface.
            "busybox sysctl -w net.ipv4.conf.all.arp_ignore=1".into(),
        ] {
            self.run(&words)?;
        }
        Ok(())
    }

    /// Queues of a tap that are attached, and that are detached.
    ///
    /// # Errors
    /// No interface has this name.
    pub fn tap_queues(&self, name: &str) -> Outcome<(u64, u64)> {
        let mut command = self.command("ip");
        let json = output(command.args(["-json", "-details", "link", "show", name]))?;
        let json: Value = serde_json::from_slice(&json).context("ip -json")?;
        let data = json.pointer("/0/linkinfo/info_data").ok_or(format!("{name} is no tap"))?;
        let count = |field: &str| {
            let count = data.get(field).and_then(Value::as_u64);
            count.ok_or_else(|| format!("{name} has no {field}: {data}"))
        };
        Ok((count("numqueues")?, count("numdisabled")?))
    }

    /// Waits until a tap has `queues` queues attached.
    ///
    /// # Errors
    /// It has not, within 5 s.
    pub fn until_attached(&self, name: &str, queues: u64) -> Outcome {
        let mut last = (0, 0);
        let attached = wait_for("the tap's queues", Duration::from_secs(30), || {
            last = self.tap_queues(name)?;
            Ok((last.0 == queues).then_some(()))
        });
        attached.map_err(|_| format!("{name} has {last:?} queues on and off, not {queues} on"))
    }

    /// Whether the namespace has an interface.
    #[must_use]
    pub fn has(&self, interface: &str) -> bool {
        self.run(&format!("ip link show {interface}")).is_ok()
    }

    /// Fails unless the only interfaces are these and the loopback.
    ///
    /// # Errors
    /// There are others.
    pub fn holds_only(&self, interfaces: &[&str]) -> Outcome {
        let found = self.run("ls /sys/class/net")?;
        let left: Vec<_> = found
            .split_whitespace()
            .filter(|name| *name != "lo" && !interfaces.contains(name))
            .collect();
        check(left.is_empty(), || format!("these interfaces are left behind: {left:?}"))
    }
}

fn inside(mut command: Command, wrapper: &[String], program: &str) -> Command {
    let program = find(program).unwrap_or_else(|| program.into());
    command.args(wrapper).arg(program).env("PATH", path());
    command
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The search path, and where a user's path has no `ip`.
fn path() -> String {
    format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default())
}

//! `manyring.service` under systemd as PID 1: ready when its sockets listen, reloaded, killed more
//! than a hundred times under clients that are never refused, restarted by the watchdog, stopped
//! without a trace.

use super::{Behaviour, Scene};
use crate::systemd::{Root, SERVICE, kept};
use crate::{Context, Outcome};

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "systemd_service", run };

const CONFIG: &str = r#"[daemon]
control = "/run/manyring/control.sock"
domains = "one"
state_dir = "/var/lib/manyring"
[[blk]]
name = "a"
socket_path = "/run/manyring/a.sock"
memory = "64M"

[[blk]]
name = "b"
socket_path = "/run/manyring/b.sock"
memory = "64M"
[[net]]
name = "n"
socket_path = "/run/manyring/n.sock"
tap = "mr0"
"#;

const SECOND: &str = "[[blk]]\nsocket_path = '/run/manyring-two/c.sock'\nmemory = '64M'\n";

/// Its control socket is the socket unit's.
const THIRD: &str = "daemon.control = '/run/manyring-control/three.sock'\n[[blk]]\nname = 'd'\n\
    socket_path = '/run/manyring-three/d.sock'\nmemory = '64M'\n";

/// The gap between two processes is long enough to be met, and the watchdog quick.
const DROP_IN: &str = "[Service]\nRestartSec=300ms\nWatchdogSec=2\n";

fn run(scene: &Scene<'_>) -> Outcome {
    let root = Root::new(scene.folder.path())?;
    root.install(&scene.stage.binary, "manyring")?;
    root.install(&scene.stage.bench, "manyring-bench")?;
    root.install_units(DROP_IN)?;
    root.write("etc/manyring/manyring.toml", CONFIG)?;
    root.write("etc/manyring/two.toml", SECOND)?;
    root.write("etc/manyring/three.toml", THIRD)?;
    let said = root.run(SERVICE, &scene.log("systemd.log"))?;
    std::fs::write(scene.log("said"), &said).context("said")?;
    let _ = std::fs::copy(root.at("day/journal"), scene.log("journal"));
    kept(&said, 52)
}

//! Where the kernel refuses io_uring (as container profiles do) the daemon says so in one line,
//! falls back to plain reads and writes, and serves a guest just as well.

use super::uml_ext4_checksums::agree_on;
use super::{Behaviour, Scene};
use crate::daemon::Daemon;
use crate::{Outcome, check, packages};

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_where_io_uring_is_refused", run };

/// strace answers in the kernel's place.
const REFUSAL: &str = "inject=io_uring_setup:error=EPERM";

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("the test without io_uring", &["strace"])?;
    let image = scene.image(256)?;
    let mut options = scene.options(&image, &[]);
    let trace = scene.log("strace.log").display().to_string();
    let strace =
        ["strace", "-D", "-f", "-qq", "-e", "trace=io_uring_setup", "-e", REFUSAL, "-o", &trace];
    options.wrapper = strace.iter().map(|&a| a.to_owned()).collect();
    let socket = options.socket();
    let daemon = Daemon::start(options, &socket)?;
    let log = daemon.log()?;
    let lines = log.lines().filter(|line| line.contains("io_uring is refused")).count();
    check(lines == 1, || format!("one line about io_uring expected:\n{log}"))?;
    agree_on(scene, &image, daemon)
}

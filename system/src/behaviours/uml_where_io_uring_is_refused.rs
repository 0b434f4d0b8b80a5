//! Where the kernel refuses io_uring (as container profiles do) the daemon says so in one line,
//! falls back to plain reads and writes, and serves a guest just as well.

use super::uml_ext4_checksums::agree_on;
use super::{Behaviour, Scene};
use crate::command::wait_for;
use crate::daemon::Daemon;
use crate::{Outcome, check, packages};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_where_io_uring_is_refused", run };

const LIMIT: Duration = Duration::from_secs(30);
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
    // The log has a thread of its own.
    let words = "io_uring is unavailable";
    let log = wait_for("the line about io_uring", LIMIT, || {
        Ok(Some(daemon.log()?).filter(|log| log.contains(words)))
    })?;
    let lines = log.lines().filter(|line| line.contains(words)).count();
    check(lines == 1, || format!("one line about io_uring expected:\n{log}"))?;
    agree_on(scene, &image, daemon)
}

//! promtool has nothing to say against what a scraper gets, nor against the alerts.

use super::{Behaviour, Scene};
use crate::command::{output, wait_for};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::kernel::cache;
use crate::packages::unpack;
use crate::{Context, Outcome, check};
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "promtool_reads_metrics", run };

fn run(scene: &Scene<'_>) -> Outcome {
    let promtool = promtool()?;
    let (control, disk) = (scene.file("control"), scene.file("disk.sock"));
    let mut config = format!("[daemon]\ncontrol = '{}'\n", control.display());
    let _ = write!(config, "[[blk]]\nsocket_path = '{}'\nmemory = '64M'\n", disk.display());
    let lan = scene.file("lan.sock");
    let _ = write!(config, "[[net]]\nsocket_path = '{}'\nnull = true\n", lan.display());
    let path = scene.file("manyring.toml");
    std::fs::write(&path, config).context(path.display())?;
    let arguments = ["run", "--config"].map(str::to_owned).into_iter();
    let options = DaemonOptions {
        binary: scene.stage.binary.clone(),
        folder: scene.folder.path().to_owned(),
        log: scene.log("manyring.log"),
        arguments: arguments.chain([path.display().to_string()]).collect(),
        is_controlled: false,
        wrapper: Vec::new(),
    };
    let daemon = Daemon::start(options, &disk)?;
    // A queue that works has counters and histograms with something in them.
    let mut load = Command::new(&scene.stage.bench);
    load.args(["load", "blkio", "--seconds", "0.2", "--socket"]).arg(&disk);
    output(&mut load)?;
    let metrics = wait_for("the metrics of the queue", Duration::from_secs(30), || {
        let text = scrape(&control)?;
        Ok(text.contains("manyring_queue_serve_seconds_bucket{").then_some(text))
    })?;
    let mut checker = Command::new(&promtool);
    checker.args(["check", "metrics"]).stdin(Stdio::piped());
    checker.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut checker = checker.spawn().context("promtool")?;
    let mut input = checker.stdin.take().ok_or("promtool has no standard input")?;
    input.write_all(metrics.as_bytes()).context("promtool")?;
    drop(input);
    let checked = checker.wait_with_output().context("promtool")?;
    let said = String::from_utf8_lossy(&checked.stderr);
    check(checked.status.success() && said.is_empty(), || format!("promtool: {said}"))?;
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/prometheus");
    let rules = rules.join("manyring.rules.yml");
    output(Command::new(&promtool).args(["check", "rules", "--lint-fatal"]).arg(rules))?;
    daemon.stop()
}

/// The metrics in the text format.
fn scrape(control: &Path) -> Outcome<String> {
    let mut stream = UnixStream::connect(control).context(control.display())?;
    let head = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    stream.write_all(head).context("the control socket")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("the control socket")?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no whole answer")?;
    check(head.contains(" 200 "), || head.to_owned())?;
    Ok(body.to_owned())
}

/// Debian's, unpacked the first time: installing it would start a server.
fn promtool() -> Outcome<PathBuf> {
    let folder = cache()?.join("prometheus");
    if !folder.is_dir() {
        crate::packages::need_lists("prometheus")?;
        unpack(&folder, &["prometheus".to_owned()], |_| Ok(()))?;
    }
    Ok(folder.join("usr/bin/promtool"))
}

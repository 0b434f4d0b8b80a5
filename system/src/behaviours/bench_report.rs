//! The report of `manyring-bench`: its page in a browser, a run without a peer, a run that is
//! interrupted.

use super::{Behaviour, Scene};
use crate::command::{command, find, wait_for};
use crate::{Context, Outcome, check, packages};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "bench_report", run };

/// A run of three scenarios, some of whose names have signs that mean something in a page.
const RUN: &str = include_str!("bench_report.json");
/// Longest time of a browser, and of a bench that was told to stop.
const TIMEOUT: Duration = Duration::from_secs(120);

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("the page of a report in a browser", &["chromium"])?;
    page_is_whole(scene)?;
    missing_peer_is_named(scene)?;
    interrupted_run_keeps_what_is_done(scene)
}

/// Every table, row and plot of the run is in the page as the browser has it, and nothing on its
/// console; a broken page is noticed.
fn page_is_whole(scene: &Scene<'_>) -> Outcome {
    let (json, folder) = (scene.file("run.json"), scene.file("page"));
    std::fs::write(&json, RUN).context(json.display())?;
    let mut bench = Command::new(&scene.stage.bench);
    bench.arg("page").arg(&json).arg("--report").arg(&folder);
    succeeds(&bench.output().context("bench")?)?;
    let page = folder.join("index.html");
    let (dom, said) = browse(scene, &page)?;
    check(said.is_empty(), || format!("the browser's console: {said}"))?;
    // Three scenarios of 4, 5 and 2 cells, behind the verdict and the plots. Their tables, that of
    // the verdict, of several queues to one, of a reference, the costs and the columns.
    let expected = [("<h2 ", 6), ("<table>", 8), ("<tr class=\"group\">", 11), ("<figure>", 18)];
    for (what, count) in expected.into_iter().chain([("<svg ", 18), ("<script", 0)]) {
        let found = dom.matches(what).count();
        check(found == count, || format!("{found} of {count} {what} are in the page"))?;
    }
    for plot in dom.split("<svg ").skip(1) {
        let drawn = plot.split("</svg>").next().unwrap_or_default();
        let is_drawn = drawn.contains("<polyline") && drawn.contains("<text");
        check(is_drawn, || format!("a plot without lines or words: {drawn:.300}"))?;
    }
    let words = [
        "sessions</th>",
        "normalized</th>",
        "several queues to one, throughput</th>",
        "ref. Mbit/s</th>",
        "manyring against qemu-storage-daemon: requests/s",
        "--only='one queue, QD32, client polls'",
        "manyring, &lt;script&gt;4&lt;/script&gt; queues",
        "A promise is broken</td><td>a promise with &lt;b&gt;marks&lt;/b&gt;",
        "Left out: fio is not installed: apt-get install fio",
        "a cache line from one CPU to the other",
    ];
    for word in words {
        check(dom.contains(word), || format!("the page does not say {word}"))?;
    }
    let broken = folder.join("broken.html");
    let text = std::fs::read_to_string(&page).context(page.display())?;
    let text = text.replace("</main>", "<script>nothing_of_this_name()</script></main>");
    std::fs::write(&broken, text).context(broken.display())?;
    let (_, said) = browse(scene, &broken)?;
    check(said.contains("nothing_of_this_name"), || "a script error goes unnoticed".into())
}

/// The page as a browser without network has it, and what its console says.
fn browse(scene: &Scene<'_>, page: &Path) -> Outcome<(String, String)> {
    let mut browser = command("timeout");
    browser.arg(TIMEOUT.as_secs().to_string()).arg("chromium");
    browser.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
    browser.args(["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0"]);
    let mut profile = std::ffi::OsString::from("--user-data-dir=");
    profile.push(scene.file("browser"));
    browser.arg(profile).arg("--dump-dom").arg(page).stdin(Stdio::null());
    let output = browser.output().context("chromium")?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    std::fs::write(scene.log("chromium.log"), &stderr).context("chromium.log")?;
    succeeds(&output)?;
    let said: Vec<&str> = stderr.lines().filter(|line| line.contains("CONSOLE")).collect();
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), said.join("\n")))
}

/// A peer that is not installed is left out and named with its package; everything else goes on,
/// and the status says so.
fn missing_peer_is_named(scene: &Scene<'_>) -> Outcome {
    let (programs, folder) = (scene.file("programs"), scene.file("without-peer"));
    std::fs::create_dir(&programs).context(programs.display())?;
    for program in ["setsid", "setpriv", "chrt", "ip"] {
        let path = find(program).ok_or_else(|| format!("no {program} here"))?;
        std::os::unix::fs::symlink(path, programs.join(program)).context(program)?;
    }
    let mut bench = bench(scene, &["null-blk", "--smoke", "--only=QD1, client polls"], &folder);
    bench.arg("--manyring").arg(&scene.stage.binary).env("PATH", &programs);
    let output = bench.output().context("bench")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    check(output.status.code() == Some(1), || format!("status {}: {said}", output.status))?;
    let is_named = said.contains("apt-get install qemu-system-common");
    check(is_named, || format!("the package is not named: {said}"))?;
    let run = document(&folder)?;
    let parties = &run["scenarios"][0]["report"]["cells"][0]["parties"];
    let names: Vec<&str> =
        parties.as_array().into_iter().flatten().filter_map(|p| p["name"].as_str()).collect();
    check(names == ["manyring"], || format!("the cell has the parties {names:?}"))?;
    let page = std::fs::read_to_string(folder.join("index.html")).context("the page")?;
    check(page.contains("Left out: qemu-storage-daemon"), || "the page is silent".into())
}

/// Ctrl-C in the second scenario: the first one is in the report, and no child is left.
fn interrupted_run_keeps_what_is_done(scene: &Scene<'_>) -> Outcome {
    let folder = scene.file("interrupted");
    // By a name of its own, so that its processes can be told from those of others.
    let daemon = scene.file("manyring-of-this-run");
    std::fs::copy(&scene.stage.binary, &daemon).context(daemon.display())?;
    let log = scene.log("interrupted.log");
    let words = ["null-blk", "neighbours", "--without-peers", "--only=QD1, client polls"];
    let mut command = bench(scene, &words, &folder);
    command.args(["--rounds=20", "--seconds=0.05"]).arg("--manyring").arg(&daemon);
    let file = File::create(&log).context(log.display())?;
    let mut child = command.stderr(file).stdout(Stdio::null()).spawn().context("manyring-bench")?;
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    let outcome = wait_for("the second scenario", TIMEOUT, || {
        Ok(said().contains("[2/2] neighbours").then_some(()))
    });
    let pid = crate::cleanup::pid(child.id()).ok_or("a child without a process id")?;
    kill_process(pid, if outcome.is_ok() { Signal::INT } else { Signal::KILL }).context("kill")?;
    let status = wait_for("the end of the bench", TIMEOUT, || child.try_wait().context("bench"));
    if status.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    outcome?;
    check(status?.code() == Some(1), || format!("the bench ended wrongly: {}", said()))?;
    let run = document(&folder)?;
    let done: Vec<&str> = run["scenarios"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|s| s["name"].as_str())
        .collect();
    check(done == ["null-blk"], || format!("the report has the scenarios {done:?}"))?;
    let left_out = run["left_out"].to_string();
    let is_said = left_out.contains("stopped by a signal after 1 of 2 scenarios");
    check(is_said, || format!("what is left out: {left_out}"))?;
    let left = running(&daemon);
    check(left.is_empty(), || format!("processes that are left: {left:?}"))
}

/// `manyring-bench run` with these words, and with a report.
fn bench(scene: &Scene<'_>, words: &[&str], report: &Path) -> Command {
    let mut bench = Command::new(&scene.stage.bench);
    bench.arg("run").args(words).arg("--report").arg(report).stdin(Stdio::null());
    bench
}

fn document(folder: &Path) -> Outcome<Value> {
    let path = folder.join("run.json");
    let text = std::fs::read_to_string(&path).context(path.display())?;
    serde_json::from_str(&text).context(path.display())
}

fn succeeds(output: &Output) -> Outcome {
    let said = || String::from_utf8_lossy(&output.stderr).into_owned();
    check(output.status.success(), || format!("{}: {}", output.status, said()))
}

/// Processes whose command line names this program.
fn running(program: &Path) -> Vec<PathBuf> {
    let name = program.as_os_str().as_encoded_bytes();
    let names = |line: &[u8]| line.split(|byte| *byte == 0).any(|word| word == name);
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.map(|process| process.path());
    processes
        .filter(|process| std::fs::read(process.join("cmdline")).is_ok_and(|line| names(&line)))
        .collect()
}

//! The image for containers: the static program and nothing else. It is unpacked and run once.

use super::VERSION;
use manyring_system::command::{command, find, output, text, wait_for};
use manyring_system::packages::need;
use manyring_system::{Context, Outcome, check};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Longest time until the program in the image answers.
const LIMIT: Duration = Duration::from_secs(60);

/// Makes `manyring-VERSION-x86_64.oci.tar`.
pub(super) fn image(program: &Path, scratch: &Path, folder: &Path) -> Outcome<PathBuf> {
    need("the image", &["runc", "umoci"])?;
    let layout = scratch.join("image");
    let name = format!("{}:{VERSION}", layout.display());
    let bundle = scratch.join("bundle");
    output(umoci(&["init", "--layout"]).arg(&layout))?;
    output(umoci(&["new", "--image", &name]).env("SOURCE_DATE_EPOCH", "0"))?;
    output(umoci(&["unpack", "--image", &name]).arg(&bundle))?;
    for directory in ["rootfs/usr/bin", "rootfs/run/manyring", "rootfs/etc/manyring"] {
        fs::create_dir_all(bundle.join(directory)).context(directory)?;
    }
    fs::copy(program, bundle.join("rootfs/usr/bin/manyring")).context(program.display())?;
    output(umoci(&["repack", "--image", &name]).arg(&bundle))?;
    let mut config = umoci(&["config", "--image", &name]);
    config.args(["--config.entrypoint", "/usr/bin/manyring"]);
    config.args(["--config.cmd", "run", "--config.cmd", "--config"]);
    config.args(["--config.cmd", "/etc/manyring/manyring.toml"]);
    output(config.args(["--config.stopsignal", "SIGTERM", "--architecture", "amd64"]))?;
    try_it(&name, scratch)?;
    let tar = folder.join(format!("manyring-{VERSION}-x86_64.oci.tar"));
    output(command("tar").arg("-cf").arg(&tar).arg("-C").arg(&layout).arg("."))?;
    Ok(tar)
}

fn umoci(arguments: &[&str]) -> Command {
    let mut umoci = command("umoci");
    umoci.args(arguments);
    umoci
}

/// Runs what the image has become as a container, and asks it from outside.
fn try_it(name: &str, scratch: &Path) -> Outcome {
    check(find("runc").is_some(), || "no runc".into())?;
    let (bundle, shared) = (scratch.join("tried"), scratch.join("shared"));
    fs::create_dir_all(&shared).context(shared.display())?;
    output(umoci(&["unpack", "--image", name]).arg(&bundle))?;
    let path = bundle.join("config.json");
    let text_of = fs::read_to_string(&path).context(path.display())?;
    let mut config: Value = serde_json::from_str(&text_of).context(path.display())?;
    config["process"]["terminal"] = json!(false);
    config["process"]["rlimits"] = json!([]);
    config["process"]["args"] = json!([
        "/usr/bin/manyring",
        "blk",
        "--memory",
        "64M",
        "--socket-path",
        "/run/manyring/vm1.sock",
        "--control",
        "/run/manyring/control.sock"
    ]);
    config["linux"]["resources"] = json!({});
    if let Some(mounts) = config["mounts"].as_array_mut() {
        mounts.retain(|mount| mount["type"] != "cgroup");
        let shared = json!({"destination": "/run/manyring", "source": shared, "type": "bind",
            "options": ["rbind", "rw"]});
        mounts.push(shared);
    }
    fs::write(&path, config.to_string()).context(path.display())?;
    let id = format!("manyring-{}", std::process::id());
    let log = fs::File::create(scratch.join("runc.log")).context("runc.log")?;
    let mut run = command("runc");
    run.args(["run", "--bundle"]).arg(&bundle).arg(&id).stdin(Stdio::null());
    run.stdout(log.try_clone().context("runc.log")?).stderr(log);
    let mut container = run.spawn().context("runc")?;
    let program = bundle.join("rootfs/usr/bin/manyring");
    let answered = wait_for("an answer of the container", LIMIT, || {
        let control = shared.join("control.sock");
        let mut stats = command(&program.to_string_lossy());
        Ok(text(stats.arg("stats").arg("--control").arg(control)).ok())
    });
    let _ = output(command("runc").args(["kill", &id, "KILL"]));
    let _ = container.wait();
    let _ = output(command("runc").args(["delete", "--force", &id]));
    let said = fs::read_to_string(scratch.join("runc.log")).unwrap_or_default();
    let answer = answered.map_err(|error| format!("{error}; runc has said: {said}"))?;
    check(answer.contains("blk0"), || format!("the container says {answer}"))
}

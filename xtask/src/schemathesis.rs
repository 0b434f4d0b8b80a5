//! `cargo xtask schemathesis`: a program of others reads the OpenAPI document of a daemon, and
//! compares what the document says with what the daemon answers.

use crate::cargo::{build_daemon, see};
use clap::Args;
use manyring_system::cleanup::Folder;
use manyring_system::command::command;
use manyring_system::guest::cache;
use manyring_system::packages::need;
use manyring_system::{Context, Outcome};
use std::fs;
use std::path::PathBuf;

/// The version that this was made with.
const VERSION: &str = "schemathesis==4.32.5";

const SCRIPT: &str = include_str!("schemathesis.sh");

/// The devices that it finds.
const CONFIG: &str = r#"[daemon]
control = "/run/manyring/control"
state_dir = "state"
[[blk]]
name = "vm1"
socket_path = "/run/manyring/vm1"
memory = "1M"
[[net]]
name = "n"
socket_path = "/run/manyring/n"
null = true
[[limit]]
name = "gold"
read_iops = 1000
"#;

/// A request of the right form can be wrong for a device (422), or for another generation (412).
const CHECKS: &str = r#"[checks]
positive_data_acceptance.expected-statuses = ["2xx", 401, 403, 404, 409, 412, 422, 500]
"#;

/// How much it asks.
#[derive(Args, Debug)]
pub(crate) struct Schemathesis {
    /// Cases for each operation.
    #[arg(long, default_value_t = 50)]
    examples: u32,
    /// Repeats a run.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The profile of cargo with which the daemon is built.
    #[arg(long, default_value = "dev")]
    profile: String,
}

pub(crate) fn run(how: &Schemathesis) -> Outcome {
    need("schemathesis", &["curl", "iproute2", "python3-venv", "socat"])?;
    let program = install()?;
    let daemon = build_daemon(&how.profile)?;
    let folder = Folder::new()?;
    let path = folder.path().join("daemon");
    fs::create_dir(&path).context(path.display())?;
    let files = [("manyring.toml", CONFIG), ("schemathesis.toml", CHECKS), ("script", SCRIPT)];
    for (name, text) in files {
        fs::write(path.join(name), text).context(name)?;
    }
    let mut unshare = command("unshare");
    unshare.args(["--net", "--mount", "--", "sh"]).arg(path.join("script"));
    unshare
        .arg(daemon)
        .arg(program)
        .arg(path)
        .args([how.examples.to_string(), how.seed.to_string()]);
    see(&mut unshare)
}

/// Installs it once, through pip, outside of the tree.
fn install() -> Outcome<PathBuf> {
    let folder = cache()?.join("tools/schemathesis");
    let program = folder.join("bin/st");
    if !program.exists() {
        println!("xtask: installing {VERSION} into {}", folder.display());
        see(command("python3").args(["-m", "venv"]).arg(&folder))?;
        see(command(&folder.join("bin/pip").to_string_lossy()).args(["install", "-q", VERSION]))?;
    }
    Ok(program)
}

//! The program for another C library, or another machine.

use crate::cargo::{cargo, see, target};
use manyring_system::command::{command, output, text, wait_for};
use manyring_system::packages::need;
use manyring_system::{Context, Outcome, check};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Largest static program, in bytes.
const SIZE_MAX: u64 = 8_000_000;

/// Longest time until a program that was started answers.
const LIMIT: Duration = Duration::from_secs(60);

/// The build of the program for one target.
#[derive(Debug)]
pub(crate) struct Program {
    /// The target, as rustc names it.
    pub(crate) target: &'static str,
    /// The Debian packages that link it.
    pub(crate) packages: &'static [&'static str],
    /// The profile of cargo, if it has one of its own.
    profile: Option<&'static str>,
    /// The variable that tells cargo who links it, or how; and its value.
    pub(crate) linker: Option<(&'static str, &'static str)>,
    strip: &'static str,
}

/// For 64-bit ARM.
pub(crate) const ARM64: Program = Program {
    target: "aarch64-unknown-linux-gnu",
    packages: &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"],
    profile: None,
    linker: Some(("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc")),
    strip: "aarch64-linux-gnu-strip",
};

impl Program {
    /// It needs no library, so that it runs on any Linux of this machine.
    pub(super) const STATIC: Self = Self {
        target: "x86_64-unknown-linux-musl",
        // The C compiler of ring.
        packages: &["musl-tools"],
        profile: Some("static"),
        // The list of addresses that it corrects when it starts takes 0.3 MB, unless it is packed.
        linker: Some((
            "CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUSTFLAGS",
            "-C link-arg=-Wl,-z,pack-relative-relocs",
        )),
        strip: "strip",
    };

    /// Builds and strips it, and gives the path back.
    pub(super) fn build(&self, profile: &str, to: &Path) -> Outcome<PathBuf> {
        need(self.target, self.packages)?;
        let profile = self.profile.unwrap_or(profile);
        see(command("rustup").args(["target", "add", self.target]))?;
        let mut build = cargo(&["build", "--package", "manyring", "--profile", profile]);
        build.args(["--target", self.target]).envs(self.linker);
        see(&mut build)?;
        let folder = if profile == "dev" { "debug" } else { profile };
        let built = target()?.join(self.target).join(folder).join("manyring");
        output(command(self.strip).arg("-o").arg(to).arg(built))?;
        Ok(to.to_owned())
    }
}

/// Looks whether the program is small, asks for no loader, serves a disk and answers.
pub(super) fn try_static(program: &Path, scratch: &Path) -> Outcome {
    let size = fs::metadata(program).context(program.display())?.len();
    check(size <= SIZE_MAX, || format!("{size} bytes, {SIZE_MAX} at most"))?;
    let headers = text(command("readelf").args(["--program-headers", "--wide"]).arg(program))?;
    check(!headers.contains("INTERP"), || format!("not static:\n{headers}"))?;
    let name = program.to_string_lossy();
    let (control, socket) = (scratch.join("control"), scratch.join("socket"));
    let mut served = command(&name);
    served.args(["blk", "--memory", "64M", "--socket-path"]).arg(&socket);
    served.arg("--control").arg(&control).stdin(Stdio::null()).stderr(Stdio::null());
    let mut served = served.spawn().context(&name)?;
    let stats = wait_for("statistics of the static program", LIMIT, || {
        Ok(text(command(&name).arg("stats").arg("--control").arg(&control)).ok())
    });
    let _ = served.kill();
    let _ = served.wait();
    stats.and_then(|stats| check(stats.contains("blk0"), || format!("it says {stats}")))
}

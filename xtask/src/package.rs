//! The Debian package of the daemon.

use crate::cargo::{build_daemon, see, target};
use clap::Args;
use manyring_system::command::{command, output};
use manyring_system::package::{Contents, deb, depends};
use manyring_system::packages::need;
use manyring_system::{Context, Outcome};
use std::fs;

/// What it is made from.
#[derive(Args, Debug)]
pub(crate) struct Package {
    /// The profile of cargo with which the program is built; it is stripped in any case.
    #[arg(long, default_value = "release")]
    profile: String,
}

/// Makes `target/package/manyring_VERSION_amd64.deb`; lintian must find no error.
pub(crate) fn run(package: &Package) -> Outcome {
    need("the Debian package", &["binutils", "dpkg-dev", "lintian"])?;
    let folder = target()?.join("package");
    let scratch = folder.join("scratch");
    let _ = fs::remove_dir_all(&scratch);
    fs::create_dir_all(&scratch).context(scratch.display())?;
    let program = scratch.join("manyring");
    let built = build_daemon(&package.profile)?;
    output(command("strip").arg("-o").arg(&program).arg(built))?;
    let pages = scratch.join("pages");
    output(command(&program.to_string_lossy()).arg("pages").arg(&pages))?;
    let contents = Contents {
        pages,
        depends: depends(&program, &scratch)?,
        program,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        architecture: "amd64",
        compression: "xz",
    };
    let deb = deb(&contents, &scratch, &folder)?;
    see(command("lintian").args(["--fail-on", "error", "--allow-root"]).arg(&deb))?;
    let size = fs::metadata(&deb).context(deb.display())?.len();
    println!("{}: {size} bytes", deb.display());
    Ok(())
}

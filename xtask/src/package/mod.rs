//! Packages of the daemon: for Debian, as one static program, and as an image for containers.

mod oci;
mod program;

use crate::cargo::{build_daemon, see, target};
use clap::Args;
use manyring_system::command::{command, output};
use manyring_system::package::{Contents, deb, depends};
use manyring_system::packages::need;
use manyring_system::{Context, Outcome};
pub(crate) use program::ARM64;
use program::Program;
use std::fs;
use std::path::Path;

/// The version of everything here.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The files to make, and the build to make them from.
#[derive(Args, Debug)]
pub(crate) struct Package {
    /// The profile of cargo with which the program is built; it is stripped in any case.
    #[arg(long, default_value = "release")]
    profile: String,
    /// Also a program that needs no library of the host: manyring-VERSION-x86_64.
    #[arg(long = "static")]
    is_static: bool,
    /// Also an image for containers, made of that: manyring-VERSION-x86_64.oci.tar.
    #[arg(long)]
    oci: bool,
    /// Also the Debian package for arm64: built, not tried.
    #[arg(long)]
    arm64: bool,
}

/// Makes `target/package/manyring_VERSION_amd64.deb`, in which lintian must find nothing, and what
/// else is asked for.
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
        version: VERSION.to_owned(),
        architecture: "amd64",
        compression: "xz",
    };
    made(&contents, &scratch, &folder)?;
    if package.arm64 {
        let scratch = scratch.join("arm64");
        fs::create_dir_all(&scratch).context(scratch.display())?;
        let program = ARM64.build(&package.profile, &scratch.join("manyring"))?;
        // The least C library that has what it needs, as in the package for amd64.
        let depends = contents.depends.clone();
        let contents = Contents { program, depends, architecture: "arm64", ..contents };
        made(&contents, &scratch, &folder)?;
    }
    if package.is_static || package.oci {
        let program = folder.join(format!("manyring-{VERSION}-x86_64"));
        let program = Program::STATIC.build(&package.profile, &program)?;
        program::try_static(&program, &scratch)?;
        say(&program)?;
        if package.oci {
            say(&oci::image(&program, &scratch, &folder)?)?;
        }
    }
    Ok(())
}

fn made(contents: &Contents, scratch: &Path, folder: &Path) -> Outcome {
    let deb = deb(contents, scratch, folder)?;
    // Its remarks on a package for another machine are ignored.
    let fatal = if contents.architecture == "amd64" { "error,warning" } else { "error" };
    see(command("lintian").args(["--fail-on", fatal, "--allow-root"]).arg(&deb))?;
    say(&deb)
}

fn say(path: &Path) -> Outcome {
    let size = fs::metadata(path).context(path.display())?.len();
    println!("{}: {size} bytes", path.display());
    Ok(())
}

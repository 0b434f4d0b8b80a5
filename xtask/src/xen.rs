//! `cargo xtask xen`: Manyring in the dom0 of a real Xen, under emulation.

use crate::cargo::{ROOT, build_daemon, target};
use clap::{Args, ValueEnum};
use manyring_system::xen::{self, Options, Server};
use manyring_system::{Context, Outcome, check};
use std::path::{Path, PathBuf};

/// The back-end and the cases to run.
#[derive(Args, Debug)]
pub(crate) struct Xen {
    /// Who serves the guests' disks.
    #[arg(long, value_enum, default_value_t = By::Manyring)]
    backend: By,
    /// Only cases whose names hold one of these.
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    only: Vec<String>,
    /// The daemon to try [default: the release build of this tree].
    #[arg(long, value_name = "PATH")]
    manyring: Option<PathBuf>,
    /// Instead: compare the requests per second of all three, by a clock that counts instructions.
    #[arg(long, conflicts_with_all = ["backend", "only"])]
    compare: bool,
    /// How often each is measured for that; they take turns.
    #[arg(long, default_value_t = 1, requires = "compare")]
    rounds: usize,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum By {
    /// The daemon.
    Manyring,
    /// The kernel's xen-blkback.
    Blkback,
    /// QEMU's qdisk.
    Qdisk,
}

impl From<By> for Server {
    fn from(by: By) -> Self {
        match by {
            By::Manyring => Self::Manyring,
            By::Blkback => Self::Blkback,
            By::Qdisk => Self::Qdisk,
        }
    }
}

/// Plays the cases on one boot of Xen, as far as none fails, or compares.
pub(crate) fn run(args: Xen) -> Outcome {
    let manyring = match args.manyring {
        Some(path) => path.canonicalize().context(format!("--manyring {}", path.display()))?,
        None => {
            println!("xtask: building manyring");
            build_daemon("release")?
        }
    };
    let options = Options {
        manyring,
        script: Path::new(ROOT).join("contrib/xen/block-manyring"),
        logs: target()?.join("xen-logs"),
        server: args.backend.into(),
        only: args.only,
    };
    if args.compare {
        check(args.rounds > 0, || "--rounds must be more than 0".into())?;
        return xen::compare(&options, args.rounds);
    }
    let totals = xen::run(&options)?;
    println!("\n{}", totals.report());
    check(totals.failed == 0, || format!("not every case passed; see {}", options.logs.display()))
}

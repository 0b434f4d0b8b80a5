//! An operator's day with the Debian package, in a root that has not had it: installed, enabled,
//! disks and networks added, a limit changed, fifty changes refused and then made, looked at with
//! `top` and metrics, killed, upgraded, removed, purged.

use super::{Behaviour, Scene};
use crate::command::{child, output};
use crate::package::{Contents, deb, depends};
use crate::packages::need;
use crate::systemd::{PACKAGE, Root, kept};
use crate::{Context, Outcome};

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "package_day", run };

fn run(scene: &Scene<'_>) -> Outcome {
    need("an operator", &["curl", "man-db"])?;
    let program = scene.file("manyring");
    output(child("strip").arg("-o").arg(&program).arg(&scene.stage.binary))?;
    let pages = scene.file("pages");
    output(child(&program).arg("pages").arg(&pages))?;
    let contents = Contents {
        pages,
        depends: depends(&program, scene.folder.path())?,
        program,
        version: "0.1.0".to_owned(),
        architecture: "amd64",
        compression: "gzip",
    };
    let deb = deb(&contents, scene.folder.path(), scene.folder.path())?;
    let root = Root::with_packages(scene.folder.path())?;
    root.install(&scene.stage.bench, "manyring-bench")?;
    std::fs::copy(&deb, root.at("day/manyring.deb")).context(deb.display())?;
    let said = root.run(PACKAGE, &scene.log("systemd.log"))?;
    std::fs::write(scene.log("said"), &said).context("said")?;
    kept(&said, 53)
}

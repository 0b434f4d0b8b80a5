//! The commands of README's first pages, as they stand there, each fragment typed at once as
//! somebody does who copies it: the try without root, image or VM, and the quick start's disk.

use super::{Behaviour, Scene};
use crate::command::{child, text};
use crate::{Context, Outcome, check};
use std::os::unix::fs::symlink;
use std::path::Path;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "readme_is_tried", run };

/// Ends whatever a script has left running.
const END: &str = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n";

fn run(scene: &Scene<'_>) -> Outcome {
    let programs = scene.file("programs");
    std::fs::create_dir(&programs).context("programs")?;
    let stage = &scene.stage;
    for (program, name) in [(&stage.binary, "manyring"), (&stage.bench, "manyring-bench")] {
        symlink(program, programs.join(name)).context(name)?;
    }
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = std::fs::read_to_string(&readme).context(readme.display())?;
    let typed = |name: &str, script: &str| -> Outcome<String> {
        let folder = scene.file(name);
        std::fs::create_dir(&folder).context(name)?;
        let path = std::env::var("PATH").unwrap_or_default();
        let mut shell = child("bash");
        shell.args(["-ec", &format!("{END}{script}")]).current_dir(&folder);
        text(shell.env("PATH", format!("{}:{path}", programs.display())))
    };
    let says = |said: &str, words: &str| {
        check(said.contains(words), || format!("{words:?} is not in what was said:\n{said}"))
    };

    let tried = fragments(&readme, "## Try it")?.concat();
    // The first line builds what the tests have built already.
    let (build, tried) = tried.split_once('\n').ok_or("the try is one line")?;
    check(build.starts_with("cargo build "), || format!("{build:?} does not build"))?;
    let said = typed("try", tried)?;
    says(&said, "IOPS")?;
    says(&said, "blk0")?;

    let quick = fragments(&readme, "## Quick start with QEMU")?;
    let [serve, snippet, _, watch, ..] = &quick[..] else {
        return Err(format!("the quick start has {} fragments", quick.len()));
    };
    // The first fragment's last command runs in a terminal of its own, and the table is watched
    // until somebody has seen enough.
    let serve = format!("{} &\n", serve.trim_end());
    let waits = "until test -S control.sock; do sleep 0.1; done\n";
    let watch = watch.replace("manyring stats", "timeout 3 manyring stats");
    let watch = watch.replacen("--watch\n", "--watch || test $? = 124\n", 1);
    let said = typed("quick", &format!("{serve}{waits}{snippet}{watch}"))?;
    says(&said, "vhost-user-blk-pci")?;
    says(&said, "blk0: 21474836480 bytes")
}

/// The shell's fragments of a section, up to the next one.
fn fragments(text: &str, section: &str) -> Outcome<Vec<String>> {
    let (_, rest) = text.split_once(section).ok_or(format!("there is no section {section:?}"))?;
    let section = rest.split("\n## ").next().unwrap_or_default();
    let fragments = section.split("```sh\n").skip(1).filter_map(|part| part.split("```").next());
    Ok(fragments.map(str::to_owned).collect())
}

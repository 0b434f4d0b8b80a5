//! An operator's day with the Debian package, in a root that has not had it: installed, enabled,
//! disks and networks added, a guest booted on two of them, looked at with `top` and metrics, a
//! limit changed, fifty changes refused and then made, killed, upgraded, removed, purged. The guest
//! compares what it writes all the time.

use super::{Behaviour, Scene};
use crate::command::{child, output};
use crate::guest::{GuestOptions, Kind, Net, for_container};
use crate::net::WORDS;
use crate::package::{Contents, deb, depends};
use crate::packages::need;
use crate::systemd::{PACKAGE, Root, kept};
use crate::{Context, Outcome};
use std::path::Path;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "package_day", run };

/// The guest's script: it writes and compares until it reads `end`. It marks each other word when a
/// comparison that began after the word is done and the host has answered a ping.
const GUEST: &str = r#"
network
compare() {
    turn=0
    while [ ! -e /tmp/stop ]; do
        head -c 65536 /dev/urandom > /tmp/written
        dd if=/tmp/written of=$DISK bs=64k seek=$((turn % 64)) oflag=direct conv=notrunc \
            2>/dev/null || fail "write of turn $turn"
        dd if=$DISK of=/tmp/read bs=64k skip=$((turn % 64)) count=1 iflag=direct 2>/dev/null ||
            fail "read of turn $turn"
        cmp /tmp/written /tmp/read || fail "bytes of turn $turn"
        turn=$((turn + 1))
        echo $turn > /tmp/turn
    done
}
echo 0 > /tmp/turn
compare &
while read -r word && [ "$word" != end ]; do
    before=$(cat /tmp/turn)
    until [ "$(cat /tmp/turn)" -gt $((before + 1)) ]; do sleep 0.1; done
    until ping -c 1 -W 1 $HOST > /dev/null; do sleep 0.1; done
    mark "$word"
done
touch /tmp/stop
wait
dmesg | grep 'I/O error' && fail "its kernel tells of an error"
"#;

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
    let name = deb.file_name().ok_or("a package without a name")?;
    std::fs::copy(&deb, root.at("day").join(name)).context(deb.display())?;
    root.write("day/guide", &installing()?)?;
    let script = format!("{WORDS}{GUEST}");
    let guest = GuestOptions {
        socket: Some(Path::new("/run/manyring/web.sock")),
        net: Some(Net { socket: Path::new("/run/manyring/n1.sock"), pairs: 1 }),
        script: &script,
        ..GuestOptions::default()
    };
    let inside = Path::new("/day/guest");
    for_container(scene.kernel(Kind::Qemu)?, &guest, &root.at("day/guest"), inside)?;
    let said = root.run(PACKAGE, &scene.log("systemd.log"))?;
    std::fs::write(scene.log("said"), &said).context("said")?;
    let _ = std::fs::copy(root.at("day/console"), scene.log("guest.log"));
    kept(&said, 61)
}

/// The commands by which docs/guide/install.md installs the package and adds a disk.
fn installing() -> Outcome<String> {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide/install.md");
    let guide = std::fs::read_to_string(&guide).context(guide.display())?;
    let fragments = guide.split("```sh\n").filter_map(|part| part.split("```").next());
    // Before the first fragment stands the title; the first makes the package.
    Ok(fragments.skip(2).take(2).collect())
}

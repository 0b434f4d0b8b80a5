//! The lines for a guest with a disk boot one: README's own for QEMU, and those that `manyring
//! snippet` prints for QEMU and User Mode Linux. (The network's line: `ovmf_boots_from_network`;
//! libvirt's: `qemu_under_libvirt`.)

use super::{Behaviour, Scene};
use crate::command::{command, text};
use crate::guest::{Guest, GuestOptions, Kind, environment, initramfs, memory_folder};
use crate::{Context, Outcome, check};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "snippets_boot", run };

/// README's command line, up to the system disk that its reader has.
const README_BEGINS: &str = "qemu-system-x86_64 -accel kvm";
const README_ENDS: &str = "-drive file=your-system.qcow2,if=virtio";
const QUEUES: &str = "4";
const LIMIT: Duration = Duration::from_secs(600);

const SCRIPT: &str = r#"
echo "queues: $(ls /sys/block/$(basename $DISK)/mq | wc -l)"
must dd if=/dev/zero of=$DISK bs=64k count=16 conv=fsync 2>/dev/null
must dd if=$DISK of=/dev/null bs=64k count=16 2>/dev/null
"#;

fn run(scene: &Scene<'_>) -> Outcome {
    let daemon = scene.serve(&scene.image(64)?, &["--num-queues", QUEUES])?;
    let socket = daemon.socket();
    let snippet = |vmm: &str| {
        let mut snippet = command(&scene.stage.binary.to_string_lossy());
        let more = ["--num-queues", QUEUES, "--socket-path"];
        text(snippet.args(["snippet", vmm]).args(more).arg(&socket))
    };
    for (name, line) in [("readme", readme(&socket)?), ("snippet", snippet("qemu")?)] {
        let said = boot(scene, name, qemu(scene, &line)?)?;
        check(said.contains(&format!("queues: {QUEUES}")), || format!("{name}: not four queues"))?;
    }
    boot(scene, "uml", uml(scene, &snippet("uml")?)?)?;
    for (index, queue) in daemon.queues()?.iter().enumerate() {
        let faults = queue.value("faults")? + queue.value("errors")?;
        check(faults == 0, || format!("queue {index}: {faults} faults and errors"))?;
    }
    daemon.stop()
}

fn boot(scene: &Scene<'_>, name: &str, words: Vec<String>) -> Outcome<String> {
    let (program, arguments) = words.split_first().ok_or("an empty command line")?;
    let log = scene.log(&format!("guest-{name}.log"));
    let mut guest = Guest::by_firmware(program, arguments, &log)?;
    guest.until_up(LIMIT)?;
    guest.finish(LIMIT)
}

/// README's command line for the disk that is served at `socket`.
fn readme(socket: &Path) -> Outcome<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = std::fs::read_to_string(&path).context(path.display())?;
    let begin = readme.find(README_BEGINS).ok_or("README has no command line of QEMU")?;
    let line = &readme[begin..];
    let end = line.find(README_ENDS).ok_or("README's guest has no system disk")?;
    let here = line[..end].replace("path=disk.sock", &format!("path={}", socket.display()));
    check(here.contains(&*socket.to_string_lossy()), || "README names no disk.sock".into())?;
    Ok(here)
}

fn words(line: &str) -> Vec<String> {
    line.replace("\\\n", " ").split_whitespace().map(str::to_owned).collect()
}

/// The line's words, and those that boot our test guest; without KVM where this host has none.
fn qemu(scene: &Scene<'_>, line: &str) -> Outcome<Vec<String>> {
    let kernel = scene.kernel(Kind::Qemu)?;
    let (hosted, emulated) = ("-accel kvm -cpu host", "-accel tcg,thread=multi -cpu max");
    check(line.contains(hosted), || format!("no KVM: {line}"))?;
    let line = if kernel.is_kvm() { line.to_owned() } else { line.replace(hosted, emulated) };
    let mut words = words(&line);
    let quiet = "-nodefaults -no-user-config -no-reboot -display none -serial stdio -monitor none";
    words.extend(quiet.split(' ').map(str::to_owned));
    let append = format!("console=ttyS0 quiet panic=-1 no_timer_check {}", own_words());
    let initramfs = userland(scene, kernel.modules())?;
    for (option, value) in [
        ("-kernel", kernel.image().display().to_string()),
        ("-initrd", initramfs.display().to_string()),
        ("-append", append),
    ] {
        words.extend([option.to_owned(), value]);
    }
    Ok(words)
}

fn uml(scene: &Scene<'_>, line: &str) -> Outcome<Vec<String>> {
    let kernel = scene.kernel(Kind::Uml)?;
    let initramfs = userland(scene, kernel.modules())?;
    let mut own = vec!["env".to_owned(), format!("TMPDIR={}", memory_folder(&initramfs).display())];
    own.extend(kernel.shim().map(|shim| format!("LD_PRELOAD={}", shim.display())));
    own.push(kernel.image().display().to_string());
    own.extend(words(line).into_iter().skip(1));
    own.push(format!("initrd={}", initramfs.display()));
    own.push(format!("uml_dir={}/", scene.folder.path().display()));
    let quiet = "con=null con0=fd:0,fd:1 ssl=null quiet noreboot";
    own.extend(quiet.split(' ').map(str::to_owned));
    own.extend(own_words().split(' ').map(str::to_owned));
    Ok(own)
}

/// Words that tell the guest which devices to wait for.
fn own_words() -> String {
    let options = GuestOptions { socket: Some(Path::new("")), ..Default::default() };
    environment(&options).join(" ")
}

fn userland(scene: &Scene<'_>, modules: &[PathBuf]) -> Outcome<PathBuf> {
    let path = scene.file("initramfs");
    initramfs::write(&path, modules, &[], None, SCRIPT)?;
    Ok(path)
}

//! The lines for a guest with a disk boot one: README's own for QEMU, and those that `manyring
//! snippet` prints for QEMU and User Mode Linux. Those for the newest QEMU start that, and it
//! connects again. (The network's line: `ovmf_boots_from_network`; libvirt's:
//! `qemu_under_libvirt`.)

use super::{Behaviour, Scene};
use crate::command::{command, text, wait_for};
use crate::daemon::Daemon;
use crate::guest::{Emulator, Guest, GuestOptions, Kind, environment, initramfs, memory_folder};
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
    let mut daemon = scene.serve(&scene.image(64)?, &["--num-queues", QUEUES])?;
    let socket = daemon.socket();
    let snippet = |words: &[&str]| {
        let mut snippet = command(&scene.stage.binary.to_string_lossy());
        let more = ["--num-queues", QUEUES, "--socket-path"];
        text(snippet.arg("snippet").args(words).args(more).arg(&socket))
    };
    let (system, newest) = (Emulator::of_system()?, Emulator::newest()?);
    let of_system = snippet(&["qemu", "--qemu-version", &system.version()])?;
    for (name, line) in [("readme", readme(&socket, system)?), ("snippet", of_system.clone())] {
        let said = boot(scene, name, qemu(scene, &line)?)?;
        check(said.contains(&format!("queues: {QUEUES}")), || format!("{name}: not four queues"))?;
    }
    boot(scene, "uml", uml(scene, &snippet(&["uml"])?)?)?;
    for (index, queue) in daemon.queues()?.iter().enumerate() {
        let faults = queue.value("faults")? + queue.value("errors")?;
        check(faults == 0, || format!("queue {index}: {faults} faults and errors"))?;
    }
    let of_newest = snippet(&["qemu"])?;
    for (name, emulator, line) in [
        ("system", system, &of_system),
        ("newest", &newest, &of_newest),
        ("newest-readme", &newest, &readme(&socket, &newest)?),
    ] {
        daemon = connects_again(scene, name, emulator, line, daemon)?;
    }
    // What the line says of itself is so: each of them takes the form of its own version only.
    if system.reconnect() != newest.reconnect() {
        for (emulator, line) in [(system, &of_newest), (&newest, &of_system)] {
            let said = refused(emulator, line)?;
            check(said.contains("reconnect"), || format!("{}: {said}", emulator.version()))?;
        }
    }
    daemon.stop()
}

/// Starts the machine of a line, without a guest, and kills the daemon: the machine is connected
/// to the next one a moment later.
fn connects_again(
    scene: &Scene<'_>,
    name: &str,
    emulator: &Emulator,
    line: &str,
    daemon: Daemon,
) -> Outcome<Daemon> {
    let (program, arguments) = stopped(emulator, line)?;
    let log = scene.log(&format!("machine-{name}.log"));
    let connections =
        |daemon: &Daemon| Ok::<_, String>(daemon.log()?.matches("front-end connected").count());
    let before = connections(&daemon)?;
    let mut machine = Guest::by_firmware(&program, &arguments, &log)?;
    let mut connects = |daemon: &Daemon, count| {
        wait_for(&format!("a connection of the machine {name}"), Duration::from_secs(60), || {
            check(!machine.has_ended()?, || {
                format!("QEMU {} ended: {:?}", emulator.version(), machine.said())
            })?;
            Ok((connections(daemon)? >= before + count).then_some(()))
        })
    };
    connects(&daemon, 1)?;
    let socket = daemon.socket();
    let daemon = Daemon::start(daemon.crash()?, &socket)?;
    connects(&daemon, 2)?;
    Ok(daemon)
}

/// What a QEMU says that does not start with a line.
fn refused(emulator: &Emulator, line: &str) -> Outcome<String> {
    let (program, arguments) = stopped(emulator, line)?;
    match text(command("timeout").arg("30").arg(program).args(arguments)) {
        Ok(said) => Err(format!("QEMU {} starts with {line}: {said}", emulator.version())),
        Err(said) => Ok(said),
    }
}

/// The program and the words of a line, for a machine that stands still and shows nothing.
fn stopped(emulator: &Emulator, line: &str) -> Outcome<(String, Vec<String>)> {
    let line = line.replace("-accel kvm -cpu host", "-accel tcg -cpu max");
    let (program, own) = emulator.words().split_first().ok_or("no program")?;
    let quiet = "-S -nodefaults -no-user-config -display none -monitor none";
    let words = words(&line).into_iter().skip(1).chain(quiet.split(' ').map(str::to_owned));
    Ok((program.clone(), own.iter().cloned().chain(words).collect()))
}

fn boot(scene: &Scene<'_>, name: &str, words: Vec<String>) -> Outcome<String> {
    let (program, arguments) = words.split_first().ok_or("an empty command line")?;
    let log = scene.log(&format!("guest-{name}.log"));
    let mut guest = Guest::by_firmware(program, arguments, &log)?;
    guest.until_up(LIMIT)?;
    guest.finish(LIMIT)
}

/// README's command line for the disk that is served at `socket`, with the value of its variable
/// that it names for this QEMU.
fn readme(socket: &Path, emulator: &Emulator) -> Outcome<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = std::fs::read_to_string(&path).context(path.display())?;
    let begin = readme.find(README_BEGINS).ok_or("README has no command line of QEMU")?;
    let line = &readme[begin..];
    let end = line.find(README_ENDS).ok_or("README's guest has no system disk")?;
    let here = line[..end].replace("path=disk.sock", &format!("path={}", socket.display()));
    let how = emulator.reconnect();
    check(readme.contains(&format!("RECONNECT={how}")), || format!("README has no {how}"))?;
    check(here.contains(",$RECONNECT "), || "README's socket has no $RECONNECT".into())?;
    let here = here.replace("$RECONNECT", how);
    check(here.contains(&*socket.to_string_lossy()), || "README names no disk.sock".into())?;
    Ok(here)
}

/// The words of a command, without the line that says for which program it is.
fn words(line: &str) -> Vec<String> {
    let line = line.split_once('\n').filter(|_| line.starts_with('#')).map_or(line, |all| all.1);
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

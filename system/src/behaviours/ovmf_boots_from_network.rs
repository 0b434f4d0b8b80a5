//! UEFI firmware boots Linux over our tap: OVMF's own driver, which is of before virtio 1.0, on the
//! device line that `manyring snippet` prints. Linux then drives the same device with VERSION_1.

use super::{Behaviour, Scene};
use crate::command::{command, output, text, wait_for};
use crate::daemon::Daemon;
use crate::guest::{Emulator, Guest, GuestOptions, Kind, Net, environment, initramfs};
use crate::net::{Far, Namespace, Service, WORDS};
use crate::{Context, Outcome, check, packages};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "ovmf_boots_from_network", run };

const PACKAGES: [&str; 3] = ["dnsmasq-base", "grub-efi-amd64-bin", "ovmf"];
const FIRMWARE: &str = "/usr/share/OVMF";
const TAP: &str = "tap0";

/// The loader is what the firmware downloads. It gets the rest itself, by the firmware's driver.
const LOADER: &str = "boot.efi";
const LOADER_MODULES: [&str; 6] = ["efinet", "tftp", "linux", "normal", "serial", "terminal"];

const SCRIPT: &str = r#"
network
is "VERSION_1" "$(cut -c33 < /sys/class/net/eth0/device/features)" 1
pings $HOST
agrees $HOST 256 "booted over the network"
"#;

/// Under emulation on a busy host.
const LIMIT: Duration = Duration::from_secs(600);

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("a network boot", &PACKAGES)?;
    let namespace = Namespace::new()?;
    let daemon = scene.serve_net(&namespace, &["--tap", TAP])?;
    namespace.address(TAP)?;
    let _far = Far::start(&namespace, scene.folder.path())?;
    let offered = offer(scene)?;
    let log = scene.log("dnsmasq.log");
    let _server = serve(&namespace, &offered, &log)?;
    let machine = machine(scene, &daemon.socket())?;
    let mut guest = Guest::by_firmware(&machine[0], &machine[1..], &scene.log("guest.log"))?;
    let said = || std::fs::read_to_string(&log).context(log.display());
    for what in ["DHCPACK", LOADER, "vmlinuz", "initramfs"] {
        wait_for(&format!("{what} in what dnsmasq did"), LIMIT, || {
            Ok(said()?.lines().any(|line| line.contains(what) && is_done(line)).then_some(()))
        })?;
    }
    guest.until_up(LIMIT)?;
    guest.finish(LIMIT)?;
    has_faultless_queues(&daemon)?;
    daemon.stop()?;
    namespace.holds_only(&[])
}

fn is_done(line: &str) -> bool {
    line.contains("DHCPACK") || line.contains(": sent ")
}

/// A folder with all that the firmware and its loader download.
fn offer(scene: &Scene<'_>) -> Outcome<PathBuf> {
    let folder = scene.file("offered");
    std::fs::create_dir(&folder).context(folder.display())?;
    let kernel = scene.kernel(Kind::Qemu)?;
    let image = folder.join("vmlinuz");
    std::fs::copy(kernel.image(), &image).context(image.display())?;
    let script = format!("{WORDS}{SCRIPT}");
    initramfs::write(&folder.join("initramfs"), kernel.modules(), &[], None, &script)?;
    let net = Some(Net { socket: Path::new(""), pairs: 1 });
    let words = environment(&GuestOptions { net, ..Default::default() }).join(" ");
    let config = scene.file("grub.cfg");
    let text = format!(
        "linux (tftp)/vmlinuz console=ttyS0 quiet panic=-1 no_timer_check {words}\n\
         initrd (tftp)/initramfs\nboot\n"
    );
    std::fs::write(&config, text).context(config.display())?;
    let mut image = command("grub-mkimage");
    image.args(["-O", "x86_64-efi", "-p", "/", "-c"]).arg(config).arg("-o");
    output(image.arg(folder.join(LOADER)).args(LOADER_MODULES))?;
    Ok(folder)
}

/// DHCP and TFTP on the tap.
fn serve(namespace: &Namespace, folder: &Path, log: &Path) -> Outcome<Service> {
    let mut command = namespace.child("dnsmasq");
    command.args(["--no-daemon", "--conf-file=/dev/null", "--port=0", "--leasefile-ro"]);
    command.args(["--user=root", "--group=root", "--log-dhcp", "--bind-interfaces"]);
    command.arg(format!("--interface={TAP}")).arg("--dhcp-range=192.0.2.10,192.0.2.50,1h");
    command.arg(format!("--dhcp-boot={LOADER}"));
    command.arg("--enable-tftp").arg(format!("--tftp-root={}", folder.display()));
    let mut service = Service::silent(command, log)?;
    service.until_says("TFTP root", log)?;
    Ok(service)
}

/// The snippet's command line, emulated and with firmware.
fn machine(scene: &Scene<'_>, socket: &Path) -> Outcome<Vec<String>> {
    let mut snippet = command(&scene.stage.binary.to_string_lossy());
    snippet.args(["snippet", "qemu", "--qemu-version", &Emulator::of_system()?.version()]);
    snippet.args(["--net", "--queue-pairs", "1", "--socket-path"]).arg(socket);
    let said = text(&mut snippet)?;
    // The first line says for which QEMU it is.
    let (_, said) = said.split_once('\n').ok_or("the snippet is one line")?;
    let said = said.replace("\\\n", " ");
    let emulated = said.replace("-accel kvm -cpu host", "-accel tcg,thread=multi -cpu max");
    check(emulated != said, || format!("the snippet has no KVM: {said}"))?;
    let mut words: Vec<_> = emulated.split_whitespace().map(str::to_owned).collect();
    let device = words.last_mut().filter(|word| word.starts_with("virtio-net-pci,"));
    // Without vectors, since Debian 12's QEMU itself crashes under emulation with MSI-X. Without
    // the ROM that QEMU adds: its driver (iPXE) knows virtio 1.0, and the firmware's own does not.
    device.ok_or_else(|| format!("no device: {said}"))?.push_str(",vectors=0,romfile=");
    let variables = scene.file("variables.fd");
    let template = format!("{FIRMWARE}/OVMF_VARS_4M.fd");
    std::fs::copy(&template, &variables).context(template)?;
    let code = format!("{FIRMWARE}/OVMF_CODE_4M.fd,readonly=on");
    for file in [code, variables.display().to_string()] {
        words.extend(["-drive".into(), format!("if=pflash,format=raw,file={file}")]);
    }
    let quiet = "-nodefaults -no-user-config -no-reboot -display none -serial stdio -monitor none";
    words.extend(quiet.split(' ').map(str::to_owned));
    Ok(words)
}

fn has_faultless_queues(daemon: &Daemon) -> Outcome {
    for (index, queue) in daemon.queues()?.iter().enumerate() {
        let faults = queue.value("faults")?;
        check(faults == 0, || format!("queue {index}: {faults} faults"))?;
    }
    Ok(())
}

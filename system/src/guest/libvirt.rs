//! A guest that libvirt starts: a libvirtd of its own, as a user of its own, in folders that go
//! with the guest. Nothing of the host's libvirt is used or changed.

use super::{GuestOptions, Kernel};
use crate::command::{child, command, output, wait_for};
use crate::{Context, Outcome};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The name of the domain.
const DOMAIN: &str = "manyring";
/// Seconds after which libvirtd ends when its last domain has ended.
const IDLE: &str = "5";
const START: Duration = Duration::from_secs(20);
/// Seconds for a command: before its first domain, libvirt asks this QEMU for all that it can do.
const TIMEOUT: &str = "90";
/// Where libvirtd keeps what it has heard.
const CAPABILITIES: &str = "cache/libvirt/qemu/cache/capabilities";
/// The user that runs libvirtd and QEMU if this process is root: `nobody`.
const NOBODY: u32 = 65_534;
/// The first process reaps what QEMU leaves behind, for which libvirtd would wait.
const FIRST: &str = "\"$@\" & wait $!";

/// The user that QEMU runs as, if it is not that of this process: QEMU's sockets must belong to it.
#[must_use]
pub fn user() -> Option<u32> {
    rustix::process::geteuid().is_root().then_some(NOBODY)
}

/// Starts libvirtd in a pid namespace of its own. `folder` holds the initramfs.
pub(super) fn start(
    kernel: &Kernel,
    options: &GuestOptions<'_>,
    devices: &str,
    folder: &Path,
) -> Outcome<Child> {
    crate::packages::need(
        "a guest under libvirt",
        &["libvirt-daemon", "libvirt-daemon-driver-qemu", "libvirt-clients", "qemu-system-x86"],
    )?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))
        .context(folder.display())?;
    std::fs::copy(kernel.image(), folder.join("vmlinuz")).context("the guest's kernel")?;
    for name in ["run", "config/libvirt", CAPABILITIES, "data"] {
        std::fs::create_dir_all(folder.join(name)).context(name)?;
    }
    let files = [
        // No virtlogd, and no part of the host that a test cannot have.
        (
            "config/libvirt/qemu.conf",
            "stdio_handler = \"file\"\nsecurity_driver = \"none\"\n".into(),
        ),
        ("libvirtd.conf", format!("log_outputs = \"2:file:{}/libvirtd.log\"\n", folder.display())),
        ("domain.xml", domain(options, devices, folder)),
        ("libvirtd.log", String::new()),
        ("console", String::new()),
    ];
    for (name, content) in files {
        std::fs::write(folder.join(name), content).context(name)?;
    }
    copy_files(&kept_capabilities()?, &folder.join(CAPABILITIES), user())?;
    if let Some(user) = user() {
        let mut names = vec!["run", "config", "config/libvirt", "data", "libvirtd.log", "console"];
        let cache = Path::new(CAPABILITIES).ancestors().filter_map(Path::to_str);
        names.extend(cache.filter(|name| !name.is_empty()));
        for name in names {
            chown(folder.join(name), Some(user), Some(user)).context(name)?;
        }
    }
    let mut first = child("unshare");
    if user().is_none() {
        first.args(["--user", "--map-current-user"]);
    }
    first.args(["--fork", "--pid", "--kill-child", "--mount-proc", "--", "sh", "-c", FIRST, "sh"]);
    let libvirtd = crate::command::find("libvirtd").ok_or("libvirtd is not installed")?;
    let config = folder.join("libvirtd.conf");
    as_user(&mut first, &libvirtd, folder).args(["--timeout", IDLE, "--config"]).arg(config);
    first.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    first.spawn().context("libvirtd")
}

/// Makes libvirtd create the domain. Its findings about this QEMU are kept for the next libvirtd.
pub(super) fn create(folder: &Path) -> Outcome {
    let socket = folder.join("run/libvirt/libvirt-sock");
    wait_for("libvirtd's socket", START, || Ok(socket.exists().then_some(())))?;
    virsh(folder, &["create"], &folder.join("domain.xml"))?;
    copy_files(&folder.join(CAPABILITIES), &kept_capabilities()?, None)
}

/// Plugs a device into the running domain, or unplugs it: `verb` is `attach-device` or
/// `detach-device`, `device` its element.
pub(super) fn change(folder: &Path, verb: &str, device: &str) -> Outcome {
    let file = folder.join("device.xml");
    std::fs::write(&file, device).context(file.display())?;
    virsh(folder, &[verb, "--live", DOMAIN], &file)
}

/// Runs virsh with `words` and a file of XML.
fn virsh(folder: &Path, words: &[&str], xml: &Path) -> Outcome {
    let mut virsh = command("timeout");
    let program = crate::command::find("virsh").ok_or("virsh is not installed")?;
    virsh.arg(TIMEOUT);
    let socket = folder.join("run/libvirt/libvirt-sock");
    let uri = format!("qemu:///session?socket={}", socket.display());
    as_user(&mut virsh, &program, folder).args(["--connect", &uri]).args(words);
    let ran = output(virsh.arg(xml));
    let log = || std::fs::read_to_string(folder.join("libvirtd.log")).unwrap_or_default();
    ran.map(|_| ()).map_err(|error| format!("{error}; libvirtd says: {}", log().trim()))
}

/// Where libvirtd's answers to its questions about QEMU are kept between runs: asking takes most of
/// a minute. libvirtd itself asks anew when QEMU, the kernel or libvirt is another one.
fn kept_capabilities() -> Outcome<PathBuf> {
    let folder = super::cache()?.join("libvirt-capabilities");
    std::fs::create_dir_all(&folder).context(folder.display())?;
    Ok(folder)
}

/// Copies the files of a folder into another one, where they belong to `owner`.
fn copy_files(from: &Path, to: &Path, owner: Option<u32>) -> Outcome {
    for entry in std::fs::read_dir(from).context(from.display())? {
        let path = entry.context(from.display())?.path();
        let Some(name) = path.file_name().filter(|_| path.is_file()) else { continue };
        // Under another name first: two guests may be started at once.
        let (partial, whole) = (to.join(format!(".{}", std::process::id())), to.join(name));
        std::fs::copy(&path, &partial).context(path.display())?;
        chown(&partial, owner, owner).context(partial.display())?;
        std::fs::rename(&partial, &whole).context(whole.display())?;
    }
    Ok(())
}

/// Goes on with `program` as the user of libvirt, whose folders are all in `folder`.
fn as_user<'a>(command: &'a mut Command, program: &Path, folder: &Path) -> &'a mut Command {
    command.env("HOME", folder);
    for (name, value) in [
        ("XDG_RUNTIME_DIR", "run"),
        ("XDG_CONFIG_HOME", "config"),
        ("XDG_CACHE_HOME", "cache"),
        ("XDG_DATA_HOME", "data"),
    ] {
        command.env(name, folder.join(value));
    }
    if let Some(user) = user() {
        let user = user.to_string();
        command.args(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups", "--"]);
    }
    command.arg(program)
}

fn domain(options: &GuestOptions<'_>, devices: &str, folder: &Path) -> String {
    let (folder, environment) = (folder.display(), super::machine::environment(options).join(" "));
    let (mib, cpus) = (super::machine::MEMORY_MIB, options.cpus);
    // Two for the devices that it has, one into which another can be plugged.
    let ports = "<controller type='pci' model='pcie-root'/>".to_owned()
        + &"<controller type='pci' model='pcie-root-port'/>".repeat(3);
    // With MSI-X Debian 12's QEMU itself crashes under emulation: no vectors for the network.
    format!(
        "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n\
           <name>{DOMAIN}</name><memory unit='MiB'>{mib}</memory><vcpu>{cpus}</vcpu>\n\
           <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\n\
           <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{folder}/vmlinuz</kernel>\
           <initrd>{folder}/initramfs</initrd><cmdline>console=ttyS0 quiet panic=-1 \
           no_timer_check {environment}</cmdline></os>\n\
           <cpu mode='maximum'/><features><acpi/></features><on_reboot>destroy</on_reboot>\n\
           <devices>\n<controller type='usb' model='none'/><memballoon model='none'/>\n\
           {ports}\n\
           <serial type='file'><source path='{folder}/console'/></serial>\n\
           {devices}</devices>\n\
           <qemu:override><qemu:device alias='ua-net'><qemu:frontend>\
           <qemu:property name='vectors' type='unsigned' value='0'/>\
           </qemu:frontend></qemu:device></qemu:override>\n\
         </domain>\n"
    )
}

//! `manyring snippet`: the command line, XML or JSON with which a VMM uses a device of the daemon.
//!
//! Every snippet makes the VMM share the guest's memory (memfd, `share=on`): without that, a
//! vhost-user back-end cannot map it.

mod blk;
mod net;
mod qemu;
mod storage_daemon;
#[cfg(test)]
mod tests;

use crate::cli::{SnippetArgs, Vmm};
use manyring_config::plan::{BlkPlan, DevicePlan, NetPlan, SocketPlan};
use manyring_config::plan::{NUM_QUEUES, is_device_name};
use manyring_device::net::MacAddress;
use qemu::Version;
use std::path::{Path, PathBuf};

/// The facts about a device that a snippet needs.
#[derive(Clone, Debug)]
struct Wanted {
    name: String,
    socket: PathBuf,
    /// True if the daemon connects to the VMM, which must listen.
    client: bool,
    /// Queues, or queue pairs of a network device.
    queues: usize,
    kind: Kind,
    /// The version of QEMU for which the line is written.
    qemu: Version,
}

/// Facts that depend on the kind of the device.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Blk {
        queue_size: u16,
    },
    Net {
        /// The guest's MAC address; `None`: the interface's address, which is unknown since this
        /// command does not open the interface.
        mac: Option<MacAddress>,
        mtu: Option<u16>,
    },
}

/// Returns the text for the VMM that the command line names.
pub(crate) fn text(args: &SnippetArgs) -> Result<String, String> {
    if args.vmm != Vmm::Qemu && args.qemu_version.is_some() {
        return Err("--qemu-version: applies to qemu only".to_owned());
    }
    if args.vmm == Vmm::Helper {
        return storage_daemon::text(args.device.as_deref());
    }
    let wanted = wanted(args)?;
    check_path(args.vmm, &wanted.socket)?;
    match wanted.kind {
        Kind::Blk { queue_size } => blk::text(args.vmm, &wanted, queue_size),
        Kind::Net { mac, mtu } => net::text(args.vmm, &wanted, mac, mtu),
    }
}

fn wanted(args: &SnippetArgs) -> Result<Wanted, String> {
    if let Some(socket) = &args.socket_path {
        return of_socket(args, socket);
    }
    let file = args.config.as_ref().ok_or("--config: is missing (or --socket-path)")?;
    let plan = manyring_config::read(file).map_err(|failure| failure.to_string())?;
    let name = args.device.as_ref().ok_or_else(|| plan.devices_of(file))?;
    if let Some(blk) = plan.blk.iter().find(|blk| blk.device.name == *name) {
        return of_blk(blk, args);
    }
    let net = plan.net.iter().find(|net| net.device.name == *name);
    let net = net.ok_or_else(|| format!("{}: no device is named {name:?}", file.display()))?;
    of_net(net, args)
}

fn of_socket(args: &SnippetArgs, socket: &Path) -> Result<Wanted, String> {
    let (default, kind) = match args.net {
        false => ("blk0", Kind::Blk { queue_size: 128 }),
        true => ("net0", Kind::Net { mac: None, mtu: None }),
    };
    let name = args.device.clone().unwrap_or_else(|| default.to_owned());
    if !is_device_name(&name) {
        return Err(format!("DEVICE: {name:?} is not the name of a device"));
    }
    // Without --num-queues or --queue-pairs: the default number of the commands `blk` and `net`.
    let queues = match args.net {
        true => queue_pairs(args, usize::MAX)?.unwrap_or(1),
        false => num_queues(args, usize::MAX)?.unwrap_or(NUM_QUEUES),
    };
    let (socket, qemu) = (absolute(socket)?, qemu::version(args)?);
    Ok(Wanted { name, socket, client: false, queues, kind, qemu })
}

fn of_blk(blk: &BlkPlan, args: &SnippetArgs) -> Result<Wanted, String> {
    let (socket, client) = socket_of(&blk.device)?;
    Ok(Wanted {
        name: blk.device.name.clone(),
        socket,
        client,
        queues: num_queues(args, blk.options.num_queues)?.unwrap_or(blk.options.num_queues),
        kind: Kind::Blk { queue_size: blk.options.queue_size },
        qemu: qemu::version(args)?,
    })
}

fn of_net(net: &NetPlan, args: &SnippetArgs) -> Result<Wanted, String> {
    let (socket, client) = socket_of(&net.device)?;
    // `None` for a macvtap or an AF_XDP interface, whose address is not known here. Inherited
    // descriptors may be queues of a macvtap, too.
    let made = (!net.port.kind().demands_mac).then(|| net.made_mac());
    Ok(Wanted {
        name: net.device.name.clone(),
        socket,
        client,
        queues: queue_pairs(args, net.options.queue_pairs)?.unwrap_or(net.options.queue_pairs),
        kind: Kind::Net { mac: net.mac.or(made), mtu: net.options.mtu },
        qemu: qemu::version(args)?,
    })
}

fn num_queues(args: &SnippetArgs, most: usize) -> Result<Option<usize>, String> {
    match args.queue_pairs {
        Some(_) => Err("--queue-pairs: is for network devices; use --num-queues".to_owned()),
        None => at_most("--num-queues", args.num_queues, most),
    }
}

fn queue_pairs(args: &SnippetArgs, most: usize) -> Result<Option<usize>, String> {
    match args.num_queues {
        Some(_) => Err("--num-queues: is for disks; use --queue-pairs".to_owned()),
        None => at_most("--queue-pairs", args.queue_pairs, most),
    }
}

fn at_most(option: &str, count: Option<usize>, most: usize) -> Result<Option<usize>, String> {
    match count {
        Some(count) if count > most => {
            Err(format!("{option}: {count} is more than the device's {most}"))
        }
        count => Ok(count),
    }
}

/// Returns the path of a device's socket, and true if the daemon connects to it.
fn socket_of(device: &DevicePlan) -> Result<(PathBuf, bool), String> {
    match &device.socket {
        SocketPlan::Listen { path, .. } => Ok((absolute(path)?, false)),
        SocketPlan::Connect { path } => Ok((absolute(path)?, true)),
        SocketPlan::Fd(_) => Err(format!("{}: fd: has no path to connect to", device.name)),
    }
}

fn absolute(path: &Path) -> Result<PathBuf, String> {
    std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Refuses a path with characters that the syntax of the VMM cannot express, so that no snippet is
/// wrong.
fn check_path(vmm: Vmm, path: &Path) -> Result<(), String> {
    let text = path.to_str().ok_or_else(|| format!("{}: is not UTF-8", path.display()))?;
    let special = match vmm {
        Vmm::Qemu | Vmm::CloudHypervisor | Vmm::Crosvm => ",",
        Vmm::Uml => ":",
        Vmm::Libvirt | Vmm::Firecracker | Vmm::Helper => "",
    };
    // Also refuse characters that would need quotes in a shell, XML or JSON.
    match text
        .chars()
        .find(|c| c.is_whitespace() || special.contains(*c) || "'\"\\&<>$`".contains(*c))
    {
        None => Ok(()),
        Some(c) => Err(format!("{text}: this VMM does not support {c:?} in a socket path")),
    }
}

/// XML comment that says which versions of libvirt and QEMU support `<reconnect>`.
const LIBVIRT_RECONNECT: &str = "\
    <!-- libvirt tells QEMU to connect again in the form that this QEMU knows. libvirt 11.3\n     \
    and newer: any QEMU; older ones (9.0 is Debian 12's): QEMU before 10.2. -->\n";

/// The XML element by which a libvirt domain shares its memory.
const LIBVIRT_MEMORY: &str = "<!-- in <domain> -->\n\
     <memoryBacking>\n  \
       <source type='memfd'/>\n  \
       <access mode='shared'/>\n\
     </memoryBacking>\n";

/// Returns XML comments about the socket's permissions and about reconnecting. They are needed
/// because libvirt reports no error if QEMU cannot open the socket: the domain hangs.
fn libvirt_socket(wanted: &Wanted) -> String {
    if wanted.client {
        return String::new();
    }
    let permissions = "<!-- QEMU's user must be able to open the socket, else the domain hangs at \
        its start.\n     \
        Where that is Debian's libvirt-qemu, serve the device with socket_owner =\n     \
        \"libvirt-qemu\"; or with a socket_group that it is in, and socket_mode = \"0660\". -->\n";
    format!("{permissions}{LIBVIRT_RECONNECT}")
}

/// Returns the beginning of Cloud Hypervisor's command line, with shared memory; the option of the
/// device follows.
fn cloud_hypervisor_machine(wanted: &Wanted) -> String {
    format!("cloud-hypervisor --cpus boot={} --memory size=1G,shared=on \\\n", wanted.queues)
}

/// crosvm's command line for a device of this `kind`. It names the ring size, because crosvm's
/// default of 32768 entries works, but makes the guest keep memory for each entry.
fn crosvm(wanted: &Wanted, kind: &str, queue_size: u16) -> String {
    let (socket, queues) = (wanted.socket.display(), wanted.queues);
    format!(
        "crosvm run --cpus {queues} --mem 1024 \\\n  \
         --vhost-user {kind},socket={socket},max-queue-size={queue_size}\n"
    )
}

/// User Mode Linux' command line for a device of this virtio id. UML always shares its memory, so
/// no option is needed for that.
fn uml(wanted: &Wanted, virtio_id: u32) -> String {
    format!("linux mem=512M virtio_uml.device={}:{virtio_id}\n", wanted.socket.display())
}

/// Returns the error for a device with `client`, if the VMM cannot listen for the daemon.
fn cannot_listen(name: &str) -> String {
    format!("{name}: client: this VMM cannot listen for its back-end")
}

/// Returns an id that QEMU and Firecracker accept: letters, digits and `_`, the first a letter.
fn id(kind: &str, name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    format!("{kind}_{}", name.chars().map(plain).collect::<String>())
}

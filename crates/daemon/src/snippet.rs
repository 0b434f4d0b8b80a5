//! `manyring snippet`: what a VMM is told, ready to paste, to use a device that we serve.
//!
//! Every VMM must share the guest's memory with us (memfd, `share=on`): without it a vhost-user
//! back-end sees nothing.

use crate::cli::{SnippetArgs, Vmm};
use crate::config::plan::{BlkPlan, SocketPlan};
use std::path::{Path, PathBuf};

/// What a snippet needs to know of a device.
#[derive(Clone, Debug)]
struct Wanted {
    name: String,
    socket: PathBuf,
    queues: usize,
    queue_size: u16,
    /// We connect: the VMM must listen.
    client: bool,
}

/// The text for the VMM.
pub(crate) fn text(args: &SnippetArgs) -> Result<String, String> {
    let wanted = wanted(args)?;
    if wanted.client && args.vmm != Vmm::Qemu {
        return Err(format!("{}: client: this VMM cannot listen for its back-end", wanted.name));
    }
    check_path(args.vmm, &wanted.socket)?;
    Ok(match args.vmm {
        Vmm::Qemu => qemu(&wanted),
        Vmm::Libvirt => libvirt(&wanted),
        Vmm::CloudHypervisor => cloud_hypervisor(&wanted),
        Vmm::Crosvm => crosvm(&wanted),
        Vmm::Firecracker => firecracker(&wanted),
        Vmm::Uml => uml(&wanted),
    })
}

fn wanted(args: &SnippetArgs) -> Result<Wanted, String> {
    if let Some(socket) = &args.socket_path {
        let queues = args.num_queues.unwrap_or(1);
        let name = args.device.clone().unwrap_or_else(|| "blk0".to_owned());
        let name_ok = crate::config::plan::is_device_name(&name);
        return if name_ok {
            Ok(Wanted { name, socket: absolute(socket)?, queues, queue_size: 128, client: false })
        } else {
            Err(format!("DEVICE: {name:?} is no name of a device"))
        };
    }
    let file = args.config.as_ref().ok_or("--config: is missing (or --socket-path)")?;
    let plan = crate::config::read(file)?;
    let name = args.device.as_ref().ok_or("DEVICE: is missing")?;
    let blk = plan.blk.iter().find(|blk| blk.name == *name);
    let blk = blk.ok_or_else(|| format!("{}: no device is named {name:?}", file.display()))?;
    from_plan(blk, args.num_queues)
}

fn from_plan(blk: &BlkPlan, num_queues: Option<usize>) -> Result<Wanted, String> {
    let (socket, client) = match &blk.socket {
        SocketPlan::Listen { path, .. } => (path, false),
        SocketPlan::Connect { path } => (path, true),
        SocketPlan::Fd(_) => return Err(format!("{}: fd: has no path to connect to", blk.name)),
    };
    let queues = num_queues.unwrap_or(blk.num_queues);
    if queues > blk.num_queues {
        let most = blk.num_queues;
        return Err(format!("--num-queues: {queues} is more than the device's {most}"));
    }
    Ok(Wanted {
        name: blk.name.clone(),
        socket: absolute(socket)?,
        queues,
        queue_size: blk.queue_size,
        client,
    })
}

fn absolute(path: &Path) -> Result<PathBuf, String> {
    std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// A path that the VMM's own syntax could not carry is refused, not quoted wrongly.
fn check_path(vmm: Vmm, path: &Path) -> Result<(), String> {
    let text = path.to_str().ok_or_else(|| format!("{}: is not UTF-8", path.display()))?;
    let special = match vmm {
        Vmm::Qemu | Vmm::CloudHypervisor | Vmm::Crosvm => ",",
        Vmm::Uml => ":",
        Vmm::Libvirt | Vmm::Firecracker => "",
    };
    // What would need quotes in a shell, XML or JSON is refused as well.
    match text
        .chars()
        .find(|c| c.is_whitespace() || special.contains(*c) || "'\"\\&<>$`".contains(*c))
    {
        None => Ok(()),
        Some(c) => Err(format!("{text}: this VMM takes no {c:?} in a socket path")),
    }
}

/// An id that QEMU and Firecracker take: letters, digits, `_`; begins with a letter.
fn id(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    format!("blk_{}", name.chars().map(plain).collect::<String>())
}

fn qemu(wanted: &Wanted) -> String {
    let (id, socket, queues) = (id(&wanted.name), wanted.socket.display(), wanted.queues);
    let how = if wanted.client { "server=on,wait=off" } else { "reconnect=1" };
    format!(
        "qemu-system-x86_64 -machine q35,memory-backend=mem0 \\\n  \
         -m 1G -object memory-backend-memfd,id=mem0,size=1G,share=on \\\n  \
         -smp {queues} \\\n  \
         -chardev socket,id={id},path={socket},{how} \\\n  \
         -device vhost-user-blk-pci,chardev={id},num-queues={queues}\n"
    )
}

fn libvirt(wanted: &Wanted) -> String {
    let (socket, queues) = (wanted.socket.display(), wanted.queues);
    format!(
        "<!-- in <domain> -->\n\
         <memoryBacking>\n  \
           <source type='memfd'/>\n  \
           <access mode='shared'/>\n\
         </memoryBacking>\n\
         <!-- in <devices> -->\n\
         <disk type='vhostuser' device='disk'>\n    \
           <driver name='qemu' type='raw' queues='{queues}'/>\n    \
           <source type='unix' path='{socket}'>\n      \
             <reconnect enabled='yes' timeout='1'/>\n    \
           </source>\n    \
           <target dev='vda' bus='virtio'/>\n\
         </disk>\n"
    )
}

fn cloud_hypervisor(wanted: &Wanted) -> String {
    let (socket, queues) = (wanted.socket.display(), wanted.queues);
    format!(
        "cloud-hypervisor --cpus boot={queues} --memory size=1G,shared=on \\\n  \
         --disk vhost_user=true,socket={socket},num_queues={queues},queue_size={}\n",
        wanted.queue_size
    )
}

fn crosvm(wanted: &Wanted) -> String {
    let (socket, queues) = (wanted.socket.display(), wanted.queues);
    format!("crosvm run --cpus {queues} --mem 1024 \\\n  --vhost-user block,socket={socket}\n")
}

fn firecracker(wanted: &Wanted) -> String {
    let drive = serde_json::json!({
        "drives": [{
            "drive_id": id(&wanted.name),
            "is_root_device": false,
            "socket": wanted.socket,
        }]
    });
    // Firecracker shares the memory itself once a drive has a socket; it uses one queue.
    format!("{drive:#}\n")
}

fn uml(wanted: &Wanted) -> String {
    // 2 is VIRTIO_ID_BLOCK. The memory of UML is a file that it shares with its back-ends.
    format!("linux mem=512M virtio_uml.device={}:2\n", wanted.socket.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    fn snippet(arguments: &[&str]) -> Result<String, String> {
        let all = ["manyring", "snippet"].iter().chain(arguments);
        match Cli::try_parse_from(all).map_err(|e| e.to_string())?.command {
            crate::cli::Command::Snippet(args) => text(&args),
            other => Err(format!("{other:?}")),
        }
    }

    fn of(vmm: &str) -> String {
        snippet(&[vmm, "--socket-path", "/run/d.sock", "--num-queues", "4"]).unwrap()
    }

    #[test]
    fn qemu_gets_shared_memory_queues_and_a_socket_that_reconnects() {
        let text = of("qemu");
        for part in [
            "-machine q35,memory-backend=mem0",
            "memory-backend-memfd,id=mem0,size=1G,share=on",
            "-chardev socket,id=blk_blk0,path=/run/d.sock,reconnect=1",
            "-device vhost-user-blk-pci,chardev=blk_blk0,num-queues=4",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        let lines: Vec<_> = text.lines().collect();
        let (last, others) = lines.split_last().unwrap();
        assert!(!last.ends_with('\\') && others.iter().all(|l| l.ends_with('\\')), "{text}");
    }

    #[test]
    fn libvirt_gets_a_vhostuser_disk_and_memfd_memory() {
        let text = of("libvirt");
        for part in [
            "<source type='memfd'/>",
            "<access mode='shared'/>",
            "<disk type='vhostuser' device='disk'>",
            "queues='4'",
            "<source type='unix' path='/run/d.sock'>",
            "<reconnect enabled='yes' timeout='1'/>",
            "<target dev='vda' bus='virtio'/>",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        for tag in ["memoryBacking", "disk", "source"] {
            let opened = text.matches(&format!("<{tag} ")).count()
                + text.matches(&format!("<{tag}>")).count();
            let empty =
                text.lines().filter(|l| l.contains(&format!("<{tag} ")) && l.ends_with("/>"));
            let closed = text.matches(&format!("</{tag}>")).count() + empty.count();
            assert_eq!(opened, closed, "{tag}\n{text}");
        }
    }

    #[test]
    fn cloud_hypervisor_gets_shared_memory_and_a_vhost_user_disk() {
        let text = of("cloud-hypervisor");
        assert!(text.contains("--memory size=1G,shared=on"), "{text}");
        let disk = "--disk vhost_user=true,socket=/run/d.sock,num_queues=4,queue_size=128";
        assert!(text.contains(disk), "{text}");
    }

    #[test]
    fn crosvm_gets_a_vhost_user_block_device() {
        let text = of("crosvm");
        assert!(text.starts_with("crosvm run ") && text.contains("--cpus 4"), "{text}");
        assert!(text.contains("--vhost-user block,socket=/run/d.sock"), "{text}");
    }

    #[test]
    fn firecracker_gets_a_drive_with_a_socket_and_without_a_file() {
        let config: serde_json::Value = serde_json::from_str(&of("firecracker")).unwrap();
        let drive = &config["drives"][0];
        assert_eq!(drive["socket"], "/run/d.sock");
        assert_eq!(
            (&drive["drive_id"], &drive["is_root_device"]),
            (&"blk_blk0".into(), &false.into())
        );
        // Firecracker refuses what belongs to a drive with a file.
        assert!(drive["path_on_host"].is_null() && drive["is_read_only"].is_null());
    }

    #[test]
    fn uml_gets_the_socket_with_the_id_of_a_block_device() {
        assert_eq!(of("uml"), "linux mem=512M virtio_uml.device=/run/d.sock:2\n");
    }

    #[test]
    fn a_device_of_a_configuration_keeps_its_queues_and_its_side() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("m.toml");
        let config = "[[blk]]\nname = 'root'\nsocket_path = '/run/r'\nnull = '1G'\nnum_queues = 2\n\
            [[blk]]\nname = 'data'\nsocket_path = '/run/c'\nclient = true\nnull = '1G'\n\
            [[blk]]\nname = 'in'\nfd = 5\nnull = '1G'\n";
        std::fs::write(&file, config).unwrap();
        let of = |vmm: &str, rest: &[&str]| {
            let arguments = [&[vmm, "--config", file.to_str().unwrap()], rest].concat();
            snippet(&arguments)
        };
        assert!(of("qemu", &["root"]).unwrap().contains("num-queues=2"));
        assert!(of("qemu", &["data"]).unwrap().contains("path=/run/c,server=on,wait=off"));
        for (vmm, rest, word) in [
            ("uml", &["data"][..], "client"),
            ("libvirt", &["data"], "client"),
            ("qemu", &["in"], "fd"),
            ("qemu", &["none"], "none"),
            ("qemu", &[], "DEVICE"),
            ("qemu", &["root", "--num-queues", "9"], "num-queues"),
        ] {
            let error = of(vmm, rest).expect_err(word);
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_path_that_the_vmm_cannot_carry_is_refused() {
        for (vmm, path) in
            [("qemu", "/a,b"), ("uml", "/a:b"), ("libvirt", "/a'b"), ("crosvm", "/a b")]
        {
            let error = snippet(&[vmm, "--socket-path", path]).expect_err(path);
            assert!(error.contains(path), "{error}");
        }
        assert!(snippet(&["libvirt", "--socket-path", "/a,b:c"]).is_ok());
    }
}

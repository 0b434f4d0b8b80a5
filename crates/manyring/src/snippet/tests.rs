//! Snippets as they are pasted.

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

#[test]
fn a_device_that_was_told_no_number_of_queues_has_as_many_as_its_snippet_says() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.toml");
    std::fs::write(&file, "[[blk]]\nname = 'blk0'\nsocket_path = '/s'\nnull = '1G'\n").unwrap();
    let of_config = ["qemu", "--config", file.to_str().unwrap(), "blk0"];
    let text = snippet(&["qemu", "--socket-path", "/s"]).unwrap();
    assert_eq!(text, snippet(&of_config).unwrap());
    let net = snippet(&["qemu", "--net", "--socket-path", "/s"]).unwrap();
    assert!(net.contains("queues=1 "), "{net}");
}

fn of(vmm: &str) -> String {
    snippet(&[vmm, "--socket-path", "/run/d.sock", "--num-queues", "4"]).unwrap()
}

#[test]
fn qemu_gets_shared_memory_queues_and_a_socket_that_reconnects() {
    let text = of("qemu");
    for part in [
        "qemu-system-x86_64 -accel kvm -cpu host -machine q35,memory-backend=mem0",
        "memory-backend-memfd,id=mem0,size=1G,share=on",
        "-chardev socket,id=blk_blk0,path=/run/d.sock,reconnect-ms=1000 ",
        "-device vhost-user-blk-pci,chardev=blk_blk0,num-queues=4",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let lines: Vec<_> = text.lines().skip_while(|line| line.starts_with('#')).collect();
    let (last, others) = lines.split_last().unwrap();
    assert!(!last.ends_with('\\') && others.iter().all(|l| l.ends_with('\\')), "{text}");
}

#[test]
fn the_line_for_qemu_connects_again_in_the_form_of_its_version_and_says_for_which_it_is() {
    let (seconds, milliseconds) = (",reconnect=1 ", ",reconnect-ms=1000 ");
    for net in [&[][..], &["--net"]] {
        let of = |version: &[&str]| {
            snippet(&[&["qemu", "--socket-path", "/s"], net, version].concat()).unwrap()
        };
        let newest = of(&[]);
        assert!(newest.starts_with("# QEMU 9.2 and newer; for an older one: --qemu-version 7.2\n"));
        assert!(newest.contains(milliseconds), "{newest}");
        for version in ["9.2", "9.2.0", "10.0.13", "11", "11.1.3", "100.0"] {
            assert_eq!(of(&["--qemu-version", version]), newest, "{version}");
        }
        for version in ["5.0", "7.2", "7.2.22", "8", "9.1.50"] {
            let text = of(&["--qemu-version", version]);
            assert!(text.starts_with("# QEMU 5.0 to 10.1\n"), "{version}: {text}");
            assert_eq!(text.matches(seconds).count(), 1, "{version}: {text}");
            assert!(!text.contains("reconnect-ms"), "{version}: {text}");
        }
    }
}

#[test]
fn a_version_that_is_none_of_qemu_is_refused_with_its_option() {
    for version in ["", "x", "7.", ".2", "7..2", "-7.2", "+7.2", "7.2-1", "v7.2", "1.2.3.4.5"] {
        let option = format!("--qemu-version={version}");
        let error = snippet(&["qemu", "--socket-path", "/s", &option]).expect_err(version);
        let is_told = format!("--qemu-version: {version:?} is not a version of QEMU");
        assert!(error.starts_with(&is_told), "{version}: {error}");
    }
    let of = |vmm: &str, version: &str| {
        snippet(&[vmm, "--socket-path", "/s", "--qemu-version", version]).unwrap_err()
    };
    assert!(of("qemu", "99999999999.1").contains("\"99999999999.1\" is not a version"));
    assert_eq!(of("qemu", "4.2"), "--qemu-version: 4.2 is too old: the line needs 5.0");
    let only = "--qemu-version: applies to qemu only";
    for other in ["libvirt", "cloud-hypervisor", "crosvm", "firecracker", "uml", "helper"] {
        assert_eq!(of(other, "7.2"), only, "{other}");
    }
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
        let opened =
            text.matches(&format!("<{tag} ")).count() + text.matches(&format!("<{tag}>")).count();
        let empty = text.lines().filter(|l| l.contains(&format!("<{tag} ")) && l.ends_with("/>"));
        let closed = text.matches(&format!("</{tag}>")).count() + empty.count();
        assert_eq!(opened, closed, "{tag}\n{text}");
    }
}

#[test]
fn libvirt_is_told_who_must_be_able_to_open_the_socket() {
    for text in [of("libvirt"), of_net("libvirt").unwrap()] {
        for part in [
            "libvirt 11.3",
            "QEMU before 10.2",
            "hangs",
            "socket_owner",
            "\"libvirt-qemu\"",
            "socket_mode = \"0660\"",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        let comments = text.split("<!--").skip(1).map(|c| c.split("-->").next().unwrap());
        assert!(comments.into_iter().all(|c| !c.contains("--")), "no XML comment: {text}");
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
    assert!(text.contains("--vhost-user block,socket=/run/d.sock,max-queue-size=128\n"), "{text}");
}

#[test]
fn firecracker_gets_a_drive_with_a_socket_and_without_a_file() {
    let config: serde_json::Value = serde_json::from_str(&of("firecracker")).unwrap();
    let drive = &config["drives"][0];
    assert_eq!(drive["socket"], "/run/d.sock");
    assert_eq!((&drive["drive_id"], &drive["is_root_device"]), (&"blk_blk0".into(), &false.into()));
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
    let data = of("qemu", &["data"]).unwrap();
    assert!(data.contains("path=/run/c,server=on,wait=off"), "{data}");
    assert!(data.starts_with("# QEMU 5.0 and newer\nqemu-system-x86_64 "), "{data}");
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
    for (vmm, path) in [("qemu", "/a,b"), ("uml", "/a:b"), ("libvirt", "/a'b"), ("crosvm", "/a b")]
    {
        let error = snippet(&[vmm, "--socket-path", path]).expect_err(path);
        assert!(error.contains(path), "{error}");
    }
    assert!(snippet(&["libvirt", "--socket-path", "/a,b:c"]).is_ok());
}

fn of_net(vmm: &str) -> Result<String, String> {
    snippet(&[vmm, "--net", "--socket-path", "/run/n.sock", "--queue-pairs", "4"])
}

#[test]
fn qemu_gets_a_vhost_user_netdev_with_all_its_pairs() {
    let text = of_net("qemu").unwrap();
    for part in [
        "memory-backend-memfd,id=mem0,size=1G,share=on",
        "-chardev socket,id=net_net0,path=/run/n.sock,reconnect-ms=1000 ",
        "-netdev vhost-user,id=netdev_net_net0,chardev=net_net0,queues=4",
        "-device virtio-net-pci,netdev=netdev_net_net0,mq=on,vectors=10,ctrl_guest_offloads=off",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let one = snippet(&["qemu", "--net", "--socket-path", "/s"]).unwrap();
    assert!(one.contains("queues=1") && !one.contains("mq=on"), "{one}");
    assert!(one.contains("netdev=netdev_net_net0,ctrl_guest_offloads=off"), "{one}");
}

#[test]
fn other_vmms_get_a_network_device_each_in_its_words() {
    for (vmm, part) in [
        ("cloud-hypervisor", "--memory size=1G,shared=on"),
        ("cloud-hypervisor", "--net vhost_user=true,socket=/run/n.sock,num_queues=8\n"),
        ("crosvm", "--vhost-user net,socket=/run/n.sock,max-queue-size=256\n"),
        ("uml", "linux mem=512M virtio_uml.device=/run/n.sock:1\n"),
        ("libvirt", "<interface type='vhostuser'>\n  <source type='unix' path='/run/n.sock'"),
        ("libvirt", "mode='client'>\n    <reconnect enabled='yes' timeout='1'/>\n  </source>\n"),
        ("libvirt", "  <driver queues='4'/>\n</interface>\n"),
        ("libvirt", "<access mode='shared'/>"),
    ] {
        let text = of_net(vmm).unwrap();
        assert!(text.contains(part), "{vmm}: {part}\n{text}");
    }
    let error = of_net("firecracker").expect_err("it has none");
    assert!(error.contains("net0: Firecracker has no vhost-user network device"), "{error}");
}

#[test]
fn a_network_device_of_a_configuration_brings_its_address_and_its_mtu() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.toml");
    let config = "[[net]]\nname = 'lan'\nsocket_path = '/run/l'\ntap = 't0'\nqueue_pairs = 2\n\
        mtu = 9000\nmac = '52:54:00:12:34:56'\n\
        [[net]]\nname = 'mv'\nsocket_path = '/run/m'\nmacvtap = 'mv0'\n\
        [[net]]\nname = 'out'\nsocket_path = '/run/o'\nnull = true\nclient = true\n";
    std::fs::write(&file, config).unwrap();
    let of = |vmm: &str, rest: &[&str]| {
        snippet(&[&[vmm, "--config", file.to_str().unwrap()], rest].concat())
    };
    for (vmm, part) in [
        ("qemu", "mac=52:54:00:12:34:56,host_mtu=9000,mq=on,vectors=6"),
        ("cloud-hypervisor", "num_queues=4,mac=52:54:00:12:34:56,mtu=9000\n"),
        ("libvirt", "<mac address='52:54:00:12:34:56'/>\n  <source"),
        ("libvirt", "<mtu size='9000'/>\n</interface>"),
    ] {
        let text = of(vmm, &["lan"]).unwrap();
        assert!(text.contains(part), "{vmm}: {part}\n{text}");
    }
    let macvtap = of("qemu", &["mv"]).unwrap();
    let device = "virtio-net-pci,netdev=netdev_net_mv,ctrl_guest_offloads=off\n";
    assert!(macvtap.contains(device), "its address is its own: {macvtap}");
    for (vmm, part) in [
        ("qemu", "path=/run/o,server=on \\"),
        ("libvirt", "path='/run/o' mode='server'/>"),
        ("cloud-hypervisor", "socket=/run/o,vhost_mode=server,"),
    ] {
        let text = of(vmm, &["out"]).unwrap();
        assert!(text.contains(part), "{vmm}: {part}\n{text}");
    }
    for (vmm, rest, word) in [
        ("uml", &["out"][..], "client"),
        ("crosvm", &["out"], "client"),
        ("qemu", &["lan", "--queue-pairs", "3"], "--queue-pairs: 3 is more than the device's 2"),
        ("qemu", &["lan", "--num-queues", "2"], "--num-queues"),
    ] {
        let error = of(vmm, rest).expect_err(word);
        assert!(error.contains(word), "{error}");
    }
    let error = snippet(&["qemu", "--socket-path", "/s", "--queue-pairs", "2"]).expect_err("blk");
    assert!(error.contains("--queue-pairs"), "{error}");
    let error = snippet(&["qemu", "--net", "--config", "/c"]).expect_err("which");
    assert!(error.contains("--net"), "{error}");
}

//! Behaviours that must hold with real guests and foreign programs: one file for each.

use crate::cleanup::Folder;
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kernel, Kind, Net};
use crate::net::{Namespace, WORDS};
use crate::{Context, Outcome};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

mod bench_report;
mod direct_past_the_cache;
mod full_host_waits;
mod hundred_devices_idle;
mod image_lock_refuses_others;
mod macvtap_over_veth;
mod ovmf_boots_from_network;
mod package_day;
mod pcap_opens_in_tshark;
mod promtool_reads_metrics;
mod qemu_discard_punches_holes;
mod qemu_discard_without_io_uring;
mod qemu_flush_reaches_the_host;
mod qemu_four_queues;
mod qemu_hot_plug;
mod qemu_live_resize;
mod qemu_microvm;
mod qemu_migrates_between_daemons;
mod qemu_net_four_pairs;
mod qemu_net_legacy;
mod qemu_net_survives;
mod qemu_packed_rings;
mod qemu_process_dies;
mod qemu_reports;
mod qemu_survives_daemon_sigkill;
mod qemu_survives_sigkills_under_load;
mod qemu_switch;
mod qemu_under_libvirt;
mod qemu_xdp_program;
mod qemu_zero_copy;
mod read_only_disk;
mod readme_is_tried;
mod sectors_stay;
mod snippets_boot;
mod soak_short;
mod systemd_processes;
mod systemd_service;
mod testpmd_client;
mod testpmd_switch;
mod three_hosts;
mod uml_ceph_osd_killed;
mod uml_ethtool;
mod uml_ext4_checksums;
mod uml_helpers;
mod uml_merge_dns;
mod uml_merge_router;
mod uml_merge_transfers;
mod uml_nbd_servers_killed;
mod uml_nbd_under_tls;
mod uml_nbdkit_filters;
mod uml_net_ping_and_iperf3;
mod uml_offload_limits;
mod uml_offload_matrix;
mod uml_outlives_its_process;
mod uml_overlays;
mod uml_qcow2_helper;
mod uml_reclaim;
mod uml_rss;
mod uml_switch;
mod uml_tap_made_again;
mod uml_tcp_rr;
mod uml_vlan_between_guests;
mod uml_where_io_uring_is_refused;
mod uml_without_io_uring;
mod uml_xdp;
mod xen_disk;

/// A named promise and the test of it.
#[derive(Clone, Copy, Debug)]
pub struct Behaviour {
    /// Unique; what `cargo xtask test --only` takes.
    pub name: &'static str,
    run: fn(&Scene<'_>) -> Outcome,
}

impl Behaviour {
    /// Whether it looks at times or at what the host counts for everybody: it then runs after the
    /// others, with none beside it.
    #[must_use]
    pub fn runs_alone(&self) -> bool {
        ALONE.contains(&self.name)
    }
}

/// Names of those that run with none beside them.
const ALONE: [&str; 7] = [
    "hundred_devices_idle",
    "bench_report",
    "soak_short",
    // Its service has a watchdog of seconds, and its guests share two CPUs with two others' guests
    // that compute.
    "systemd_processes",
    "uml_tcp_rr",
    "uml_reclaim",
    "uml_merge_router",
];

/// All of them: the long ones first, so that none of them goes on alone when the others have ended;
/// those that run alone at the end. Guests of QEMU, which compute, stand between those of User Mode
/// Linux, which wait.
pub const ALL: &[Behaviour] = &[
    qemu_zero_copy::BEHAVIOUR,
    testpmd_client::BEHAVIOUR,
    uml_offload_matrix::BEHAVIOUR,
    xen_disk::BEHAVIOUR,
    systemd_service::BEHAVIOUR,
    systemd_processes::BEHAVIOUR,
    uml_merge_dns::BEHAVIOUR,
    qemu_migrates_between_daemons::BEHAVIOUR,
    uml_ethtool::BEHAVIOUR,
    qemu_packed_rings::BEHAVIOUR,
    uml_merge_transfers::BEHAVIOUR,
    uml_outlives_its_process::BEHAVIOUR,
    qemu_net_four_pairs::BEHAVIOUR,
    uml_ceph_osd_killed::BEHAVIOUR,
    qemu_net_survives::BEHAVIOUR,
    package_day::BEHAVIOUR,
    uml_vlan_between_guests::BEHAVIOUR,
    qemu_switch::BEHAVIOUR,
    uml_helpers::BEHAVIOUR,
    uml_nbdkit_filters::BEHAVIOUR,
    qemu_net_legacy::BEHAVIOUR,
    qemu_xdp_program::BEHAVIOUR,
    testpmd_switch::BEHAVIOUR,
    uml_xdp::BEHAVIOUR,
    qemu_survives_sigkills_under_load::BEHAVIOUR,
    uml_switch::BEHAVIOUR,
    uml_net_ping_and_iperf3::BEHAVIOUR,
    ovmf_boots_from_network::BEHAVIOUR,
    macvtap_over_veth::BEHAVIOUR,
    snippets_boot::BEHAVIOUR,
    qemu_under_libvirt::BEHAVIOUR,
    uml_qcow2_helper::BEHAVIOUR,
    uml_tap_made_again::BEHAVIOUR,
    three_hosts::BEHAVIOUR,
    full_host_waits::BEHAVIOUR,
    uml_offload_limits::BEHAVIOUR,
    uml_overlays::OVS,
    qemu_four_queues::BEHAVIOUR,
    uml_nbd_servers_killed::BEHAVIOUR,
    uml_rss::BEHAVIOUR,
    qemu_process_dies::BEHAVIOUR,
    qemu_reports::BEHAVIOUR,
    direct_past_the_cache::BEHAVIOUR,
    qemu_survives_daemon_sigkill::BEHAVIOUR,
    uml_nbd_under_tls::BEHAVIOUR,
    uml_overlays::VXLAN,
    qemu_discard_without_io_uring::BEHAVIOUR,
    uml_ext4_checksums::BEHAVIOUR,
    qemu_discard_punches_holes::BEHAVIOUR,
    uml_where_io_uring_is_refused::BEHAVIOUR,
    read_only_disk::BEHAVIOUR,
    readme_is_tried::BEHAVIOUR,
    qemu_hot_plug::BEHAVIOUR,
    uml_without_io_uring::BEHAVIOUR,
    qemu_flush_reaches_the_host::BEHAVIOUR,
    pcap_opens_in_tshark::BEHAVIOUR,
    qemu_live_resize::BEHAVIOUR,
    qemu_microvm::BEHAVIOUR,
    sectors_stay::BEHAVIOUR,
    promtool_reads_metrics::BEHAVIOUR,
    image_lock_refuses_others::BEHAVIOUR,
    hundred_devices_idle::BEHAVIOUR,
    bench_report::BEHAVIOUR,
    soak_short::BEHAVIOUR,
    uml_tcp_rr::BEHAVIOUR,
    uml_reclaim::BEHAVIOUR,
    uml_merge_router::BEHAVIOUR,
];

/// The programs that all behaviours use, each prepared once: the binary under test,
/// `manyring-bench`, and the kernels.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) binary: PathBuf,
    pub(crate) bench: PathBuf,
    pub(crate) uml: OnceLock<Outcome<Kernel>>,
    pub(crate) qemu: OnceLock<Outcome<Kernel>>,
}

/// Where one behaviour plays: files that go with it, logs that stay if it fails.
#[derive(Debug)]
pub(crate) struct Scene<'a> {
    stage: &'a Stage,
    folder: Folder,
    logs: PathBuf,
}

impl<'a> Scene<'a> {
    /// Runs `behaviour`, its logs in the folder `logs`.
    pub(crate) fn play(stage: &'a Stage, behaviour: &Behaviour, logs: &Path) -> Outcome {
        std::fs::create_dir_all(logs).context(logs.display())?;
        let scene = Self { stage, folder: Folder::new()?, logs: logs.to_owned() };
        (behaviour.run)(&scene)
    }

    /// A file of this scene.
    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A log that stays.
    fn log(&self, name: &str) -> PathBuf {
        self.logs.join(name)
    }

    /// A new sparse image.
    fn image(&self, mib: u64) -> Outcome<PathBuf> {
        let path = self.file("disk.img");
        let file = File::create(&path).context(path.display())?;
        file.set_len(mib << 20).context(path.display())?;
        Ok(path)
    }

    /// How to serve an image.
    fn options(&self, image: &Path, more: &[&str]) -> DaemonOptions {
        let log = self.log("manyring.log");
        DaemonOptions::blk(&self.stage.binary, self.folder.path(), &log, image, more)
    }

    /// A daemon that serves an image.
    fn serve(&self, image: &Path, more: &[&str]) -> Outcome<Daemon> {
        let options = self.options(image, more);
        let socket = options.socket();
        Daemon::start(options, &socket)
    }

    /// How to serve a network port in a namespace.
    fn net_options(&self, namespace: &Namespace, more: &[&str]) -> DaemonOptions {
        let log = self.log("manyring-net.log");
        let folder = self.folder.path();
        DaemonOptions::net(&self.stage.binary, folder, &log, namespace, more)
    }

    /// A daemon that serves a network port in a namespace.
    fn serve_net(&self, namespace: &Namespace, more: &[&str]) -> Outcome<Daemon> {
        let options = self.net_options(namespace, more);
        let socket = options.socket();
        Daemon::start(options, &socket)
    }

    /// As [`Scene::serve_net`], one of several: `number` tells sockets and logs apart.
    fn serve_net_of(&self, number: u32, namespace: &Namespace, more: &[&str]) -> Outcome<Daemon> {
        let folder = self.file(&format!("net{number}"));
        std::fs::create_dir_all(&folder).context(folder.display())?;
        let log = self.log(&format!("manyring-net{number}.log"));
        let options = DaemonOptions::net(&self.stage.binary, &folder, &log, namespace, more);
        let socket = options.socket();
        Daemon::start(options, &socket)
    }

    /// A guest whose network this daemon serves. Its script has the words of `net/words.sh`.
    fn boot_net(&self, kind: Kind, daemon: &Daemon, options: GuestOptions<'_>) -> Outcome<Guest> {
        let socket = daemon.socket();
        let pairs = options.net.map_or(1, |net| net.pairs);
        let net = Some(Net { socket: &socket, pairs });
        let script = format!("{WORDS}{}", options.script);
        let options = GuestOptions { net, script: &script, ..options };
        Guest::boot(self.kernel(kind)?, &options, &self.log("guest.log"))
    }

    fn kernel(&self, kind: Kind) -> Outcome<&Kernel> {
        let cell = match kind {
            Kind::Uml => &self.stage.uml,
            Kind::Qemu => &self.stage.qemu,
        };
        cell.get_or_init(|| Kernel::prepare(kind)).as_ref().map_err(Clone::clone)
    }

    /// A guest whose disk this daemon serves.
    fn boot(&self, kind: Kind, daemon: &Daemon, options: GuestOptions<'_>) -> Outcome<Guest> {
        let socket = daemon.socket();
        let options = GuestOptions { socket: Some(&socket), ..options };
        Guest::boot(self.kernel(kind)?, &options, &self.log("guest.log"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_what_runs_alone_is_there() {
        let mut names: Vec<_> = ALL.iter().map(|behaviour| behaviour.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
        assert!(ALONE.iter().all(|name| names.contains(name)), "{ALONE:?}");
    }
}

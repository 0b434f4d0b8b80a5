//! The configuration as the user writes it: the keys of `manyring.toml`, of requests, and of
//! options. Names are fixed in `docs/design/0001`; unknown keys are refused.

mod fault;
mod limit;
mod schema;
mod switch;
mod text;

pub use fault::{RawFault, RawNetFault};
pub use limit::{RawLimit, RawLimitOption, RawScalar};
pub use switch::RawSwitch;
pub use text::{RawAccount, RawQueueLength, RawReceivePairs, RawSize};

use crate::key_class::{Class, Given, INT_MAX, Key, Numbers, all, some};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use utoipa::ToSchema;

/// The whole file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawConfig {
    /// The keys of the whole process.
    pub daemon: RawDaemon,
    /// Block devices.
    pub blk: Vec<RawBlk>,
    /// Network devices.
    pub net: Vec<RawNet>,
    /// Disks of Xen guests.
    pub xen_blk: Vec<RawXenBlk>,
    /// Limits that devices share.
    pub limit: Vec<RawLimit>,
    /// Switches between network devices.
    pub switch: Vec<RawSwitch>,
}

/// `[daemon]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawDaemon {
    /// The most worker threads; default: the number of CPUs that this process may use.
    pub workers: Option<usize>,
    /// For each worker, the CPUs on which it may run, like `0-3,8`; default: all CPUs that this
    /// process may use.
    pub worker_cpus: Option<Vec<String>>,
    /// Whether idle workers poll for work before they sleep: "auto", "always" or "never".
    pub polling: Option<String>,
    /// The most microseconds that a worker polls before it sleeps, 0 to 1000; default: ten times
    /// the time that waking a thread takes.
    pub spin_us: Option<u32>,
    /// Use io_uring where the kernel allows it; default true.
    pub io_uring: Option<bool>,
    /// Whether workers run on the NUMA node of their guests' memory: "auto" (default) or "off".
    pub numa: Option<String>,
    /// Path of the control socket; default: none.
    pub control: Option<PathBuf>,
    /// Owner of the control socket; default: the owner of the process.
    pub control_owner: Option<RawAccount>,
    /// Group of the control socket.
    pub control_group: Option<RawAccount>,
    /// Mode of the control socket, in octal.
    pub control_mode: Option<String>,
    /// Path of a read-only control socket; default: none.
    pub control_read: Option<PathBuf>,
    /// Owner of the read-only control socket.
    pub control_read_owner: Option<RawAccount>,
    /// Group of the read-only control socket.
    pub control_read_group: Option<RawAccount>,
    /// Mode of the read-only control socket, in octal.
    pub control_read_mode: Option<String>,
    /// Address of the host's loopback at which metrics can be scraped; default: none.
    pub metrics_listen: Option<SocketAddr>,
    /// Folders below which users other than root and the daemon's own may name files and sockets
    /// over the control API; default: none.
    #[serde(default)]
    pub allow_paths: Vec<PathBuf>,
    /// The most devices that each such user may have at a time, 0 to 65536; default 256.
    pub user_devices_max: Option<u64>,
    /// Folder in which devices of the control API are saved; default: these devices are lost when
    /// the process ends.
    pub state_dir: Option<PathBuf>,
    /// Seconds to wait for a resource that another process uses; 0: fail at once; default: without
    /// end.
    pub wait: Option<u32>,
    /// Which devices share a device process: those of VMMs of one user ("user", default), or none
    /// ("device"); "one": the daemon itself serves all devices.
    pub domains: Option<String>,
    /// Which rights device processes give up: "none", "auto" or "seccomp"; default "auto".
    pub sandbox: Option<String>,
}

impl RawDaemon {
    /// Returns the first option of these, except `--control`, that was given on the command line;
    /// `None`: none was.
    pub fn given(&self) -> Option<&'static str> {
        let given = [
            ("--workers", self.workers.is_some()),
            ("--worker-cpus", self.worker_cpus.is_some()),
            ("--polling", self.polling.is_some()),
            ("--spin-us", self.spin_us.is_some()),
            ("--no-io-uring", self.io_uring.is_some()),
            ("--numa", self.numa.is_some()),
            ("--wait", self.wait.is_some()),
        ];
        given.iter().find(|(_, is_given)| *is_given).map(|(option, _)| *option)
    }
}

/// How a device gets its front-end, and the bounds of the front-end: keys of every device, and
/// options of every command that serves a device.
#[derive(Args, Clone, Debug)]
pub struct RawSocket {
    /// Path of the vhost-user socket to which the VMM connects.
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,
    /// Without --socket-path, an inherited file descriptor of a listening or connected socket.
    #[arg(long, value_name = "N")]
    pub fd: Option<i32>,
    /// The VMM listens at the socket: connect to it, and again whenever the connection ends.
    #[arg(long)]
    pub client: bool,
    /// Owner of the socket, by name or number.
    #[arg(long, value_name = "USER")]
    pub socket_owner: Option<RawAccount>,
    /// Group of the socket, by name or number.
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<RawAccount>,
    /// Mode of the socket, in octal, like 0660.
    #[arg(long, value_name = "MODE")]
    pub socket_mode: Option<String>,
    /// Exit when the first VMM disconnects.
    #[arg(long)]
    pub one_off: bool,
    /// Disconnect a VMM that has not sent its first message after this many seconds, 1 to 3600
    /// [default: 10].
    #[arg(long, value_name = "SECONDS")]
    pub handshake_timeout: Option<u64>,
    /// Accept guest memory in files on a local disk. Page faults then wait for the disk, and can
    /// delay other guests of this process.
    #[arg(long)]
    pub memory_on_disk: bool,
    /// Refuse a VMM that shares more memory than this, like 16G [default: 8T].
    #[arg(long, value_name = "SIZE")]
    pub memory_max: Option<RawSize>,
}

/// Defines a table of keys, each with its type, its [`Class`] and the range of its numbers.
macro_rules! table {
    (
        $(#[$about:meta])*
        $table:ident {
            $($(#[$doc:meta])* $key:ident: $type:ty = $class:ident $(, $numbers:expr)?;)*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct $table {
            $($(#[$doc])* pub $key: $type,)*
        }

        impl $table {
            pub(crate) const KEYS: &[Key] = &[$(Key {
                name: stringify!($key),
                class: Class::$class,
                numbers: table!($($numbers)?),
            }),*];

            /// Lists the numbers that were given, each with its key.
            pub(crate) fn numbers(&self) -> Vec<(&'static str, u64)> {
                let mut all = Vec::new();
                $($(
                    const _: Numbers = $numbers;
                    all.extend(self.$key.given().into_iter().map(|n| (stringify!($key), n)));
                )?)*
                all
            }
        }
    };
    () => { None };
    ($numbers:expr) => { Some($numbers) };
}

/// Defines the table of a kind of device: the keys of every device, then those of the kind. (With
/// `serde(flatten)` an error would name neither the line nor the known keys.)
macro_rules! device_table {
    ($(#[$about:meta])* $table:ident { $($own:tt)* }) => {
        table! {
            $(#[$about])*
            $table {
                /// Name of the device, unique.
                name: Option<String> = Replace;
                /// Path of the vhost-user socket.
                #[schema(value_type = Option<String>)]
                socket_path: Option<PathBuf> = Replace;
                /// Number of a listening socket that was passed when the daemon started.
                #[schema(ignore)]
                fd: Option<i32> = Replace, all(3, INT_MAX);
                /// True: the front-end listens at the socket, and the daemon connects.
                client: bool = Replace;
                /// Owner of the socket.
                socket_owner: Option<RawAccount> = Replace;
                /// Group of the socket.
                socket_group: Option<RawAccount> = Replace;
                /// Mode of the socket, in octal.
                socket_mode: Option<String> = Replace;
                /// The device ends with its first session.
                one_off: bool = Reconnect;
                /// Seconds from connecting after which a front-end that has sent no message is
                /// disconnected.
                handshake_timeout: Option<u64> = Reconnect, all(1, 3600);
                /// Accept guest memory in files on a local disk.
                memory_on_disk: bool = Reconnect;
                /// The most guest memory that a front-end may share, in bytes.
                memory_max: Option<RawSize> = Reconnect;
                /// The operations and bytes per second that the daemon serves for the device at
                /// most.
                limit: Option<RawLimit> = Live;
                $($own)*
            }
        }

        impl $table {
            /// Makes a device with the keys of every device, and with none of its kind.
            pub fn new(name: String, socket: RawSocket) -> Self {
                Self {
                    name: Some(name),
                    socket_path: socket.socket_path,
                    fd: socket.fd,
                    client: socket.client,
                    socket_owner: socket.socket_owner,
                    socket_group: socket.socket_group,
                    socket_mode: socket.socket_mode,
                    one_off: socket.one_off,
                    handshake_timeout: socket.handshake_timeout,
                    memory_on_disk: socket.memory_on_disk,
                    memory_max: socket.memory_max,
                    ..Self::default()
                }
            }

            /// Returns the keys that every device has.
            pub fn socket(&self) -> RawSocket {
                RawSocket {
                    socket_path: self.socket_path.clone(),
                    fd: self.fd,
                    client: self.client,
                    socket_owner: self.socket_owner.clone(),
                    socket_group: self.socket_group.clone(),
                    socket_mode: self.socket_mode.clone(),
                    one_off: self.one_off,
                    handshake_timeout: self.handshake_timeout,
                    memory_on_disk: self.memory_on_disk,
                    memory_max: self.memory_max.clone(),
                }
            }
        }
    };
}

device_table! {
    /// `[[blk]]`
    RawBlk {
        /// Serve this file or block device.
        #[schema(value_type = Option<String>)]
        file: Option<PathBuf> = Replace;
        /// The trust domain whose device process serves the device; default: as `domains` says.
        domain: Option<String> = Replace;
        /// Serve a disk of this size that stores nothing: reads give zeros.
        null: Option<RawSize> = Replace;
        /// Serve a disk of this size in memory.
        memory: Option<RawSize> = Replace;
        /// Serve the disk of the NBD server at this address.
        nbd: Option<String> = Replace;
        /// How long requests wait while that server is unreachable, before they fail: `forever`
        /// (default) or like `60s`.
        reconnect: Option<String> = Replace;
        /// The guest can read the disk, and not write to it.
        read_only: bool = Reconnect;
        /// Bypass the host's page cache (`O_DIRECT`).
        direct: bool = Replace;
        /// For live migration: lock the file only while a guest's rings run, not as long as the
        /// file is open.
        lock_with_rings: bool = Replace;
        /// `raw`: serve the file's bytes even if they look like an image of another format.
        /// `qcow2`, `vmdk`, `vdi`, `vhdx`: a helper reads the file, which needs a state_dir in
        /// `[daemon]`.
        format: Option<String> = Replace;
        /// The sector size that the guest sees, 512 or 4096 bytes; default 512, but 4096 for a
        /// block device with such sectors.
        logical_block_size: Option<u32> = Reconnect, some(512, 4096, "512 or 4096");
        /// Request queues, 1 to 256; default 8.
        num_queues: Option<usize> = Reconnect, all(1, 256);
        /// The ring size that the VMM sets: the longest request that the guest is offered fits such
        /// a ring; default 128.
        queue_size: Option<u16> = Reconnect, some(4, 1024, "a power of two from 4 to 1024");
        /// The worker of each queue, by its index; default: queues move to workers on idle CPUs.
        queue_workers: Option<Vec<usize>> = Reconnect, all(0, 255);
        /// How interrupts of the guest are held back: "off" (default), or a count and a time like
        /// "32/100us".
        moderation: Option<String> = Reconnect;
        /// The device id string, at most 20 bytes; default: the name.
        serial: Option<String> = Reconnect;
        /// `writeback` (default) or `writethrough`.
        cache: Option<String> = Reconnect;
        /// What happens to writes while the host's file system is full: they wait (`wait`,
        /// default), or fail (`report`).
        on_full: Option<String> = Reconnect;
        /// Faults that the device makes on purpose, to test guests.
        fault: Option<RawFault> = Replace;
    }
}

device_table! {
    /// `[[net]]`
    RawNet {
        /// Connect the guest to this tap, which is created if it does not exist.
        tap: Option<String> = Replace;
        /// Fail if the tap does not exist.
        must_exist: bool = Replace;
        /// The numbers of inherited file descriptors that are queues of a tap or macvtap.
        #[schema(ignore)]
        tap_fds: Option<Vec<i32>> = Replace, all(3, INT_MAX);
        /// Connect the guest to this macvtap.
        macvtap: Option<String> = Replace;
        /// Connect the guest to this interface through AF_XDP: it receives the packets instead of
        /// the host's network stack.
        xdp: Option<String> = Replace;
        /// With `xdp`: the network card reads large packets directly from guest memory, all of
        /// which is pinned.
        zero_copy: bool = Replace;
        /// Connect the guest to no interface: all its frames are dropped.
        null: bool = Replace;
        /// With `null`: deliver frames of this many bytes to the guest, as fast as it receives
        /// them.
        generate: Option<usize> = Replace, some(0, 65_553, "0, or a whole number from 60 to 65553");
        /// Connect the guest to a port of this `[[switch]]`.
        switch: Option<String> = Replace;
        /// The VLAN of the port, 1 to 4094: the guest's frames have no tags; default: all VLANs,
        /// with tags.
        vlan: Option<u16> = Replace, all(1, 4094);
        /// The VLANs of the port: the guest's frames have tags.
        trunk: Option<Vec<u16>> = Replace, all(1, 4094);
        /// The port exchanges no frames with other isolated ports.
        isolated: bool = Replace;
        /// Drop frames of the guest whose source is not its own MAC address.
        anti_spoof: bool = Replace;
        /// The most MAC addresses that the switch learns behind the port, 1 to 4096; default 8.
        macs_max: Option<u32> = Replace, all(1, 4096);
        /// The most frames per second that the port may send to all other ports, 1 to 1000000;
        /// default 1000.
        floods_max: Option<u32> = Replace, all(1, 1_000_000);
        /// Queue pairs, 1 to 127; default 1, or the number of `tap_fds`.
        queue_pairs: Option<usize> = Reconnect, all(1, 127);
        /// The worker of each queue pair, by its index; default: pairs move to workers on idle
        /// CPUs.
        queue_workers: Option<Vec<usize>> = Reconnect, all(0, 255);
        /// How interrupts of the guest are held back: "off" (default), or a count and a time like
        /// "32/100us".
        moderation: Option<String> = Reconnect;
        /// When the guest gets back the buffers of sent frames: "off" (default, at once) or "auto"
        /// (several together, while the guest then sends longer frames).
        reclaim: Option<String> = Reconnect;
        /// Offloads between guest and host: "all" (default, checksums and segmentation), "csum"
        /// (checksums) or "none".
        offload: Option<String> = Reconnect;
        /// MAC address of the guest; default: that of the interface of `macvtap` or `xdp`, else
        /// derived from name and socket.
        mac: Option<String> = Reconnect;
        /// MTU to set on the interface and to report to the guest, 68 to 65535; default: neither.
        mtu: Option<u32> = Live, all(68, 65_535);
        /// Link speed that the guest sees, in Mbit/s.
        speed: Option<u32> = Reconnect, all(1, INT_MAX);
        /// The bridge to which the interface is added.
        bridge: Option<String> = Reconnect;
        /// Set the interface up; default: true if it is created here.
        up: Option<bool> = Reconnect;
        /// The most bytes of sent frames that the host holds, for each queue of the tap.
        sndbuf: Option<u32> = Reconnect, all(1, INT_MAX);
        /// Frames that wait for the guest at most, in all queues together that it uses: "auto"
        /// (1000), 1 to 1000000, or "host" (default): each queue has the interface's own length.
        txqueuelen: Option<RawQueueLength> = Reconnect;
        /// Join consecutive packets of one flow into one GSO packet before it is written to the
        /// tap; default true.
        merge: Option<bool> = Reconnect;
        /// Deliver the packets of a flow to the queue pair on which the guest sends that flow, with
        /// a BPF program; false: the tap driver does this, with about 20 % more time for each short
        /// packet; default true.
        steer: Option<bool> = Reconnect;
        /// To how many of the guest's pairs the host delivers frames: "all" (default), "auto" (as
        /// many as are worth it), or 1 to 127, the first ones; with `steer`.
        receive_pairs: Option<RawReceivePairs> = Reconnect;
        /// Offer the guest the hash of each frame that it receives; each frame then takes more
        /// time; default false.
        hash_report: Option<bool> = Reconnect;
        /// The trust domain whose device process serves the device; default: as `domains` says.
        domain: Option<String> = Replace;
        /// Capture all frames in this file (pcap).
        #[schema(value_type = Option<String>)]
        pcap: Option<PathBuf> = Replace;
        /// Faults that the device makes on purpose, to test guests.
        fault: Option<RawNetFault> = Replace;
    }
}

/// Finds a device's key by its name. A key that both tables have has the same properties in both.
pub(crate) fn key(name: &str) -> Option<&'static Key> {
    RawBlk::KEYS.iter().chain(RawNet::KEYS).find(|key| key.name == name)
}

/// Returns the class of a device's key; `None` if there is no such key.
pub fn class_of(key: &str) -> Option<Class> {
    if key == "kind" { Some(Class::Replace) } else { self::key(key).map(|key| key.class) }
}

/// `[[xen_blk]]`: keys of a Xen's disks, and options of the command that serves them.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawXenBlk {
    /// First part of the disks' names in logs, counters and the control API [default: xen].
    #[arg(long)]
    pub name: Option<String>,
    /// Serve the disks below backend/KIND in xenstore; once for each kind [default: manyring].
    #[arg(long = "kind", value_name = "KIND")]
    pub kinds: Option<Vec<String>>,
    /// The socket or the device of xenstore [default: the first of the usual paths that exists].
    #[arg(long, value_name = "PATH")]
    pub xenstore: Option<PathBuf>,
    /// For tests: a simulated Xen, whose xenstore is this socket, instead of this machine's.
    #[arg(long, value_name = "SOCKET")]
    pub simulated: Option<PathBuf>,
    /// The number of the domain in which this process runs [default: 0].
    #[arg(long, value_name = "N")]
    pub domain: Option<u16>,
    /// Bypass the host's page cache (O_DIRECT).
    #[arg(long)]
    pub direct: bool,
    /// raw: serve a file as it is, even if it looks like an image of another format (qcow2, ..).
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// The sector size that guests see, 512 or 4096 bytes [default: 512, but 4096 for a block
    /// device that has such sectors itself].
    #[arg(long, value_name = "BYTES")]
    pub logical_block_size: Option<u32>,
    /// The most queues of a disk, 1 to 256 [default: 8].
    #[arg(long, alias = "queues", value_name = "N")]
    pub num_queues: Option<usize>,
    /// When a write is durable: after the guest's next flush (writeback), or as soon as the write
    /// completes (writethrough) [default: writeback].
    #[arg(long, value_name = "MODE")]
    pub cache: Option<String>,
    /// When the host's file system is full: let the guest's writes wait until there is space
    /// (wait), or fail them with I/O errors (report) [default: wait].
    #[arg(long, value_name = "MODE")]
    pub on_full: Option<String>,
    /// Offer discards, where the disk and the tool stack allow them [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub discard: Option<bool>,
    /// Offer write barriers, each of which waits for all requests before it.
    #[arg(long)]
    pub barrier: bool,
    /// Keep pages mapped that a guest uses again and again (persistent grants), which makes
    /// requests much cheaper [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub persistent: Option<bool>,
    /// The most pages of a queue that stay mapped, 1 to 1048576 [default: 1056].
    #[arg(long, value_name = "N")]
    pub persistent_max: Option<u32>,
    /// The most segments of an indirect request, up to 4096; 0: do not offer indirect requests
    /// [default: 256].
    #[arg(long, value_name = "N")]
    pub indirect_segments_max: Option<u16>,
    /// The largest ring, as log2 of its pages, 0 to 4: 4 is 16 pages [default: 4].
    #[arg(long, value_name = "N")]
    pub ring_page_order_max: Option<u32>,
    /// Send fewer notifications to the guest: off, or COUNT/TIMEus. 32/100us delays a notification
    /// until 32 requests are done, but by at most 100 microseconds [default: off].
    #[arg(long, value_name = "MODE")]
    pub moderation: Option<String>,
    /// Folder for journals of the rings, by which the next process continues to serve guests that
    /// stay connected, even after a SIGKILL [default: /run/manyring].
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// The limits of each disk, per second.
    #[arg(skip)]
    pub limit: Option<RawLimit>,
    /// Faults that the device makes on purpose, to test guests.
    #[arg(skip)]
    pub fault: Option<RawFault>,
}

//! The answers of the API about devices, as JSON: written by the daemon, read by `manyring stats`.
//! The answers about workers are in `manyring_serve::worker_view`.

#![allow(unused_qualifications, reason = "utoipa's macros write types by longer paths than needed")]

use manyring_backend::blk::Connection;
use manyring_backend::net::QueueLengthInfo;
use manyring_backend::net::switch::PortCounters;
use manyring_config::plan::mac_text;
use manyring_device::SideKind;
use manyring_device::net::{NetSide, Receives};
use manyring_engine::QueueStats;
use manyring_serve::worker_view::Summary;
use manyring_supervisor::model::{Controlled, Entry, Waiting};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::ToSchema;

/// The answer to `GET /v1/devices`.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub struct Devices {
    /// All devices, in the order of their names.
    pub devices: Vec<DeviceInfo>,
}

/// One device, as `GET /v1/devices/{name}` shows it.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub struct DeviceInfo {
    /// Name of the device.
    pub name: String,
    /// `blk` or `net`.
    pub kind: String,
    /// The values that only disks, or only networks, have.
    #[serde(flatten)]
    pub detail: Detail,
    /// `serving`; `waiting`: another process holds something that the device needs; `failed`:
    /// opening the device failed. Waiting and failed devices are retried.
    #[serde(default)]
    pub state: String,
    /// `file`, `api`, `command-line` or `xen`.
    #[serde(default)]
    pub origin: String,
    /// For a device that is not served: the key of the configuration that names the missing
    /// resource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// For a device that is not served: why, in one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Keys that were changed, and whose new values apply when the guest reconnects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending_keys: Vec<String>,
    /// The trust domain whose device process serves the device. `user:` if the user who connects
    /// decides the domain, and no user has connected yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<String>,
    /// True while a front-end is connected.
    pub connected: bool,
    /// Path of the socket to which the front-end connects.
    pub socket: String,
    /// The queues of the device, by their index.
    pub queues: Vec<QueueInfo>,
}

/// The values that only devices of one kind have.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Detail {
    /// The values of a disk.
    Blk {
        /// The image, memory or server that holds the disk's bytes.
        disk: String,
        /// The size of the disk in bytes.
        size: u64,
        /// True if the disk is read-only for the guest.
        read_only: bool,
        /// The logical block size of the disk's geometry, in bytes.
        #[serde(default)]
        logical_block_size: u32,
        /// The physical block size of the host's medium, in bytes. Writing less than such a block
        /// costs extra work.
        #[serde(default)]
        physical_block_size: u32,
        /// The connections of the queues to the disk's NBD server; empty for any other disk.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        connections: Vec<ConnectionInfo>,
    },
    /// The values of a network device.
    Net {
        /// The port that sends and receives the frames.
        port: String,
        /// The name of the host's interface, if the port is an interface.
        interface: Option<String>,
        /// The MAC address of the guest.
        mac: String,
        /// The MTU in bytes that the device reports to the guest, if it reports one.
        mtu: Option<u16>,
        /// The MTU in bytes of the host's interface.
        host_mtu: Option<u16>,
        /// The state of the guest's link: `up` or `down`.
        link: String,
        /// Queue pairs that the device has.
        queue_pairs: usize,
        /// Queue pairs that the host may use now.
        attached_pairs: usize,
        /// How many frames may wait in the interface for the guest. Absent: the port has no queues
        /// of the host, or another process opened them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        txqueuelen: Option<QueueLength>,
        /// To how many of these pairs the host delivers frames. Absent: the port is no interface.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        receive_pairs: Option<ReceivingPairs>,
        /// The counters of the port of a switch, by the names of [`PortCounters`].
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        switch: BTreeMap<String, u64>,
    },
    /// A device that is not served yet: its size, MTU and other values are not known.
    Waiting {},
}

/// How many frames may wait for a guest in the queues of its interface that the host uses.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize, ToSchema)]
pub struct QueueLength {
    /// The number of frames for all these queues together; 0: unknown.
    pub frames: u32,
    /// Who has chosen the number: `auto`, `operator`, or `host`, where each queue has the length of
    /// the interface.
    pub source: String,
    /// How often the length of the interface was changed.
    pub changes: u64,
}

/// To how many of a guest's pairs the host delivers frames.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize, ToSchema)]
pub struct ReceivingPairs {
    /// Pairs.
    pub pairs: usize,
    /// Who has chosen them: `all`, `auto`, `operator`; `rss`: the guest's hash needs all; `host`:
    /// the host delivers to all by its own table.
    pub source: String,
    /// How often the number was changed.
    pub changes: u64,
}

impl From<Receives> for ReceivingPairs {
    fn from(Receives { pairs, source, changes }: Receives) -> Self {
        Self { pairs, source: source.to_owned(), changes }
    }
}

impl From<QueueLengthInfo> for QueueLength {
    fn from(QueueLengthInfo { frames, source, changes }: QueueLengthInfo) -> Self {
        Self { frames, source: source.word().to_owned(), changes }
    }
}

/// The connection of a queue to the server of its disk.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub struct ConnectionInfo {
    /// True while the connection is up.
    pub up: bool,
    /// Whether the queue shares the connection with other queues, because the server accepts no
    /// more connections.
    #[serde(default)]
    pub shared: bool,
    /// How often the connection was lost.
    pub losses: u64,
    /// Number of requests that the server has not answered.
    pub in_flight: u64,
    /// Bytes that were sent to the server.
    pub bytes_sent: u64,
    /// Bytes that were received from the server.
    pub bytes_received: u64,
}

/// A queue of a device, with its counters.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub struct QueueInfo {
    /// Index of the queue in its device.
    pub index: usize,
    /// The usual name of a network queue, seen from the guest: `rx0`, `tx0`, .., or `ctrl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The average size of a network queue's packets, in bytes without the virtio-net header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packet_size_average: Option<u64>,
    /// The share, 0 to 1, of a network queue's packets that are GSO packets, not segmented yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gso_share: Option<f64>,
    /// The counters of the queue, by their names.
    pub counters: BTreeMap<String, u64>,
    /// The histograms of the queue, by their names.
    pub histograms: BTreeMap<String, Summary>,
}

impl DeviceInfo {
    pub(crate) fn of(entry: &Entry) -> Self {
        match entry {
            Entry::Served(controlled) => Self::new(controlled),
            Entry::Waiting(waiting) => Self::waiting(waiting),
        }
    }

    fn waiting(waiting: &Waiting) -> Self {
        Self {
            name: waiting.name.clone(),
            kind: waiting.kind.to_owned(),
            detail: Detail::Waiting {},
            state: waiting.state().to_owned(),
            origin: waiting.origin.to_owned(),
            waits_for: Some(waiting.key.to_owned()),
            reason: Some(waiting.reason.clone()),
            pending_keys: Vec::new(),
            process: None,
            connected: false,
            socket: waiting.socket.clone(),
            queues: Vec::new(),
        }
    }

    fn new(controlled: &Controlled) -> Self {
        let view = &controlled.view;
        let name = |index| {
            let net = view.side.as_net()?;
            Some(queue_name(index, net.is_control_queue(index)))
        };
        let queue = |(index, stats): (usize, &Arc<QueueStats>)| {
            let queue = QueueInfo::new(index, stats);
            QueueInfo { name: name(index), ..queue }
        };
        let queues = view.side.stats.all().iter().enumerate().map(queue).collect();
        let detail = match &view.side.kind {
            SideKind::Blk(blk) => {
                let (disk, geometry) = (blk.host.disk(), blk.host.geometry());
                Detail::Blk {
                    disk: disk.kind().to_owned(),
                    size: geometry.size,
                    read_only: blk.host.is_read_only(),
                    logical_block_size: geometry.block_size,
                    physical_block_size: geometry.physical_block_size,
                    connections: disk.connections().into_iter().map(Into::into).collect(),
                }
            }
            SideKind::Net(net) => Detail::net(&**net),
        };
        Self {
            name: view.name().to_owned(),
            kind: view.side.word().to_owned(),
            detail,
            state: "serving".to_owned(),
            origin: view.origin.to_owned(),
            waits_for: None,
            reason: None,
            pending_keys: controlled.pending_keys(),
            process: view.process.clone(),
            connected: *view.connected.borrow(),
            socket: view.socket.clone(),
            queues,
        }
    }
}

fn switch_counters(counters: &PortCounters) -> BTreeMap<String, u64> {
    counters.all().into_iter().map(|counter| (counter.name.to_owned(), counter.value)).collect()
}

/// Returns the name of a network queue, like `rx0`; that of the control queue is `ctrl`.
fn queue_name(index: usize, is_control: bool) -> String {
    match index {
        _ if is_control => "ctrl".to_owned(),
        _ if index.is_multiple_of(2) => format!("rx{}", index / 2),
        _ => format!("tx{}", index / 2),
    }
}

impl From<Connection> for ConnectionInfo {
    fn from(connection: Connection) -> Self {
        let Connection { is_up, is_shared, losses, in_flight, bytes_sent, bytes_received } =
            connection;
        Self { up: is_up, shared: is_shared, losses, in_flight, bytes_sent, bytes_received }
    }
}

impl Detail {
    fn net(net: &dyn NetSide) -> Self {
        let port = net.port();
        Self::Net {
            port: port.kind().to_owned(),
            interface: port.interface().map(str::to_owned),
            mac: mac_text(net.mac()),
            mtu: net.mtu(),
            host_mtu: port.mtu(),
            link: if net.is_link_up() { "up" } else { "down" }.to_owned(),
            queue_pairs: net.queue_pairs(),
            attached_pairs: net.attached_pairs(),
            txqueuelen: port.queue_length().map(QueueLength::from),
            receive_pairs: port.interface().map(|_| net.receives().into()),
            switch: port.counted().map(switch_counters).unwrap_or_default(),
        }
    }
}

impl QueueInfo {
    fn new(index: usize, stats: &QueueStats) -> Self {
        let counters = stats.counters().into_iter().map(|c| (c.name.to_owned(), c.value));
        let plain = stats.histograms();
        let mut histograms: BTreeMap<_, _> =
            plain.into_iter().map(|h| (h.name.to_owned(), Summary::of(h.value))).collect();
        if let Some(times) = stats.served() {
            histograms.insert("serve_ns".to_owned(), Summary::new(times.filled(), times.sum()));
            for (op, histogram) in times.ops().filter(|(_, histogram)| histogram.count() > 0) {
                histograms.insert(format!("{op}_ns"), Summary::of(histogram));
            }
        }
        Self::of(index, counters.collect(), histograms)
    }

    /// Makes the entry of a queue, and derives the average packet size and the share of GSO packets
    /// from the counters.
    pub fn of(
        index: usize,
        counters: BTreeMap<String, u64>,
        histograms: BTreeMap<String, Summary>,
    ) -> Self {
        let value = |name: &str| counters.get(name).copied().unwrap_or(0);
        // A control queue counts commands, which have no size.
        let has_sizes = value("packets") > 0 && value("bytes_passed") > 0;
        let packets = has_sizes.then(|| value("packets"));
        let packet_size_average = packets.map(|packets| value("bytes_passed") / packets);
        let gso_share = packets.map(|packets| as_float(value("gso_packets")) / as_float(packets));
        Self { index, name: None, packet_size_average, gso_share, counters, histograms }
    }

    /// Returns the value of a counter; 0 if the daemon that answered has no such counter.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    /// Returns a histogram; empty if the daemon that answered has no such histogram.
    pub fn histogram(&self, name: &str) -> Summary {
        self.histograms.get(name).cloned().unwrap_or_default()
    }
}

/// Converts a number to a float, to show it to people: a number above 2^53 is rounded.
#[allow(clippy::cast_precision_loss, reason = "shown with fewer digits than a float holds")]
pub fn as_float(n: u64) -> f64 {
    n as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_from_the_counters_of_a_network_queue_is_there_once_it_has_packets() {
        let of = |counters: &[(&str, u64)]| {
            let counters = counters.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
            QueueInfo::of(0, counters, BTreeMap::new())
        };
        let idle = of(&[("packets", 0), ("bytes_passed", 0)]);
        assert_eq!((idle.packet_size_average, idle.gso_share), (None, None));
        let control = of(&[("packets", 5), ("bytes_passed", 0)]);
        assert_eq!((control.packet_size_average, control.gso_share), (None, None));
        let busy = of(&[("packets", 8), ("bytes_passed", 1000), ("gso_packets", 2)]);
        assert_eq!((busy.packet_size_average, busy.gso_share), (Some(125), Some(0.25)));
        let text = serde_json::to_string(&busy).unwrap();
        assert!(text.contains("\"packet_size_average\":125,\"gso_share\":0.25"), "{text}");
        assert!(!serde_json::to_string(&idle).unwrap().contains("gso_share"));
    }
}

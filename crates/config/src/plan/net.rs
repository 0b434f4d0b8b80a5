//! The plan of a network device.

use super::LimitPlan;
use super::switch::SwitchPortPlan;
use super::{DevicePlan, Place, PlanError, SocketPlan, Source, device_place, moderation, pins};
use crate::limit_keys::Of;
use crate::numbers;
use crate::tables::{RawNet, RawQueueLength, RawReceivePairs};
use manyring_backend::net::tap::{QueueLength, check_name};
use manyring_device::net::{MacAddress, NetOptions, Offload, ReceivePairs, Reclaim, parse_mac};
use manyring_protocol::spec::{DeviceSpec, KindSpec, NetFaultSpec, NetSpec, PortSpec};
use serde::{Serialize, Serializer};
use std::path::PathBuf;

/// The most frames that the queues of an interface may hold together.
const QUEUE_LENGTH_MAX: u32 = 1_000_000;

/// The plan of a vhost-user network device.
#[derive(Clone, Debug, Serialize)]
pub struct NetPlan {
    /// The keys that a disk and a network share: name, socket, limit.
    #[serde(flatten)]
    pub device: DevicePlan,
    /// The port of the host to which the guest's frames go.
    pub port: PortPlan,
    /// The options of the device, the same in the daemon and in a device process. Their MAC address
    /// is set only when the interface is open.
    #[serde(flatten)]
    pub options: NetOptions,
    /// The configured MAC address. `None`: the guest gets the address of the interface, if it must
    /// use that one (macvtap, AF_XDP), else an address that is derived from the device's name and
    /// socket.
    #[serde(serialize_with = "serialize_mac")]
    pub mac: Option<MacAddress>,
    /// The bridge that the interface joins.
    pub bridge: Option<String>,
    /// True: set the interface up; false: set it down; `None`: leave it as it is.
    pub up: Option<bool>,
    /// The most bytes of sent frames that the host holds for a queue of the tap.
    pub sndbuf: Option<u32>,
    /// Frames that wait in the interface for the guest; `None`: the port has no such queues.
    #[serde(serialize_with = "serialize_queue_length")]
    pub txqueuelen: Option<QueueLength>,
    /// True if consecutive packets of a flow from the guest are joined into one GSO packet before
    /// they are written to the tap.
    pub merge: bool,
    /// True if a flow's frames reach the queue pair on which the guest sends that flow.
    pub steer: bool,
    /// The file that captures the frames.
    pub pcap: Option<PathBuf>,
    /// The faults that the device makes on purpose, to test guests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<NetFaultSpec>,
}

/// The port of the host to which a network device is connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PortPlan {
    /// A tap, which is created if it does not exist.
    Tap {
        /// Name of the interface.
        name: String,
        /// True: the tap must exist, and is not created.
        must_exist: bool,
    },
    /// Inherited descriptors of the queues of a tap, which the process that started the daemon has
    /// opened.
    TapFds(Vec<i32>),
    /// A macvtap that exists.
    Macvtap {
        /// Name of the interface.
        name: String,
    },
    /// Queues of an interface, by AF_XDP.
    Xdp {
        /// Name of the interface.
        name: String,
        /// True if the network card reads long frames in the guest's memory, without a copy.
        zero_copy: bool,
    },
    /// No interface: frames of the guest are dropped.
    Null {
        /// Size in bytes of the frames that the port delivers to the guest; 0: it delivers none.
        generate: usize,
    },
    /// A port of a switch of the daemon.
    Switch(SwitchPortPlan),
}

/// The properties that follow from the kind of a port. Only [`PortPlan::kind`] decides them, so a
/// new kind of port needs a new arm there.
#[derive(Clone, Copy, Debug)]
pub struct PortKind<'a> {
    /// The key that names the port.
    pub key: &'static str,
    /// The interface of the host that the configuration names.
    pub interface: Option<&'a str>,
    /// True if the port is an interface of the host, which may be deleted and created again.
    pub is_interface: bool,
    /// True if a takeover hands the queues of the interface over to the next supervisor.
    pub are_queues_left: bool,
    /// True if the guest may have to use the MAC address of the interface.
    pub demands_mac: bool,
    /// True if an unprivileged user of the control API (`allow_paths`) may add such a port.
    pub is_for_all: bool,
}

impl NetPlan {
    pub(crate) fn new(raw: RawNet, index: usize, source: Source) -> Result<Self, PlanError> {
        let name = raw.name.clone().unwrap_or_else(|| format!("net{index}"));
        let place = device_place(&name, "[[net]]", source)?;
        numbers::check_all(raw.numbers(), &place)?;
        let port = PortPlan::new(&raw, &place)?;
        let default_pairs = if let PortPlan::TapFds(fds) = &port { fds.len() } else { 1 };
        let queue_pairs = raw.queue_pairs.unwrap_or(default_pairs);
        if raw.zero_copy && queue_pairs > 1 {
            let problem = format!(
                "{queue_pairs} queue pairs, but a device with {} has one",
                place.key("zero_copy")
            );
            return place.error("queue_pairs", problem);
        }
        let mac = match raw.mac.as_deref() {
            None => None,
            Some(text) => match parse_mac(text) {
                Some(mac) => Some(mac),
                None => {
                    return place.error("mac", no_mac(text));
                }
            },
        };
        let mtu = raw.mtu.and_then(|mtu| u16::try_from(mtu).ok());
        let txqueuelen = txqueuelen(raw.txqueuelen.as_ref(), &port, &place)?;
        let reclaim = reclaim(raw.reclaim.as_deref(), &place)?;
        let offload = offload(&raw, &place)?;
        let queue_workers = pins::queue_workers(raw.queue_workers.as_deref(), queue_pairs, &place)?;
        let limit = LimitPlan::new(raw.limit.as_ref(), Of::Net, &place)?;
        let options = NetOptions {
            name: name.clone(),
            queue_pairs,
            mac: MacAddress::default(),
            mtu,
            speed: raw.speed,
            moderation: moderation(raw.moderation.as_deref(), &place)?,
            reclaim,
            offload,
            hash_report: raw.hash_report.unwrap_or(false),
            receive_pairs: receive_pairs(&raw, &place)?,
        };
        let device = DevicePlan::new(name, place, raw.socket(), queue_workers, limit)?;
        let net = Self {
            device: device.within(raw.domain)?,
            options,
            mac,
            bridge: raw.bridge,
            up: raw.up,
            sndbuf: raw.sndbuf,
            txqueuelen,
            // The host must segment a merged packet: that needs the offload of segments.
            merge: raw.merge.unwrap_or(true) && offload == Offload::All,
            steer: raw.steer.unwrap_or(true),
            pcap: raw.pcap,
            fault: raw.fault.map(Into::into),
            port,
        };
        net.check_domain()?;
        Ok(net)
    }

    /// Makes the description of the device for a device process, with the present address and MTU.
    /// `None`: no device process can serve the port.
    pub fn spec(&self, mac: MacAddress, mtu: Option<u16>) -> Option<DeviceSpec> {
        let port = self.port_spec()?;
        let Self {
            device,
            options,
            fault,
            pcap,
            // These fields are in `port`, the description of the port.
            port: _,
            merge: _,
            // The parameter `mac` is the address in use, which may differ.
            mac: _,
            // The supervisor sets these on the interface when it opens the interface.
            bridge: _,
            up: _,
            sndbuf: _,
            txqueuelen: _,
            steer: _,
        } = self;
        let options = NetOptions { mtu, ..options.clone() };
        // The supervisor writes the capture file; the spec says only whether there is one.
        let net = NetSpec { port, captures: pcap.is_some(), mac, options, fault: *fault };
        Some(device.spec(KindSpec::Net(net)))
    }

    fn port_spec(&self) -> Option<PortSpec> {
        match &self.port {
            PortPlan::Null { generate } => Some(PortSpec::Null { generate: *generate }),
            // The supervisor opens the interface, and hands over its queues and properties.
            PortPlan::Tap { name: _, must_exist: _ }
            | PortPlan::TapFds(_)
            | PortPlan::Macvtap { name: _ } => Some(PortSpec::Interface { merge: self.merge }),
            // `Command::SwitchPort` describes the port of the switch.
            PortPlan::Switch(_) => Some(PortSpec::Switch),
            // `Plan::check_domains` refuses `zero_copy` for a device of a device process.
            PortPlan::Xdp { name: _, zero_copy } => (!zero_copy).then_some(PortSpec::Xdp),
        }
    }

    /// Returns the MAC address of a device without the key `mac`. It is derived from the device's
    /// name and socket, so it is the same at each start. The name alone would not suffice: two
    /// daemons may use the same name.
    pub fn made_mac(&self) -> MacAddress {
        let socket = match &self.device.socket {
            SocketPlan::Listen { path, .. } | SocketPlan::Connect { path } => {
                path.display().to_string()
            }
            SocketPlan::Fd(fd) => fd.to_string(),
        };
        made_from(&format!("{}@{socket}", self.device.name))
    }
}

impl PortPlan {
    /// Returns the properties that follow from the kind of the port.
    pub fn kind(&self) -> PortKind<'_> {
        let interface = PortKind {
            key: "tap",
            interface: None,
            is_interface: true,
            are_queues_left: false,
            demands_mac: true,
            is_for_all: false,
        };
        let inside = PortKind { is_interface: false, demands_mac: false, ..interface };
        match self {
            Self::Tap { name, must_exist: _ } => PortKind {
                interface: Some(name),
                are_queues_left: true,
                demands_mac: false,
                ..interface
            },
            // `demands_mac`: the descriptors may be queues of a macvtap.
            Self::TapFds(_) => PortKind { key: "tap_fds", ..interface },
            Self::Macvtap { name } => {
                PortKind { key: "macvtap", interface: Some(name), ..interface }
            }
            Self::Xdp { name, .. } => PortKind { key: "xdp", interface: Some(name), ..interface },
            Self::Null { .. } => PortKind { key: "null", is_for_all: true, ..inside },
            Self::Switch(_) => PortKind { key: "switch", ..inside },
        }
    }

    fn new(raw: &RawNet, place: &Place) -> Result<Self, PlanError> {
        Self::check_keys(raw, place)?;
        let is_other = raw.tap.is_some()
            || raw.macvtap.is_some()
            || raw.tap_fds.is_some()
            || raw.xdp.is_some()
            || raw.null;
        match SwitchPortPlan::new(raw, place)? {
            Some(port) if !is_other => return Ok(Self::Switch(port)),
            Some(_) => return Self::several(place),
            None => {}
        }
        match (&raw.tap, &raw.tap_fds, &raw.macvtap, &raw.xdp, raw.null) {
            (Some(name), None, None, None, false) => {
                Ok(Self::Tap { name: name.clone(), must_exist: raw.must_exist })
            }
            (None, Some(fds), None, None, false) if fds.is_empty() => {
                place.error("tap_fds", "is empty")
            }
            (None, Some(fds), None, None, false) => match fds.iter().find(|fd| **fd < 3) {
                Some(fd) => place.error("tap_fds", format!("{fd} was not passed to this process")),
                None => Ok(Self::TapFds(fds.clone())),
            },
            (None, None, Some(name), None, false) => Ok(Self::Macvtap { name: name.clone() }),
            (None, None, None, Some(name), false) => {
                Ok(Self::Xdp { name: name.clone(), zero_copy: raw.zero_copy })
            }
            (None, None, None, None, true) => {
                let generate = raw.generate.unwrap_or(0);
                if generate != 0 && !(60..=65_553).contains(&generate) {
                    let problem = format!("{generate} is not between 60 and 65553 bytes");
                    return place.error("generate", problem);
                }
                Ok(Self::Null { generate })
            }
            (None, None, None, None, false) => {
                let others = place.keys(&Self::keys(place)[1..], "or");
                place.error("tap", format!("is missing (or {others})"))
            }
            _ => Self::several(place),
        }
    }

    /// Returns the keys that can name a port in this place.
    fn keys(place: &Place) -> &'static [&'static str] {
        match place {
            // A command serves one device, so a switch would have no other port.
            Place::CommandLine => &["tap", "tap_fds", "macvtap", "xdp", "null"],
            _ => &["tap", "tap_fds", "macvtap", "xdp", "null", "switch"],
        }
    }

    /// Checks that each key which only some kinds of port have is used with such a port, and that
    /// names of interfaces are valid.
    fn check_keys(raw: &RawNet, place: &Place) -> Result<(), PlanError> {
        if raw.bridge.is_some() && raw.macvtap.is_some() {
            return place.error("bridge", "a macvtap cannot be in a bridge");
        }
        let [tap, tap_fds, macvtap, xdp] =
            [raw.tap.is_some(), raw.tap_fds.is_some(), raw.macvtap.is_some(), raw.xdp.is_some()];
        let (taps, queues) = (["tap", "tap_fds"].as_slice(), ["tap", "tap_fds", "macvtap"]);
        let interfaces = ["tap", "tap_fds", "macvtap", "xdp"];
        let is_queue = tap || tap_fds || macvtap;
        for (key, is_set, needs, is_there) in [
            ("steer", raw.steer.is_some(), taps, tap || tap_fds),
            ("receive_pairs", is_chosen(raw), taps, tap || tap_fds),
            ("bridge", raw.bridge.is_some(), &queues, is_queue),
            ("up", raw.up.is_some(), &interfaces, is_queue || xdp),
            ("sndbuf", raw.sndbuf.is_some(), &queues, is_queue),
            ("txqueuelen", raw.txqueuelen.is_some(), &queues, is_queue),
            ("merge", raw.merge.is_some(), &queues, is_queue),
            ("must_exist", raw.must_exist, &["tap"], tap),
            ("generate", raw.generate.is_some(), &["null"], raw.null),
            ("zero_copy", raw.zero_copy, &["xdp"], xdp),
        ] {
            if is_set && !is_there {
                return place.error(key, format!("needs {}", place.keys(needs, "or")));
            }
        }
        for (key, name) in [
            ("tap", &raw.tap),
            ("macvtap", &raw.macvtap),
            ("xdp", &raw.xdp),
            ("bridge", &raw.bridge),
        ] {
            if let Some(Err(error)) = name.as_deref().map(check_name) {
                return place.error(key, error.to_string());
            }
        }
        Ok(())
    }

    fn several<T>(place: &Place) -> Result<T, PlanError> {
        let all = place.keys(Self::keys(place), "and");
        place.error("tap", format!("only one of {all} can be served"))
    }
}

fn reclaim(raw: Option<&str>, place: &Place) -> Result<Reclaim, PlanError> {
    match raw {
        None | Some("off") => Ok(Reclaim::Off),
        Some("auto") => Ok(Reclaim::Auto),
        Some(text) => place.error("reclaim", format!("{text:?} is neither \"off\" nor \"auto\"")),
    }
}

/// Returns the queue length of a port; `None` if the port has no queues.
fn txqueuelen(
    raw: Option<&RawQueueLength>,
    port: &PortPlan,
    place: &Place,
) -> Result<Option<QueueLength>, PlanError> {
    let has_queues =
        matches!(port, PortPlan::Tap { .. } | PortPlan::TapFds(_) | PortPlan::Macvtap { .. });
    let Some(RawQueueLength(text)) = raw else {
        return Ok(has_queues.then_some(QueueLength::Host));
    };
    match (text.as_str(), text.parse()) {
        ("auto", _) => Ok(Some(QueueLength::Auto)),
        ("host", _) => Ok(Some(QueueLength::Host)),
        (_, Ok(frames @ 1..=QUEUE_LENGTH_MAX)) => Ok(Some(QueueLength::Frames(frames))),
        _ => {
            let problem = format!(
                "{text:?} is neither \"auto\" nor \"host\", nor a whole number from 1 to \
                 {QUEUE_LENGTH_MAX}"
            );
            place.error("txqueuelen", problem)
        }
    }
}

/// True if the pairs that receive are not all: only the table of a tap can restrict them.
fn is_chosen(raw: &RawNet) -> bool {
    raw.receive_pairs.as_ref().is_some_and(|RawReceivePairs(text)| text != "all")
}

/// The pairs to which the host delivers.
fn receive_pairs(raw: &RawNet, place: &Place) -> Result<ReceivePairs, PlanError> {
    let Some(RawReceivePairs(text)) = &raw.receive_pairs else { return Ok(ReceivePairs::All) };
    let pairs = match (text.as_str(), text.parse()) {
        ("all", _) => return Ok(ReceivePairs::All),
        ("auto", _) => ReceivePairs::Auto,
        (_, Ok(pairs @ 1..=127)) => ReceivePairs::Number(pairs),
        _ => {
            let problem = format!(
                "{text:?} is neither \"all\" nor \"auto\", nor a whole number from 1 to 127"
            );
            return place.error("receive_pairs", problem);
        }
    };
    if raw.steer == Some(false) {
        let problem = format!(
            "{text:?} needs {} = true: else the host chooses the queues",
            place.key("steer")
        );
        return place.error("receive_pairs", problem);
    }
    Ok(pairs)
}

fn offload(raw: &RawNet, place: &Place) -> Result<Offload, PlanError> {
    let offload = match raw.offload.as_deref() {
        None | Some("all") => return Ok(Offload::All),
        Some("csum") => Offload::Csum,
        Some("none") => Offload::None,
        Some(text) => {
            let problem = format!("{text:?} is not one of \"all\", \"csum\" and \"none\"");
            return place.error("offload", problem);
        }
    };
    if raw.merge == Some(true) {
        let problem =
            format!("needs {} = \"all\": the host segments what was merged", place.key("offload"));
        return place.error("merge", problem);
    }
    Ok(offload)
}

/// Hashes a text into a locally administered MAC address (FNV-1a of 64 bits).
fn made_from(text: &str) -> MacAddress {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325, mix);
    let [a, b, c, d, e, ..] = hash.to_be_bytes();
    [0x02, a, b, c, d, e]
}

/// Returns the error for a text that is no unicast MAC address.
fn no_mac(text: &str) -> String {
    let first = text.split(':').next().and_then(|byte| u8::from_str_radix(byte, 16).ok());
    let is_group = first.is_some_and(|first| first & 1 == 1) && text.split(':').count() == 6;
    let group = if is_group { " (it is the address of a group, multicast)" } else { "" };
    format!("{text:?} is not an address like 52:54:00:12:34:56{group}")
}

/// Formats a MAC address like `52:54:00:12:34:56`.
pub fn mac_text(mac: MacAddress) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

#[allow(clippy::ref_option, reason = "what serde gives")]
fn serialize_mac<S: Serializer>(
    mac: &Option<MacAddress>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    mac.map(mac_text).serialize(serializer)
}

#[allow(clippy::ref_option, reason = "what serde gives")]
fn serialize_queue_length<S: Serializer>(
    length: &Option<QueueLength>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match length {
        None => serializer.serialize_none(),
        Some(QueueLength::Auto) => serializer.serialize_str("auto"),
        Some(QueueLength::Host) => serializer.serialize_str("host"),
        Some(QueueLength::Frames(frames)) => serializer.serialize_u32(*frames),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;

    #[test]
    fn a_short_file_gets_its_defaults() {
        let short = plan("[[net]]\nsocket_path = '/s'\ntap_fds = [7, 8]\n").unwrap();
        let net = &short.net[0];
        assert_eq!((net.device.name.as_str(), net.options.queue_pairs), ("net0", 2));
        assert_eq!((net.mac, net.made_mac()[0]), (None, 2));
        let made = |socket: &str| {
            let text = format!("[[net]]\nsocket_path = '{socket}'\nnull = true\n");
            plan(&text).unwrap().net[0].made_mac()
        };
        assert_eq!(made("/run/a"), made("/run/a"));
        assert_ne!(made("/run/a"), made("/run/b"), "two processes, a device net0 each");
    }

    #[test]
    fn every_error_names_its_key() {
        let base = "[[net]]\nname = 'a'\nsocket_path = '/s'\n";
        for (more, key) in [
            ("", "tap"),
            ("tap = 't'\nnull = true", "tap"),
            ("tap = 't'\nqueue_pairs = 0", "queue_pairs"),
            ("tap = 't'\nqueue_pairs = 128", "queue_pairs"),
            ("tap = 't'\nmac = '01:00:00:00:00:00'", "mac"),
            ("tap = 't'\nmtu = 67", "mtu"),
            ("tap = 't'\nmtu = 65536", "mtu"),
            ("tap = 't'\nspeed = 0", "speed"),
            ("tap = 't'\nsndbuf = 0", "sndbuf"),
            ("tap = 't'\nmac = '33:33:00:00:00:01'", "(it is the address of a group, multicast)"),
            ("tap = 't'\nspeed = 2147483648", "speed"),
            ("macvtap = 't'\nbridge = 'b'", "bridge"),
            ("xdp = 't'\nbridge = 'b'", "bridge: needs tap, tap_fds or macvtap"),
            ("xdp = 't'\nmerge = true", "merge"),
            (
                "xdp = 't'\nzero_copy = true\nqueue_pairs = 2",
                "queue_pairs: 2 queue pairs, but a device with zero_copy has one",
            ),
            ("tap = 't'\nzero_copy = true", "zero_copy: needs xdp"),
            ("xdp = 't'\ntap = 'u'", "tap: only one of tap, tap_fds, macvtap, xdp, null"),
            ("xdp = 'a/b'", "xdp"),
            (
                "xdp = 't'\nzero_copy = true\ndomain = 'b'",
                "zero_copy: true is not served by a device process",
            ),
            ("tap = 't'\ngenerate = 64", "generate"),
            ("null = true\ngenerate = 59", "generate"),
            ("null = true\nbridge = 'b'", "bridge"),
            ("null = true\nmust_exist = true", "must_exist"),
            ("tap_fds = []", "tap_fds"),
            ("tap_fds = [1]", "tap_fds"),
            ("tap_fds = [7, 7]", "tap_fds"),
            ("tap = 't'\nfd = 3", "fd"),
            ("tap = 't'\nmoderation = '0/10us'", "moderation"),
            ("tap = 't'\nreclaim = 'on'", "reclaim: \"on\" is neither \"off\" nor \"auto\""),
            ("tap = 't'\noffload = 'tso'", "offload: \"tso\" is not one of"),
            ("tap = 't'\noffload = 'csum'\nmerge = true", "merge"),
            ("tap = 't'\ncolour = 1", "colour"),
        ] {
            let message = plan(&format!("{base}{more}\n")).expect_err(more);
            assert!(message.contains(key), "{more}\n-> {message}");
        }
        let twice =
            format!("{base}tap = 't'\n[[net]]\nname = 'b'\nsocket_path = '/t'\ntap = 't'\n");
        assert!(plan(&twice).expect_err("twice").contains("b: tap"));
    }
}

//! Messages between the supervisor and a device process: a byte for the version, then JSON.
//!
//! A device process may be compromised by its guest. So its messages are short, name only devices
//! that it was given, and request only what a guest may choose ([`PrivilegedRequest`]), one request
//! at a time.

use crate::digits;
use crate::nbd::{NbdFailure, NbdFound, NbdTarget};
use crate::spec::{DeviceSpec, XenBlkSpec};
use crate::switch::{SwitchPortSpec, SwitchSpec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of all messages. Supervisor and device process are one program: another version is
/// refused.
pub const VERSION: u8 = 2;
/// Longest message, in bytes.
pub const SIZE_MAX: usize = 16384;
/// Most file descriptors of a message.
pub const FDS_MAX: usize = 240;

/// A message of the supervisor to a device process.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// A device to serve. File descriptors: one for the counters; of a disk in a file, one for
    /// transfers and all others for flushes, of a disk in memory one; if it has a `port`, one for
    /// each of its queue pairs, and one for the table of flows if that has a key, or one for the
    /// memory of its sockets by AF_XDP; one for the frames that are captured, if they are.
    Device {
        /// Its name.
        device: String,
        /// The device.
        spec: DeviceSpec,
        /// Its frames go to an interface of the host.
        port: Option<PortFacts>,
    },
    /// The switch whose ports the process serves, before the first of them. File descriptors: the
    /// queue of its uplink, if it has one, or the socket of AF_XDP and its memory.
    Switch {
        /// The name by which commands and reports about the uplink name it.
        device: String,
        /// The switch.
        spec: SwitchSpec,
        /// Its uplink.
        uplink: Option<PortFacts>,
    },
    /// A port of the switch, whether or not its device is given to the process: it takes the place
    /// of an earlier one of its name.
    SwitchPort {
        /// The device's name.
        device: String,
        /// The port; `None`: it is no port any more.
        port: Option<SwitchPortSpec>,
    },
    /// A disk of a Xen guest to serve. File descriptors: as for [`Self::Device`].
    XenDisk {
        /// Its name.
        device: String,
        /// The disk.
        spec: XenBlkSpec,
    },
    /// A ring of the front-end that connects next. File descriptors: of this machine's Xen the
    /// device of the event channel, of a simulated one the two eventfds; then the journal.
    XenRing {
        /// The device's name.
        device: String,
        /// The ring.
        ring: XenRing,
    },
    /// The front-end of a Xen disk connects, with the rings of the commands before. One descriptor:
    /// this machine's grant device, or the memory of a simulated domain.
    XenConnect {
        /// The device's name.
        device: String,
        /// The front-end.
        front: XenFrontEnd,
    },
    /// Leave the rings of a Xen disk as they are.
    XenDisconnect {
        /// The device's name.
        device: String,
        /// That of the connection.
        number: u64,
    },
    /// A change of a network device by host or operator; each message has the whole state.
    Outside {
        /// The device's name.
        device: String,
        /// The operator has not pulled the guest's cable.
        link_up: bool,
        /// The interface was deleted.
        is_gone: bool,
        /// The MTU that the next driver reads.
        mtu: Option<u16>,
        /// How often the guest was asked to announce itself.
        announcements: u64,
    },
    /// The supervisor has joined another interface in place of one that was deleted. File
    /// descriptors: one for each queue pair.
    Queues {
        /// The device's name.
        device: String,
        /// What the host keeps from this interface.
        filter: PortFilter,
        /// Bytes of a chunk, of sockets of AF_XDP; their memory follows them.
        chunk: Option<u32>,
    },
    /// The limit of a device, per second. A group's rates hold for all its devices together.
    Limit {
        /// The device's name.
        device: String,
        /// Its own.
        rates: LimitRates,
        /// That of the group which it is in.
        group: Option<GroupRates>,
    },
    /// Devices of other processes share a group with those of this one: its time comes from a
    /// lease. File descriptors: what was granted, and what is used.
    Lease {
        /// The group.
        group: String,
    },
    /// The answer to [`Report::Request`].
    Done {
        /// The number of the request.
        number: u64,
        /// The system's error number; 0: the request was carried out.
        error: i32,
    },
    /// The answer to [`PrivilegedRequest::Connect`]. File descriptors: a socket, and a file with
    /// certificates if the disk has TLS.
    Connected {
        /// The number of the request.
        number: u64,
        /// There is no connection.
        failed: Option<NbdFailure>,
    },
    /// Ask a server for its export, and answer with [`Report::Export`]. File descriptors: as for
    /// [`Self::Connected`].
    Export {
        /// What the server is asked for.
        target: NbdTarget,
        /// For how many milliseconds.
        limit_ms: u32,
    },
    /// File descriptors that the journal of the client that comes next names.
    SavedFds {
        /// The device's name.
        device: String,
        /// Their names, in the order of the descriptors.
        named: Vec<NamedFds>,
    },
    /// A client has connected to a device, or has lost the device process that served it. Two file
    /// descriptors: the socket, and the journal of its session (`protocol/journal.rs`).
    Client {
        /// The device's name.
        device: String,
        /// Reports name the client by this number.
        number: u64,
    },
    /// Quiesce for another supervisor: queues stop, descriptors and mappings are closed, and
    /// front-ends stay connected.
    Quiesce {},
    /// Stop a device.
    Remove {
        /// Its name.
        device: String,
    },
    /// Read the size of a device's file again.
    Measure {
        /// The device's name.
        device: String,
    },
    /// One file descriptor: the file to which the state of the threads is written.
    Threads {},
    /// Write down counters and the state of the threads.
    Count {
        /// The answer names it.
        number: u64,
    },
    /// Answer, to show that the process is responsive.
    Ping {
        /// The answer names it.
        number: u64,
    },
}

/// Properties of the interface whose queues a device process is given.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PortFacts {
    /// The interface's name.
    pub interface: String,
    /// It is a macvtap.
    pub is_macvtap: bool,
    /// Offloads that the kernel accepts and can deliver, as `VIRTIO_NET_F_GUEST_*` bits.
    pub offloads: u64,
    /// The interface's MTU in bytes.
    pub mtu: Option<u16>,
    /// The key of the table in which flows are noted, if there is one.
    pub table_key: Option<u64>,
    /// The host can choose queues by the guest's hash.
    pub can_hash: bool,
    /// What the host keeps from the interface.
    pub filter: PortFilter,
    /// Bytes of a chunk of its sockets, if it is one by AF_XDP.
    pub chunk: Option<u32>,
}

/// The frames that the host keeps from an interface.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PortFilter {
    /// The only unicast address whose frames reach it, if there is one.
    pub only_to: Option<[u8; 6]>,
    /// Only frames to groups that the host has joined reach it.
    pub lacks_groups: bool,
}

/// A ring of a Xen front-end.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenRing {
    /// The grant references of its pages.
    pub refs: Vec<u32>,
    /// The port of the event channel, of this machine's Xen.
    pub port: Option<u32>,
    /// It has a journal.
    pub has_journal: bool,
}

/// A Xen front-end that connects.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenFrontEnd {
    /// Reports name the connection by this number.
    pub number: u64,
    /// The domain of the front-end.
    pub domain: u16,
    /// The layout of its rings: an index in `Abi::ALL`.
    pub abi: usize,
    /// It uses persistent grants.
    pub persistent: bool,
    /// Most segments of an indirect request, as it was offered.
    pub indirect_segments_max: u16,
    /// An earlier process has served its rings.
    pub takeover: bool,
    /// Where the pages of a simulated domain are mapped from.
    pub seat: Option<XenSeat>,
}

/// The right to map pages of a simulated domain.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenSeat {
    /// Entries of the domain's grant table.
    pub entries: u32,
    /// The seat.
    pub seat: u8,
}

/// A report about the connection of a Xen disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum XenReport {
    /// Its rings are served.
    Started {},
    /// Its rings are not served, and nothing of the front-end is in use.
    Refused {
        /// The reason.
        text: String,
        /// Another try may succeed.
        passes: bool,
    },
    /// A queue met a fault of the front-end.
    Fault {
        /// What the front-end did wrong, one sentence for the log.
        text: String,
    },
    /// Its rings are not served any more: nothing of the front-end is in use.
    Stopped {},
}

/// Rates of a limit, per second; 0: no limit.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LimitRates {
    /// Requests or packets: read or sent, written or received, all.
    pub ops: [u64; 3],
    /// Their bytes.
    pub bytes: [u64; 3],
    /// Burst: milliseconds without requests whose share is kept.
    pub burst_ms: u64,
}

/// The rates of a group of devices.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GroupRates {
    /// The group's name.
    pub name: String,
    /// Rates of all its devices together.
    pub rates: LimitRates,
}

/// Some of a message's file descriptors, which belong to an entry of a session's journal.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NamedFds {
    /// By which the entry names them.
    pub name: u64,
    /// How many there are.
    pub count: usize,
}

/// A request of a device process for what its guest may choose and only the supervisor may do.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PrivilegedRequest {
    /// Attach or detach a queue pair of the interface.
    Pair {
        /// Its index.
        pair: u16,
        /// Attach it.
        attached: bool,
    },
    /// Deliver frames with these offloads only.
    Offloads {
        /// As `VIRTIO_NET_F_GUEST_*`.
        bits: u64,
    },
    /// Steer frames to the pairs that the guest's hash chooses.
    Rss {
        /// `struct virtio_net_rss_config`, as its driver writes it; empty: the host steers.
        #[serde(with = "digits")]
        config: Vec<u8>,
    },
    /// Lock the image for rings that start, or unlock it after all rings have stopped.
    Lock {
        /// Lock it.
        is_held: bool,
    },
    /// Connect to the server of the disk, answered by [`Command::Connected`].
    Connect {
        /// For how many milliseconds.
        limit_ms: u32,
    },
}

/// A message of a device process to the supervisor. Only [`Self::SessionFds`] has file descriptors.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Report {
    /// The process has started.
    Ready {},
    /// All devices have quiesced, and all their descriptors and mappings are closed. No further
    /// report follows.
    Quiesced {},
    /// A front-end has connected to a device, or has left.
    Session {
        /// The device's name.
        device: String,
        /// It has connected.
        is_open: bool,
    },
    /// The file descriptors of a client's session: those of this message are kept for the next
    /// device process, and some that came before are not needed any more.
    SessionFds {
        /// The device's name.
        device: String,
        /// The number of the client.
        number: u64,
        /// The name under which those of the message are kept, if it has any.
        keep: Option<u64>,
        /// The names of those that may be closed.
        release: Vec<u64>,
    },
    /// The session of a client has ended, or the client was refused.
    Gone {
        /// The device's name.
        device: String,
        /// The number of the client.
        number: u64,
    },
    /// A device has stopped, and all its descriptors and mappings are closed.
    Removed {
        /// Its name.
        device: String,
    },
    /// A request for the guest of a device, answered by [`Command::Done`].
    Request {
        /// The device's name.
        device: String,
        /// The answer names it.
        number: u64,
        /// The request.
        request: PrivilegedRequest,
    },
    /// A queue of a device cannot be read or written: the interface may be gone.
    Suspect {
        /// The device's name.
        device: String,
    },
    /// Devices of a group with a lease need something while the supervisor sleeps.
    Needs {},
    /// What the guest of a network device chose, for the API to show.
    Guest {
        /// The device's name.
        device: String,
        /// Its address.
        mac: Option<[u8; 6]>,
        /// It can announce itself.
        announces: bool,
        /// The index of its control queue.
        control: Option<u16>,
        /// The pairs in use of a port that the device process has.
        pairs: Option<u16>,
    },
    /// A report about the connection of a Xen disk that was named last.
    Xen {
        /// The device's name.
        device: String,
        /// The number of the connection.
        number: u64,
        /// The report.
        said: XenReport,
    },
    /// The answer to [`Command::Export`].
    Export {
        /// What the server offers.
        found: NbdFound,
    },
    /// The counters are written.
    Counted {
        /// The number of the question.
        number: u64,
    },
}

/// Why bytes are no message.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum MessageError {
    #[error("an empty message")]
    Empty,
    #[error("message version {found} instead of {VERSION}")]
    Version { found: u8 },
    #[error("a message of {size} bytes; the maximum is {SIZE_MAX}")]
    Long { size: usize },
    #[error("malformed message: {0}")]
    Text(#[from] serde_json::Error),
}

/// A message as bytes.
///
/// # Errors
/// [`MessageError::Long`].
pub fn emit<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    let mut bytes = vec![VERSION];
    serde_json::to_writer(&mut bytes, message)?;
    if bytes.len() > SIZE_MAX {
        return Err(MessageError::Long { size: bytes.len() });
    }
    Ok(bytes)
}

/// Bytes as a message.
///
/// # Errors
/// [`MessageError`], one for each reason.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    match bytes {
        [] => Err(MessageError::Empty),
        bytes if bytes.len() > SIZE_MAX => Err(MessageError::Long { size: bytes.len() }),
        [VERSION, text @ ..] => Ok(serde_json::from_slice(text)?),
        [found, ..] => Err(MessageError::Version { found: *found }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::SPEC_SIZE_MAX;
    use crate::spec::tests::{largest_blk, largest_nbd, largest_net, largest_xen};
    use crate::switch::tests::largest_switch_port;

    /// Pseudo-random bits (xorshift).
    fn next(seed: &mut u64) -> u64 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed
    }

    fn text(seed: &mut u64) -> String {
        (0..next(seed) % 40).filter_map(|_| char::from_u32((next(seed) % 0x3000) as u32)).collect()
    }

    fn command_of_xen(number: u64, device: String) -> Command {
        let is_open = number.is_multiple_of(2);
        let seat = is_open.then_some(XenSeat { entries: 7, seat: 3 });
        match number % 4 {
            0 => {
                let refs = vec![1, u32::MAX];
                let ring = XenRing { refs, port: Some(9), has_journal: is_open };
                Command::XenRing { device, ring }
            }
            1 => {
                let front = XenFrontEnd { number, domain: 7, seat, ..XenFrontEnd::default() };
                Command::XenConnect { device, front }
            }
            2 => Command::XenDisconnect { device, number },
            _ => Command::XenDisk { device, spec: largest_xen() },
        }
    }

    fn report_of_xen(number: u64) -> XenReport {
        match number % 5 {
            0 => XenReport::Started {},
            1 => XenReport::Stopped {},
            2 => XenReport::Fault { text: "a".to_owned() },
            _ => XenReport::Refused { text: "b".to_owned(), passes: number.is_multiple_of(2) },
        }
    }

    /// A spoiled message parses as another one, or not at all; a part of one never parses.
    fn spoil(bytes: &[u8], seed: &mut u64) {
        let mut spoiled = bytes.to_vec();
        let at = usize::try_from(next(seed)).unwrap() % spoiled.len();
        spoiled[at] ^= 1 << (next(seed) % 8);
        let _ = parse::<Report>(&spoiled);
        assert!(parse::<Report>(&bytes[..at]).is_err(), "{at} bytes of {}", bytes.len());
    }

    fn guest(device: String, pairs: Option<u16>) -> Report {
        let (mac, announces, control) = (Some([2; 6]), pairs.is_some(), pairs);
        Report::Guest { device, mac, announces, control, pairs }
    }

    fn facts(number: u64) -> PortFacts {
        PortFacts {
            interface: "up0".to_owned(),
            is_macvtap: number.is_multiple_of(3),
            offloads: number,
            mtu: None,
            table_key: Some(number),
            can_hash: !number.is_multiple_of(3),
            filter: PortFilter::default(),
            chunk: number.is_multiple_of(2).then_some(2048),
        }
    }

    /// Any command to a device process but those of Xen guests' disks.
    fn command(number: u64, device: String, name: String) -> Command {
        let is_open = number.is_multiple_of(2);
        let mtu = is_open.then_some(1500);
        let filter = PortFilter { only_to: Some([2; 6]), lacks_groups: !is_open };
        let rates = LimitRates { ops: [number; 3], bytes: [1, 2, 3], burst_ms: 100 };
        match number % 15 {
            12 => {
                let spec = SwitchSpec { name, age: 300, group_fwd_mask: 8 };
                Command::Switch { device, spec, uplink: is_open.then(|| facts(number)) }
            }
            14 => Command::Lease { group: name },
            13 => Command::SwitchPort { device, port: is_open.then(largest_switch_port) },
            10 => {
                let failure = NbdFailure { text: name, is_limit: is_open, passes: !is_open };
                Command::Connected { number, failed: is_open.then_some(failure) }
            }
            11 => {
                let target = NbdTarget { export: name, tls: is_open.then(|| "h".to_owned()) };
                Command::Export { target, limit_ms: 5 }
            }
            0 => {
                let port = PortFacts { interface: name, mtu, filter, ..facts(number) };
                match number.is_multiple_of(30) {
                    true => Command::Device { device, spec: largest_blk(), port: None },
                    false => Command::Device { device, spec: largest_net(), port: Some(port) },
                }
            }
            1 => Command::Client { device, number },
            2 => Command::Remove { device },
            3 => Command::Measure { device },
            4 => Command::Queues { device, filter, chunk: is_open.then_some(4096) },
            5 => Command::Done { number, error: 5 },
            6 => {
                let (link_up, is_gone, announcements) = (is_open, !is_open, number);
                Command::Outside { device, link_up, is_gone, mtu, announcements }
            }
            7 => {
                let group = is_open.then_some(GroupRates { name, rates });
                Command::Limit { device, rates, group }
            }
            8 => {
                let named = vec![NamedFds { name: number, count: 1 }; 2];
                Command::SavedFds { device, named }
            }
            _ if number % 30 > 14 => Command::Count { number },
            _ => Command::Ping { number },
        }
    }

    fn report(number: u64, device: String) -> Report {
        let is_open = number.is_multiple_of(2);
        let ask = |device, request| Report::Request { device, number, request };
        match number % 16 {
            14 => ask(device, PrivilegedRequest::Connect { limit_ms: 5 }),
            15 => {
                let failure = NbdFailure { text: device, is_limit: is_open, passes: !is_open };
                Report::Export { found: NbdFound::Failed(failure) }
            }
            0 => Report::Ready {},
            1 => Report::Session { device, is_open },
            2 => Report::Removed { device },
            3 => Report::Suspect { device },
            4 => guest(device, is_open.then_some(1500)),
            5 => ask(device, PrivilegedRequest::Offloads { bits: number }),
            6 => ask(device, PrivilegedRequest::Pair { pair: 3, attached: is_open }),
            7 => ask(device, PrivilegedRequest::Lock { is_held: is_open }),
            8 => ask(device, PrivilegedRequest::Rss { config: vec![7; 307] }),
            9 => Report::Gone { device, number },
            10 => {
                let keep = is_open.then_some(number);
                Report::SessionFds { device, number, keep, release: vec![5, 6] }
            }
            13 if number % 32 > 16 => Report::Needs {},
            11 | 12 => Report::Xen { device, number, said: report_of_xen(number) },
            _ => Report::Counted { number },
        }
    }

    #[test]
    fn every_message_is_read_as_it_was_written() {
        let seed = &mut 0x9e37_79b9_7f4a_7c15;
        for round in 0..2000 {
            let (device, number) = (text(seed), next(seed));
            let sent = match number % 4 {
                0 => command_of_xen(number / 4, device),
                _ => command(number / 4, device, text(seed)),
            };
            let bytes = emit(&sent).unwrap();
            assert_eq!(parse::<Command>(&bytes).unwrap(), sent, "round {round}");
            let sent = report(number, text(seed));
            let bytes = emit(&sent).unwrap();
            assert_eq!(parse::<Report>(&bytes).unwrap(), sent, "round {round}");
            spoil(&bytes, seed);
        }
    }

    #[test]
    fn the_command_to_serve_the_largest_device_is_a_message() {
        // The longest name of a device, and that of a Xen guest's disk.
        let (device, disk) = ("a".repeat(64), "a".repeat(64 + 32 + 2 * 10 + 3));
        let port = PortFacts {
            interface: "\u{1}".repeat(15),
            is_macvtap: false,
            offloads: u64::MAX,
            mtu: Some(u16::MAX),
            table_key: Some(u64::MAX),
            can_hash: false,
            filter: PortFilter { only_to: Some([u8::MAX; 6]), lacks_groups: false },
            chunk: Some(u32::MAX),
        };
        for command in [
            Command::Device { device: device.clone(), spec: largest_blk(), port: None },
            Command::Device { device: device.clone(), spec: largest_nbd(), port: None },
            Command::Device { device, spec: largest_net(), port: Some(port) },
            Command::XenDisk { device: disk, spec: largest_xen() },
            Command::SwitchPort { device: "a".repeat(64), port: Some(largest_switch_port()) },
        ] {
            let bytes = emit(&command).unwrap();
            assert!(bytes.len() < SPEC_SIZE_MAX + 1024, "{} bytes", bytes.len());
            assert_eq!(parse::<Command>(&bytes).unwrap(), command);
        }
        const { assert!(SPEC_SIZE_MAX + 1024 < SIZE_MAX) };
    }

    #[test]
    fn what_is_no_message_is_refused_and_named() {
        let said = |bytes: &[u8]| parse::<Report>(bytes).unwrap_err().to_string();
        assert_eq!(said(&[]), "an empty message");
        assert_eq!(said(b"\x01{}"), "message version 1 instead of 2");
        assert!(said(&[VERSION; SIZE_MAX + 1]).contains("the maximum is 16384"));
        assert!(said(b"\x02{\"counted\":{\"number\":1,\"more\":2}}").contains("unknown field"));
        let spec = parse::<Command>(b"\x02{\"device\":{\"device\":\"a\",\"spec\":{}}}");
        assert!(spec.unwrap_err().to_string().contains("missing field `front_end`"));
        assert!(said(b"\x02{\"remove\":{\"device\":\"a\"}}").contains("unknown variant"));
        let long = Command::Remove { device: "x".repeat(SIZE_MAX) };
        assert!(matches!(emit(&long), Err(MessageError::Long { .. })));
    }
}

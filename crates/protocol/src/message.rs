//! Messages between the supervisor and a device process: a byte for the version, then JSON.
//!
//! A device process may be compromised by its guest. So the supervisor accepts only short messages
//! from it, about devices that it was given. Its requests ([`PrivilegedRequest`]) are limited to
//! settings that a guest may choose; one request for a device is served, and one may wait.

use crate::digits;
use crate::nbd::{NbdFailure, NbdFound, NbdTarget};
use crate::spec::{DeviceSpec, XenBlkSpec};
use crate::switch::{SwitchPortSpec, SwitchSpec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of all messages. Supervisor and device process are the same program, so a message of
/// another version is refused.
pub const VERSION: u8 = 2;
/// Longest message, in bytes.
pub const SIZE_MAX: usize = 16384;
/// Most file descriptors of a message.
pub const FDS_MAX: usize = 240;

/// A message of the supervisor to a device process.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// Serve a device. File descriptors, in this order:
    /// * one for the counters;
    /// * of a disk in a file: one for transfers, and all others for flushes; of a disk in memory:
    ///   one for the memory;
    /// * with a `port`: one for each queue pair, then one for the table of flows (if `table_key` is
    ///   set), or one for the memory of AF_XDP sockets (if `chunk` is set);
    /// * if frames are captured: one for the pipe to the supervisor.
    Device {
        /// The device's name.
        device: String,
        /// The description of the device.
        spec: DeviceSpec,
        /// The interface of the host to which the device's frames go; `None`: they go to no
        /// interface.
        port: Option<PortFacts>,
    },
    /// Create the switch; this command precedes those for its ports. File descriptor, if there is
    /// an uplink by a tap or a macvtap: its queue. The socket of an AF_XDP uplink follows in
    /// [`Self::Queues`].
    Switch {
        /// The name of the uplink in commands and reports.
        device: String,
        /// The description of the switch.
        spec: SwitchSpec,
        /// The interface of the host that is the uplink, if there is one.
        uplink: Option<PortFacts>,
    },
    /// Add or replace a port of the switch, or remove it. The port's device may be served later, or
    /// not at all.
    SwitchPort {
        /// The device's name.
        device: String,
        /// The description of the port; `None`: remove the port.
        port: Option<SwitchPortSpec>,
    },
    /// Serve a disk of a Xen guest. File descriptors: as for [`Self::Device`].
    XenDisk {
        /// The disk's name.
        device: String,
        /// The description of the disk.
        spec: XenBlkSpec,
    },
    /// Describes one ring of the front-end for which [`Self::XenConnect`] follows. File
    /// descriptors: on a real Xen the device of the event channel, on a simulated one two eventfds;
    /// then the journal of the ring, if it has one.
    XenRing {
        /// The device's name.
        device: String,
        /// The event channel and the grants of the ring.
        ring: XenRing,
    },
    /// Connect the front-end of a Xen disk, with the rings of the preceding [`Self::XenRing`]
    /// commands. One file descriptor: on a real Xen the grant device, on a simulated one the memory
    /// of the domain.
    XenConnect {
        /// The device's name.
        device: String,
        /// The front-end: its domain, the layout of its rings, and its features.
        front: XenFrontEnd,
    },
    /// Stop serving the connection of a Xen disk, and leave its rings as they are.
    XenDisconnect {
        /// The device's name.
        device: String,
        /// The number of the connection.
        number: u64,
    },
    /// The host or the operator has changed a network device. The message has the whole state, not
    /// only the change.
    Outside {
        /// The device's name.
        device: String,
        /// True: the operator has set the link up.
        link_up: bool,
        /// True: the interface was deleted.
        is_gone: bool,
        /// The MTU in bytes that the device reports to the next driver; `None`: it reports none.
        mtu: Option<u16>,
        /// How often the guest was asked to announce itself.
        announcements: u64,
    },
    /// Use the queues of an interface that the supervisor has opened: the AF_XDP socket of the
    /// uplink of a switch, or the queues in place of those of a deleted interface. File
    /// descriptors: one for each queue pair; then, with `chunk`, one for the memory of the AF_XDP
    /// sockets.
    Queues {
        /// The device's name.
        device: String,
        /// The frames that the host does not deliver to this interface.
        filter: PortFilter,
        /// Of AF_XDP sockets: the size of a chunk in bytes.
        chunk: Option<u32>,
    },
    /// Set the limit of a device. The rates of a group hold for all its devices together.
    Limit {
        /// The device's name.
        device: String,
        /// The device's own rates.
        rates: LimitRates,
        /// The rates of the device's group, if it is in one.
        group: Option<GroupRates>,
    },
    /// Use a lease for a group, because devices of other processes are in it too: the supervisor
    /// divides the group's rates among the processes. File descriptors: the memory in which the
    /// supervisor writes grants, and the memory in which this process writes its use.
    Lease {
        /// The name of the group.
        group: String,
    },
    /// The answer to [`Report::Request`].
    Done {
        /// The number of the request.
        number: u64,
        /// The errno of the failure; 0: the request was carried out.
        error: i32,
    },
    /// The answer to [`PrivilegedRequest::Connect`]. File descriptors: a socket, and a file with
    /// certificates if the disk has TLS.
    Connected {
        /// The number of the request.
        number: u64,
        /// Why connecting failed; `None`: the socket is connected.
        failed: Option<NbdFailure>,
    },
    /// Ask a server for its export, and answer with [`Report::Export`]. File descriptors: as for
    /// [`Self::Connected`].
    Export {
        /// The export to ask the server for.
        target: NbdTarget,
        /// The timeout in milliseconds.
        limit_ms: u32,
    },
    /// Hands over file descriptors that the journal of the next client names: that of the
    /// [`Self::Client`] which follows.
    SavedFds {
        /// The device's name.
        device: String,
        /// The names of the descriptors, in the order of the descriptors.
        named: Vec<NamedFds>,
    },
    /// Serve a client that has connected to a device, or whose device process has ended. Two file
    /// descriptors: the socket, and the journal of the session (`protocol/journal_layout.rs`).
    Client {
        /// The device's name.
        device: String,
        /// Reports name the client by this number.
        number: u64,
    },
    /// Quiesce for another supervisor: queues stop, descriptors and mappings are closed, and
    /// front-ends stay connected.
    Quiesce {},
    /// Stop serving a device.
    Remove {
        /// The device's name.
        device: String,
    },
    /// Read the size of a device's image again.
    Measure {
        /// The device's name.
        device: String,
    },
    /// Hands over the file into which the process writes the state of its threads. One file
    /// descriptor.
    Threads {},
    /// Write counters and the state of the threads into their files, and answer with
    /// [`Report::Counted`].
    Count {
        /// The answer repeats this number.
        number: u64,
    },
    /// Answer with [`Report::Counted`], to show that the process is responsive.
    Ping {
        /// The answer repeats this number.
        number: u64,
    },
}

/// The properties of an interface whose queues the supervisor hands to a device process.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PortFacts {
    /// The interface's name.
    pub interface: String,
    /// True if the interface is a macvtap.
    pub is_macvtap: bool,
    /// Offloads that the kernel accepts and can deliver, as `VIRTIO_NET_F_GUEST_*` bits.
    pub offloads: u64,
    /// The interface's MTU in bytes.
    pub mtu: Option<u16>,
    /// The hash key of the BPF map that steers flows to queues, if there is a map.
    pub table_key: Option<u64>,
    /// True if the host can choose queues by the guest's hash.
    pub can_hash: bool,
    /// The frames that the host does not deliver to the interface.
    pub filter: PortFilter,
    /// Of AF_XDP sockets: the size of a chunk in bytes.
    pub chunk: Option<u32>,
}

/// The frames that the host does not deliver to an interface.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PortFilter {
    /// Unicast frames are delivered only if they are for this address; `None`: all are.
    pub only_to: Option<[u8; 6]>,
    /// True if multicast frames are delivered only for groups that the host has joined.
    pub lacks_groups: bool,
}

/// A ring of a Xen front-end.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenRing {
    /// The grant references of the ring's pages.
    pub refs: Vec<u32>,
    /// The port of the event channel; `None`: the Xen is simulated.
    pub port: Option<u32>,
    /// True if a descriptor for the journal of the ring follows.
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
    /// True if the front-end uses persistent grants.
    pub persistent: bool,
    /// The most segments of an indirect request that the front-end was offered.
    pub indirect_segments_max: u16,
    /// True if an earlier process has served the front-end's rings: resume them.
    pub takeover: bool,
    /// The right to map pages of a simulated domain; `None`: the Xen is real.
    pub seat: Option<XenSeat>,
}

/// The right to map pages of a simulated domain.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenSeat {
    /// Entries of the domain's grant table.
    pub entries: u32,
    /// The index of this process among those that map the domain's pages.
    pub seat: u8,
}

/// A report about the connection of a Xen disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum XenReport {
    /// The rings of the connection are served.
    Started {},
    /// Starting the rings failed, and nothing of the front-end is mapped or open any more.
    Refused {
        /// The reason, in one sentence.
        text: String,
        /// True if another attempt may succeed.
        passes: bool,
    },
    /// A queue met a fault of the front-end.
    Fault {
        /// What the front-end did wrong, one sentence for the log.
        text: String,
    },
    /// The rings are no longer served, and nothing of the front-end is mapped or open any more.
    Stopped {},
}

/// Rates of a limit, per second; 0: no limit.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LimitRates {
    /// Requests or packets. Index 0: reads, or packets that the guest sends; 1: writes, or packets
    /// that it receives; 2: all together.
    pub ops: [u64; 3],
    /// Bytes, with the same indexes as `ops`.
    pub bytes: [u64; 3],
    /// The burst: unused rate is saved up for at most this many milliseconds.
    pub burst_ms: u64,
}

/// The rates of a group of devices.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GroupRates {
    /// The group's name.
    pub name: String,
    /// The rates of all the group's devices together.
    pub rates: LimitRates,
}

/// Consecutive file descriptors of a message, which belong to one entry of a session's journal.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NamedFds {
    /// The name by which the entry refers to the descriptors.
    pub name: u64,
    /// The number of descriptors.
    pub count: usize,
}

/// A request of a device process for a setting that its guest may choose, but that only the
/// supervisor has the rights to make.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PrivilegedRequest {
    /// Attach or detach a queue pair of the interface.
    Pair {
        /// The index of the pair.
        pair: u16,
        /// True: attach the pair; false: detach it.
        attached: bool,
    },
    /// Deliver frames with these offloads only.
    Offloads {
        /// The offloads as `VIRTIO_NET_F_GUEST_*` bits.
        bits: u64,
    },
    /// Steer frames to the pairs that the guest's hash chooses.
    Rss {
        /// `struct virtio_net_rss_config` as the driver sent it; empty: the host chooses the pairs.
        #[serde(with = "digits")]
        config: Vec<u8>,
    },
    /// Lock the image for rings that start, or unlock it after all rings have stopped.
    Lock {
        /// True: lock the image; false: unlock it.
        is_held: bool,
    },
    /// Connect to the server of the disk, answered by [`Command::Connected`].
    Connect {
        /// The timeout in milliseconds.
        limit_ms: u32,
    },
}

/// A message of a device process to the supervisor. Only [`Self::SessionFds`] and [`Self::Ready`]
/// have file descriptors.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Report {
    /// The process has started. File descriptor, if the process could open it: its
    /// `/proc/self/stat`, from which the supervisor reads CPU time and memory of the process.
    Ready {},
    /// All devices have quiesced, and all their descriptors and mappings are closed. No further
    /// report follows.
    Quiesced {},
    /// The session of a front-end has begun, or has ended.
    Session {
        /// The device's name.
        device: String,
        /// True: the session has begun; false: it has ended.
        is_open: bool,
    },
    /// Asks the supervisor to keep the message's file descriptors for the next device process that
    /// serves the session, and to close descriptors that were kept before.
    SessionFds {
        /// The device's name.
        device: String,
        /// The number of the client.
        number: u64,
        /// The name under which to keep the message's descriptors, if it has any.
        keep: Option<u64>,
        /// The names of the descriptors to close.
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
        /// The device's name.
        device: String,
    },
    /// A request for the guest of a device, answered by [`Command::Done`].
    Request {
        /// The device's name.
        device: String,
        /// The answer repeats this number.
        number: u64,
        /// The request.
        request: PrivilegedRequest,
    },
    /// A queue of a device's interface cannot be read or written: the interface may be deleted.
    Suspect {
        /// The device's name.
        device: String,
    },
    /// The lease of a group does not suffice for the requests of the group's devices, and the
    /// supervisor's thread that divides the rates of groups sleeps: wake that thread.
    Needs {},
    /// The settings that the guest of a network device chose, for the API to show.
    Guest {
        /// The device's name.
        device: String,
        /// The MAC address that the guest uses.
        mac: Option<[u8; 6]>,
        /// True if the guest's driver can announce the guest.
        announces: bool,
        /// The index of the control queue; `None`: the guest uses none.
        control: Option<u16>,
        /// The number of queue pairs in use; `None`: the port is an interface of the host.
        pairs: Option<u16>,
    },
    /// A report about the latest connection of a Xen disk.
    Xen {
        /// The device's name.
        device: String,
        /// The number of the connection.
        number: u64,
        /// The result of connecting or disconnecting, or a fault of the front-end.
        said: XenReport,
    },
    /// The answer to [`Command::Export`].
    Export {
        /// The export, or why the server did not give it.
        found: NbdFound,
    },
    /// The answer to [`Command::Count`] and [`Command::Ping`].
    Counted {
        /// The number of the command.
        number: u64,
    },
}

/// Why bytes cannot be parsed as a message, or a message cannot be written.
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

/// Encodes a message.
///
/// # Errors
/// [`MessageError::Long`]: the message is longer than [`SIZE_MAX`].
pub fn emit<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    let mut bytes = vec![VERSION];
    serde_json::to_writer(&mut bytes, message)?;
    if bytes.len() > SIZE_MAX {
        return Err(MessageError::Long { size: bytes.len() });
    }
    Ok(bytes)
}

/// Parses a message.
///
/// # Errors
/// [`MessageError`]: the bytes are empty, too long, of another version, or malformed.
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

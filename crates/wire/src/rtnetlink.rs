//! rtnetlink: what the kernel reports of network interfaces, and the requests that ask for it or
//! change an interface (`linux/rtnetlink.h`). Numbers are in the byte order of this host.

const NLMSG_HEADER_SIZE: usize = 16;
const IFINFOMSG_SIZE: usize = 16;
const ATTRIBUTE_HEADER_SIZE: usize = 4;
const NLMSG_ERROR: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
/// `EIO`.
const EIO: i32 = 5;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const IFF_UP: u32 = 1;
const IFF_PROMISC: u32 = 0x100;
const IFF_ALLMULTI: u32 = 0x200;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
const IFLA_TXQLEN: u16 = 13;
const IFLA_LINKINFO: u16 = 18;
const IFLA_STATS64: u16 = 23;
const IFLA_PROMISCUITY: u16 = 30;
const IFLA_XDP: u16 = 43;
/// The id of one attached program. An interface with several programs has several such attributes.
const IFLA_XDP_PROG_ID: u16 = 4;
const IFLA_XDP_HW_PROG_ID: u16 = 7;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_PI: u16 = 4;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;
const IFLA_TUN_NUM_QUEUES: u16 = 8;
const IFLA_TUN_NUM_DISABLED_QUEUES: u16 = 9;
const IFLA_MACVLAN_MODE: u16 = 1;
const IFLA_MACVLAN_FLAGS: u16 = 2;
const MACVLAN_MODE_PASSTHRU: u32 = 8;
const MACVLAN_FLAG_NOPROMISC: u16 = 1;
/// Offsets of two counters in `struct rtnl_link_stats64`.
const RX_DROPPED_AT: usize = 48;
const TX_DROPPED_AT: usize = 56;
/// The tun driver's own number for a tap.
const TUN_TYPE_TAP: u8 = 2;

/// The properties of an interface that the kernel reports (`RTM_NEWLINK`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceInfo {
    /// The number of the interface in this network namespace.
    pub index: u32,
    /// The interface is administratively up.
    pub is_up: bool,
    /// The hardware address; `None` if the interface has none of six bytes.
    pub address: Option<[u8; 6]>,
    /// The MTU: the most bytes of payload of one frame.
    pub mtu: u32,
    /// The number of the bridge, or other master, whose port the interface is.
    pub master: Option<u32>,
    /// How many frames each queue of the interface may hold; 0 if the kernel does not report it.
    pub txqueuelen: u32,
    /// Frames from the interface to the host that were dropped.
    pub rx_dropped: u64,
    /// Frames from the host to the interface that were dropped.
    pub tx_dropped: u64,
    /// The kind as the kernel names it: `tun`, `bridge`, `macvtap`; empty for most hardware.
    pub kind: String,
    /// The interface takes frames to any unicast address: it is promiscuous, or it is a macvtap in
    /// mode `passthru` that has made the interface below it promiscuous.
    pub takes_any_address: bool,
    /// The interface takes frames to any group address, because the operator has set it so.
    pub takes_any_group: bool,
    /// The kernel's ids of the XDP programs that are attached to the interface.
    pub xdp_programs: Vec<u32>,
    /// The properties of a tap; `None`: the interface is no tap.
    pub tap: Option<TapLink>,
}

/// The properties that only a tap has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapLink {
    /// Packet information precedes each frame (no `IFF_NO_PI`).
    pub has_packet_info: bool,
    /// The tap can have several queues (`IFF_MULTI_QUEUE`).
    pub is_multi_queue: bool,
    /// Number of queues that the host uses; 0 for a tap of one queue, for which the kernel reports
    /// none.
    pub attached: u32,
    /// Number of open queues that are detached: the host does not use them.
    pub detached: u32,
}

/// Settings of an interface to change; `None` leaves a setting unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The MTU in bytes.
    pub mtu: Option<u32>,
    /// The number of the bridge whose port the interface is to be.
    pub master: Option<u32>,
    /// How many frames each queue of the interface may hold.
    pub txqueuelen: Option<u32>,
    /// True: set administratively up; false: down.
    pub up: Option<bool>,
}

/// A change of one interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkEvent {
    /// The number of the interface.
    pub index: u32,
    /// The name of the interface.
    pub name: String,
    /// True: the interface has left this network namespace. False: it was added or changed.
    pub is_gone: bool,
}

/// A request to the kernel.
#[derive(Debug)]
pub struct Request(Vec<u8>);

impl Request {
    /// Asks for the interface `name`.
    #[must_use]
    pub fn find(name: &str) -> Self {
        let mut request = Self::new(RTM_GETLINK, 0, 0, None);
        let mut bytes = name.as_bytes().to_vec();
        bytes.push(0);
        request.attribute(IFLA_IFNAME, &bytes);
        request
    }

    /// Asks for the interface with the number `index`.
    #[must_use]
    pub fn at(index: u32) -> Self {
        Self::new(RTM_GETLINK, 0, index, None)
    }

    /// Changes the interface with the number `index`.
    #[must_use]
    pub fn set(index: u32, change: &Change) -> Self {
        let mut request = Self::new(RTM_SETLINK, NLM_F_ACK, index, change.up);
        if let Some(mtu) = change.mtu {
            request.attribute(IFLA_MTU, &mtu.to_ne_bytes());
        }
        if let Some(master) = change.master {
            request.attribute(IFLA_MASTER, &master.to_ne_bytes());
        }
        if let Some(frames) = change.txqueuelen {
            request.attribute(IFLA_TXQLEN, &frames.to_ne_bytes());
        }
        request
    }

    /// The bytes of the request, with the sequence number `sequence`.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "a request of some attributes")]
    pub fn emit(mut self, sequence: u32) -> Vec<u8> {
        let len = self.0.len() as u32;
        self.0[..4].copy_from_slice(&len.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }

    fn new(kind: u16, flags: u16, index: u32, up: Option<bool>) -> Self {
        let mut bytes = vec![0; NLMSG_HEADER_SIZE + IFINFOMSG_SIZE];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
        bytes[20..24].copy_from_slice(&index.to_ne_bytes());
        if let Some(up) = up {
            bytes[24..28].copy_from_slice(&u32::from(up).to_ne_bytes());
            bytes[28..32].copy_from_slice(&IFF_UP.to_ne_bytes());
        }
        Self(bytes)
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let len = u16::try_from(ATTRIBUTE_HEADER_SIZE + value.len()).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

/// Parses the answer to the request with the number `sequence`. `None`: it answers another request.
///
/// # Errors
/// The kernel's error number; `EIO` (5) if the bytes are no answer.
#[must_use]
pub fn parse_answer(bytes: &[u8], sequence: u32) -> Option<Result<Option<InterfaceInfo>, i32>> {
    if u32_at(bytes, 8)? != sequence {
        return None;
    }
    match u16_at(bytes, 4)? {
        NLMSG_ERROR => match u32_at(bytes, NLMSG_HEADER_SIZE)?.cast_signed() {
            0 => Some(Ok(None)),
            error => Some(Err(error.saturating_neg())),
        },
        RTM_NEWLINK => Some(parse_link(bytes).map(Some).ok_or(EIO)),
        _ => Some(Err(EIO)),
    }
}

/// The changes of interfaces that a message reports. Ends at the first one that is cut short.
#[must_use]
pub fn parse_events(mut bytes: &[u8]) -> Vec<LinkEvent> {
    let mut events = Vec::new();
    while let Some(len) = u32_at(bytes, 0).and_then(|len| usize::try_from(len).ok()) {
        let Some(message) = bytes.get(..len).filter(|_| len >= NLMSG_HEADER_SIZE) else { break };
        events.extend(parse_event(message));
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    events
}

fn parse_event(message: &[u8]) -> Option<LinkEvent> {
    let kind = u16_at(message, 4).filter(|kind| matches!(*kind, RTM_NEWLINK | RTM_DELLINK))?;
    let index = u32_at(message, NLMSG_HEADER_SIZE + 4)?;
    let mut found = attributes(message.get(NLMSG_HEADER_SIZE + IFINFOMSG_SIZE..)?);
    let (_, name) = found.find(|(kind, _)| *kind == IFLA_IFNAME)?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = String::from_utf8_lossy(name).into_owned();
    Some(LinkEvent { index, name, is_gone: kind == RTM_DELLINK })
}

fn parse_link(bytes: &[u8]) -> Option<InterfaceInfo> {
    let flags = u32_at(bytes, 24)?;
    let index = u32_at(bytes, 20)?;
    let mut link = InterfaceInfo { index, is_up: flags & IFF_UP != 0, ..InterfaceInfo::default() };
    link.takes_any_group = flags & (IFF_PROMISC | IFF_ALLMULTI) != 0;
    let mut promiscuity = 0;
    for (kind, value) in attributes(bytes.get(NLMSG_HEADER_SIZE + IFINFOMSG_SIZE..)?) {
        match kind {
            IFLA_ADDRESS => link.address = value.try_into().ok(),
            IFLA_MTU => link.mtu = u32_at(value, 0)?,
            IFLA_MASTER => link.master = u32_at(value, 0),
            IFLA_TXQLEN => link.txqueuelen = u32_at(value, 0)?,
            IFLA_PROMISCUITY => promiscuity = u32_at(value, 0)?,
            IFLA_STATS64 => {
                link.rx_dropped = u64_at(value, RX_DROPPED_AT)?;
                link.tx_dropped = u64_at(value, TX_DROPPED_AT)?;
            }
            IFLA_LINKINFO => parse_info(value, &mut link),
            IFLA_XDP => {
                let ids = IFLA_XDP_PROG_ID..=IFLA_XDP_HW_PROG_ID;
                let all = attributes(value).filter(|(kind, _)| ids.contains(kind));
                link.xdp_programs = all.filter_map(|(_, id)| u32_at(id, 0)).collect();
            }
            _ => {}
        }
    }
    // An interface that lies on another one receives only frames to addresses that the driver of
    // the lower interface has found to be its own.
    link.takes_any_address |= promiscuity > 0 && !matches!(&*link.kind, "macvtap" | "ipvtap");
    Some(link)
}

fn parse_info(bytes: &[u8], link: &mut InterfaceInfo) {
    let mut data = &[][..];
    for (kind, value) in attributes(bytes) {
        match kind {
            IFLA_INFO_KIND => {
                let text = value.split(|&b| b == 0).next().unwrap_or_default();
                link.kind = String::from_utf8_lossy(text).into_owned();
            }
            IFLA_INFO_DATA => data = value,
            _ => {}
        }
    }
    match link.kind.as_str() {
        "tun" => link.tap = parse_tap(data),
        "macvtap" => link.takes_any_address = is_promiscuous(data),
        _ => {}
    }
}

/// True if a macvtap with these properties gets every frame of the interface below it.
fn is_promiscuous(data: &[u8]) -> bool {
    let (mut mode, mut flags) = (None, None);
    for (kind, value) in attributes(data) {
        match kind {
            IFLA_MACVLAN_MODE => mode = u32_at(value, 0),
            IFLA_MACVLAN_FLAGS => flags = u16_at(value, 0),
            _ => {}
        }
    }
    mode == Some(MACVLAN_MODE_PASSTHRU) && flags.unwrap_or(0) & MACVLAN_FLAG_NOPROMISC == 0
}

/// The properties of a tap; `None`: the interface is a tun, which carries no Ethernet frames.
fn parse_tap(data: &[u8]) -> Option<TapLink> {
    let mut tap = TapLink::default();
    let mut is_tap = false;
    for (kind, value) in attributes(data) {
        match kind {
            IFLA_TUN_TYPE => is_tap = value.first() == Some(&TUN_TYPE_TAP),
            IFLA_TUN_PI => tap.has_packet_info = value.first() == Some(&1),
            IFLA_TUN_MULTI_QUEUE => tap.is_multi_queue = value.first() == Some(&1),
            IFLA_TUN_NUM_QUEUES => tap.attached = u32_at(value, 0).unwrap_or(0),
            IFLA_TUN_NUM_DISABLED_QUEUES => tap.detached = u32_at(value, 0).unwrap_or(0),
            _ => {}
        }
    }
    is_tap.then_some(tap)
}

/// The number and value of each attribute. Ends at the first attribute that is cut short.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(bytes, 0)?);
        // The two highest bits are flags: nested attributes, and byte order.
        let kind = u16_at(bytes, 2)? & 0x3fff;
        let value = bytes.get(ATTRIBUTE_HEADER_SIZE..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests;

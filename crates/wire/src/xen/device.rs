//! The nodes of a Xen block device, read together: one record for each step of its life.
//!
//! ```text
//! tool stack   Assignment    whose disk it is, and what is served        both ends Initialising
//! back-end     Offer         what it can do                              InitWait
//! front-end    Connection    its queues: rings and event channels        Initialised
//! back-end     Disk          size and blocks                             Connected
//! ```
//! Each record is parsed from the nodes of one folder and emitted as such nodes. A record that
//! exists keeps the rules of Xen's `io/blkif.h`.

use super::blkif::{Abi, INDIRECT_SEGMENTS_MAX, Limits, RING_PAGE_ORDER_MAX, SECTOR_SIZE};
use super::keys::{self, Key, KeyError, KeyFault, shown};
use std::collections::BTreeMap;

/// Most queues that this back-end serves for one device.
pub const QUEUES_MAX: u32 = 256;

/// The values of the nodes in a folder, by name. Nodes in the folder of a queue have that folder in
/// their name: `queue-0/ring-ref`.
pub type Nodes = BTreeMap<String, Vec<u8>>;

/// Nodes to be written: name and value.
pub type Writes = Vec<(String, String)>;

/// Reads a number of 32 bits. The row of `key` must have limits within 32 bits.
fn number(nodes: &Nodes, key: Key) -> Result<u32, KeyError> {
    let value = wide(nodes, key)?;
    u32::try_from(value)
        .map_err(|_| KeyFault::Range { value, min: 0, max: u32::MAX.into() }.of(key.name))
}

fn wide(nodes: &Nodes, key: Key) -> Result<u64, KeyError> {
    key.number(value(nodes, key.name)).map_err(|fault| fault.of(key.name))
}

fn flag(nodes: &Nodes, key: Key) -> Result<bool, KeyError> {
    key.flag(value(nodes, key.name)).map_err(|fault| fault.of(key.name))
}

fn text(nodes: &Nodes, key: Key) -> Result<String, KeyError> {
    let text = key.text(value(nodes, key.name)).map_err(|fault| fault.of(key.name))?;
    Ok(text.to_owned())
}

fn value<'a>(nodes: &'a Nodes, name: &str) -> Option<&'a [u8]> {
    nodes.get(name).map(Vec::as_slice)
}

fn write(key: Key, value: impl ToString) -> (String, String) {
    (key.name.to_owned(), value.to_string())
}

fn write_flag(key: Key, value: bool) -> (String, String) {
    write(key, u8::from(value))
}

/// The nodes that the tool stack has written into the back-end's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Path of the front-end's folder.
    pub frontend: String,
    /// Domain of the front-end.
    pub frontend_id: u16,
    /// `mode`: the front-end may write.
    pub writable: bool,
    /// `params`: the image to serve, as the tool stack names it.
    pub params: String,
    /// False: the device is to be removed for good.
    pub online: bool,
    /// The medium can be removed.
    pub removable: bool,
    /// The back-end may offer discards.
    pub discard_enable: bool,
}

impl Assignment {
    /// Parses the nodes of the back-end's folder.
    ///
    /// # Errors
    /// [`KeyError`], which names the node.
    pub fn parse(nodes: &Nodes) -> Result<Self, KeyError> {
        let domain = wide(nodes, keys::FRONTEND_ID)?;
        Ok(Self {
            frontend: text(nodes, keys::FRONTEND)?,
            frontend_id: u16::try_from(domain).map_err(|_| {
                KeyFault::Range { value: domain, min: 0, max: 0x7fef }.of(keys::FRONTEND_ID.name)
            })?,
            writable: text(nodes, keys::MODE)?.starts_with('w'),
            params: text(nodes, keys::PARAMS)?,
            online: flag(nodes, keys::ONLINE)?,
            removable: flag(nodes, keys::REMOVABLE)?,
            discard_enable: flag(nodes, keys::DISCARD_ENABLE)?,
        })
    }
}

/// The properties of discards, as the back-end offers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Discard {
    /// Offset in bytes of the first extent.
    pub alignment: u32,
    /// Bytes of an extent. `None`: those of a sector.
    pub granularity: Option<u32>,
    /// The back-end serves discards that erase.
    pub secure: bool,
}

/// The features that a back-end offers to a front-end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// The back-end serves write barriers.
    pub barrier: bool,
    /// The back-end serves flushes.
    pub flush: bool,
    /// The properties of discards; `None`: they are not served.
    pub discard: Option<Discard>,
    /// The back-end keeps grants mapped.
    pub persistent: bool,
    /// Most segments of an indirect request; 0: none are served.
    pub indirect_segments_max: u16,
    /// Largest ring, in log2 of its pages.
    pub ring_page_order_max: u32,
    /// Most queues; 0 is read as 1.
    pub queues_max: u32,
}

impl Offer {
    /// The nodes of the offer. The size of rings is written under both of its names.
    #[must_use]
    pub fn emit(&self) -> Writes {
        let mut nodes = vec![
            write_flag(keys::FEATURE_BARRIER, self.barrier),
            write_flag(keys::FEATURE_FLUSH_CACHE, self.flush),
            write_flag(keys::FEATURE_DISCARD, self.discard.is_some()),
            write_flag(keys::BACK_PERSISTENT, self.persistent),
            write(keys::MAX_RING_PAGE_ORDER, self.ring_page_order_max),
            write(keys::MAX_RING_PAGES, 1_u64 << self.ring_page_order_max.min(31)),
            write(keys::MULTI_QUEUE_MAX_QUEUES, self.queues_max.max(1)),
        ];
        // A back-end that serves no indirect requests does not have this node.
        if self.indirect_segments_max > 0 {
            nodes.push(write(keys::FEATURE_MAX_INDIRECT_SEGMENTS, self.indirect_segments_max));
        }
        if let Some(discard) = self.discard {
            nodes.push(write(keys::DISCARD_ALIGNMENT, discard.alignment));
            nodes.push(write_flag(keys::DISCARD_SECURE, discard.secure));
            if let Some(granularity) = discard.granularity {
                nodes.push(write(keys::DISCARD_GRANULARITY, granularity));
            }
        }
        nodes
    }

    /// What the requests are checked against if the front-end was offered this and is connected to
    /// `disk`.
    #[must_use]
    pub fn limits(&self, disk: &DiskGeometry, writable: bool) -> Limits {
        let block = (u64::from(disk.sector_size) / SECTOR_SIZE).max(1);
        Limits {
            sectors: disk.sectors,
            block_shift: block.trailing_zeros(),
            writable,
            barrier: self.barrier,
            flush: self.flush,
            discard: self.discard.is_some(),
            discard_secure: self.discard.is_some_and(|discard| discard.secure),
            indirect_segments_max: self.indirect_segments_max,
        }
    }

    /// Parses the nodes of a back-end's folder. Values above what this crate supports are lowered.
    ///
    /// # Errors
    /// [`KeyError`], which names the node.
    pub fn parse(nodes: &Nodes) -> Result<Self, KeyError> {
        let indirect = number(nodes, keys::FEATURE_MAX_INDIRECT_SEGMENTS)?;
        let order = number(nodes, keys::MAX_RING_PAGE_ORDER)?;
        let pages = number(nodes, keys::MAX_RING_PAGES)?;
        let discard = flag(nodes, keys::FEATURE_DISCARD)?.then(|| {
            let granularity = nodes.contains_key(keys::DISCARD_GRANULARITY.name);
            let granularity = granularity.then(|| number(nodes, keys::DISCARD_GRANULARITY));
            Ok(Discard {
                alignment: number(nodes, keys::DISCARD_ALIGNMENT)?,
                granularity: granularity.transpose()?,
                secure: flag(nodes, keys::DISCARD_SECURE)?,
            })
        });
        Ok(Self {
            barrier: flag(nodes, keys::FEATURE_BARRIER)?,
            flush: flag(nodes, keys::FEATURE_FLUSH_CACHE)?,
            discard: discard.transpose()?,
            persistent: flag(nodes, keys::BACK_PERSISTENT)?,
            indirect_segments_max: u16::try_from(indirect)
                .unwrap_or(u16::MAX)
                .min(INDIRECT_SEGMENTS_MAX),
            ring_page_order_max: order.max(pages.ilog2()).min(RING_PAGE_ORDER_MAX),
            queues_max: number(nodes, keys::MULTI_QUEUE_MAX_QUEUES)?,
        })
    }
}

/// A queue of a front-end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Grant references of the ring's pages, in order.
    pub ring_refs: Vec<u32>,
    /// The port of the queue's event channel.
    pub event_channel: u32,
}

/// The front-end's half of a connection: its ABI, and the ring and event channel of each queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The ABI of the front-end's requests.
    pub abi: Abi,
    /// Size of each ring, in log2 of its pages.
    pub ring_page_order: u32,
    /// The front-end uses the same grants again and again.
    pub persistent: bool,
    /// The queues of the front-end, at least one.
    pub queues: Vec<Queue>,
}

impl Connection {
    /// Parses the nodes of the front-end's folder, and of the folders of its queues.
    ///
    /// # Errors
    /// [`KeyError`], which names the node, also if the front-end asks for more than `offer` has, or
    /// names a page or an event channel twice.
    pub fn parse(nodes: &Nodes, offer: &Offer) -> Result<Self, KeyError> {
        let ring_page_order = parse_order(nodes, offer)?;
        let count = number(nodes, keys::MULTI_QUEUE_NUM_QUEUES)?;
        let max = offer.queues_max.clamp(1, QUEUES_MAX);
        if count > max {
            let fault = KeyFault::Range { value: count.into(), min: 1, max: max.into() };
            return Err(fault.of(keys::MULTI_QUEUE_NUM_QUEUES.name));
        }
        let mut taken = Taken::default();
        let queues = (0..count).map(|index| {
            // A front-end with one queue writes the queue's nodes into its own folder, as a
            // front-end that does not know several queues does.
            let folder = if count == 1 { String::new() } else { format!("queue-{index}/") };
            parse_queue(nodes, &folder, ring_page_order, &mut taken)
        });
        let queues = queues.collect::<Result<_, _>>()?;
        let persistent = flag(nodes, keys::FRONT_PERSISTENT)?;
        Ok(Self { abi: parse_abi(nodes)?, ring_page_order, persistent, queues })
    }

    /// The nodes of the connection. The size of rings is written under both of its names.
    #[must_use]
    pub fn emit(&self) -> Writes {
        let mut nodes = vec![write_flag(keys::FRONT_PERSISTENT, self.persistent)];
        if let Some(name) = self.abi.name() {
            nodes.push(write(keys::PROTOCOL, name));
        }
        if self.ring_page_order > 0 {
            nodes.push(write(keys::RING_PAGE_ORDER, self.ring_page_order));
            nodes.push(write(keys::NUM_RING_PAGES, 1_u64 << self.ring_page_order.min(31)));
        }
        let is_multi = self.queues.len() > 1;
        if is_multi {
            nodes.push(write(keys::MULTI_QUEUE_NUM_QUEUES, self.queues.len()));
        }
        for (index, queue) in self.queues.iter().enumerate() {
            let folder = if is_multi { format!("queue-{index}/") } else { String::new() };
            for (page, gref) in queue.ring_refs.iter().enumerate() {
                nodes.push((ring_ref(&folder, self.ring_page_order, page), gref.to_string()));
            }
            let name = format!("{folder}{}", keys::EVENT_CHANNEL.name);
            nodes.push((name, queue.event_channel.to_string()));
        }
        nodes
    }
}

/// The name of the node with the grant reference of page `page` of a ring.
fn ring_ref(folder: &str, order: u32, page: usize) -> String {
    let name = keys::RING_REF.name;
    if order == 0 { format!("{folder}{name}") } else { format!("{folder}{name}{page}") }
}

fn parse_abi(nodes: &Nodes) -> Result<Abi, KeyError> {
    let Some(value) = value(nodes, keys::PROTOCOL.name) else { return Ok(Abi::Native) };
    let fault = || KeyFault::NotAnAbi { value: shown(value) }.of(keys::PROTOCOL.name);
    Abi::parse(value).ok_or_else(fault)
}

/// Reads the size of the rings, which a front-end may write under either of its names, or both.
fn parse_order(nodes: &Nodes, offer: &Offer) -> Result<u32, KeyError> {
    let order = number(nodes, keys::RING_PAGE_ORDER)?;
    let pages = number(nodes, keys::NUM_RING_PAGES)?;
    let has = |key: Key| nodes.contains_key(key.name);
    let (order, key) = match (has(keys::RING_PAGE_ORDER), has(keys::NUM_RING_PAGES)) {
        (true, true) if pages.ilog2() != order => {
            let other = keys::RING_PAGE_ORDER.name;
            let fault = KeyFault::Contradiction { value: pages.into(), other };
            return Err(fault.of(keys::NUM_RING_PAGES.name));
        }
        (false, true) => (pages.ilog2(), keys::NUM_RING_PAGES),
        _ => (order, keys::RING_PAGE_ORDER),
    };
    let order_max = offer.ring_page_order_max.min(RING_PAGE_ORDER_MAX);
    if order <= order_max {
        return Ok(order);
    }
    let fault = if key == keys::NUM_RING_PAGES {
        KeyFault::Range { value: pages.into(), min: 1, max: 1 << order_max }
    } else {
        KeyFault::Range { value: order.into(), min: 0, max: order_max.into() }
    };
    Err(fault.of(key.name))
}

/// The grant references and event channels of the queues parsed so far, with the nodes' names.
#[derive(Default)]
struct Taken {
    ring_refs: BTreeMap<u32, String>,
    event_channels: BTreeMap<u32, String>,
}

fn parse_queue(
    nodes: &Nodes,
    folder: &str,
    order: u32,
    taken: &mut Taken,
) -> Result<Queue, KeyError> {
    let mut ring_refs = Vec::with_capacity(1 << order);
    for page in 0..1_usize << order {
        let mut name = ring_ref(folder, order, page);
        // The only page of a ring may also be named like the first of several pages.
        let first = format!("{name}0");
        if order == 0 && !nodes.contains_key(&name) && nodes.contains_key(&first) {
            name = first;
        }
        ring_refs.push(parse_own(nodes, keys::RING_REF, name, &mut taken.ring_refs)?);
    }
    let name = format!("{folder}{}", keys::EVENT_CHANNEL.name);
    let channels = &mut taken.event_channels;
    let event_channel = parse_own(nodes, keys::EVENT_CHANNEL, name, channels)?;
    Ok(Queue { ring_refs, event_channel })
}

/// Reads a number that no other queue and no other page may have.
fn parse_own(
    nodes: &Nodes,
    key: Key,
    name: String,
    taken: &mut BTreeMap<u32, String>,
) -> Result<u32, KeyError> {
    let number = match key.number(value(nodes, &name)) {
        Ok(number) => number,
        Err(fault) => return Err(fault.of(name)),
    };
    // The rows of both keys limit the number to 32 bits.
    let short = u32::try_from(number).unwrap_or(u32::MAX);
    match taken.insert(short, name.clone()) {
        None => Ok(short),
        Some(other) => Err(KeyFault::Taken { value: number, other }.of(name)),
    }
}

/// The size and block sizes of a disk. The back-end writes them when it connects, and when the size
/// changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskGeometry {
    /// Size in sectors of 512 bytes.
    pub sectors: u64,
    /// Bytes of a logical block.
    pub sector_size: u32,
    /// Bytes of a physical block.
    pub physical_sector_size: u32,
    /// `VDISK_*`
    pub info: u32,
}

impl DiskGeometry {
    /// The nodes of the disk.
    #[must_use]
    pub fn emit(&self) -> Writes {
        vec![
            write(keys::SECTORS, self.sectors),
            write(keys::SECTOR_SIZE, self.sector_size),
            write(keys::PHYSICAL_SECTOR_SIZE, self.physical_sector_size),
            write(keys::INFO, self.info),
        ]
    }

    /// Parses the nodes of a back-end's folder.
    ///
    /// # Errors
    /// [`KeyError`], which names the node: also if the size is not in whole logical blocks.
    pub fn parse(nodes: &Nodes) -> Result<Self, KeyError> {
        let sectors = wide(nodes, keys::SECTORS)?;
        let sector_size = number(nodes, keys::SECTOR_SIZE)?;
        let physical = keys::PHYSICAL_SECTOR_SIZE;
        let has_physical = nodes.contains_key(physical.name);
        let physical_size = if has_physical { number(nodes, physical)? } else { sector_size };
        let multiple = |key: Key, value: u64, of: u32| {
            let fault = KeyFault::NotAMultiple { value, of: of.into() };
            if value.is_multiple_of(of.into()) { Ok(()) } else { Err(fault.of(key.name)) }
        };
        multiple(physical, physical_size.into(), sector_size)?;
        multiple(keys::SECTORS, sectors << 9, sector_size)?;
        let info = number(nodes, keys::INFO)?;
        Ok(Self { sectors, sector_size, physical_sector_size: physical_size, info })
    }
}

#[cfg(test)]
mod tests;

//! Random frames behind random headers between ports of every kind, against a model that judges the
//! bytes which *arrive*, and those which a receiver makes of them when it finishes a checksum.
//!
//! ```text
//! MANYRING_MODEL_FRAMES=10000000 cargo test --release -p manyring-backend --test switch_model
//! ```
//! `MANYRING_MODEL_SEED` chooses other frames. The model is plain and slow: it knows no channels,
//! no frame copies and no table, and believes whatever some receiver might believe.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod seen;
mod sent;

use manyring_backend::net::switch::{Clock, PortOptions, Switch, SwitchOptions, SwitchPort, Vlans};
use manyring_backend::net::{Frames, Incoming, Port, PortRx, PortTx};
use manyring_memory::{Mapping, SliceList, copy_from_slices};
use manyring_wire::net::{HEADER_SIZE, Offloads, PLACE_BYTES, RawNetHeader};
use seen::{finished, senders, vlan, word};
use sent::{Random, Sent, make, open};
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::{FromBytes, IntoBytes};

const FRAMES: u64 = 200_000;
const SEED: u64 = 777;
const ALL: Offloads =
    Offloads { csum: true, tso4: true, tso6: true, ecn: true, uso4: false, uso6: false };
/// LLDP passes.
const MASK: u16 = 1 << 0xe;
const UPLINK: usize = 8;
/// Bytes of the longest frame here.
const LEN_MAX: usize = 1024;
fn mac(n: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, u8::try_from(n).unwrap()]
}

/// The ports: those with an odd number take nothing unfinished.
fn ports(switch: &Arc<Switch>) -> Vec<(PortOptions, SwitchPort)> {
    let new = |name: &str| PortOptions { floods_max: 1_000_000, ..PortOptions::new(name, 1) };
    let pinned = |n: usize| PortOptions { mac: Some(mac(n)), ..new(&n.to_string()) };
    let guarded = |n: usize| PortOptions { only: Some(mac(n)), ..pinned(n) };
    let all = [
        new("0"),
        PortOptions { macs_max: 64, ..new("1") },
        PortOptions { vlans: Vlans::Access(5), ..guarded(2) },
        PortOptions { vlans: Vlans::Access(5), ..pinned(3) },
        PortOptions { vlans: Vlans::Trunk(vec![5, 6]), ..new("4") },
        PortOptions { vlans: Vlans::Trunk(vec![5]), ..guarded(5) },
        PortOptions { vlans: Vlans::Access(6), isolated: true, ..guarded(6) },
        PortOptions { isolated: true, ..guarded(7) },
        PortOptions { is_uplink: true, macs_max: 1024, ..new("8") },
        PortOptions { vlans: Vlans::Access(6), ..pinned(9) },
    ];
    let open = |(n, options): (usize, PortOptions)| {
        let port = switch.port(options.clone()).unwrap();
        port.set_attached(0, true).unwrap();
        port.set_offloads(if n % 2 == 0 { ALL } else { Offloads::default() }).unwrap();
        (options, port)
    };
    all.into_iter().enumerate().map(open).collect()
}

/// The frames that a half has, each with its header.
fn received(rx: &mut dyn PortRx, room: &Mapping) -> Vec<(RawNetHeader, Vec<u8>)> {
    let mut all = Vec::new();
    let mut add = |bytes: Vec<u8>| {
        let header = RawNetHeader::read_from_bytes(&bytes[..HEADER_SIZE]).unwrap();
        all.push((header, bytes[HEADER_SIZE..].to_vec()));
    };
    loop {
        match rx.incoming(64) {
            Incoming::Read => {
                let buffers = [room.slice(0, room.size()).unwrap()];
                while let Ok(len) = rx.recv(&buffers) {
                    let mut bytes = vec![0; len];
                    buffers[0].read_into(&mut bytes);
                    add(bytes);
                }
            }
            Incoming::Lent(frames) => {
                let count = frames.count();
                for index in 0..count {
                    let mut bytes = vec![0; HEADER_SIZE + frames.len(index)];
                    assert_eq!(copy_from_slices(frames.slices(index), &mut bytes), bytes.len());
                    add(bytes);
                }
                rx.release(count);
                if count == 0 {
                    return all;
                }
            }
        }
    }
}

/// The ports of a switch, and what the model knows of them.
struct World {
    /// The addresses of the last frame of each port to another one alone; and which frames have
    /// gone so in this second.
    last: Vec<Option<[u8; 12]>>,
    ways: HashSet<(usize, [u8; 12], BTreeSet<usize>)>,
    switch: Arc<Switch>,
    ports: Vec<(PortOptions, SwitchPort)>,
    senders: Vec<Box<dyn PortTx>>,
    halves: Vec<Box<dyn PortRx>>,
    memory: Arc<Mapping>,
    room: Mapping,
}

impl World {
    fn new(clock: Clock) -> Self {
        let options = SwitchOptions { name: "s".to_owned(), age: 300, group_fwd_mask: MASK, clock };
        let switch = Switch::new(options);
        let ports = ports(&switch);
        Self {
            senders: ports.iter().map(|(_, port)| port.open_tx(0).unwrap()).collect(),
            halves: ports.iter().map(|(_, port)| port.open_rx(0).unwrap()).collect(),
            last: vec![None; ports.len()],
            ways: HashSet::new(),
            switch,
            ports,
            memory: Arc::new(Mapping::anonymous(LEN_MAX as u64).unwrap()),
            room: Mapping::anonymous(1 << 17).unwrap(),
        }
    }

    fn unfinished(&self, port: usize) -> u64 {
        self.ports[port].1.counters().dropped_unfinished.value()
    }

    /// The causes for which frames of a port are dropped, and how often they were.
    fn drops(&self, port: usize) -> [(&'static str, u64); 7] {
        let counters = self.ports[port].1.counters();
        [
            ("vlan", counters.dropped_vlan.value()),
            ("spoofed", counters.dropped_spoofed.value()),
            ("reserved", counters.dropped_reserved.value()),
            ("own", counters.dropped_own.value()),
            ("isolated", counters.dropped_isolated.value()),
            ("flood", counters.dropped_flood.value()),
            ("unfinished", counters.dropped_unfinished.value()),
        ]
    }

    /// Hands a frame to the switch as the device or the uplink does. The driver may have changed it
    /// since the device's check: `bytes` is what it is then.
    fn send(&mut self, from: usize, header: &RawNetHeader, bytes: &[u8]) {
        if from == UPLINK {
            self.ports[from].1.copy_path().send(&[header.as_bytes(), bytes].concat());
            return;
        }
        self.memory.slice(0, bytes.len()).unwrap().write_from(bytes);
        let len = u32::try_from(bytes.len()).unwrap();
        let cut = len.min(23);
        let pieces = [(0, cut), (u64::from(cut), len - cut)];
        let pieces = if len % 3 == 0 && len > cut { &pieces[..] } else { &[(0, len)] };
        let slices = SliceList::of_mapping(&self.memory, pieces).unwrap();
        let mut frames = Frames::new().unwrap();
        assert!(frames.push_as(7, header, slices.all(), 0, bytes.len()));
        let sent = self.senders[from].send(&frames, 0);
        assert_eq!((sent.taken, sent.stop), (1, None));
    }

    /// The port that this address is configured for in this VLAN.
    fn owner(&self, address: &[u8], vlan_of: u16) -> Option<usize> {
        let is_in = |vlans: &Vlans| match vlans {
            Vlans::All => true,
            Vlans::Access(own) => *own == vlan_of,
            Vlans::Trunk(vlans) => vlans.contains(&vlan_of),
        };
        self.ports.iter().position(|(options, _)| {
            options.mac.is_some_and(|mac| mac == address) && is_in(&options.vlans)
        })
    }

    /// Judges a frame that has arrived, by its bytes alone.
    fn judge(&self, (from, sent): (usize, &[u8]), to: usize, header: &RawNetHeader, seen: &[u8]) {
        let ((sender, _), (receiver, _)) = (&self.ports[from], &self.ports[to]);
        assert!(from != to && !(sender.isolated && receiver.isolated), "an isolated port");
        let vlan_of = vlan(sender, sent).expect("the sender is not in this VLAN");
        let is_plain = to % 2 == 1;
        assert!(!is_plain || (header.flags & 1 == 0 && header.gso_type == 0), "unfinished");
        for bytes in [seen, &finished(header, seen)] {
            assert_eq!(vlan(receiver, bytes), Some(vlan_of), "another VLAN");
            if let Some(only) = sender.only {
                assert!(senders(bytes).iter().all(|sender| *sender == only), "another sender");
            }
            assert_eq!(bytes[..12], sent[..12], "other addresses");
            if bytes[..5] == [1, 0x80, 0xc2, 0, 0] && bytes[5] < 16 {
                assert!(MASK >> bytes[5] & 1 == 1, "a frame for the next bridge");
            }
            if let Some(owner) = self.owner(&bytes[..6], vlan_of) {
                assert_eq!(owner, to, "an address that is configured for another port");
            }
        }
    }

    /// The ports that a frame which breaks no rule goes to, before it is sent.
    fn destinations(&self, from: usize, bytes: &[u8]) -> Option<BTreeSet<usize>> {
        let vlan_of = vlan(&self.ports[from].0, bytes)?;
        let to = &bytes[..6];
        let known = self.owner(to, vlan_of).or_else(|| {
            let stations = self.switch.stations();
            let is_it = |station: &&(_, String)| {
                let station: &(manyring_backend::net::switch::Station, String) = station;
                station.0.address == to && station.0.vlan == vlan_of
            };
            stations.iter().find(is_it).map(|(_, name)| name.parse().unwrap())
        });
        let all = match known {
            Some(to) => vec![to],
            None => (0..self.ports.len()).collect(),
        };
        let is_in = |to: &usize| {
            let (sender, receiver) = (&self.ports[from].0, &self.ports[*to].0);
            let may = match &receiver.vlans {
                Vlans::All => true,
                Vlans::Access(own) => *own == vlan_of,
                Vlans::Trunk(vlans) => vlans.contains(&vlan_of),
            };
            *to != from && may && !(sender.isolated && receiver.isolated)
        };
        Some(all.into_iter().filter(is_in).collect())
    }
}

/// The bytes of a frame as they leave by this port, before a checksum is finished.
fn leaving(receiver: &PortOptions, vlan_of: u16, sent: &[u8]) -> Vec<u8> {
    let tag = (word(sent, 12) == Some(0x8100)).then(|| word(sent, 14)).flatten();
    let has_tag = match &receiver.vlans {
        Vlans::All => vlan_of != 0 || tag.is_some(),
        Vlans::Access(_) => false,
        Vlans::Trunk(_) => true,
    };
    let rest = &sent[if tag.is_some() { 16 } else { 12 }..];
    let tci = tag.unwrap_or(0) & 0xf000 | vlan_of;
    let tag = [[0x81, 0], tci.to_be_bytes()].concat();
    [&sent[..12], if has_tag { &tag } else { &[] }, rest].concat()
}

#[derive(Debug, Default)]
struct Tally {
    arrived: u64,
    refused_header: u64,
    dropped: u64,
    finished: u64,
    cut: u64,
}

/// What a port sends, as the device or the uplink hands it to the switch.
struct Handed {
    from: usize,
    header: RawNetHeader,
    bytes: Vec<u8>,
    is_honest: bool,
}

/// The next frame; `None`: the device refuses its header.
fn next(world: &World, random: &mut Random) -> Option<Handed> {
    let from = random.below(world.ports.len());
    let last = world.last[from].filter(|_| random.one_in(3));
    let Sent { header, mut bytes, mut is_honest } = make(random, from, &world.ports[from].0);
    if let Some(last) = last {
        // The addresses of the frame before: the switch takes it the same way.
        bytes[..12].copy_from_slice(&last);
        is_honest = false;
    }
    if from == UPLINK {
        return Some(Handed { from, header, bytes, is_honest });
    }
    // As the device does with what a driver sends.
    let start = &bytes[..bytes.len().min(PLACE_BYTES)];
    let checked = header.checked(bytes.len(), ALL).ok();
    let checked = checked.filter(|header| header.is_in_place(start));
    assert!(!is_honest || checked.is_some(), "an honest header is refused");
    if !is_honest && random.one_in(6) {
        // The driver changes the frame after the check.
        let other = make(random, from, &world.ports[from].0).bytes;
        let count = random.below(other.len().min(bytes.len()));
        bytes[..count].copy_from_slice(&other[..count]);
    }
    Some(Handed { from, header: checked?, bytes, is_honest })
}

/// Compares a frame that was not cut: all bytes are those that were sent, but for the tag and the
/// checksum. True if that was finished.
fn compare(world: &World, handed: &Handed, to: usize, header: &RawNetHeader, seen: &[u8]) -> bool {
    let Handed { from, header: checked, bytes, .. } = handed;
    let (sender, receiver) = (&world.ports[*from].0, &world.ports[to].0);
    let sent = leaving(receiver, vlan(sender, bytes).unwrap(), bytes);
    let moved = usize::from(checked.csum_start.get()) + sent.len();
    let start = moved.saturating_sub(bytes.len());
    let offset = usize::from(checked.csum_offset.get());
    let is_finished = checked.flags & 1 == 1 && header.flags & 1 == 0;
    if !is_finished {
        let is_there = usize::from(header.csum_start.get()) == start;
        assert!(checked.flags & 1 == 0 || is_there, "the checksum is elsewhere");
        assert!(seen == sent, "other bytes");
        return false;
    }
    let right = finished(&open(start, offset), &sent);
    // Both ways to write a checksum of nothing are right.
    let mut either = right.clone();
    if word(&right, start + offset) == Some(0) {
        either[start + offset..][..2].fill(0xff);
    }
    assert!(seen == right || seen == either, "other bytes");
    true
}

/// Judges all that has arrived. Returns the ports that the frame has reached, or that could not
/// have it finished.
fn arrivals(
    world: &mut World,
    handed: &Handed,
    failed_before: &[u64],
    tally: &mut Tally,
) -> BTreeSet<usize> {
    let Handed { from, header: checked, bytes, .. } = handed;
    let mut reached = BTreeSet::new();
    for (to, failed) in failed_before.iter().enumerate() {
        for (header, seen) in received(&mut *world.halves[to], &world.room) {
            world.judge((*from, bytes), to, &header, &seen);
            tally.arrived += 1;
            reached.insert(to);
            if checked.gso_type == 0 {
                let is_finished = compare(world, handed, to, &header, &seen);
                tally.finished += u64::from(is_finished);
            } else {
                tally.cut += u64::from(header.gso_type == 0);
            }
        }
        if to != *from && world.unfinished(to) != *failed {
            reached.insert(to);
        }
    }
    reached
}

fn step(world: &mut World, random: &mut Random, tally: &mut Tally) {
    let Some(handed) = next(world, random) else {
        tally.refused_header += 1;
        return;
    };
    let Handed { from, header, bytes, is_honest } = &handed;
    // A frame to its own source goes where it was learnt just now, if there was room.
    // One that ends behind its tag is left out where the tag would be taken off.
    let mut is_sure = bytes[..6] != bytes[6..12] && bytes.len() >= 18;
    // The switch's table is a long list to look through.
    is_sure &= bytes[0] & 1 == 1 || random.one_in(8);
    let expected = is_sure.then(|| world.destinations(*from, bytes)).flatten();
    let before = world.drops(*from);
    let failed_before: Vec<_> = (0..world.ports.len()).map(|to| world.unfinished(to)).collect();
    world.send(*from, header, bytes);
    let reached = arrivals(world, &handed, &failed_before, tally);
    if world.drops(*from) == before {
        // A queue goes on the way of a frame before for the rest of a second.
        let addresses = *bytes.first_chunk().unwrap();
        let is_as_before = world.ways.contains(&(*from, addresses, reached.clone()));
        let is_right = Some(&reached) == expected.as_ref() || is_as_before;
        assert!(!is_sure || is_right, "{reached:?}, not {expected:?}");
        if bytes[0] & 1 == 0 && reached.len() == 1 {
            world.ways.insert((*from, addresses, reached));
            world.last[*from] = Some(addresses);
        }
    } else {
        tally.dropped += 1;
        assert_eq!(reached, BTreeSet::new(), "it was dropped");
        let may_drop = ["own", "isolated", "vlan"];
        let (why, _) = *world.drops(*from).iter().find(|cause| !before.contains(cause)).unwrap();
        assert!(!is_honest || may_drop.contains(&why), "an honest frame is dropped: {why}");
        assert!(!(*is_honest && is_sure) || expected.is_none_or(|all| all.is_empty()), "{why}");
    }
    let mut done = Vec::new();
    world.senders[*from].reap(&mut done);
    assert!(world.senders[*from].recall(&mut done) == 0 && done.len() <= 1);
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect(name))
}

#[test]
fn what_arrives_would_have_been_let_through_as_it_arrives() {
    let (frames, seed) =
        (number("MANYRING_MODEL_FRAMES", FRAMES), number("MANYRING_MODEL_SEED", SEED));
    let ms = Arc::new(AtomicU64::new(5_000));
    let time = ms.clone();
    let mut world = World::new(Clock::new(move || time.load(Ordering::Relaxed)));
    let (mut random, mut tally) = (Random(seed), Tally::default());
    for number in 0..frames {
        let begun = random.0;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            step(&mut world, &mut random, &mut tally);
        }));
        assert!(result.is_ok(), "frame {number} of seed {seed} (state {begun:#x})");
        if number % 512 == 0 {
            ms.fetch_add(1000, Ordering::Relaxed);
            world.ways.clear();
        }
    }
    println!("{frames} frames, seed {seed}: {tally:?}");
    let Tally { arrived, refused_header, dropped, finished, cut } = tally;
    let least = frames / 1000;
    for (what, count) in [
        ("arrived", arrived),
        ("refused by their header", refused_header),
        ("dropped by the switch", dropped),
        ("finished", finished),
        ("cut", cut),
    ] {
        assert!(count >= least, "only {count} frames {what}");
    }
}

//! Input: what guests send to a switch. Any bytes behind any header are a frame that goes to other
//! ports or nowhere: whole and finished to those who take nothing unfinished, with the tag of their
//! VLAN, never from an address that its sender may not have, never to a port that another address
//! is configured for, never for the next bridge, and never between isolated ports.
#![no_main]

use libfuzzer_sys::fuzz_target;
use manyring_backend::net::switch::{Clock, PortOptions, Switch, SwitchOptions, SwitchPort, Vlans};
use manyring_backend::net::{Frames, Incoming, Port, PortRx};
use manyring_memory::{Mapping, SliceList, copy_from_slices};
use manyring_wire::net::{FRAME_SIZE_MAX, HEADER_SIZE, Offloads, RawNetHeader};
use std::sync::Arc;
use zerocopy::FromBytes;

/// Bytes of a frame here: longer ones are what their headers say, and no more.
const LEN_MAX: usize = 8192;
const ALL: Offloads =
    Offloads { csum: true, tso4: true, tso6: true, ecn: true, uso4: false, uso6: false };

fn mac(n: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, u8::try_from(n).unwrap()]
}

/// Ports of all kinds; the last two are isolated.
fn ports(switch: &Arc<Switch>) -> Vec<SwitchPort> {
    let all = [
        PortOptions::new("all", 1),
        PortOptions { vlans: Vlans::Access(5), ..PortOptions::new("access", 1) },
        PortOptions { vlans: Vlans::Trunk(vec![5, 6]), ..PortOptions::new("trunk", 2) },
        PortOptions {
            mac: Some(mac(3)),
            only: Some(mac(3)),
            isolated: true,
            ..PortOptions::new("guarded", 1)
        },
        PortOptions { isolated: true, ..PortOptions::new("isolated", 1) },
    ];
    all.map(|options| {
        let pairs = options.queue_pairs;
        let port = switch.port(options).unwrap();
        (0..pairs).for_each(|pair| port.set_attached(pair, true).unwrap());
        port
    })
    .into()
}

/// The frames that a half has, each with its header.
fn received(rx: &mut dyn PortRx, process: &Mapping) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        match rx.incoming(64) {
            Incoming::Read => {
                let buffers = [process.slice(0, process.size()).unwrap()];
                while let Ok(len) = rx.recv(&buffers) {
                    let mut bytes = vec![0; len];
                    buffers[0].read_into(&mut bytes);
                    all.push(bytes);
                }
            }
            Incoming::Lent(frames) => {
                let count = frames.count();
                for index in 0..count {
                    let mut bytes = vec![0; HEADER_SIZE + frames.len(index)];
                    let copied = copy_from_slices(frames.slices(index), &mut bytes);
                    assert_eq!(copied, bytes.len());
                    all.push(bytes);
                }
                rx.release(count);
                if count == 0 {
                    return all;
                }
            }
        }
    }
}

fuzz_target!(|input: Vec<(u8, bool, [u8; HEADER_SIZE], Vec<u8>)>| {
    let clock = Clock::new(|| 5_000);
    let name = "s".to_owned();
    let switch = Switch::new(SwitchOptions { name, age: 300, group_fwd_mask: 0, clock });
    let ports = ports(&switch);
    // Every other port takes nothing unfinished.
    for (n, port) in ports.iter().enumerate() {
        port.set_offloads(if n % 2 == 0 { ALL } else { Offloads::default() }).unwrap();
    }
    let mut halves: Vec<_> = ports
        .iter()
        .map(|port| (0..port.queue_pairs()).map(|pair| port.open_rx(pair).unwrap()).collect())
        .collect::<Vec<Vec<_>>>();
    let mut senders: Vec<_> = ports.iter().map(|port| port.open_tx(0).unwrap()).collect();
    let process = Mapping::anonymous((HEADER_SIZE + FRAME_SIZE_MAX) as u64).unwrap();
    let memory = Arc::new(Mapping::anonymous(LEN_MAX as u64).unwrap());
    for (from, is_frame_copy, header, mut bytes) in input.into_iter().take(64) {
        let from = usize::from(from) % ports.len();
        bytes.truncate(LEN_MAX);
        // Addresses that there are, so that frames arrive.
        if let [to, .., _, _, _, _, _, source] = bytes.get_mut(..12).unwrap_or_default()
            && *to & 1 == 0
        {
            let (to, source) = (usize::from(*to) % 8, usize::from(*source) % 8);
            bytes[..6].copy_from_slice(&mac(to));
            bytes[6..12].copy_from_slice(&mac(source));
        }
        if bytes.is_empty() {
            continue;
        }
        let (mut frames, mut done) = (Frames::new().unwrap(), Vec::new());
        if is_frame_copy {
            ports[from].copy_path().send(&[&header[..], &bytes].concat());
        } else {
            memory.slice(0, bytes.len()).unwrap().write_from(&bytes);
            let len = u32::try_from(bytes.len()).unwrap();
            let slices = SliceList::of_mapping(&memory, &[(0, len)]).unwrap();
            let header = RawNetHeader::read_from_bytes(&header).unwrap();
            assert!(frames.push_as(7, &header, slices.all(), 0, bytes.len()));
            let sent = senders[from].send(&frames, 0);
            assert_eq!((sent.taken, sent.stop), (1, None));
        }
        for (to, queues) in halves.iter_mut().enumerate() {
            for rx in queues {
                for frame in received(&mut **rx, &process) {
                    assert!(to != from, "a frame comes back to its sender");
                    assert!(from < 3 || to < 3, "isolated ports hear each other");
                    assert!((HEADER_SIZE..=HEADER_SIZE + FRAME_SIZE_MAX).contains(&frame.len()));
                    let header = RawNetHeader::read_from_prefix(&frame).unwrap().0;
                    if to % 2 == 1 {
                        assert_eq!((header.gso_type, header.flags & 1), (0, 0), "unfinished");
                    }
                    let frame = &frame[HEADER_SIZE..];
                    if from == 3 {
                        assert_eq!(frame[6..12], mac(3), "a guarded guest is somebody else");
                        let is_arp = frame.len() >= 28 && frame[12..14] == [8, 6];
                        assert!(!is_arp || frame[22..28] == mac(3), "in ARP");
                    }
                    let is_reserved = frame.starts_with(&[1, 0x80, 0xc2, 0, 0]) && frame[5] < 16;
                    assert!(!is_reserved, "a frame for the next bridge");
                    assert!(!frame.starts_with(&mac(3)) || to == 3, "a configured address");
                    let is_tagged = frame.len() > 13 && frame[12..14] == [0x81, 0];
                    assert!(to != 2 || is_tagged, "no tag where there are only some");
                }
            }
        }
        senders[from].reap(&mut done);
        assert!(senders[from].recall(&mut done) == 0 && done.len() <= 1);
    }
});

//! Door: the supervisor, and the estate that it keeps, of a device process which a guest has taken.
//! Whatever the device process says, in any order, is heard or ends the device process; and what
//! the next device process is told of its front-ends always fits a message.
#![no_main]

use arbitrary::Arbitrary;
use manyring_daemon::processes::fuzzing::{DEVICES, CompromisedProcess};
use manyring_daemon::processes::message::{Answered, Heard, Wish, Written, XenSaid, emit};

#[derive(Arbitrary, Debug)]
enum Act {
    Connect(u8),
    Say { said: Said, device: u8, number: u8, fds: u8 },
    Bytes { bytes: Vec<u8>, fds: u8 },
    Counters { device: u8, bytes: Vec<u8> },
    Remove(u8),
    Die,
}

#[derive(Arbitrary, Debug)]
enum Said {
    Ready,
    Session(bool),
    Note { puts: Vec<(u8, u16)>, drops: Vec<u8>, answer: Option<u16>, sent: bool },
    Gone,
    Removed,
    Pair(u16, bool),
    Offloads(u64),
    Lock(bool),
    Doubt,
    Guest { mac: Option<[u8; 6]>, announces: bool, control: Option<u16>, pairs: Option<u16> },
    Counted,
    Xen { kind: u8, text: String },
}

impl Said {
    fn heard(self, device: String, number: u64) -> Heard {
        let ask = |device, wish| Heard::Ask { device, number, wish };
        match self {
            Self::Ready => Heard::Ready {},
            Self::Session(is_open) => Heard::Session { device, is_open },
            Self::Note { puts, drops, answer, sent } => {
                let written = |(key, size): (u8, u16)| Written {
                    key: key.into(),
                    bytes: vec![key; usize::from(size) % 8000],
                };
                let answer = match (answer, sent) {
                    (Some(size), _) => Answered::UnderWay(vec![1; usize::from(size) % 600]),
                    (None, true) => Answered::Sent,
                    (None, false) => Answered::Unchanged,
                };
                let puts = puts.into_iter().map(written).collect();
                let drops = drops.into_iter().map(u32::from).collect();
                Heard::Note { device, number, puts, drops, answer }
            }
            Self::Gone => Heard::Gone { device, number },
            Self::Removed => Heard::Removed { device },
            Self::Pair(pair, attached) => ask(device, Wish::Pair { pair, attached }),
            Self::Offloads(bits) => ask(device, Wish::Offloads { bits }),
            Self::Lock(is_held) => ask(device, Wish::Lock { is_held }),
            Self::Doubt => Heard::Doubt { device },
            Self::Guest { mac, announces, control, pairs } => {
                Heard::Guest { device, mac, announces, control, pairs }
            }
            Self::Counted => Heard::Counted { number },
            Self::Xen { kind, text } => {
                let said = match kind % 4 {
                    0 => XenSaid::Started {},
                    1 => XenSaid::Refused { text, passes: kind > 127 },
                    2 => XenSaid::Fault { text },
                    _ => XenSaid::Stopped {},
                };
                Heard::Xen { device, number, said }
            }
        }
    }
}

libfuzzer_sys::fuzz_target!(|acts: Vec<Act>| {
    let Some(process) = CompromisedProcess::new() else { return };
    let mut clients = Vec::new();
    for act in acts {
        let goes_on = match act {
            Act::Connect(device) => {
                let client = process.connects(device.into());
                clients.extend(client);
                client.is_some()
            }
            Act::Say { said, device, number, fds } => {
                // Now and then one that it was not given.
                let name = DEVICES.get(usize::from(device) % 3).copied().unwrap_or("other");
                // The number of a front-end, or one that means something else or nothing.
                let number = u64::from(number % 8);
                let client = usize::try_from(number).ok().and_then(|at| clients.get(at));
                let heard = said.heard(name.to_owned(), client.copied().unwrap_or(number));
                // One that is too long cannot be sent.
                emit(&heard).map_or(true, |bytes| process.hears(&bytes, usize::from(fds) % 12))
            }
            Act::Bytes { bytes, fds } => process.hears(&bytes, usize::from(fds) % 12),
            Act::Counters { device, bytes } => {
                process.counts(device.into(), &bytes);
                true
            }
            Act::Remove(device) => process.removes(device.into()),
            Act::Die => {
                process.dies();
                true
            }
        };
        if !goes_on {
            break;
        }
    }
    process.dies();
});

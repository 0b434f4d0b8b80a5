//! Input: the messages of a compromised device process. The supervisor handles each, in any order,
//! or ends the process; and what it has stored of the process's sessions always fits the messages
//! to the next process.
#![no_main]

use arbitrary::Arbitrary;
use manyring_supervisor::processes::fuzzing::{CompromisedProcess, DEVICES};
use manyring_protocol::message::{PrivilegedRequest, Report, XenReport, emit};

#[derive(Arbitrary, Debug)]
enum Act {
    Connect(u8),
    Say { said: Outgoing, device: u8, number: u8, fds: u8 },
    Bytes { bytes: Vec<u8>, fds: u8 },
    Counters { device: u8, bytes: Vec<u8> },
    Remove(u8),
    Die,
}

#[derive(Arbitrary, Debug)]
enum Outgoing {
    Ready,
    Session(bool),
    SessionFds { keep: Option<u8>, release: Vec<u8> },
    Gone,
    Removed,
    Pair(u16, bool),
    Offloads(u64),
    Lock(bool),
    Suspect,
    Guest { mac: Option<[u8; 6]>, announces: bool, control: Option<u16>, pairs: Option<u16> },
    Counted,
    Xen { kind: u8, text: String },
}

impl Outgoing {
    fn report(self, device: String, number: u64) -> Report {
        let ask = |device, request| Report::Request { device, number, request };
        match self {
            Self::Ready => Report::Ready {},
            Self::Session(is_open) => Report::Session { device, is_open },
            Self::SessionFds { keep, release } => {
                let release = release.into_iter().map(u64::from).collect();
                Report::SessionFds { device, number, keep: keep.map(u64::from), release }
            }
            Self::Gone => Report::Gone { device, number },
            Self::Removed => Report::Removed { device },
            Self::Pair(pair, attached) => ask(device, PrivilegedRequest::Pair { pair, attached }),
            Self::Offloads(bits) => ask(device, PrivilegedRequest::Offloads { bits }),
            Self::Lock(is_held) => ask(device, PrivilegedRequest::Lock { is_held }),
            Self::Suspect => Report::Suspect { device },
            Self::Guest { mac, announces, control, pairs } => {
                Report::Guest { device, mac, announces, control, pairs }
            }
            Self::Counted => Report::Counted { number },
            Self::Xen { kind, text } => {
                let said = match kind % 4 {
                    0 => XenReport::Started {},
                    1 => XenReport::Refused { text, passes: kind > 127 },
                    2 => XenReport::Fault { text },
                    _ => XenReport::Stopped {},
                };
                Report::Xen { device, number, said }
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
                let report = said.report(name.to_owned(), client.copied().unwrap_or(number));
                // One that is too long cannot be sent.
                emit(&report).map_or(true, |bytes| process.hears(&bytes, usize::from(fds) % 12))
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

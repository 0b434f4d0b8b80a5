//! Messages by which the running supervisor hands its devices to the next one.

use manyring_engine::StandIns;
use manyring_protocol::message::NamedFds;
use manyring_protocol::nbd::{ExportSpec, NbdTarget};
use manyring_serve::outgoing::MessageFd;
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};
use std::io;

/// A message of the running supervisor to the next one.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum HandoffMessage {
    /// A listening socket, the last file descriptor, under the name by which a service manager
    /// hands it in. The descriptor before it, if there is one, is the socket's file, opened with
    /// `O_PATH`: a next supervisor that does not serve the socket unlinks that file.
    Socket {
        /// The name under which a service manager hands the socket in.
        name: String,
    },
    /// The open file description of a disk: that of an image, with the lock, or that of the disk's
    /// memory.
    Disk {
        /// The device's name.
        device: String,
    },
    /// The export of an NBD server that the guest of a disk was told of. The next supervisor need
    /// not ask the server, which may be unreachable, or may export another disk by now.
    Export {
        /// The device's name.
        device: String,
        /// The export that the server was asked for.
        target: NbdTarget,
        /// The answer of the server, with the size of the last resize.
        told: ExportSpec,
    },
    /// Queues of a tap, as file descriptors in the order of the queue pairs. A tap with many queues
    /// takes several messages.
    Queues {
        /// The device's name, or the domain of the switch whose uplink the tap is.
        device: String,
    },
    /// The file to which the frames of a network device are captured.
    Capture {
        /// The device's name.
        device: String,
    },
    /// The locks that keep other daemons from the disks of a Xen, each as a file descriptor.
    Locks {},
    /// The file descriptor of the memory that holds a Xen guest's disk.
    XenMemory {
        /// The kind of the disk's back-end in xenstore, such as `vbd`.
        kind: String,
        /// The number of the guest's Xen domain.
        domain: u16,
        /// The number of the virtual device in its guest.
        device: u32,
        /// The key `params` of the disk in xenstore, by which the tool stack names its image.
        params: String,
    },
    /// File descriptors that the journal of a client names. The message [`Self::Client`] that
    /// follows is about this client.
    SavedFds {
        /// The device's name.
        device: String,
        /// The names of the descriptors, in the same order.
        named: Vec<NamedFds>,
    },
    /// A front-end: its socket, and the journal of its session if it is served.
    Client {
        /// The device's name.
        device: String,
        /// The domain of its user.
        domain: String,
    },
    /// The pidfd of a device process that was killed and still exists. Until it exits, no other
    /// process may use the device.
    Held {
        /// The device's name.
        device: String,
    },
    /// The lock byte of an earlier device process, in the disk's image. While the byte is locked,
    /// requests of that process may be in flight, and no device process may open the image. File
    /// descriptors: copies of those open files of the process on which the byte is not locked yet.
    Marked {
        /// The device's name.
        device: String,
        /// The offset of the byte in the image.
        byte: i64,
        /// True if the former device process could read the image, and not write to it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        only_reads: bool,
    },
    /// The device is not served: it waits for a resource that is in use or unavailable.
    Waits {
        /// The device's name.
        device: String,
    },
    /// Everything was sent.
    End {},
    /// The running supervisor hands nothing over: it continues to serve, or it was stopped.
    GoesOn {},
}

/// The messages that hand over one device, with the file descriptors of each message.
pub(in crate::processes) type DeviceHandoff = Vec<(HandoffMessage, Vec<MessageFd>)>;

/// A front-end that another supervisor handed over: its socket and the journal of its session.
#[derive(Debug)]
pub(in crate::processes) struct AdoptedSession {
    /// The domain of its user.
    pub(in crate::processes) domain: String,
    pub(in crate::processes) socket: OwnedFd,
    /// `None`: the front-end waits, and has no session yet.
    pub(in crate::processes) journal: Option<OwnedFd>,
    /// The descriptors that the journal names.
    pub(in crate::processes) named: Vec<(u64, Vec<OwnedFd>)>,
}

/// Device processes of an earlier supervisor, and their requests in flight, that may still use a
/// device. The supervisor gives the device to no device process before these have ended.
#[derive(Debug, Default)]
pub(in crate::processes) struct LingeringIo {
    /// Processes, as pidfds.
    pub(in crate::processes) held: Vec<OwnedFd>,
    /// Lock bytes of the device's image: each stays locked until the requests of one process have
    /// ended.
    pub(in crate::processes) marks: Vec<Locked>,
    /// Counts these descriptors in the budget of front-ends.
    pub(in crate::processes) part: Option<StandIns>,
}

impl LingeringIo {
    /// Counts the descriptors in the budget of front-ends. They stay open even if the budget has
    /// no room for them.
    pub(in crate::processes) fn count(&mut self) {
        let unmarked = self.marks.iter().map(|mark| mark.unmarked.len());
        let count = self.held.len() + unmarked.sum::<usize>();
        self.part = Some(StandIns::up_to(u32::try_from(count).unwrap_or(u32::MAX)));
    }

    /// Makes the messages that hand copies of these descriptors to another supervisor.
    ///
    /// # Errors
    /// The process may open no more files.
    pub(in crate::processes) fn share(&self, device: &str) -> io::Result<DeviceHandoff> {
        let device = || device.to_owned();
        let mut share = DeviceHandoff::new();
        for process in &self.held {
            share.push((
                HandoffMessage::Held { device: device() },
                vec![process.try_clone()?.into()],
            ));
        }
        for &Locked { byte, only_reads, ref unmarked } in &self.marks {
            let copies = unmarked.iter().map(|fd| fd.try_clone().map(Into::into));
            let copies = copies.collect::<io::Result<_>>()?;
            share.push((HandoffMessage::Marked { device: device(), byte, only_reads }, copies));
        }
        Ok(share)
    }
}

/// The lock byte of an earlier device process whose requests may be in flight.
#[derive(Debug)]
pub(in crate::processes) struct Locked {
    pub(in crate::processes) byte: i64,
    /// True if the device process could read the image, and not write to it.
    pub(in crate::processes) only_reads: bool,
    /// Copies of those open files of the process on which the byte is not locked yet.
    pub(in crate::processes) unmarked: Vec<OwnedFd>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_protocol::message::{emit, parse};

    #[test]
    fn a_mark_of_requests_that_may_write_reads_as_it_did_before_there_were_others() {
        let before = br#"{"marked":{"device":"a","byte":7}}"#;
        let mark =
            |only_reads| HandoffMessage::Marked { device: "a".to_owned(), byte: 7, only_reads };
        let written = emit(&mark(false)).unwrap();
        assert_eq!(&written[1..], before);
        for only_reads in [false, true] {
            let written = emit(&mark(only_reads)).unwrap();
            assert_eq!(parse::<HandoffMessage>(&written).unwrap(), mark(only_reads));
        }
    }
}

//! How a session starts: features, memory, rings.

use super::FrontEnd;
use crate::{Arena, DriverError, Virtqueue};
use manyring_queue::{Base, RingFeatures};
use manyring_wire::vhost_user::VringAddr;
use manyring_wire::virtio::{
    VIRTIO_F_EVENT_IDX, VIRTIO_F_IN_ORDER, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_RING_PACKED,
    VIRTIO_F_VERSION_1,
};
use std::path::Path;
use std::time::Duration;

/// Features that decide how rings are laid out, read and notified. A driver that asks for one of
/// them needs it: without the feature it would measure or test another kind of ring.
const RINGS: u64 = VIRTIO_F_VERSION_1
    | VIRTIO_F_EVENT_IDX
    | VIRTIO_F_INDIRECT_DESC
    | VIRTIO_F_IN_ORDER
    | VIRTIO_F_RING_PACKED;

impl FrontEnd {
    /// The virtio features that the back-end at the socket `path` offers. For a foreign client that
    /// does not report which features were negotiated. Connects and disconnects again.
    ///
    /// # Errors
    /// [`DriverError::Io`], or the socket's.
    pub fn offered(path: &Path, max_wait: Duration) -> Result<u64, DriverError> {
        Self::connect(path, max_wait)?.features()
    }

    /// Begins a session: negotiates those of `features` and `protocol` that are offered. Returns
    /// the negotiated virtio features, which include `required` and every ring feature in
    /// `features`.
    ///
    /// # Errors
    /// [`DriverError::Features`] if a required feature is not offered.
    pub fn negotiate(
        &mut self,
        features: u64,
        required: u64,
        protocol: u64,
    ) -> Result<u64, DriverError> {
        let offered = self.features()?;
        let missing = (required | features & RINGS) & !offered;
        if missing != 0 {
            return Err(DriverError::Features { missing });
        }
        let protocol = self.protocol_features()? & protocol;
        self.set_protocol_features(protocol)?;
        self.set_owner()?;
        let agreed = offered & (features | required);
        self.set_features(agreed)?;
        Ok(agreed)
    }

    /// Sends the back-end all regions of `arena`, in one table.
    ///
    /// # Errors
    /// See [`Self::features`].
    pub fn set_memory(&mut self, arena: &Arena) -> Result<(), DriverError> {
        self.set_mem_table(&arena.table())
    }

    /// Sets up a ring that starts at `base`, and enables it.
    ///
    /// # Errors
    /// See [`Self::features`]. [`DriverError::RingFeatures`], before anything is sent, if the
    /// negotiated ring features are not those that the driver half of this ring uses.
    pub fn start_vring(
        &mut self,
        vring: &Virtqueue,
        base: impl Into<Base>,
    ) -> Result<(), DriverError> {
        let index = vring.index();
        let (serves, set) = (vring.features(), RingFeatures::from_bits(self.features));
        if serves != set {
            return Err(DriverError::RingFeatures { index, serves, set });
        }
        let at = vring.addresses();
        self.set_vring_num(index, vring.size().into())?;
        self.set_vring_base(index, base)?;
        self.set_vring_addr(&VringAddr {
            index,
            flags: 0,
            descriptor: at.descriptor,
            used: at.used,
            available: at.available,
            log: 0,
        })?;
        self.set_vring_call(index, Some(vring.call_fd()))?;
        self.set_vring_err(index, Some(vring.err_fd()))?;
        self.set_vring_kick(index, Some(vring.kick_fd()))?;
        self.set_vring_enable(index, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_wire::vhost_user::{F_PROTOCOL_FEATURES, FLAG_REPLY, FLAG_VERSION, Header};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    /// Sets `features`, starts a ring that serves `serves`, and counts the messages of its start.
    fn start(features: u64, serves: u64) -> (Result<(), DriverError>, usize) {
        let arena = Arena::new(1 << 20).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut front = FrontEnd::from_stream(ours).unwrap();
        front.set_features(features).unwrap();
        let vring = Virtqueue::new(&arena, 3, 16, RingFeatures::from_bits(serves), 0).unwrap();
        let started = front.start_vring(&vring, 0);
        drop(front);
        let mut sent = Vec::new();
        theirs.read_to_end(&mut sent).unwrap();
        // A header of 12 bytes each, whose last word is the size of the rest.
        let (mut count, mut rest) = (0, &sent[..]);
        while let Some((header, behind)) = rest.split_at_checked(12) {
            let size = u32::from_ne_bytes(header[8..].try_into().unwrap());
            rest = &behind[size as usize..];
            count += 1;
        }
        (started, count - 1)
    }

    #[test]
    fn ring_is_started_only_if_it_serves_the_features_that_were_set() {
        let each =
            [VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_IN_ORDER, VIRTIO_F_RING_PACKED];
        let all = each.iter().fold(VIRTIO_F_VERSION_1, |all, one| all | one);
        for features in [0, VIRTIO_F_VERSION_1, all] {
            let (started, messages) = start(features, features);
            assert!(started.is_ok(), "{started:?}");
            assert_eq!(messages, 7, "size, base, addresses, call, err, kick, enable");
        }
        for one in each {
            for (set, served) in [(one, 0), (0, one), (all, all & !one), (all & !one, all)] {
                let (refused, messages) = start(set, served);
                let Err(DriverError::RingFeatures { index: 3, serves, set: said }) = refused else {
                    panic!("{one:#x}: {refused:?}");
                };
                let bits = RingFeatures::from_bits;
                assert_eq!((serves, said, messages), (bits(served), bits(set), 0), "{one:#x}");
            }
        }
    }

    /// Negotiates `features` with a back-end that offers `offered` and no protocol feature.
    fn negotiate(offered: u64, features: u64) -> Result<u64, DriverError> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut front = FrontEnd::from_stream(ours).unwrap();
        // The replies to GET_FEATURES and GET_PROTOCOL_FEATURES.
        for (request, value) in [(1, offered), (15, 0)] {
            let header = Header { request, flags: FLAG_VERSION | FLAG_REPLY, size: 8 };
            theirs.write_all(&header.emit()).unwrap();
            theirs.write_all(&value.to_ne_bytes()).unwrap();
        }
        front.negotiate(features, F_PROTOCOL_FEATURES, 0)
    }

    #[test]
    fn features_of_the_rings_that_are_asked_for_must_be_offered_and_others_need_not() {
        let other = 1 << 5;
        let asked = RINGS | other;
        let offered = F_PROTOCOL_FEATURES | asked | 1 << 6;
        assert_eq!(negotiate(offered, asked).unwrap(), F_PROTOCOL_FEATURES | asked);
        assert_eq!(negotiate(offered & !other, asked).unwrap(), F_PROTOCOL_FEATURES | RINGS);
        for one in (0..64).map(|bit| 1 << bit).filter(|bit| RINGS & bit != 0) {
            let refused = negotiate(offered & !one, asked);
            let is_named =
                matches!(refused, Err(DriverError::Features { missing }) if missing == one);
            assert!(is_named, "{one:#x}: {refused:?}");
            assert_eq!(negotiate(offered & !one, asked & !one).unwrap() & RINGS, RINGS & !one);
        }
    }
}

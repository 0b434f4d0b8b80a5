//! `Saved`: the settings of a driver that its rings, features and memory do not contain, as bytes
//! for a device in another process (vhost-user, "Migrating back-end state").
//!
//! ```text
//! "MANYRING" | version: u32 | virtio device id: u32 | features: u64     then records, to the end:
//! kind: u16 | len: u16 | `len` bytes                                    all little-endian
//! ```
//! The device defines the meaning of its records. An unknown record or version is refused: without
//! it, the device would differ from the one that its driver has configured.

use std::fmt::Debug;

const MAGIC: [u8; 8] = *b"MANYRING";
const VERSION: u32 = 1;

/// Why a saved state is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum StateError {
    #[error("{size} bytes are no device state of Manyring")]
    NoState { size: usize },
    #[error("a device state of version {version}, where {VERSION} is known")]
    Version { version: u32 },
    #[error("the state of a virtio device {found}, not {expected}")]
    Device { found: u32, expected: u32 },
    #[error("the state of a driver with features {bits:#x} that this device does not offer")]
    Features { bits: u64 },
    #[error("a device state whose record of kind {kind} is unknown, wrong or cut")]
    Record { kind: u16 },
}

/// A record of a saved state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateRecord {
    pub(crate) kind: u16,
    pub(crate) bytes: Vec<u8>,
}

impl StateRecord {
    /// Returns the bytes of a record that must have `SIZE` of them.
    ///
    /// # Errors
    /// [`StateError::Record`]: the record has another size.
    pub(crate) fn array<const SIZE: usize>(&self) -> Result<[u8; SIZE], StateError> {
        <[u8; SIZE]>::try_from(self.bytes.as_slice()).map_err(|_| self.wrong())
    }

    pub(crate) fn wrong(&self) -> StateError {
        StateError::Record { kind: self.kind }
    }
}

/// A state whose records are not parsed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    pub(crate) virtio_id: u32,
    /// The features that the driver has negotiated; 0: no driver runs.
    pub(crate) features: u64,
    pub(crate) records: Vec<StateRecord>,
}

impl Saved {
    pub(crate) fn new(virtio_id: u32, features: u64) -> Self {
        Self { virtio_id, features, records: Vec::new() }
    }

    /// Adds a record, of 65,535 bytes at most.
    pub(crate) fn add(&mut self, kind: u16, bytes: impl Into<Vec<u8>>) {
        self.records.push(StateRecord { kind, bytes: bytes.into() });
    }

    pub(crate) fn emit(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.virtio_id.to_le_bytes());
        bytes.extend(self.features.to_le_bytes());
        for StateRecord { kind, bytes: record } in &self.records {
            bytes.extend(kind.to_le_bytes());
            bytes.extend(u16::try_from(record.len()).unwrap_or(u16::MAX).to_le_bytes());
            bytes.extend(record);
        }
        bytes
    }

    /// Parses the state of a device that has this ID and offers these features.
    ///
    /// # Errors
    /// [`StateError`]: the bytes are no state, or the state of another kind of device.
    pub(crate) fn parse(bytes: &[u8], virtio_id: u32, offered: u64) -> Result<Self, StateError> {
        let mut rest = bytes;
        let none = StateError::NoState { size: bytes.len() };
        if take::<8>(&mut rest) != Some(MAGIC) {
            return Err(none);
        }
        let version = take(&mut rest).map(u32::from_le_bytes).ok_or(none)?;
        if version != VERSION {
            return Err(StateError::Version { version });
        }
        let found = take(&mut rest).map(u32::from_le_bytes).ok_or(none)?;
        if found != virtio_id {
            return Err(StateError::Device { found, expected: virtio_id });
        }
        let features = take(&mut rest).map(u64::from_le_bytes).ok_or(none)?;
        let bits = features & !offered;
        if bits != 0 {
            return Err(StateError::Features { bits });
        }
        let mut saved = Self::new(virtio_id, features);
        while !rest.is_empty() {
            let kind = take(&mut rest).map_or(0, u16::from_le_bytes);
            let cut = StateError::Record { kind };
            let len = take(&mut rest).map(u16::from_le_bytes).ok_or(cut)?;
            let (record, behind) = rest.split_at_checked(len.into()).ok_or(cut)?;
            saved.add(kind, record);
            rest = behind;
        }
        Ok(saved)
    }
}

fn take<const SIZE: usize>(rest: &mut &[u8]) -> Option<[u8; SIZE]> {
    let (first, behind) = rest.split_first_chunk()?;
    *rest = behind;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved() -> Saved {
        let mut saved = Saved::new(2, 0x11);
        saved.add(7, *b"abc");
        saved.add(9, []);
        saved
    }

    #[test]
    fn a_state_is_read_as_it_was_written() {
        assert_eq!(Saved::parse(&saved().emit(), 2, 0x31), Ok(saved()));
        assert_eq!(Saved::parse(&Saved::new(1, 0).emit(), 1, 0), Ok(Saved::new(1, 0)));
    }

    #[test]
    fn each_byte_that_is_missing_is_missed() {
        let whole = saved().emit();
        let fits = |len: usize| Saved::parse(&whole[..len], 2, 0x11).is_ok();
        let lens: Vec<_> = (0..=whole.len()).filter(|len| fits(*len)).collect();
        // A state may end after the header, the first record, or the second.
        assert_eq!(lens, [24, 31, 35]);
    }

    #[test]
    fn a_state_of_another_device_version_or_feature_is_refused() {
        let bytes = saved().emit();
        let other = |at: usize| {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x40;
            Saved::parse(&bytes, 2, 0x11).unwrap_err()
        };
        assert_eq!(other(0), StateError::NoState { size: 35 });
        assert_eq!(other(8), StateError::Version { version: 0x41 });
        assert_eq!(other(12), StateError::Device { found: 0x42, expected: 2 });
        assert_eq!(other(16), StateError::Features { bits: 0x40 });
        assert_eq!(other(26), StateError::Record { kind: 7 });
    }
}

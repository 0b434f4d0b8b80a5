//! The faults that a hostile receive buffer can have.

/// One fault of a receive buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RxSpoil {
    /// A device-readable buffer.
    ReadOnly,
    /// A device-readable buffer before a device-writable one.
    ReadOnlyFirst,
    /// A buffer of no bytes.
    ZeroLength,
    /// A buffer of one byte.
    OneByte,
    /// A buffer of 11 bytes, too small for a header.
    ShorterThanHeader,
    /// A buffer as large as a header, without a byte for a frame.
    HeaderAlone,
}

impl RxSpoil {
    /// Every fault.
    pub const ALL: [Self; 6] = [
        Self::ReadOnly,
        Self::ReadOnlyFirst,
        Self::ZeroLength,
        Self::OneByte,
        Self::ShorterThanHeader,
        Self::HeaderAlone,
    ];
}

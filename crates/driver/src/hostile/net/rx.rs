//! How a buffer to receive into can be wrong.

/// One way for a buffer to receive into to be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RxSpoil {
    /// A buffer the device may only read.
    ReadOnly,
    /// A buffer the device may only read, before one that it may write.
    ReadOnlyFirst,
    /// A buffer of no bytes.
    ZeroLength,
    /// A buffer of one byte.
    OneByte,
    /// A buffer of 11 bytes, no room for a header.
    ShorterThanHeader,
    /// A buffer that holds a header and nothing else.
    HeaderAlone,
}

impl RxSpoil {
    /// Every way.
    pub const ALL: [Self; 6] = [
        Self::ReadOnly,
        Self::ReadOnlyFirst,
        Self::ZeroLength,
        Self::OneByte,
        Self::ShorterThanHeader,
        Self::HeaderAlone,
    ];
}

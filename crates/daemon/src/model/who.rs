//! `Who`: who asks for a change.

/// Who asks for a change, as the kernel tells.
#[derive(Clone, Debug, Default)]
pub(crate) struct Who {
    pub(crate) uid: u32,
    pub(crate) pid: i32,
    /// The name of its program, as it calls itself.
    pub(crate) comm: String,
}

//! `Who`: who asks for a change.

/// Who asks for a change, as the kernel tells.
#[derive(Clone, Debug, Default)]
pub struct Who {
    /// The user.
    pub uid: u32,
    /// The process.
    pub pid: i32,
    /// The name of its program, as it calls itself.
    pub comm: String,
}

//! `Who`: the process that asks for a change.

/// The process that asks for a change, as the credentials of its connection (`SO_PEERCRED`) name
/// it.
#[derive(Clone, Debug, Default)]
pub struct Who {
    /// The user id of the process.
    pub uid: u32,
    /// The process id.
    pub pid: i32,
    /// The name of the process, from /proc/PID/comm: the process can choose it.
    pub comm: String,
}

//! Pure decisions of devices: no I/O, no clock (time is an argument), no unsafe. Decisions that
//! concern neither requests nor frames are in the engine.

pub(crate) mod burst;
pub(crate) mod reclaim;

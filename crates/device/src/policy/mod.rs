//! Pure decisions of devices: no I/O, no clock (time is an argument), no unsafe. Those that know
//! neither request nor frame are the engine's.

pub(crate) mod burst;
pub(crate) mod reclaim;

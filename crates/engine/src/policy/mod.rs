//! Pure decisions: no I/O, no clock (time is an argument), no unsafe.

pub mod moderation;
pub mod numa;
pub mod placement;
pub mod polling;
pub mod receive_pairs;
pub mod share;
pub mod wake;

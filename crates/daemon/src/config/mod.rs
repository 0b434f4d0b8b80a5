//! Raw configuration -> plan: what the user wrote, and what will be done.

pub(crate) mod plan;
pub(crate) mod raw;

//! Licences, bans and sources of the dependencies. Advisories need the network: not here.

use super::tools;
use crate::cargo::{cargo, see};
use manyring_system::Outcome;

pub(crate) fn run() -> Outcome {
    tools::need("deny", "0.20.2")?;
    see(cargo(&["deny", "check", "licenses", "bans", "sources"]).env("PATH", tools::path()?))
}

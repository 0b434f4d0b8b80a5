//! Promises that must hold for the disks of Xen guests: one function for each.

mod data;
mod guests;
mod life;

use super::rig::Rig;
use super::serve::Server;
use crate::Outcome;

/// A named promise and the test of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    /// Unique; what `--only` takes.
    pub(super) name: &'static str,
    /// Whether it is part of `cargo xtask test`.
    pub(super) is_short: bool,
    /// The back-ends that can do it: the others lack some features that Manyring has.
    servers: &'static [Server],
    pub(super) run: Run,
}

impl Case {
    /// Whether this back-end can do it.
    pub(super) fn is_for(&self, server: Server) -> bool {
        self.servers.contains(&server)
    }
}

const EVERYBODY: &[Server] = &[Server::Manyring, Server::Blkback, Server::Qdisk];
const MANY_QUEUES: &[Server] = &[Server::Manyring, Server::Blkback];
const MANYRING: &[Server] = &[Server::Manyring];

type Run = fn(&mut Rig) -> Outcome;

const fn case(name: &'static str, servers: &'static [Server], run: Run) -> Case {
    Case { name, is_short: false, servers, run }
}

const fn short(name: &'static str, servers: &'static [Server], run: Run) -> Case {
    Case { name, is_short: true, servers, run }
}

/// All of them. They share their guests, so those that end a guest come last.
pub(super) const ALL: &[Case] = &[
    short("dom0_is_its_own_guest", MANYRING, life::own_guest),
    short("several_queues", MANY_QUEUES, data::several_queues),
    short("ext4_checksums", EVERYBODY, data::ext4),
    short("fio_verify", EVERYBODY, data::verify),
    case("flush", EVERYBODY, data::flush),
    short("discard", EVERYBODY, data::discard),
    case("persistent_grants_off", MANY_QUEUES, data::without_persistent_grants),
    case("read_only", EVERYBODY, life::read_only),
    case("resize", MANYRING, life::resize),
    short("attach_and_detach", EVERYBODY, life::attach_and_detach),
    case("own_kind_by_plain_nodes", MANYRING, life::plain_nodes),
    case("tool_stacks_own_script", MANY_QUEUES, life::own_script),
    case("process_killed_under_load", MANYRING, guests::process_killed),
    case("sigterm_under_load", MANYRING, guests::sigterm),
    case("sigkill_under_load", MANYRING, guests::sigkill),
    case("reboot", EVERYBODY, guests::reboot),
    case("pvh_guest", EVERYBODY, guests::pvh),
    case("one_destroyed_while_one_verifies", EVERYBODY, guests::destroyed_under_load),
];

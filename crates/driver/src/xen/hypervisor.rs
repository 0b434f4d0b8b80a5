//! `SimulatedHypervisor`: domains with their memory, who maps it, and event channels, as real Xen
//! has them.
//!
//! **Memory.** A domain's memory is one memfd, made here and sealed, so that nobody can cut it
//! away; its first pages are the grant table (`manyring_memory::simgrant`). The domain gets the
//! file when it is created, and a process that is to map granted pages when it attaches, with one
//! of four seats. When a process is gone, its seats' marks are cleared, as Xen unmaps the pages of
//! a domain that died. A domain that is gone leaves its memory to those who have it mapped.
//!
//! **Event channels.** A channel has two ends, each a port of a domain, and two eventfds, one for
//! each direction. An end that is closed leaves the other one unbound, for the same domain to bind
//! again: so a back-end that was restarted joins the channel of a front-end that kept running. A
//! new end is signalled once when it is bound, since it may have missed something.

use manyring_memory::simgrant::{GRANT_ENTRY_SIZE, GrantTable, SEATS};
use manyring_wire::xen::hypercall::{Hypercall, Outcome};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most domains at a time.
const DOMAINS_MAX: usize = 1024;
/// Most pages of a domain: 16 GiB.
const PAGES_MAX: u32 = 1 << 22;
/// Most entries of a grant table: as many as 128 grant frames of a real domain have.
const ENTRIES_MAX: u32 = 1 << 16;
/// Most ports of a connection: enough for sixteen queues of sixteen disks.
const PORTS_MAX: usize = 256;
const PAGE_SIZE: u64 = 4096;

/// A domain and its memory.
#[derive(Debug)]
struct Domain {
    file: OwnedFd,
    table: GrantTable,
    /// Which connections map its pages.
    seats: [Option<u64>; SEATS as usize],
}

/// A port of a domain.
#[derive(Debug)]
struct DomainPort {
    owner: u64,
    /// The domain at the other end.
    remote: u16,
    /// The port at the other end, while that is bound.
    peer: Option<u32>,
    /// The eventfd that is signalled for this end, and the one for the other end.
    own: Arc<OwnedFd>,
    other: Arc<OwnedFd>,
}

/// An answer: words, and file descriptors.
pub(super) type Reply = (Outcome, Vec<OwnedFd>);

/// Domains, seats and ports.
#[derive(Debug, Default)]
pub(super) struct SimulatedHypervisor {
    domains: BTreeMap<u16, Domain>,
    /// By domain and port.
    ports: BTreeMap<(u16, u32), DomainPort>,
    /// The domain of each connection that is not domain 0.
    callers: BTreeMap<u64, u16>,
}

impl SimulatedHypervisor {
    /// The domain for which a connection speaks; 0 by default.
    fn domain_of(&self, caller: u64) -> u16 {
        self.callers.get(&caller).copied().unwrap_or(0)
    }

    /// Serves a call.
    pub(super) fn serve(&mut self, caller: u64, call: Hypercall) -> Reply {
        let served = match call {
            Hypercall::Create { domain, pages, entries } => {
                self.create(caller, domain, pages, entries)
            }
            Hypercall::Attach { domain } => self.attach(caller, domain),
            Hypercall::Detach { domain } => self.detach(caller, domain),
            Hypercall::AllocUnbound { remote } => self.alloc_unbound(caller, remote),
            Hypercall::Bind { remote, port } => self.bind(caller, remote, port),
            Hypercall::Close { port } => self.close(caller, port),
        };
        served.unwrap_or_else(refused)
    }

    /// Handles the end of a connection: closes its ports, frees its seats and ends its domain.
    /// Returns the domain.
    pub(super) fn disconnect(&mut self, caller: u64) -> Option<u16> {
        let ports: Vec<_> = self.ports.iter().filter(|(_, port)| port.owner == caller).collect();
        let ports: Vec<_> = ports.into_iter().map(|(place, _)| *place).collect();
        ports.into_iter().for_each(|(domain, port)| self.close_port(domain, port));
        for domain in self.domains.values_mut() {
            domain.free_seats(caller);
        }
        let domain = self.callers.remove(&caller)?;
        self.domains.remove(&domain);
        Some(domain)
    }

    fn create(
        &mut self,
        caller: u64,
        domain: u16,
        pages: u32,
        entries: u32,
    ) -> Result<Reply, Errno> {
        let table_size = u64::from(entries) * GRANT_ENTRY_SIZE as u64;
        let size = u64::from(pages) * PAGE_SIZE;
        if domain == 0 || entries == 0 || entries > ENTRIES_MAX || pages > PAGES_MAX {
            return Err(Errno::INVAL);
        }
        if table_size > size {
            return Err(Errno::INVAL);
        }
        if self.domain_of(caller) != 0 || self.domains.contains_key(&domain) {
            return Err(Errno::EXIST);
        }
        if self.domains.len() >= DOMAINS_MAX {
            return Err(Errno::NOSPC);
        }
        let file = memfd_create("domain", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, size)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let table = GrantTable::of_file(&file, entries).map_err(|_| Errno::NOMEM)?;
        let copy = file.try_clone().map_err(|_| Errno::MFILE)?;
        let seats = [None; SEATS as usize];
        self.domains.insert(domain, Domain { file, table, seats });
        self.callers.insert(caller, domain);
        Ok((Outcome { first: entries, ..Outcome::default() }, vec![copy]))
    }

    fn attach(&mut self, caller: u64, domain: u16) -> Result<Reply, Errno> {
        if self.domain_of(caller) != 0 {
            return Err(Errno::PERM);
        }
        let domain = self.domains.get_mut(&domain).ok_or(Errno::SRCH)?;
        let seat = domain.seats.iter().position(Option::is_none).ok_or(Errno::BUSY)?;
        let file = domain.file.try_clone().map_err(|_| Errno::MFILE)?;
        domain.seats[seat] = Some(caller);
        let second = u32::try_from(seat).unwrap_or(0);
        Ok((Outcome { errno: 0, first: domain.table.len(), second }, vec![file]))
    }

    fn detach(&mut self, caller: u64, domain: u16) -> Result<Reply, Errno> {
        self.domains.get_mut(&domain).ok_or(Errno::SRCH)?.free_seats(caller);
        Ok(Reply::default())
    }

    /// The lowest free port of a domain, from 1 on.
    fn free_port(&self, caller: u64) -> Result<u32, Errno> {
        let domain = self.domain_of(caller);
        if self.ports.values().filter(|port| port.owner == caller).count() >= PORTS_MAX {
            return Err(Errno::NOSPC);
        }
        let taken = self.ports.range((domain, 0)..=(domain, u32::MAX)).map(|((_, port), _)| *port);
        let free = (1..).zip(taken).find(|(free, taken)| free != taken).map(|(free, _)| free);
        let count = self.ports.range((domain, 0)..=(domain, u32::MAX)).count();
        Ok(free.unwrap_or(u32::try_from(count).map_err(|_| Errno::NOSPC)? + 1))
    }

    fn alloc_unbound(&mut self, caller: u64, remote: u16) -> Result<Reply, Errno> {
        let port = self.free_port(caller)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Arc::new);
        let (own, other) = (event()?, event()?);
        let ends = DomainPort { owner: caller, remote, peer: None, own, other };
        self.open(caller, port, ends)
    }

    fn bind(&mut self, caller: u64, remote: u16, port: u32) -> Result<Reply, Errno> {
        let (domain, local) = (self.domain_of(caller), self.free_port(caller)?);
        let far = self.ports.get_mut(&(remote, port)).ok_or(Errno::INVAL)?;
        if far.remote != domain || far.peer.is_some() || (remote, port) == (domain, local) {
            return Err(Errno::INVAL);
        }
        let (own, other) = (far.other.clone(), far.own.clone());
        let ends = DomainPort { owner: caller, remote, peer: Some(port), own, other };
        signal(&ends.own);
        let reply = self.open(caller, local, ends)?;
        if let Some(far) = self.ports.get_mut(&(remote, port)) {
            far.peer = Some(local);
        }
        Ok(reply)
    }

    fn open(&mut self, caller: u64, port: u32, ends: DomainPort) -> Result<Reply, Errno> {
        let copy = |fd: &OwnedFd| fd.try_clone().map_err(|_| Errno::MFILE);
        let fds = vec![copy(&ends.own)?, copy(&ends.other)?];
        self.ports.insert((self.domain_of(caller), port), ends);
        Ok((Outcome { first: port, ..Outcome::default() }, fds))
    }

    fn close(&mut self, caller: u64, port: u32) -> Result<Reply, Errno> {
        let domain = self.domain_of(caller);
        let ends = self.ports.get(&(domain, port)).ok_or(Errno::INVAL)?;
        if ends.owner != caller {
            return Err(Errno::PERM);
        }
        self.close_port(domain, port);
        Ok(Reply::default())
    }

    fn close_port(&mut self, domain: u16, port: u32) {
        let Some(DomainPort { remote, peer: Some(peer), .. }) = self.ports.remove(&(domain, port))
        else {
            return;
        };
        if let Some(far) = self.ports.get_mut(&(remote, peer)) {
            far.peer = None;
        }
    }
}

impl Domain {
    /// Frees all seats of a connection, which maps nothing any more.
    fn free_seats(&mut self, caller: u64) {
        for (number, seat) in (0..SEATS).zip(&mut self.seats) {
            if *seat == Some(caller) {
                *seat = None;
                self.table.clear_seat(number);
            }
        }
    }
}

/// Signals an eventfd. One whose count is full is signalled already.
fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// The answer to a call that fails.
pub(super) fn refused(errno: Errno) -> Reply {
    (Outcome { errno: errno.raw_os_error().unsigned_abs(), ..Outcome::default() }, Vec::new())
}

#[cfg(test)]
mod tests;

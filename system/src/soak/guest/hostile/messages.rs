//! Tricks with messages: pieces of them, fds that are odd, memory that moves or is cut away.

use super::{Driver, Hostile, Played};
use manyring_driver::hostile::{HeldLock, OddFd, fill_eventfd};
use manyring_driver::wire::vhost_user::{FLAG_VERSION, Header, PROTOCOL_F_MQ};
use manyring_driver::{Arena, DriverError, DriverOp, FrontEnd, Virtqueue};
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, fallocate, ftruncate};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::time::Duration;

/// Vhost-user request numbers.
const SET_MEM_TABLE: u32 = 5;
const GET_FEATURES: u32 = 1;
const SET_VRING_KICK: u32 = 12;
const PAGE: u64 = 4096;
/// Waiters on each file descriptor. A process may have some thousand descriptors.
const WAITERS: usize = 250;

impl Driver {
    fn front(&mut self) -> &mut FrontEnd {
        match self {
            Self::Blk(driver) => &mut driver.front,
            Self::Net(driver) => &mut driver.front,
        }
    }

    fn arena(&self) -> &Arena {
        match self {
            Self::Blk(driver) => &driver.arena,
            Self::Net(driver) => &driver.arena,
        }
    }

    /// The first queue that the driver fills.
    fn vring(&mut self) -> Option<&mut Virtqueue> {
        match self {
            Self::Blk(driver) => driver.queues.first_mut().map(|queue| queue.vring()),
            Self::Net(driver) => driver.pairs.first_mut().map(|pair| pair.tx.vring()),
        }
    }

    /// Keeps the device at work: requests or frames of which nobody looks at the outcome.
    fn work(&mut self) -> Played {
        match self {
            Self::Blk(driver) => {
                let queue = &mut driver.queues[0];
                while queue.take().is_some() {}
                while queue.submit(DriverOp::Read { sector: 0, len: 32 << 10 })?.is_some() {}
                queue.publish()?;
            }
            Self::Net(driver) => {
                let tx = &mut driver.pairs[0].tx;
                while tx.send(&manyring_driver::wire::net::RawNetHeader::default(), &[255; 200])? {}
                tx.publish(0)?;
            }
        }
        Ok(())
    }
}

/// The start of a message, or a whole one without its answer being read, and then nothing.
pub(super) fn half_messages(hostile: &mut Hostile<'_>) -> Played {
    let mut front = hostile.front()?;
    let header = Header { request: SET_MEM_TABLE, flags: FLAG_VERSION, size: 264 }.emit();
    match hostile.random.below(4) {
        0 => front.send_bytes(&header[..5], &[])?,
        1 => front.send_bytes(&header, &[])?,
        2 => {
            let odd = OddFd::File.open()?;
            front.send_bytes(&[&header[..], &[0; 100]].concat(), &[odd.fd.as_fd()])?;
        }
        _ => {
            // Answers that nobody reads fill the socket.
            let ask = Header { request: GET_FEATURES, flags: FLAG_VERSION, size: 0 }.emit();
            front.stream().set_nonblocking(true)?;
            while !hostile.is_over() && front.send_bytes(&ask, &[]).is_ok() {}
        }
    }
    hostile.wait(Duration::from_secs(1));
    Ok(())
}

/// Sessions that begin and end as fast as they can.
pub(super) fn reconnect_storm(hostile: &mut Hostile<'_>) -> Played {
    while !hostile.is_over() {
        let mut front = hostile.front()?;
        if hostile.random.below(2) == 0 {
            front.send_message(GET_FEATURES, &[], &[])?;
        }
        if hostile.random.below(8) == 0 {
            drop(front);
            drop(hostile.driver()?);
        }
    }
    Ok(())
}

/// Odd fds where the doorbells of a running ring are due. The daemon holds the last copy.
pub(super) fn odd_doorbells(hostile: &mut Hostile<'_>) -> Played {
    while !hostile.is_over() {
        let mut driver = hostile.driver()?;
        let odd = hostile.random.pick(&OddFd::ALL).open()?;
        let request = SET_VRING_KICK + u32::try_from(hostile.random.below(3)).unwrap_or(0);
        driver.work()?;
        // No acknowledgement is asked for: our copy must be gone before the daemon closes its own.
        let sent = driver.front().send_message(request, &0u64.to_ne_bytes(), &[odd.fd.as_fd()]);
        drop(odd.fd);
        sent?;
        for _ in 0..10 {
            driver.work()?;
            hostile.wait(Duration::from_millis(10));
        }
        drop(driver);
        // The other end goes last: while it is there, the close of a lingering socket waits.
        hostile.pause();
    }
    Ok(())
}

/// Odd fds as memory, as the back-end channel, and with messages that have none.
pub(super) fn unexpected_fds(hostile: &mut Hostile<'_>) -> Played {
    while !hostile.is_over() {
        let mut front = hostile.front()?;
        front.negotiate(0, 0, PROTOCOL_F_MQ)?;
        let odd = hostile.random.pick(&OddFd::ALL).open()?;
        let fd = [odd.fd.as_fd()];
        let sent = match hostile.random.below(4) {
            0 => {
                let arena = Arena::new(1 << 20)?;
                let table: Vec<_> =
                    arena.table().into_iter().map(|(region, _)| (region, fd[0])).collect();
                front.set_mem_table(&table)
            }
            1 => front.send_message(21, &[], &fd),
            2 => front.send_bytes(&[1], &fd),
            _ => front.send_message(GET_FEATURES, &[], &fd),
        };
        drop(odd.fd);
        sent?;
        hostile.pause();
    }
    Ok(())
}

/// Regions added, removed and replaced while the rings run on them.
pub(super) fn moved_memory(hostile: &mut Hostile<'_>) -> Played {
    while !hostile.is_over() {
        let mut driver = hostile.driver()?;
        for _ in 0..20 {
            driver.work()?;
            let (region, file) = {
                let table = driver.arena().table();
                (table[0].0, table[0].1.try_clone_to_owned()?)
            };
            let front = driver.front();
            match hostile.random.below(4) {
                0 => {
                    let extra = Arena::new(1 << 20)?;
                    let mut entry = extra.table()[0];
                    entry.0.guest_addr += 1 << 40;
                    entry.0.user_addr += 1 << 40;
                    front.add_mem_region(&entry)?;
                    front.remove_mem_region(&entry.0)?;
                }
                1 => front.set_mem_table(&[(region, file.as_fd())])?,
                2 => {
                    let mut moved = region;
                    moved.guest_addr += 1 << 40;
                    front.set_mem_table(&[(moved, file.as_fd())])?;
                    front.set_mem_table(&[(region, file.as_fd())])?;
                }
                _ => {
                    front.remove_mem_region(&region)?;
                    front.add_mem_region(&(region, file.as_fd()))?;
                }
            }
            if hostile.is_over() {
                break;
            }
        }
    }
    Ok(())
}

/// The file behind the memory becomes empty while the rings run on it, and whole again.
pub(super) fn cut_memory(hostile: &mut Hostile<'_>) -> Played {
    while !hostile.is_over() {
        let mut driver = hostile.driver()?;
        driver.work()?;
        let table = driver.arena().table();
        let (size, file) = (table[0].0.size, table[0].1.try_clone_to_owned()?);
        // From here on nothing of the arena may be touched: we would end by SIGBUS.
        let kick = driver.vring().ok_or(DriverError::RingFull)?.kick_fd().try_clone_to_owned()?;
        let keep = hostile.random.below(size);
        ftruncate(&file, keep)?;
        rustix::io::write(&kick, &1u64.to_ne_bytes())?;
        hostile.wait(Duration::from_millis(20));
        ftruncate(&file, size)?;
        rustix::io::write(&kick, &1u64.to_ne_bytes())?;
        hostile.wait(Duration::from_millis(50));
    }
    Ok(())
}

/// Holes are punched into the memory, those of the rings among them, while the rings run on it.
pub(super) fn punched_memory(hostile: &mut Hostile<'_>) -> Played {
    while !hostile.is_over() {
        let mut driver = hostile.driver()?;
        driver.work()?;
        let table = driver.arena().table();
        let (size, file) = (table[0].0.size, table[0].1.try_clone_to_owned()?);
        // From here on the driver does not know its own rings any more.
        let kick = driver.vring().ok_or(DriverError::RingFull)?.kick_fd().try_clone_to_owned()?;
        for _ in 0..10 {
            let at = hostile.random.below(size / PAGE) * PAGE;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&file, flags, at, size - at)?;
            rustix::io::write(&kick, &1u64.to_ne_bytes())?;
            hostile.wait(Duration::from_millis(5));
        }
    }
    Ok(())
}

/// A lock of the kernel is held that the close of the call needs, for a while after the session.
pub(super) fn held_lock(hostile: &mut Hostile<'_>) -> Played {
    let mut driver = hostile.driver()?;
    let (_reader, writer) = rustix::pipe::pipe()?;
    driver.front().set_vring_call(0, Some(writer.as_fd()))?;
    driver.work()?;
    let hold = HeldLock::pipe(writer)?;
    drop(driver);
    hostile.pause();
    drop(hold);
    Ok(())
}

/// Many waiters on kick, call and the session's socket, all of which each write walks.
pub(super) fn many_waiters(hostile: &mut Hostile<'_>) -> Played {
    let mut driver = hostile.driver()?;
    let socket = driver.front().stream().try_clone().map_err(DriverError::Io)?;
    let mut sets = waiters(&socket)?;
    let vring = driver.vring().ok_or(DriverError::RingFull)?;
    sets.append(&mut waiters(vring.kick_fd())?);
    sets.append(&mut waiters(vring.call_fd())?);
    while !hostile.is_over() {
        driver.work()?;
        driver.front().features()?;
        hostile.wait(Duration::from_millis(1));
    }
    Ok(())
}

/// Sets of epoll that watch a file descriptor.
fn waiters(fd: impl AsFd) -> Result<Vec<OwnedFd>, DriverError> {
    let watch = || {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&set, fd.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(set)
    };
    (0..WAITERS).map(|_| watch()).collect()
}

/// A call that the daemon writes to while it is full and blocks: an eventfd whose `O_NONBLOCK` is
/// taken away again and again, or a socket whose buffer is full.
pub(super) fn blocking_call(hostile: &mut Hostile<'_>) -> Played {
    let mut driver = hostile.driver()?;
    let is_socket = hostile.random.below(3) == 0;
    let (_near, far) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if is_socket {
        driver.front().set_vring_call(0, Some(far.as_fd()))?;
    }
    let call = driver.vring().ok_or(DriverError::RingFull)?.call_fd().try_clone_to_owned()?;
    while !hostile.is_over() {
        driver.vring().ok_or(DriverError::RingFull)?.queue().enable_notifications();
        fill_eventfd(&call)?;
        driver.work()?;
    }
    Ok(())
}

//! `SocketReplacer`: the thread that replaces the socket of a port which lends guests' pages to the
//! device.
//!
//! ```text
//! a half sends from pages that the device has not   register them: make a new socket
//! memory has changed, or the half has ended         a new socket with the new pages, or none
//! frames must come back, or do not come             wait 100 ms for them; make a new socket
//!
//! new socket:  map and pin its pages (the old one goes on)
//!              close the old one; bind the new one, again and again while the queue is busy
//!              bound: the device has let go of the old one's pages; its frames are back
//! ```
//! 1. A device has frames whose memory it reads. A frame comes back when the device says that it is
//!    done, or when its socket is closed *and* another one is bound to the queue: the kernel closes
//!    a socket a little after the call, and then the queue is busy.
//! 2. Frames that are with a driver when its interface goes down are never finished. The half
//!    notices that nothing has come back for a second.
//! 3. To pin a gigabyte of memory that was never touched takes seconds: no worker does it. Until it
//!    is done frames are copied.

use super::Shared;
use super::busy::while_busy;
use super::pair::Pair;
use super::socket::{Wanted, XdpSocket};
use manyring_memory::{Duty, GuestMemory, take_duty};
use rustix::io::Errno;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often the thread checks whether the frames that must return are back, and the pause between.
const DRAIN_LOOKS: u32 = 50;
const DRAIN_INTERVAL: Duration = Duration::from_millis(2);

/// An order for the replacer thread.
#[derive(Debug, Default)]
pub(super) struct ReplaceRequest {
    /// The device shall read the pages of this snapshot; `Some(None)`: of no guest.
    pub(super) memory: Option<Option<Arc<GuestMemory>>>,
    /// All frames that the device has must return to their half.
    pub(super) must_return: bool,
    /// The device has lost frames: none has come back for a second.
    pub(super) is_stuck: bool,
    ends: bool,
}

/// Carries the orders of the sending halves to the replacer thread, and gives the halves the length
/// from which on frames are lent.
#[derive(Debug)]
pub(super) struct ReplaceRequests {
    request: Mutex<ReplaceRequest>,
    changed: Condvar,
    /// Bytes: a frame of at least this length is lent to the device, and a shorter one copied.
    pub(super) threshold: usize,
}

impl ReplaceRequests {
    pub(super) fn new(threshold: usize) -> Self {
        Self { request: Mutex::default(), changed: Condvar::new(), threshold }
    }

    pub(super) fn request(&self, change: impl FnOnce(&mut ReplaceRequest)) {
        change(&mut self.request.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_one();
    }

    /// True if the port is being dropped, so that the thread must end.
    fn is_ending(&self) -> bool {
        self.request.lock().unwrap_or_else(PoisonError::into_inner).ends
    }

    /// Waits for an order.
    fn next(&self) -> ReplaceRequest {
        let request = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        let is_idle = |request: &mut ReplaceRequest| {
            !request.ends && request.memory.is_none() && !request.must_return && !request.is_stuck
        };
        let woken = self.changed.wait_while(request, is_idle);
        std::mem::take(&mut *woken.unwrap_or_else(PoisonError::into_inner))
    }
}

/// The thread, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct SocketReplacer {
    pub(super) requests: Arc<ReplaceRequests>,
    thread: Option<JoinHandle<()>>,
}

impl SocketReplacer {
    /// # Errors
    /// `EAGAIN`: the host has no thread to give.
    pub(super) fn start(shared: Arc<Shared>, threshold: usize) -> Result<Self, Errno> {
        let requests = Arc::new(ReplaceRequests::new(threshold));
        let thread = std::thread::Builder::new().name(format!("xdp-{}", shared.name));
        let asked = requests.clone();
        let thread = thread.spawn(move || run(&shared, &asked)).map_err(|_| Errno::AGAIN)?;
        Ok(Self { requests, thread: Some(thread) })
    }
}

impl Drop for SocketReplacer {
    fn drop(&mut self) {
        self.requests.request(|request| request.ends = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(shared: &Shared, requests: &ReplaceRequests) {
    take_duty(Duty::Both);
    // The number of the snapshot whose pages the device has, and of the last one that it refused.
    let (mut has, mut refused) = (0, 0);
    let Some(pair) = shared.pairs.first() else { return };
    loop {
        let request = requests.next();
        if request.ends {
            return;
        }
        let is_new = match &request.memory {
            Some(Some(memory)) => memory.id() != has && memory.id() != refused,
            Some(None) => has != 0,
            None => false,
        };
        if is_new || request.is_stuck || (request.must_return && !drains(pair)) {
            let memory = request.memory.flatten();
            let has_pages = replace(shared, pair, memory.as_deref(), requests);
            let id = memory.map_or(0, |memory| memory.id());
            has = if has_pages { id } else { 0 };
            if id != 0 && !has_pages {
                refused = id;
            }
        }
    }
}

/// True if all frames come back within 100 ms.
fn drains(pair: &Pair) -> bool {
    for _ in 0..DRAIN_LOOKS {
        let mut outlet = pair.tx();
        let Some(end) = &mut outlet.end else { return true };
        end.reap();
        if end.with_device() == 0 {
            return true;
        }
        drop(outlet);
        std::thread::sleep(DRAIN_INTERVAL);
    }
    false
}

/// Replaces the socket by one that has these pages. True: the new socket has them.
fn replace(
    shared: &Shared,
    pair: &Pair,
    memory: Option<&GuestMemory>,
    requests: &ReplaceRequests,
) -> bool {
    let state = shared.state();
    let Some(wanted) = shared.wanted(0) else {
        // The interface was deleted, so that no device has any frame.
        pair.let_go(pair.close(), true);
        return false;
    };
    let (socket, has_pages) = make(shared, wanted, memory);
    drains(pair);
    if let Some(program) = &state.program {
        let _ = program.set(0, None);
    }
    let left = pair.close();
    let socket = socket.and_then(|socket| {
        // When the queue can be bound again, the device has let go of all frames.
        while let Err(errno) = socket.bind() {
            match errno {
                Errno::BUSY if requests.is_ending() => return Err(errno),
                Errno::BUSY => {
                    tracing::warn!(name = shared.name, "its queue is still in use; waiting")
                }
                errno => return Err(errno),
            }
        }
        Ok(socket)
    });
    let opened = match socket {
        Ok(socket) => pair.open(socket, left),
        Err(errno) => {
            // The interface is gone, or memory is short: only wait until the device has let go.
            let _ = while_busy(|| XdpSocket::copying(wanted)?.bind());
            pair.let_go(left, true);
            Err(errno)
        }
    };
    if let Err(errno) = opened {
        tracing::warn!(name = shared.name, %errno, "reopening its queue failed");
        return false;
    }
    if state.attached.first() == Some(&true)
        && let (Some(program), Some(end)) = (&state.program, &pair.tx().end)
        && let Err(errno) = program.set(0, Some(end.fd()))
    {
        tracing::warn!(name = shared.name, %errno, "directing frames to the queue failed");
    }
    has_pages
}

/// Makes a socket that has these pages; if they cannot be registered, one without pages.
fn make(
    shared: &Shared,
    wanted: Wanted,
    memory: Option<&GuestMemory>,
) -> (Result<XdpSocket, Errno>, bool) {
    if let Some(memory) = memory {
        match XdpSocket::lending(wanted, Some(memory)) {
            Ok(socket) => return (Ok(socket), true),
            Err(errno) => tracing::warn!(
                name = shared.name,
                %errno,
                "zero_copy: registering guest memory failed; frames are copied"
            ),
        }
    }
    (XdpSocket::lending(wanted, None), false)
}

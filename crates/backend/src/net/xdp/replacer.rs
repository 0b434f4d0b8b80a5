//! `SocketReplacer`: the thread that replaces the socket of a port with zero-copy.
//!
//! ```text
//! a half sends from pages that the card has not     register them: make a new socket
//! memory has changed, or the half has ended         a new socket with the new pages, or none
//! frames must come back, or do not come             wait 100 ms for them; make a new socket
//!
//! new socket:  map and pin its pages (the old one is still in use)
//!              close the old one; bind the new one, again and again while the queue is busy
//!              bound: the card no longer reads the old one's pages; its frames are back
//! ```
//! 1. A card reads the memory of frames that it has. A frame comes back when the card reports that
//!    it is done, or when its socket is closed *and* another one is bound to the queue: the kernel
//!    closes a socket a little after the call, and until then the queue is busy.
//! 2. Frames that a driver has when its interface goes down are never finished. The half notices
//!    that nothing has come back for a second.
//! 3. To pin a gigabyte of memory that was never touched takes seconds: no worker does it. Until it
//!    is done, frames are copied.

use super::Shared;
use super::busy::while_busy;
use super::pair::Pair;
use super::socket::{Wanted, XdpSocket};
use manyring_memory::{Duty, GuestMemory, take_duty};
use rustix::io::Errno;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The number of checks whether all frames are back, and the pause between two.
const DRAIN_LOOKS: u32 = 50;
const DRAIN_INTERVAL: Duration = Duration::from_millis(2);

/// A request to the replacer thread.
#[derive(Debug, Default)]
pub(super) struct ReplaceRequest {
    /// Register the pages of this memory snapshot; `Some(None)`: register no guest's pages.
    pub(super) memory: Option<Option<Arc<GuestMemory>>>,
    /// True: all frames that the card has must return to their half.
    pub(super) must_return: bool,
    /// True: the card has lost frames, since none has come back for a second.
    pub(super) is_stuck: bool,
    ends: bool,
}

/// Passes requests of the sending halves to the replacer thread, and has the length from which on
/// frames are lent.
#[derive(Debug)]
pub(super) struct ReplaceRequests {
    request: Mutex<ReplaceRequest>,
    changed: Condvar,
    /// Frames of at least so many bytes are lent to the card, shorter ones are copied.
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

    /// Waits for a request.
    fn next(&self) -> ReplaceRequest {
        let request = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        let is_idle = |request: &mut ReplaceRequest| {
            !request.ends && request.memory.is_none() && !request.must_return && !request.is_stuck
        };
        let woken = self.changed.wait_while(request, is_idle);
        std::mem::take(&mut *woken.unwrap_or_else(PoisonError::into_inner))
    }
}

/// The replacer thread, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct SocketReplacer {
    pub(super) requests: Arc<ReplaceRequests>,
    thread: Option<JoinHandle<()>>,
}

impl SocketReplacer {
    /// Starts the thread.
    ///
    /// # Errors
    /// `EAGAIN`: the host cannot start a thread.
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
    // IDs of the memory snapshot whose pages are registered, and of the last one that could not be.
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

/// Waits for the card's frames. Returns true if all come back within 100 ms.
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

/// Replaces the socket by one with these pages. Returns true if the new socket has them.
fn replace(
    shared: &Shared,
    pair: &Pair,
    memory: Option<&GuestMemory>,
    requests: &ReplaceRequests,
) -> bool {
    let state = shared.state();
    let Some(wanted) = shared.wanted(&state, 0) else {
        // The interface was deleted, so the card has no frame.
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
        // Once the queue can be bound again, the card no longer reads any frame.
        while let Err(errno) = socket.bind() {
            match errno {
                Errno::BUSY if requests.is_ending() => return Err(errno),
                Errno::BUSY => {
                    tracing::warn!(
                        name = shared.name,
                        "zero_copy: the queue is still in use by the former socket; waiting"
                    )
                }
                errno => return Err(errno),
            }
        }
        Ok(socket)
    });
    let opened = match socket {
        Ok(socket) => pair.open(socket, left),
        Err(errno) => {
            // The interface is deleted, or memory is short: only wait until the card reads no frame
            // any more.
            let _ = while_busy(|| XdpSocket::copying(wanted)?.bind());
            pair.let_go(left, true);
            Err(errno)
        }
    };
    if let Err(errno) = opened {
        tracing::warn!(name = shared.name, %errno, "zero_copy: reopening the queue failed");
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

/// Makes a socket with these pages; if they cannot be registered, one without pages. Returns true
/// if it has them.
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

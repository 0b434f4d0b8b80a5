//! Xen without Xen: a server for xenstore, grants and event channels between processes.
//!
//! ```text
//! back-end (domain 0) --- SOCKET ------------ xenstore: one tree, watches, transactions
//!                     \-- SOCKET.hypercall -- memory of domains, seats, event channels
//! front-end (domain N) -- SOCKET.hypercall -- the same calls; gives the domain its own xenstore
//! ```
//! **SOCKET** speaks xenstore's protocol as xenstored's socket does, for domain 0: any client of
//! xenstored can use it. **SOCKET.hypercall** stands for the hypervisor, with the calls of
//! `wire::xen::hypercall`; file descriptors come with the answers (`SCM_RIGHTS`):
//!
//! * *Grants are shared memory.* `Create` makes a domain: a memfd that begins with the domain's
//!   grant table. The domain gets the file; a back-end gets it by `Attach`, and maps the pages that
//!   the table lends it (`memory::simgrant` has the layout and the rules).
//! * *Event channels are eventfds*, two for a channel, one each way: `AllocUnbound` makes them for
//!   the domain, `Bind` gives the same two to the other end.
//! * *A domain's xenstore* is a third kind of connection: one end of a socket pair, which `Create`
//!   answers with. It speaks as that domain, with its permissions and relative paths; on real Xen
//!   it is a page of the domain's memory.
//!
//! A connection that has called `Create` is that domain until it ends, and the domain ends with it
//! (`@releaseDomain` fires; its nodes stay, for the toolstack to remove). All others are domain 0,
//! which is trusted as on real Xen. The harm that a domain does costs that domain only; the bounds
//! stand where they are kept: `tree.rs`, `transaction.rs`, `store.rs`, `hypervisor.rs`, `serve.rs`.

mod calls;
mod client;
mod domain;
mod hypervisor;
mod serve;
mod store;
mod toolstack;
mod transaction;
mod tree;

use crate::DriverError;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

pub use calls::{EventChannel, XenCalls};
pub use client::XenStore;
pub use domain::{XEN_PAGE_SIZE, XenDomain};
pub use toolstack::XenDisk;

/// The simulated Xen, on a thread of its own until this is dropped.
#[derive(Debug)]
pub struct SimXen {
    socket: PathBuf,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl SimXen {
    /// Listens on `socket` and on the socket for calls beside it.
    ///
    /// # Errors
    /// [`DriverError::Io`]: `EADDRINUSE` if something has one of the names already.
    pub fn start(socket: &Path) -> Result<Self, DriverError> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let listen = |path: &Path| -> std::io::Result<UnixListener> {
            let listener = UnixListener::bind(path)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let store_socket = listen(socket)?;
        let call_socket = listen(&calls::call_socket(socket)).inspect_err(|_| {
            let _ = std::fs::remove_file(socket);
        })?;
        let mut sim = Self { socket: socket.to_owned(), stop, thread: None };
        let stop = sim.stop.try_clone()?;
        let server = serve::Server::new(stop, store_socket, call_socket);
        let thread = std::thread::Builder::new().name("xen".to_owned());
        sim.thread = Some(thread.spawn(move || server.run())?);
        Ok(sim)
    }

    /// The socket of xenstore.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for SimXen {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for path in [self.socket.clone(), calls::call_socket(&self.socket)] {
            let _ = std::fs::remove_file(path);
        }
    }
}

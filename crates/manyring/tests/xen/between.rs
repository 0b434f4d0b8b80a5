//! A relay between a daemon and xenstored.

use crate::support::process::TIMEOUT;
use crate::world::World;
use rustix::net::sockopt;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Stands between a daemon and xenstored: hands on what both say, as long as it lets them.
pub(crate) struct Between {
    listener: UnixListener,
    streams: Vec<UnixStream>,
    to: PathBuf,
}

impl Between {
    /// Listens at `at`, in the place of the xenstored of `world`.
    pub(crate) fn new(world: &World, at: &str) -> Self {
        let (at, to) = (world.path(at), world.path("xenstored"));
        let calls = |path: &Path| format!("{}.hypercall", path.display());
        std::os::unix::fs::symlink(calls(&to), calls(&at)).unwrap();
        let listener = UnixListener::bind(at).unwrap();
        // A daemon that does not connect is not waited for without an end.
        sockopt::set_socket_timeout(&listener, sockopt::Timeout::Recv, Some(TIMEOUT)).unwrap();
        Self { listener, streams: Vec::new(), to }
    }

    /// The next connection, of which nobody hears yet.
    pub(crate) fn accept(&self) -> UnixStream {
        self.listener.accept().expect("the daemon connects").0
    }

    pub(crate) fn hand_on(&mut self, daemon: UnixStream) {
        let xenstored = UnixStream::connect(&self.to).unwrap();
        for (from, to) in [(&daemon, &xenstored), (&xenstored, &daemon)] {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        }
        self.streams.extend([daemon, xenstored]);
    }

    /// Ends all connections.
    pub(crate) fn cut(&mut self) {
        for stream in self.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

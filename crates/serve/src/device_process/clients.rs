//! Clients of a device: connections of front-ends, each with the journal of its session, as the
//! supervisor sends them.

use super::Inside;
use crate::device_process::session_journal::{SupervisorJournal, Written};
use crate::supervisor_client::Outgoing;
use manyring_engine::aside;
use manyring_transport::vhost_user::{Client, SessionJournal, entries_max};
use rustix::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use tokio::net::UnixStream;
use tokio::sync::Mutex;

impl Inside {
    /// Has a device serve a client: `fds` are the connection and the journal. An invalid journal
    /// ends this client's session only.
    pub(super) fn connect(&mut self, name: &str, fds: Vec<OwnedFd>, number: u64) {
        let Some(device) = self.devices.get_mut(name) else { return };
        let Ok([socket, journal]) = <[OwnedFd; 2]>::try_from(fds) else { return };
        let (mut handed, outgoing) = (std::mem::take(&mut device.saved), self.outgoing.clone());
        let stream = StdStream::from(socket);
        let entries_max = entries_max(device.here.view.side.stats.count());
        let (saved, written) = match Written::resume(journal, entries_max, &mut handed) {
            Ok(resumed) => resumed,
            Err(problem) => {
                let problem = problem.as_str();
                tracing::warn!(
                    device = name,
                    problem,
                    "front-end disconnected: the journal of its session is invalid"
                );
                let gone = Outgoing::Gone { device: name.to_owned(), number };
                tokio::spawn(async move {
                    let end = move || {
                        let _ = stream.shutdown(std::net::Shutdown::Both);
                        drop((stream, handed));
                    };
                    aside(end).await;
                    let _ = outgoing.send(gone).await;
                });
                return;
            }
        };
        let (channel, bucket, quiesces) =
            (self.channel.clone(), self.bucket.clone(), self.quiesces.clone());
        let (named, written) = (name.to_owned(), Mutex::new(written));
        let journal = Arc::new(SupervisorJournal {
            device: named,
            number,
            channel,
            bucket,
            outgoing,
            quiesces,
            written,
        });
        // No entry of the journal names these descriptors: close them here, and have the supervisor
        // close its copies.
        if !handed.is_empty() {
            let journal = journal.clone();
            tokio::spawn(async move {
                aside(move || drop(handed)).await;
                journal.release_unused().await;
            });
        }
        let kept = Some((journal as Arc<dyn SessionJournal>, saved));
        let Ok(stream) = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream))
        else {
            return;
        };
        if let Err(refused) = device.clients.try_send(Client { stream, kept }) {
            tracing::warn!(device = name, "client refused: too many are waiting");
            tokio::spawn(aside(move || refuse(refused.into_inner())));
        }
    }
}

/// Closes a connection that no session serves. May block.
fn refuse(client: Client) {
    if let Ok(stream) = client.stream.into_std() {
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
    if let Some((journal, _)) = client.kept {
        journal.forget();
    }
}

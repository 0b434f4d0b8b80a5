//! `Tasks`: a task for each device, with a stop of its own.

use super::{AssembleError, Here};
use crate::times::TASKS_END;
use manyring_transport::vhost_user::{Endpoint, ServeOptions, serve};
use std::collections::HashMap;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The end of a task: whose it was, and why it ended.
pub(crate) type Ended = (String, Result<(), AssembleError>);

/// The tasks of the devices, by the name of the device.
#[derive(Debug, Default)]
pub struct Tasks {
    set: JoinSet<(u64, Ended)>,
    running: HashMap<String, Running>,
    /// The devices whose tasks were stopped and have not ended, by the number of the task.
    stopped: HashMap<u64, String>,
    next: u64,
}

#[derive(Debug)]
struct Running {
    number: u64,
    stop: watch::Sender<bool>,
    /// Closed when the task has ended: the task holds the sender.
    ended: watch::Receiver<()>,
}

impl Tasks {
    /// Starts the task of a device. `task` gets the signal by which it is stopped.
    pub fn start<F>(&mut self, device: &str, task: impl FnOnce(watch::Receiver<bool>) -> F)
    where
        F: Future<Output = Result<(), AssembleError>> + Send + 'static,
    {
        let (stop, stopped) = watch::channel(false);
        let (ends, ended) = watch::channel(());
        // On the heap by itself: a future that was given another one and waits for it has room for
        // that one twice.
        let (task, name, number) = (Box::pin(task(stopped)), device.to_owned(), self.next);
        self.next += 1;
        self.set.spawn(async move {
            let result = task.await;
            drop(ends);
            (number, (name, result))
        });
        self.running.insert(device.to_owned(), Running { number, stop, ended });
    }

    /// Serves an assembled device at this endpoint, until it is stopped or until its only session
    /// has ended (`one_off`).
    pub(crate) fn serve(&mut self, here: &Here, endpoint: Endpoint, options: ServeOptions) {
        let (device, connected) = (here.device.clone(), here.view.connected.clone());
        self.start(here.view.name(), |stop| async move {
            let at = endpoint_of(&endpoint);
            let served = serve(device, endpoint, options, connected, stop).await;
            served.map_err(|source| AssembleError::Socket { at, source })
        });
    }

    /// Stops the task of a device. The sender of the result is dropped when the task has ended:
    /// then the socket's name is removed, and a session has stopped its queues.
    pub fn stop(&mut self, device: &str) -> Option<watch::Receiver<()>> {
        let running = self.running.remove(device)?;
        running.stop.send_replace(true);
        self.stopped.insert(running.number, device.to_owned());
        Some(running.ended)
    }

    /// Waits until tasks that were stopped have ended, but no longer than [`TASKS_END`]: a task
    /// whose image is still in use ends later. False: not all tasks have ended.
    pub async fn await_ends(ending: Vec<watch::Receiver<()>>, devices: &[&str]) -> bool {
        let ended = async {
            for mut ending in ending {
                while ending.changed().await.is_ok() {}
            }
        };
        let have_ended = timeout(TASKS_END, ended).await.is_ok();
        if !have_ended {
            let devices = devices.join(", ");
            tracing::warn!(devices, "their files are still open; not waiting");
        }
        have_ended
    }

    /// Stops all tasks, and waits for none.
    pub fn stop_all(&self) {
        self.running.values().for_each(|running| {
            running.stop.send_replace(true);
        });
    }

    /// The devices whose tasks have not ended.
    pub fn names(&self) -> String {
        let all = self.running.keys().chain(self.stopped.values());
        all.map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    /// True if no task runs.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty()
    }

    /// The next task that has ended by itself; `None` if none runs any more.
    pub async fn ended(&mut self) -> Option<Ended> {
        while let Some(ended) = self.set.join_next().await {
            let Ok((number, (name, result))) = ended else { continue };
            self.stopped.remove(&number);
            // A stopped task may have a successor of the same name, which has another number.
            if self.running.get(&name).is_some_and(|running| running.number == number) {
                self.running.remove(&name);
                return Some((name, result));
            }
        }
        None
    }
}

/// The name of an endpoint in an error: its path, or `socket`.
fn endpoint_of(endpoint: &Endpoint) -> String {
    match endpoint {
        Endpoint::Listen { path, .. } | Endpoint::Connect { path } => path.display().to_string(),
        Endpoint::Bound(_) | Endpoint::Inherited { .. } | Endpoint::Handed(_) => {
            "socket".to_owned()
        }
    }
}

//! `Tasks`: runs one tokio task for each device, and can stop each of them alone.

use super::{AssembleError, Here};
use crate::times::TASKS_END;
use manyring_transport::vhost_user::{Endpoint, ServeOptions, serve};
use std::collections::HashMap;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The end of a task: the device's name, and the task's result.
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
    /// Closed when the task has ended, because the task holds the sender.
    ended: watch::Receiver<()>,
}

impl Tasks {
    /// Starts the task of a device. `task` gets a receiver that changes to true when the task must
    /// stop.
    pub fn start<F>(&mut self, device: &str, task: impl FnOnce(watch::Receiver<bool>) -> F)
    where
        F: Future<Output = Result<(), AssembleError>> + Send + 'static,
    {
        let (stop, stopped) = watch::channel(false);
        let (ends, ended) = watch::channel(());
        // Box the future: an async block that awaits a captured future holds it twice.
        let (task, name, number) = (Box::pin(task(stopped)), device.to_owned(), self.next);
        self.next += 1;
        self.set.spawn(async move {
            let result = task.await;
            drop(ends);
            (number, (name, result))
        });
        self.running.insert(device.to_owned(), Running { number, stop, ended });
    }

    /// Starts the task that serves a device at this endpoint, until it is stopped, or until its
    /// only session has ended (`one_off`).
    pub(crate) fn serve(&mut self, here: &Here, endpoint: Endpoint, options: ServeOptions) {
        let (device, connected) = (here.device.clone(), here.view.connected.clone());
        self.start(here.view.name(), |stop| async move {
            let at = endpoint_of(&endpoint);
            let served = serve(device, endpoint, options, connected, stop).await;
            served.map_err(|source| AssembleError::Socket { at, source })
        });
    }

    /// Tells the task of a device to stop. Returns a receiver that is closed when the task has
    /// ended: then the socket's name is removed, and the session has stopped its queues. `None`:
    /// there is no such task.
    pub fn stop(&mut self, device: &str) -> Option<watch::Receiver<()>> {
        let running = self.running.remove(device)?;
        running.stop.send_replace(true);
        self.stopped.insert(running.number, device.to_owned());
        Some(running.ended)
    }

    /// Waits until stopped tasks have ended, [`TASKS_END`] at most: a task whose image is still in
    /// use ends later. Returns false if tasks are left.
    pub async fn await_ends(ending: Vec<watch::Receiver<()>>, devices: &[&str]) -> bool {
        let ended = async {
            for mut ending in ending {
                while ending.changed().await.is_ok() {}
            }
        };
        let have_ended = timeout(TASKS_END, ended).await.is_ok();
        if !have_ended {
            let devices = devices.join(", ");
            tracing::warn!(devices, "stopping devices timed out; their files are still open");
        }
        have_ended
    }

    /// Tells all tasks to stop, and waits for none.
    pub fn stop_all(&self) {
        self.running.values().for_each(|running| {
            running.stop.send_replace(true);
        });
    }

    /// Returns the names of the devices whose tasks have not ended, for a message.
    pub fn names(&self) -> String {
        let all = self.running.keys().chain(self.stopped.values());
        all.map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    /// True if the task of no device runs.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty()
    }

    /// Waits for the next task that ends without having been stopped; `None`: no task is left.
    pub async fn ended(&mut self) -> Option<Ended> {
        while let Some(ended) = self.set.join_next().await {
            let Ok((number, (name, result))) = ended else { continue };
            self.stopped.remove(&number);
            // After a stop, another task of the same name may have started; the number tells them
            // apart.
            if self.running.get(&name).is_some_and(|running| running.number == number) {
                self.running.remove(&name);
                return Some((name, result));
            }
        }
        None
    }
}

/// Returns the text by which an error names an endpoint: its path, or `socket`.
fn endpoint_of(endpoint: &Endpoint) -> String {
    match endpoint {
        Endpoint::Listen { path, .. } | Endpoint::Connect { path } => path.display().to_string(),
        Endpoint::Bound(_) | Endpoint::Inherited { .. } | Endpoint::Handed(_) => {
            "socket".to_owned()
        }
    }
}

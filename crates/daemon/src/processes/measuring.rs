//! `Measuring`: the supervisor gets to know the export of an NBD server without reading what the
//! server sends. A process with the rights of a device process, and without a device, negotiates on
//! a socket of the supervisor, answers, and is killed.

use super::begin::{self, Spawned};
use super::channel::Channel;
use super::credentials;
use super::stderr_relay::StderrRelay;
use crate::assemble::remote::Measurer;
use crate::protocol::message::{self, Command, Report};
use crate::protocol::nbd::{ExportSpec, NbdFailure, NbdFound, NbdTarget};
use crate::reaper::reap;
use crate::times::{NBD_CONNECT, NBD_MEASURE};
use manyring_engine::Janitor;
use manyring_nbd::Connected;
use rustix::fd::OwnedFd;
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use tokio::runtime::Handle;
use tokio::time::timeout;

/// Starts a process for each measurement.
#[derive(Debug)]
pub(crate) struct Measuring {
    /// The options of the process.
    arguments: Arc<[OsString]>,
    runtime: Handle,
}

impl Measuring {
    /// Needs a tokio runtime, which serves the processes.
    pub(crate) fn new(arguments: Vec<OsString>) -> Self {
        Self { arguments: arguments.into(), runtime: Handle::current() }
    }
}

impl Measurer for Measuring {
    fn measure(
        &self,
        device: &str,
        connected: Connected,
        target: NbdTarget,
    ) -> Result<ExportSpec, NbdFailure> {
        let (tells, told) = sync_channel(1);
        let fds = credentials::given(connected).map_err(|errno| failed(errno.to_string()))?;
        let (arguments, process) = (self.arguments.clone(), format!("measure:{device}"));
        self.runtime.spawn(async move {
            let _ = tells.send(measured(arguments, process, target, fds).await);
        });
        // A runtime that ends drops the task.
        match told.recv() {
            Ok(Ok(NbdFound::Export(export))) => Ok(export),
            Ok(Ok(NbdFound::Failed(failure))) => Err(failure),
            Ok(Err(problem)) => Err(failed(problem)),
            Err(_) => Err(failed("internal error".to_owned())),
        }
    }
}

/// The failure of this host.
fn failed(problem: String) -> NbdFailure {
    let text = format!("is not asked for its disk: {problem}");
    NbdFailure { text, is_limit: false, passes: true }
}

async fn measured(
    arguments: Arc<[OsString]>,
    process: String,
    target: NbdTarget,
    fds: Vec<OwnedFd>,
) -> Result<NbdFound, String> {
    let started = begin::spawned(arguments).await;
    let Spawned { mut child, socket, pidfd: _ } = started.map_err(|error| error.to_string())?;
    let stderr = child.stderr.take();
    let relay = stderr.map(|stderr| StderrRelay::new().follow(stderr, process.clone()));
    let answer = async {
        let channel = Channel::new(socket, Arc::new(Janitor::of(&process)));
        let channel = channel.map_err(|error| error.to_string())?;
        timeout(NBD_MEASURE, answer(&channel, target, fds))
            .await
            .map_err(|_| "no answer in time")?
    };
    let answer = answer.await;
    let _ = child.kill();
    reap(child);
    if let Some(relay) = relay {
        relay.end().await;
    }
    answer
}

async fn answer(
    channel: &Channel,
    target: NbdTarget,
    fds: Vec<OwnedFd>,
) -> Result<NbdFound, String> {
    let limit_ms = u32::try_from(NBD_CONNECT.as_millis()).unwrap_or(u32::MAX);
    let command = message::emit(&Command::Export { target, limit_ms });
    let command = command.map_err(|error| error.to_string())?;
    channel.send(&command, &fds).await.map_err(|error| error.to_string())?;
    drop(fds);
    loop {
        let came = channel.receive().await.map_err(|error| error.to_string())?;
        let (bytes, _) = came.ok_or("its process has ended")?;
        match message::parse(&bytes).map_err(|error| error.to_string())? {
            Report::Ready {} => {}
            Report::Export { found } => return Ok(found),
            _ => return Err("its process answers something else".to_owned()),
        }
    }
}

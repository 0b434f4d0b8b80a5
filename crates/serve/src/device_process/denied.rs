//! Logs each system call that the sandbox of a device process has denied, with the thread that made
//! it.

use crate::channel::watched;
use crate::times::DENIED_LINE_EACH;
use manyring_backend::sys::denied::{self, DeniedCall};
use manyring_engine::{Rate, aside};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::OnceLock;
use tokio::io::Interest;
use tokio::time::{Instant, sleep_until};

/// Lines that are logged at once. After these, one line is logged in each [`DENIED_LINE_EACH`], so
/// that a compromised device process cannot fill the log.
const LINES_AT_ONCE: u32 = 20;

static EVENT: OnceLock<OwnedFd> = OnceLock::new();

/// Installs the handler that records denied calls. Must be called before the seccomp filter is in
/// force.
pub(super) fn watch() -> io::Result<()> {
    let event = denied::watch()?;
    let _ = EVENT.set(event);
    Ok(())
}

/// Logs denied calls, as long as the device process runs.
pub(super) async fn tell() {
    let event = EVENT.get().and_then(|event| event.try_clone().ok());
    let event = event.and_then(|event| watched(event, Interest::READABLE).ok());
    let Some(event) = event else { return std::future::pending().await };
    let mut rate = Rate::of(LINES_AT_ONCE, DENIED_LINE_EACH, Instant::now());
    loop {
        let read = |fd: &OwnedFd| Ok(rustix::io::read(fd, &mut [0; 8])?);
        if event.async_io(Interest::READABLE, read).await.is_err() {
            return std::future::pending().await;
        }
        let (calls, mut more) = denied::take();
        for (index, call) in calls.iter().enumerate() {
            if rate.due() > Instant::now() {
                more += calls.len() - index;
                break;
            }
            let DeniedCall { call, thread } = *call;
            let name = aside(move || name_of(thread)).await.unwrap_or_default();
            tracing::warn!(call, thread, name, "system call denied by the sandbox");
            rate.charge(DENIED_LINE_EACH, Instant::now());
        }
        if more > 0 {
            tracing::warn!(more, "further system calls denied by the sandbox");
        }
        // The calls of the time until the next line are counted, and named together.
        sleep_until(rate.due()).await;
    }
}

/// Takes the denied calls that were recorded and not logged yet; returns a log text for each.
pub(super) fn lines() -> Vec<String> {
    let (calls, _) = denied::take();
    let line =
        |DeniedCall { call, thread }: &DeniedCall| format!("call {call} of {}", name_of(*thread));
    calls.iter().map(line).collect()
}

/// Returns the name of a thread; empty if it has ended.
fn name_of(thread: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
    name.unwrap_or_default().trim_end().to_owned()
}

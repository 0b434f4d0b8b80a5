//! The watchdog: sends the service manager a message, as long as every worker progresses or sleeps.

use super::Service;
use manyring_engine::{Pool, Pulse};
use std::sync::Arc;

/// Number of checks of the workers within the manager's time limit.
const LOOKS: u32 = 4;

/// Sends the watchdog's messages for ever, on the control thread: if that thread hangs, no message
/// is sent.
///
/// A check that finds a worker in the same round as the check before sends no message. If the
/// worker has progressed by the next check, nothing happens; else the manager's time limit passes,
/// and the manager restarts the process.
pub async fn feed(service: &Service, pool: &Arc<Pool>) {
    let Some(limit) = service.watchdog else { return std::future::pending().await };
    let mut before = Vec::new();
    loop {
        tokio::time::sleep(limit / LOOKS).await;
        let now = pool.pulses();
        match hanging(&before, &now) {
            None => service.tell("WATCHDOG=1\n".to_owned()),
            Some(Pulse { worker, thread_id, .. }) => {
                let (device, limit) = (pool.device_at(worker), limit.as_secs_f64());
                let problem = "a worker is blocked; not feeding the watchdog";
                tracing::error!(worker, thread_id, device, limit, "{problem}");
            }
        }
        before = now;
    }
}

/// Returns a worker that neither progressed between two checks nor sleeps.
fn hanging(before: &[Pulse], now: &[Pulse]) -> Option<Pulse> {
    let hangs = |now: &&Pulse| before.iter().any(|before| now.hangs_since(before));
    now.iter().find(hangs).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_worker_that_neither_goes_on_nor_sleeps_is_found_among_others() {
        let pulse = |worker, beats| Pulse { worker, thread_id: 100, beats };
        let before = [pulse(0, 8), pulse(1, 13), pulse(2, 21)];
        assert_eq!(hanging(&[], &before), None);
        assert_eq!(hanging(&before, &[pulse(0, 8), pulse(1, 15), pulse(2, 22)]), None);
        let hung = [pulse(0, 10), pulse(1, 13), pulse(2, 23)];
        assert_eq!(hanging(&before, &hung), Some(pulse(1, 13)));
        // A thread that has taken its place begins anew.
        let new = Pulse { thread_id: 101, ..pulse(1, 13) };
        assert_eq!(hanging(&before, &[new]), None);
    }
}

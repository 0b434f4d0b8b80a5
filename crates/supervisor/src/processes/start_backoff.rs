//! Starts the device process of a domain, and starts it again after its end. A process that dies
//! soon after its start doubles the delay before the next start.

use super::domain_members::DomainMembers;
use super::process::DeviceProcess;
use super::process_state::State;
use super::{Processes, Serving, switches};
use manyring_config::plan::{SWITCH, XEN};
use manyring_serve::device_process::sandbox;
use manyring_serve::times::{PROCESS_BRIEF, PROCESS_SHOWN, START_BACKOFF, START_BACKOFF_MAX};
use std::sync::Arc;
use tokio::time::Instant;

impl Processes {
    /// Returns the device process of a domain, which is started if it does not run. Waits for the
    /// end of its predecessor as long as the kernel takes. A process that runs with fewer workers
    /// than the domain's devices need now is replaced. `None`: no device process may start now.
    pub(super) async fn running(&self, domain: &str) -> Option<Arc<DeviceProcess>> {
        loop {
            let workers = self.workers_for(domain);
            let of = |kept: &Serving| {
                let is_enough = kept.workers >= workers;
                (kept.process.clone(), kept.started, kept.pause, is_enough)
            };
            let before = self.lock().get(domain).map(of);
            let mut pause = START_BACKOFF;
            let mut members = None;
            if let Some((process, started, paused, is_enough)) = before {
                if process.serves() {
                    if is_enough {
                        return Some(process);
                    }
                    process.leave("a device of its domain needs more workers");
                }
                self.unless_paused(process.ended()).await;
                self.unless_paused(process.members().janitor.idle()).await;
                members = Some(process.members().clone());
                if !process.has_yielded() {
                    // A process that dies soon after its start doubles the pause before the next
                    // start.
                    if started.elapsed() < PROCESS_BRIEF {
                        pause = (paused * 2).min(START_BACKOFF_MAX);
                    }
                    self.unless_paused(tokio::time::sleep_until(started + paused)).await;
                }
            }
            if self.is_paused() {
                return None;
            }
            // A switch that is removed gets no device process.
            let switch = match domain.strip_prefix(SWITCH) {
                Some(name) => Some(self.switches.apart(name)?),
                None => None,
            };
            // Another device of the domain may have started the process during the waits above.
            let mut kept = self.lock();
            let starts = kept.get(domain).map_or(0, |kept| kept.starts);
            if kept.get(domain).is_some_and(|kept| kept.process.state() != State::Ended) {
                continue;
            }
            let members =
                members.unwrap_or_else(|| DomainMembers::of(domain, self.budgets.surplus(domain)));
            let is_xen = |domain: &str| domain.starts_with(XEN);
            let usual = if is_xen(domain) { &self.xen_arguments } else { &self.arguments };
            let arguments = sandbox::arguments_for(usual, workers);
            let process = DeviceProcess::start(domain, arguments, members, switch);
            if process.switch().is_some() {
                tokio::spawn(switches::keep_switch(process.clone()));
            }
            let (started, starts) = (Instant::now(), starts + 1);
            // Each boot of a Xen guest is a domain with a new number: forget the old domains.
            kept.retain(|name, kept| {
                let is_over =
                    kept.process.state() == State::Ended && kept.started.elapsed() > PROCESS_SHOWN;
                !(is_xen(name) && is_over)
            });
            kept.insert(domain.to_owned(), Serving { process, workers, started, starts, pause });
        }
    }
}

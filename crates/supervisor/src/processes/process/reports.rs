//! Handles the reports of a device process.

use super::{Device, DeviceProcess, is};
use crate::processes::domain_members::PendingRequest;
use crate::processes::journal_store::JournalStore;
use crate::processes::process_state::State;
use crate::processes::xen_line::XenLine;
use manyring_device::net::{Guest, NetSide, OwnedPort};
use manyring_protocol::message::{PrivilegedRequest, Report};
use manyring_serve::channel::Brought;
use manyring_serve::times::PROCESS_ANSWER;
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

impl DeviceProcess {
    /// Handles a report. An error ends the process.
    ///
    /// # Errors
    /// The process was not given the device, or may not send this report now.
    pub(in crate::processes) fn handle(
        &self,
        report: Report,
        mut fds: Brought,
    ) -> Result<(), String> {
        let missing = |device: &str| format!("it was not given {device:?}");
        if self.quiescing.is_done() && !matches!(report, Report::Counted { .. }) {
            return Err("it sent a report after it had quiesced".to_owned());
        }
        // A late report with descriptors is an error: nothing would bound how many wait to be
        // closed.
        if fds.is_empty() && self.is_late(&report) {
            return Ok(());
        }
        match report {
            Report::SessionFds { device, number, keep, release } => {
                let (fds, surplus) = (fds.take(), &self.members.surplus);
                return self.journals(&device)?.keep(number, (keep, &release), fds, surplus);
            }
            // The process cannot be compromised yet: this is its first report, before any command.
            Report::Ready {} if self.state() == State::Starting => {
                self.threads.know(fds.take().pop());
                self.state.send_if_modified(|state| {
                    let starts = *state == State::Starting;
                    if starts {
                        *state = State::Serving;
                    }
                    starts
                });
            }
            _ if !fds.is_empty() => return Err("unexpected file descriptors".to_owned()),
            Report::Ready {} => {}
            Report::Gone { device, number } => self.journals(&device)?.forget(number),
            Report::Quiesced {} => {
                self.quiescing.complete()?;
                self.closes_asks();
            }
            Report::Session { device, is_open } => {
                let devices = self.lock();
                let assigned = devices.get(&device).ok_or_else(|| missing(&device))?;
                if assigned.assigned.xen.is_some() {
                    return Err(format!("{device:?} has no sessions"));
                }
                self.sessions.fetch_add(u64::from(is_open), Ordering::Relaxed);
                assigned.assigned.connected.send_replace(is_open);
            }
            Report::Removed { device } => {
                let mut devices = self.lock();
                let assigned = devices.get_mut(&device).ok_or_else(|| missing(&device))?;
                let removed = assigned.removed.take().ok_or("a removal that was not requested")?;
                let _ = removed.send(());
            }
            Report::Request { device, number, request } => {
                self.handle_request(&device, number, request)?
            }
            Report::Suspect { device } => self.port(&device)?.port_may_have_changed(),
            Report::Needs {} => self.ring.ring(),
            Report::Guest { device, mac, announces, control, pairs } => {
                let [control, pairs] = [control, pairs].map(|number| number.map(usize::from));
                self.net(&device)?.show_guest(Guest { mac, announces, control, pairs });
            }
            Report::Xen { device, number, said } => self.line(&device)?.handle(number, said)?,
            Report::Export { .. } => return Err("an export that was not asked for".to_owned()),
            Report::Counted { number } if number > self.asked.load(Ordering::Relaxed) => {
                return Err("an answer without a question".to_owned());
            }
            Report::Counted { number } => _ = self.answered.send_replace(number),
        }
        Ok(())
    }

    /// True if the report is about a device that was taken from the process. The last reports of
    /// the device's sessions and janitor may follow the report that the device has stopped.
    fn is_late(&self, report: &Report) -> bool {
        let (Report::SessionFds { device, .. }
        | Report::Gone { device, .. }
        | Report::Session { device, .. }
        | Report::Suspect { device }
        | Report::Guest { device, .. }
        | Report::Request { device, .. }
        | Report::Xen { device, .. }) = report
        else {
            return false;
        };
        !self.has(device) && self.lost.has(device)
    }

    /// Returns the uplink of the process's switch, if `name` is that of the process.
    fn uplink(&self, name: &str) -> Option<Arc<OwnedPort>> {
        self.switch().filter(|_| name == self.name())?.uplink()
    }

    /// Returns the port of the network device with this name, or the uplink.
    fn port(&self, name: &str) -> Result<Arc<OwnedPort>, String> {
        self.uplink(name).map_or_else(|| self.net(name), Ok)
    }

    /// Returns the port of the network device with this name.
    fn net(&self, name: &str) -> Result<Arc<OwnedPort>, String> {
        let devices = self.lock();
        let net = devices.get(name).and_then(|device| device.assigned.net.as_ref());
        net.cloned().ok_or_else(|| format!("{name:?} is not a network device of it"))
    }

    fn line(&self, name: &str) -> Result<Arc<XenLine>, String> {
        let devices = self.lock();
        let xen = devices.get(name).and_then(|device| device.assigned.xen.as_ref());
        xen.cloned().ok_or_else(|| format!("{name:?} is not a disk of a Xen guest"))
    }

    fn journals(&self, name: &str) -> Result<Arc<JournalStore>, String> {
        let devices = self.lock();
        let device = devices.get(name).ok_or_else(|| format!("it was not given {name:?}"))?;
        Ok(device.assigned.journals.clone())
    }

    /// Waits until few enough descriptors of front-ends wait to be closed. Fails with the reason
    /// why the process must end: the closes take too long, or the process has ended or was told to
    /// end.
    pub(super) async fn closed(&self, pidfd: &AsyncFd<OwnedFd>) -> Result<(), String> {
        let mut state = self.state.subscribe();
        tokio::select! {
            closed = timeout(PROCESS_ANSWER, self.closes()) => {
                closed.map_err(|_| "closing the file descriptors that it sent timed out".to_owned())
            }
            _ = pidfd.readable() => Err("the process has ended".to_owned()),
            () = is(&mut state, State::Ending) => Err("stop requested".to_owned()),
        }
    }

    /// Returns when few enough descriptors that the process has sent wait to be closed.
    pub(super) async fn closes(&self) {
        let of = |device: &Device| device.assigned.journals.clone();
        let all: Vec<_> = self.lock().values().map(of).collect();
        for journals in all {
            journals.closes().await;
        }
        // Descriptors of reports that may carry none go to the domain's janitor, so wait for that
        // one, too.
        self.members.janitor.room().await;
    }

    fn handle_request(
        &self,
        name: &str,
        number: u64,
        request: PrivilegedRequest,
    ) -> Result<(), String> {
        let early = || format!("{name:?}: a request before the answer to the last one");
        let request = PendingRequest { number, request };
        if let Some(switch) = self.switch().filter(|_| self.uplink(name).is_some()) {
            return if switch.ask(request) { Ok(()) } else { Err(early()) };
        }
        let devices = self.lock();
        let device = devices.get(name).ok_or_else(|| format!("it was not given {name:?}"))?;
        device.assigned.asks.try_send(request).map_err(|_| early())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::fuzzing::CompromisedProcess;
    use crate::processes::fuzzing::DEVICES;
    use manyring_protocol::message::{XenReport, emit};
    use manyring_serve::channel::pair;
    use manyring_serve::channel::watched;
    use std::sync::mpsc::{Receiver, channel};
    use tokio::io::Interest;

    impl DeviceProcess {
        /// How many commands the queue holds.
        pub(in crate::processes) fn places(&self) -> usize {
            self.orders.capacity()
        }
    }

    /// A descriptor whose close blocks until the sender is dropped.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn whoever_ends_a_device_process_does_not_wait_until_what_it_has_noted_is_closed() {
        /// More closes than may wait.
        const CLOSES: usize = 100;
        for ends in [true, false] {
            let taken = CompromisedProcess::new().unwrap();
            let (process, _) = taken.parts();
            let (release, released) = channel();
            let journals = process.all_journals();
            journals[0].janitor().dispose(Slow(released));
            (0..CLOSES).for_each(|_| journals[0].janitor().dispose(()));
            // A runtime of its own: that of the device process would start a process.
            let builder = &mut tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_all().build().unwrap();
            let reason = runtime.block_on(async {
                // Readable once the other end is closed, as a pidfd is when its process has ended.
                let (pidfd, mut lives) = pair().map(|(a, b)| (a, Some(b))).unwrap();
                let pidfd = watched(pidfd, Interest::READABLE).unwrap();
                let acts = async {
                    match ends {
                        true => process.end("of a test"),
                        false => drop(lives.take()),
                    }
                };
                tokio::join!(process.closed(&pidfd), acts).0.unwrap_err()
            });
            assert_eq!(reason, if ends { "stop requested" } else { "the process has ended" });
            drop(release);
        }
    }

    /// All reports about a device that may come before the report that it has stopped.
    fn said_of(device: &str) -> Vec<Report> {
        let (device, number) = (|| device.to_owned(), 1);
        let (mac, announces, control, pairs) = (None, false, None, None);
        vec![
            Report::Session { device: device(), is_open: false },
            Report::Gone { device: device(), number },
            Report::Suspect { device: device() },
            Report::SessionFds { device: device(), number, keep: None, release: vec![7] },
            Report::Guest { device: device(), mac, announces, control, pairs },
            Report::Request {
                device: device(),
                number,
                request: PrivilegedRequest::Lock { is_held: false },
            },
            Report::Xen { device: device(), number, said: XenReport::Stopped {} },
        ]
    }

    #[test]
    fn what_a_device_process_said_late_of_a_device_that_it_had_does_not_end_the_device_process() {
        let process = CompromisedProcess::new().unwrap();
        let hears = |report: &Report, fds| process.hears(&emit(report).unwrap(), fds);
        let [device, other] = DEVICES;
        assert!(process.removes(0));
        for report in said_of(device) {
            assert!(hears(&report, 0), "{report:?}");
            // Nothing would bound the descriptors that wait to be closed.
            assert!(!hears(&report, 1), "{report:?} with a descriptor");
        }
        // This report answers a command, so it comes once.
        assert!(!hears(&Report::Removed { device: device.to_owned() }, 0));
        for report in said_of("never given") {
            assert!(!hears(&report, 0), "{report:?}");
        }
        for report in said_of(other) {
            assert!(!hears(&report, 1), "{report:?} with a descriptor");
        }
        // A device that the process has is served as before.
        let number = process.connects(1).unwrap();
        let keeps = |keep| Report::SessionFds {
            device: other.to_owned(),
            number,
            keep,
            release: Vec::new(),
        };
        assert!(hears(&keeps(Some(1)), 2) && !hears(&keeps(Some(1)), 2), "a name is used once");
        assert!(!hears(&keeps(Some(2)), 0) && !hears(&keeps(None), 1));
        assert!(hears(&Report::Gone { device: other.to_owned(), number }, 0));
        let session = Report::Session { device: other.to_owned(), is_open: true };
        assert!(!hears(&session, 0), "a disk of a Xen guest has no sessions");
    }
}

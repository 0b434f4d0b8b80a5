//! `XenLine`: the state of a Xen disk's connection that a device process serves, as the
//! supervisor's commands and the process's reports change it. After a report that is not allowed in
//! the present state, the supervisor kills the process.

use manyring_protocol::message::XenReport;
use tokio::sync::{mpsc, watch};

/// The most faults of a front-end that wait to be handled.
const FAULTS_MAX: usize = 16;
/// The longest text of a device process that is shown, in characters.
const TEXT_MAX: usize = 300;

/// How far the connection of a Xen disk to its front-end has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// No command was sent yet, or the rings were left.
    #[default]
    Idle,
    /// The command to serve the rings was sent.
    Connecting,
    /// The rings are served.
    Started,
    /// The rings were refused.
    Refused { text: String, passes: bool },
    /// The command to leave the rings was sent.
    Stopping,
}

#[derive(Clone, Debug, Default)]
struct At {
    number: u64,
    stage: Stage,
    /// Where faults of the front-end are sent.
    faults: Option<mpsc::Sender<String>>,
}

/// The connection of one disk in one device process.
#[derive(Debug, Default)]
pub(super) struct XenLine {
    at: watch::Sender<At>,
}

impl XenLine {
    /// Called when the supervisor commands the process to connect. Returns the receiver of the
    /// connection's faults. Faults for which its queue has no room are dropped: the first fault
    /// ends the connection.
    pub(super) fn connects(&self, number: u64) -> mpsc::Receiver<String> {
        let (faults, command) = mpsc::channel(FAULTS_MAX);
        self.at.send_replace(At { number, stage: Stage::Connecting, faults: Some(faults) });
        command
    }

    /// Called when the supervisor commands the process to disconnect.
    pub(super) fn disconnects(&self) {
        self.at.send_modify(|at| at.stage = Stage::Stopping);
    }

    /// Waits for the answer to the last command, and returns the state after it.
    pub(super) async fn answered(&self) -> Stage {
        let mut at = self.at.subscribe();
        let is_answer = |at: &At| !matches!(at.stage, Stage::Connecting | Stage::Stopping);
        at.wait_for(is_answer).await.map_or(Stage::Idle, |at| at.stage.clone())
    }

    /// Handles a report.
    ///
    /// # Errors
    /// The report answers no command.
    pub(super) fn handle(&self, number: u64, said: XenReport) -> Result<(), String> {
        let (mut is_due, mut faults) = (false, None);
        self.at.send_if_modified(|at| {
            let next = match (&at.stage, &said) {
                _ if at.number != number => None,
                (Stage::Connecting, XenReport::Started {}) => Some(Stage::Started),
                (Stage::Connecting, XenReport::Refused { text, passes }) => {
                    Some(Stage::Refused { text: shown(text), passes: *passes })
                }
                (Stage::Stopping, XenReport::Stopped {}) => Some(Stage::Idle),
                // A queue may meet a fault before the others have started, and while it stops.
                (Stage::Connecting | Stage::Started | Stage::Stopping, XenReport::Fault { .. }) => {
                    (is_due, faults) = (true, at.faults.clone());
                    None
                }
                _ => None,
            };
            is_due |= next.is_some();
            next.map(|stage| at.stage = stage).is_some()
        });
        if let (Some(faults), XenReport::Fault { text }) = (faults, &said) {
            let _ = faults.try_send(shown(text));
        }
        if is_due { Ok(()) } else { Err("a report about a Xen disk without a request".to_owned()) }
    }
}

/// Returns the first [`TEXT_MAX`] printable characters of a device process's text, for the log and
/// xenstore.
fn shown(text: &str) -> String {
    text.chars().filter(|letter| (' '..='~').contains(letter)).take(TEXT_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault() -> XenReport {
        XenReport::Fault { text: "a\u{1b}[2Jb".to_owned() }
    }

    #[tokio::test]
    async fn answers_to_what_was_asked_are_heard_in_their_order() {
        let line = XenLine::default();
        let mut command = line.connects(7);
        assert_eq!(line.handle(7, fault()), Ok(()));
        assert_eq!(line.handle(7, XenReport::Started {}), Ok(()));
        assert_eq!(line.answered().await, Stage::Started);
        // There is room for a few faults, and more are not needed.
        (0..2 * FAULTS_MAX).for_each(|_| assert_eq!(line.handle(7, fault()), Ok(())));
        assert_eq!(command.recv().await.as_deref(), Some("a[2Jb"));
        line.disconnects();
        assert_eq!(line.handle(7, XenReport::Stopped {}), Ok(()));
        assert_eq!(line.answered().await, Stage::Idle);
        let _faults = line.connects(8);
        let text = "x".repeat(400);
        assert_eq!(line.handle(8, XenReport::Refused { text, passes: true }), Ok(()));
        let refused = Stage::Refused { text: "x".repeat(TEXT_MAX), passes: true };
        assert_eq!(line.answered().await, refused);
    }

    #[test]
    fn answers_that_nobody_awaits_are_refused() {
        let line = XenLine::default();
        for said in [XenReport::Started {}, XenReport::Stopped {}, fault()] {
            assert!(line.handle(0, said).is_err());
        }
        let _faults = line.connects(1);
        assert!(line.handle(1, XenReport::Stopped {}).is_err());
        assert!(line.handle(2, XenReport::Started {}).is_err());
        assert!(line.handle(2, fault()).is_err());
        line.handle(1, XenReport::Started {}).unwrap();
        assert!(line.handle(1, XenReport::Started {}).is_err());
        let refused = XenReport::Refused { text: String::new(), passes: false };
        assert!(line.handle(1, refused).is_err());
    }
}

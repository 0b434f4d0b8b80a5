//! Signals: SIGTERM and SIGINT stop the daemon cleanly; the signals of `OUTLIVED` must not end it.

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind, signal};

/// Signals that end a process by default, and that reach a daemon although nobody wants to end it:
/// SIGHUP from a closing terminal or a script that rotates logs, SIGUSR1 and SIGUSR2 from scripts
/// that ask other daemons for their state, and SIGXFSZ for a write past the host's limit of a
/// file's size (the write then fails with `EFBIG`). SIGPIPE is ignored by Rust itself.
const OUTLIVED: [(Signal, &str); 4] = [
    (Signal::HUP, "SIGHUP"),
    (Signal::USR1, "SIGUSR1"),
    (Signal::USR2, "SIGUSR2"),
    (Signal::XFSZ, "SIGXFSZ"),
];

fn handled(which: Signal) -> Result<unix::Signal, String> {
    signal(SignalKind::from_raw(which.as_raw()))
        .map_err(|error| format!("cannot handle signal {}: {error}", which.as_raw()))
}

/// Installs handlers so that the signals of `OUTLIVED` do not end the process; each one is logged.
/// If the process has a configuration file (`is_asked`), returns SIGHUP (reload) and SIGUSR2 (be
/// taken over) for the caller to handle.
pub fn outlive(is_asked: bool) -> Result<Option<[unix::Signal; 2]>, String> {
    let asks = || Ok::<_, String>([handled(Signal::HUP)?, handled(Signal::USR2)?]);
    let asks = is_asked.then(asks).transpose()?;
    for (which, name) in OUTLIVED {
        if is_asked && (which == Signal::HUP || which == Signal::USR2) {
            continue;
        }
        let mut coming = handled(which)?;
        tokio::spawn(async move {
            while coming.recv().await.is_some() {
                tracing::info!(signal = name, "ignored");
            }
        });
    }
    Ok(asks)
}

/// The handlers of the signals that end the process: SIGTERM and SIGINT.
#[derive(Debug)]
pub struct Ends {
    terminate: unix::Signal,
    interrupt: unix::Signal,
}

impl Ends {
    /// Installs handlers: from here on SIGTERM and SIGINT do not end the process, and the caller
    /// must wait for them.
    pub fn new() -> Result<Self, String> {
        Ok(Self { terminate: handled(Signal::TERM)?, interrupt: handled(Signal::INT)? })
    }

    /// Waits for SIGTERM or SIGINT; returns the signal's name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

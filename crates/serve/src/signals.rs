//! Signals: SIGTERM and SIGINT end the process in good order; others must not end it.

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind, signal};

/// Signals whose default ends a process, and that reach a daemon without anybody's wish to end it:
/// a terminal that closes and scripts that rotate logs (SIGHUP), scripts that ask other daemons for
/// their state (SIGUSR1, SIGUSR2), a write past the host's limit for the size of a file (SIGXFSZ;
/// the write then fails with `EFBIG`). A pipe without a reader (SIGPIPE) is ignored by Rust itself.
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

/// From here on the signals of `OUTLIVED` do not end the process; each one is logged. A process
/// with a configuration file (`is_asked`) gets SIGHUP, to read it, and SIGUSR2, to be taken over.
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

/// The signals that end the process.
#[derive(Debug)]
pub struct Ends {
    terminate: unix::Signal,
    interrupt: unix::Signal,
}

impl Ends {
    /// From here on SIGTERM and SIGINT do not end the process by themselves: the caller waits for
    /// them.
    pub fn new() -> Result<Self, String> {
        Ok(Self { terminate: handled(Signal::TERM)?, interrupt: handled(Signal::INT)? })
    }

    /// Waits for one; its name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

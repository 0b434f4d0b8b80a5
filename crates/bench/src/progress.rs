//! The state of a run: current scenario, remaining time, omissions, and a request to stop. One
//! process runs one scenario at a time, so that this state belongs to the process.

use crate::measure::now;
use crate::plan;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Set by the first signal that asks this process to end.
static STOP: AtomicBool = AtomicBool::new(false);
static STATE: Mutex<State> = Mutex::new(State { shown: None, left_out: Vec::new() });

struct State {
    shown: Option<Shown>,
    left_out: Vec<String>,
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handles signals to end from now on. The first one lets the current run finish and starts no
/// other, so that everything made for the run is removed. The second one ends this process and all
/// that it has started.
///
/// # Errors
/// The handlers cannot be installed.
pub(crate) fn on_signals() -> Result<(), String> {
    let failed = |error: std::io::Error| format!("signals: {error}");
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(failed)?;
    let wait = move || {
        for signal in signals.forever() {
            if STOP.swap(true, Ordering::Relaxed) {
                std::process::exit(128 + signal);
            }
            let line = "stopping after the run under way; a second signal ends it at once";
            eprintln!("\nmanyring-bench: {line}");
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(wait).map_err(failed)?;
    Ok(())
}

/// True if the user has asked us to stop.
pub(crate) fn is_stopped() -> bool {
    STOP.load(Ordering::Relaxed)
}

/// Notes an omission and its reason, which are printed once at the end.
pub(crate) fn leave_out(sentence: String) {
    let mut state = state();
    if !state.left_out.contains(&sentence) {
        state.left_out.push(sentence);
    }
}

/// Everything that was left out so far.
pub(crate) fn left_out() -> Vec<String> {
    state().left_out.clone()
}

/// Notes that a scenario begins. `number` is its place in the run, from 1, and the number of
/// scenarios.
pub(crate) fn begin(scenario: &'static str, number: (usize, usize), planned: f64, after: f64) {
    state().shown = Some(Shown { scenario, number, planned, after, began: now() });
}

/// Notes that a cell begins, and shows it.
pub(crate) fn cell(name: &str) {
    let state = state();
    let Some(shown) = &state.shown else { return };
    let line = shown.line(name, shown.began.elapsed().as_secs_f64());
    let mut stderr = std::io::stderr().lock();
    // On a terminal each cell replaces the line before; a log keeps all lines.
    let is_terminal = std::io::stderr().is_terminal();
    let (start, end) = if is_terminal { ("\r\x1b[K", "") } else { ("", "\n") };
    let _ = write!(stderr, "{start}{line}{end}");
    let _ = stderr.flush();
}

/// Notes that the scenario has ended.
pub(crate) fn end() {
    if state().shown.take().is_some() && std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
}

/// True if the scenario has used all its planned time. Disturbed runs are then not repeated.
pub(crate) fn is_late() -> bool {
    let state = state();
    state.shown.as_ref().is_some_and(|shown| shown.began.elapsed().as_secs_f64() > shown.planned)
}

/// The current scenario, and its number among all.
struct Shown {
    scenario: &'static str,
    number: (usize, usize),
    /// Seconds planned for this scenario.
    planned: f64,
    /// Seconds planned for the scenarios after it.
    after: f64,
    began: Instant,
}

impl Shown {
    fn line(&self, cell: &str, elapsed: f64) -> String {
        let (number, of) = self.number;
        let left = (self.planned - elapsed).max(0.0) + self.after;
        format!("[{number}/{of}] {}: {cell} (about {} left)", self.scenario, plan::about(left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_runs_and_how_long_still() {
        let (planned, after) = (60.0, 600.0);
        let shown = Shown { scenario: "tcp-rr", number: (2, 7), planned, after, began: now() };
        let line = "[2/7] tcp-rr: 1 connection (about 10 min left)";
        assert_eq!(shown.line("1 connection", 40.0), line);
        assert!(shown.line("x", 1e9).contains("10 min"), "a late scenario owes no time");
    }

    #[test]
    fn what_is_left_out_is_said_once() {
        for _ in 0..2 {
            leave_out("a peer of the progress test".to_owned());
        }
        let said = left_out();
        assert_eq!(said.iter().filter(|s| s.contains("of the progress test")).count(), 1);
    }
}

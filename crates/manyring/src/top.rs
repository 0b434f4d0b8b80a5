//! `manyring top`: devices, queues and workers of a running daemon, on the whole terminal.
//!
//! Three parts run without waiting for each other: a thread reads keys, a task asks the daemon once
//! in each interval, and the loop here draws the latest answer. If the daemon does not answer, the
//! last numbers stay on the screen below a line that says so, until it answers again.

mod columns;
mod draw;
mod model;
mod units;

use crate::cli::TopArgs;
use crate::stats::{Shown, fetch};
use manyring_serve::output::Failure;
use model::{Model, Wish};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{Instant, MissedTickBehavior};

/// The most keys, and the most answers of the daemon, that wait to be handled.
const WAITING_MAX: usize = 16;

/// An answer of the daemon, and when it arrived.
type Answer = (Result<Shown, String>, Instant);

/// Carries out `manyring top`: reads the first answer, then draws until the user quits.
pub(crate) async fn show(args: &TopArgs) -> Result<(), Failure> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let other = "top: needs a terminal; `manyring stats --watch` writes lines instead";
        return Err(Failure::Wrong(other.to_owned()));
    }
    // An error of the first request is printed as by any other command.
    let first = fetch(&args.control, None).await?;
    let mut model = Model::new(args.control.display().to_string());
    model.take(Ok(first), Instant::now());
    let mut ends = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
    let mut terminal = ratatui::try_init().map_err(|error| format!("the terminal: {error}"))?;
    let shown = tokio::select! {
        shown = watch(args, &mut terminal, model) => shown,
        _ = ends.recv() => Ok(()),
    };
    ratatui::restore();
    shown.map_err(|error| Failure::Refused(format!("the terminal: {error}")))
}

/// Draws after each key and each answer, until the user quits.
async fn watch(
    args: &TopArgs,
    terminal: &mut DefaultTerminal,
    mut model: Model,
) -> std::io::Result<()> {
    let (asking, mut answers) = channel(WAITING_MAX);
    let (pressing, mut events) = channel(WAITING_MAX);
    tokio::spawn(ask(args.control.clone(), Duration::from_secs(args.interval), asking));
    // The thread is never joined: it blocks in reading the terminal until a key comes, and ends
    // with the process.
    std::thread::Builder::new().name("keys".to_owned()).spawn(move || read(&pressing))?;
    loop {
        terminal.draw(|frame| draw::draw(frame, &mut model))?;
        tokio::select! {
            answer = answers.recv() => {
                let Some((shown, at)): Option<Answer> = answer else { return Ok(()) };
                model.take(shown, at);
            }
            event = next(&mut events) => match event? {
                Event::Key(key)
                    if key.kind != KeyEventKind::Release && model.press(key) == Wish::Leave =>
                {
                    return Ok(());
                }
                // Any other event, such as a new size of the terminal: draw again.
                _ => {}
            },
        }
    }
}

/// Waits for the next event of the terminal. Returns `UnexpectedEof`, which ends the program, if
/// the thread that reads events has ended because the terminal was closed.
async fn next(events: &mut Receiver<std::io::Result<Event>>) -> std::io::Result<Event> {
    let gone = || Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof));
    events.recv().await.unwrap_or_else(gone)
}

/// Reads events of the terminal and sends them to the loop, until reading fails or the loop ends.
fn read(pressing: &Sender<std::io::Result<Event>>) {
    loop {
        let event = event::read();
        let failed = event.is_err();
        if pressing.blocking_send(event).is_err() || failed {
            return;
        }
    }
}

/// Asks the daemon once in each interval and sends the answers to the loop, until the loop ends.
async fn ask(control: PathBuf, interval: Duration, asking: Sender<Answer>) {
    let control: &Path = &control;
    let mut ticks = tokio::time::interval_at(Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let shown = fetch(control, None).await;
        if asking.send((shown, Instant::now())).await.is_err() {
            return;
        }
    }
}

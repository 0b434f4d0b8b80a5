//! Daemons that die at each step of a takeover: the next one, or the one that runs.
//!
//! ```text
//! the next one ..                     dies                        sees the running one die
//! has not asked (`Starts`)            nobody pauses               -
//! has asked (`Asked`)                 the running one resumes     serves; sessions may be lost
//! has some of the copies (`Copies`)   the running one resumes     serves; sessions may be lost
//! has all of them (`Opens`)           the running one resumes     serves with all sessions
//! has sent `taken` (`Commits`)        is started again            -
//! ```
//! The running daemon has ended by itself when it has read `taken`. A daemon that has not asked
//! yet finds none where the running one has died, and is started without `--takeover`.

use super::ground::{Ground, LIMIT};
use super::steps::{Came, Step, Trace, Traced};
use super::{LONG_LIFE_MS, Worst, note_pauses, requests};
use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::soak::random::Random;
use crate::{Outcome, check};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How often a death is tried: another takeover may make fewer calls than the one that was traced,
/// or come to a call at another step.
const TRIES: u32 = 8;
/// What the running daemon says when the next one has died.
const RESUMES: &str = "takeover failed; the device processes resume";

/// Which daemon dies, and at which step of the next one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Death {
    dies: Dies,
    step: Step,
    at: At,
}

#[derive(Clone, Copy, Debug)]
enum Dies {
    /// The daemon that takes over.
    Next,
    /// The daemon that runs. The next one is stopped until that has ended.
    Running,
}

/// Behind which call of the step.
#[derive(Clone, Copy, Debug)]
enum At {
    /// The one that begins it.
    First,
    /// Any.
    Any,
}

const fn death(dies: Dies, step: Step, at: At) -> Death {
    Death { dies, step, at }
}

/// Deaths after which every guest goes on with its session: the running daemon has everything
/// until it has read `taken`, and the next one when it has got everything.
pub(super) const SURVIVED: [Death; 12] = [
    death(Dies::Next, Step::Starts, At::Any),
    death(Dies::Next, Step::Asked, At::First),
    death(Dies::Next, Step::Asked, At::Any),
    death(Dies::Next, Step::Copies, At::First),
    death(Dies::Next, Step::Copies, At::Any),
    death(Dies::Next, Step::Copies, At::Any),
    death(Dies::Next, Step::Opens, At::First),
    death(Dies::Next, Step::Opens, At::Any),
    death(Dies::Next, Step::Opens, At::Any),
    death(Dies::Next, Step::Opens, At::Any),
    death(Dies::Running, Step::Opens, At::First),
    death(Dies::Running, Step::Opens, At::Any),
];

/// Deaths after which front-ends may have to connect again: copies that have not arrived are lost
/// with the running daemon, and a daemon that dies behind `taken` is the only one.
pub(super) const CRASHES: [Death; 5] = [
    death(Dies::Running, Step::Asked, At::First),
    death(Dies::Running, Step::Copies, At::First),
    death(Dies::Running, Step::Copies, At::Any),
    death(Dies::Next, Step::Commits, At::First),
    death(Dies::Next, Step::Commits, At::First),
];

/// Takeovers in which a daemon dies.
#[derive(Debug)]
pub(super) struct Deaths<'a> {
    ground: &'a Ground,
    next: DaemonOptions,
    trace: PathBuf,
    /// A takeover without a death.
    whole: Trace,
}

impl<'a> Deaths<'a> {
    /// Has the next daemon take over, and traces that.
    ///
    /// # Errors
    /// It did not.
    pub(super) fn begin(
        ground: &'a Ground,
        mut running: Daemon,
        next: DaemonOptions,
    ) -> Outcome<(Self, Daemon)> {
        let trace = next.log.with_file_name("takeover.strace");
        let mut traced = Traced::start(&next, &trace, None)?;
        let Came::TookOver(whole) = traced.comes(&mut running)? else {
            return Err("a daemon without a place to stop at was stopped".into());
        };
        println!("soak: a whole takeover makes {}", whole.says());
        Ok((Self { ground, next, trace, whole }, traced.goes_on()?))
    }

    /// Has one daemon die after the other; notes the pauses. Returns the daemon that runs then.
    ///
    /// # Errors
    /// A death did not happen, or had an end that it must not have.
    pub(super) fn all(
        &mut self,
        mut running: Daemon,
        deaths: &[Death],
        random: &mut Random,
        pauses: &mut Worst,
    ) -> Outcome<Daemon> {
        for death in deaths {
            let began;
            (running, began) = self.happens(running, *death, random)?;
            note_pauses(self.ground, began, pauses)?;
            for tenant in &self.ground.tenants {
                serves_disk(&running, tenant.name)?;
            }
            let ended = running.ended()?;
            check(ended.is_none(), || format!("{death:?}: manyring ended: {ended:?}"))?;
        }
        Ok(running)
    }

    /// Returns the daemon that runs then, and when the last takeover began.
    fn happens(
        &mut self,
        mut running: Daemon,
        death: Death,
        random: &mut Random,
    ) -> Outcome<(Daemon, Instant)> {
        for _ in 0..TRIES {
            std::thread::sleep(Duration::from_millis(LONG_LIFE_MS + random.below(500)));
            let place = match death.at {
                At::First => self.whole.place(death.step, None)?,
                At::Any => self.whole.place(death.step, Some(random))?,
            };
            let began = Instant::now();
            let mut next = Traced::start(&self.next, &self.trace, Some(&place))?;
            match next.comes(&mut running)? {
                Came::Stopped(trace) if trace.step() == death.step => {
                    println!("soak: {death:?}: after {}", trace.says());
                    return Ok((self.dies(running, next, death)?, began));
                }
                Came::Stopped(trace) => {
                    println!("soak: {place:?} is at {:?} this time", trace.step());
                    running = taken_over(running, next)?;
                }
                Came::TookOver(trace) => {
                    println!("soak: a takeover without {place:?}; again");
                    self.whole = trace;
                    running = next.goes_on()?;
                }
            }
            note_pauses(self.ground, began, &mut Worst::default())?;
        }
        Err(format!("{death:?} did not happen: {TRIES} takeovers did not come to their places"))
    }

    /// One daemon dies where the next one is stopped. Returns the one that runs then.
    fn dies(&self, mut running: Daemon, next: Traced, death: Death) -> Outcome<Daemon> {
        let resumed = |log: &str| log.matches(RESUMES).count();
        let before = resumed(&running.log()?);
        match (death.dies, death.step) {
            (Dies::Running, _) => {
                running.crash()?;
                next.goes_on()
            }
            (Dies::Next, step) => {
                next.dies()?;
                let goes_on = wait_for("the running daemon after a death", LIMIT, || {
                    if let Some(status) = running.ended()? {
                        let is_meant = step == Step::Commits && status.success();
                        check(is_meant, || format!("{death:?}: manyring ended with {status}"))?;
                        return Ok(Some(false));
                    }
                    let is_asked = step > Step::Starts;
                    Ok((!is_asked || resumed(&running.log()?) > before).then_some(true))
                })?;
                // An operator, or a service manager, starts it again.
                if goes_on { Ok(running) } else { self.ground.serve() }
            }
        }
    }
}

/// Waits until a guest's disk has served one more request.
fn serves_disk(running: &Daemon, name: &str) -> Outcome {
    let mut first = None;
    wait_for("the next request of a disk", LIMIT, || {
        // A daemon that starts anew does not answer at once.
        let Ok(served) = requests(running, name) else { return Ok(None) };
        Ok((served != *first.get_or_insert(served)).then_some(()))
    })
}

/// Lets a daemon that is stopped go on, which takes over.
fn taken_over(mut running: Daemon, next: Traced) -> Outcome<Daemon> {
    let mut next = next.goes_on()?;
    wait_for("a takeover", LIMIT, || {
        let ended = next.ended()?;
        check(ended.is_none(), || format!("the next manyring ended: {ended:?}"))?;
        running.ended()
    })?;
    Ok(next)
}

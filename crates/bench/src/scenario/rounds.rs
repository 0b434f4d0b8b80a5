//! Rounds: every party in turn, again and again, on CPUs whose distance may change.
//!
//! The CPUs of a virtual machine can be two threads of one core now, and lie on distant cores ten
//! seconds later. A cache line then takes five times as long between them, and a ring of small
//! requests carries a third. So a ratio of two runs is a ratio of the parties only if the CPUs were
//! equally near in both:
//!
//! ```text
//! a run:    time a cache line; run; time it again
//!           other programs had too much of the CPUs, or the line takes another time now? again
//! a round:  a run of each party
//!           the line took another time for one party than for another? the whole round again
//! ```
//! Either is tried a few times and then kept as disturbed, so that a machine that never rests has a
//! table too.

use super::{ScenarioArgs, TRIES};
use crate::calibrate;
use crate::progress;
use crate::report::{Party, Sample, is_far};

/// Rounds that are tried until the CPUs are as near for all parties.
const ROUND_TRIES: usize = 4;

/// One run of a party.
pub(super) type RunOf<'a, S> = &'a dyn Fn() -> Result<S, String>;

/// Runs the parties of a cell in turn, round by round.
pub(super) fn run<S: Sample>(
    args: &ScenarioArgs,
    cell: &str,
    parties: &[(&str, RunOf<'_, S>)],
) -> Result<Vec<Party<S>>, String> {
    let line = || calibrate::line_now(args.client_cpu, args.server_cpu);
    let named = |(name, _): &(&str, _)| Party { name: (*name).to_owned(), samples: Vec::new() };
    let mut found: Vec<Party<S>> = parties.iter().map(named).collect();
    for _ in 0..args.rounds() {
        let one = |(name, run): &(&str, RunOf<'_, S>)| {
            calm(args, *run, &line).map_err(|problem| format!("{cell}: {name}: {problem}"))
        };
        let round = || parties.iter().map(one).collect::<Result<Vec<S>, String>>();
        let mut samples = round()?;
        for _ in 1..if args.smoke { 1 } else { ROUND_TRIES } {
            if is_even(&samples) || progress::is_late() {
                break;
            }
            samples = round()?;
        }
        if !is_even(&samples) {
            samples.iter_mut().for_each(Sample::disturb);
        }
        found.iter_mut().zip(samples).for_each(|(party, sample)| party.samples.push(sample));
    }
    Ok(found)
}

/// One run; again if it was disturbed.
fn calm<S: Sample>(
    args: &ScenarioArgs,
    run: RunOf<'_, S>,
    line: &dyn Fn() -> Option<u64>,
) -> Result<S, String> {
    let mut tries = if args.smoke { 1 } else { TRIES };
    loop {
        let before = line();
        let mut sample = run()?;
        place(&mut sample, before, line());
        tries -= 1;
        if tries == 0 || !sample.is_disturbed() || progress::is_late() {
            return Ok(sample);
        }
    }
}

/// Notes how long a cache line took before and after a run.
fn place(sample: &mut impl Sample, before: Option<u64>, after: Option<u64>) {
    sample.set_line(after.or(before));
    if before.zip(after).is_some_and(|(before, after)| is_far(before, after)) {
        sample.disturb();
    }
}

/// The CPUs were as near for all parties of a round, as far as that is known.
fn is_even<S: Sample>(samples: &[S]) -> bool {
    let lines = || samples.iter().filter_map(S::line_ns);
    lines().max().zip(lines().min()).is_none_or(|(most, least)| !is_far(most, least))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::blk::BlkSample;

    fn placed(before: Option<u64>, after: Option<u64>) -> BlkSample {
        let mut sample = BlkSample::default();
        place(&mut sample, before, after);
        sample
    }

    #[test]
    fn a_run_is_disturbed_if_a_cache_line_takes_another_time_after_it() {
        for (before, after, line, is_disturbed) in [
            (Some(40), Some(44), Some(44), false),
            (Some(40), Some(205), Some(205), true),
            (Some(205), Some(40), Some(40), true),
            (None, Some(40), Some(40), false),
            (Some(40), None, Some(40), false),
            (None, None, None, false),
        ] {
            let sample = placed(before, after);
            assert_eq!((sample.line_ns, sample.is_disturbed()), (line, is_disturbed), "{before:?}");
        }
    }

    #[test]
    fn a_round_is_even_if_cache_lines_took_as_long_for_all() {
        let of = |lines: &[Option<u64>]| {
            is_even(&lines.iter().map(|line| placed(*line, *line)).collect::<Vec<_>>())
        };
        assert!(of(&[]) && of(&[None, None]) && of(&[Some(40), None]) && of(&[Some(40), Some(60)]));
        assert!(!of(&[Some(40), Some(205)]) && !of(&[Some(205), None, Some(40)]));
    }
}

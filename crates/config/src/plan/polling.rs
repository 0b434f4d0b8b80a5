//! How workers poll for work: the keys `polling` and `spin_us`, checked against each other.

use super::{Place, PlanError};
use crate::numbers;
use crate::tables::RawDaemon;
use manyring_engine::Polling;
use manyring_engine::policy::polling::Mode;
use serde::Serialize;

/// How workers poll for work before they sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PollingPlan {
    polling: ModePlan,
    /// The longest polling before a sleep, in microseconds; `None`: ten times the time that waking
    /// a thread takes on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    spin_us: Option<u32>,
}

/// Whether idle workers poll for work: the values of the key `polling`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum ModePlan {
    Auto,
    Always,
    Never,
}

impl PollingPlan {
    pub(super) fn new(raw: &RawDaemon, place: &Place) -> Result<Self, PlanError> {
        let mode = match raw.polling.as_deref() {
            None => None,
            Some("auto") => Some(ModePlan::Auto),
            Some("always") => Some(ModePlan::Always),
            Some("never") => Some(ModePlan::Never),
            Some(other) => {
                let problem = format!("{other:?} is not one of \"auto\", \"always\" and \"never\"");
                return place.error("polling", problem);
            }
        };
        raw.spin_us.map_or(Ok(()), |us| numbers::check("spin_us", us, place))?;
        let polling = match (mode, raw.spin_us) {
            (None | Some(ModePlan::Never), Some(0)) => ModePlan::Never,
            (Some(ModePlan::Auto | ModePlan::Always), Some(us @ 0))
            | (Some(ModePlan::Never), Some(us)) => {
                let mode = raw.polling.as_deref().unwrap_or_default();
                return place
                    .error("spin_us", format!("{us} cannot be combined with polling {mode:?}"));
            }
            (mode, _) => mode.unwrap_or(ModePlan::Auto),
        };
        Ok(Self { polling, spin_us: raw.spin_us })
    }

    /// Returns the keys as options of a command: `--polling`, and `--spin-us` if a time is set.
    pub fn options(self) -> Vec<String> {
        let mode = match self.polling {
            ModePlan::Auto => "auto",
            ModePlan::Always => "always",
            ModePlan::Never => "never",
        };
        let mut options = vec!["--polling".to_owned(), mode.to_owned()];
        if let Some(us) = self.spin_us.filter(|_| self.polling != ModePlan::Never) {
            options.extend(["--spin-us".to_owned(), us.to_string()]);
        }
        options
    }

    /// Returns the polling policy for the engine: the mode, and the longest polling in nanoseconds.
    pub fn policy(self) -> Polling {
        let mode = match self.polling {
            ModePlan::Auto => Mode::Auto,
            ModePlan::Always => Mode::Always,
            ModePlan::Never => Mode::Never,
        };
        Polling { mode, cap_ns: self.spin_us.map(|us| u64::from(us) * 1000) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Source;

    fn plan(polling: Option<&str>, spin_us: Option<u32>) -> Result<Polling, String> {
        let raw =
            RawDaemon { polling: polling.map(str::to_owned), spin_us, ..RawDaemon::default() };
        let place = Source::File.daemon();
        PollingPlan::new(&raw, &place).map(PollingPlan::policy).map_err(|e| e.to_string())
    }

    #[test]
    fn a_mode_and_a_cap_go_together_unless_one_takes_the_other_back() {
        let policy = |mode, cap_ns| Ok(Polling { mode, cap_ns });
        for (polling, spin_us, expected) in [
            (None, None, policy(Mode::Auto, None)),
            (None, Some(0), policy(Mode::Never, Some(0))),
            (None, Some(20), policy(Mode::Auto, Some(20_000))),
            (Some("auto"), None, policy(Mode::Auto, None)),
            (Some("auto"), Some(1000), policy(Mode::Auto, Some(1_000_000))),
            (Some("always"), None, policy(Mode::Always, None)),
            (Some("always"), Some(5), policy(Mode::Always, Some(5000))),
            (Some("never"), None, policy(Mode::Never, None)),
            (Some("never"), Some(0), policy(Mode::Never, Some(0))),
        ] {
            assert_eq!(plan(polling, spin_us), expected, "{polling:?} {spin_us:?}");
        }
        for (polling, spin_us, words) in [
            (Some("auto"), 0, "[daemon]: spin_us: 0 cannot be combined with polling \"auto\""),
            (Some("always"), 0, "[daemon]: spin_us: 0 cannot be combined with polling \"always\""),
            (Some("never"), 1, "[daemon]: spin_us: 1 cannot be combined with polling \"never\""),
            (Some("Never"), 0, "[daemon]: polling: \"Never\" is not one of"),
            (None, 1001, "[daemon]: spin_us: 1001 is not between 0 and 1000"),
        ] {
            let error = plan(polling, Some(spin_us)).expect_err(words);
            assert!(error.starts_with(words), "{error}");
        }
    }
}

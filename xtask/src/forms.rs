//! The forms in which the modules of the daemon's tests run: a daemon that serves its devices
//! itself, or one with a device process for each device.
//!
//! `manyring run` has a device process for each user by default, and so have tests that start it.
//! Tests that start `manyring blk` or `xen-blk`, which serve one kind of device themselves by
//! default, run in device processes too, by [`ISOLATE`]. A test of what daemons have by default
//! alone says so there (`only_in_default_form` of `support/process.rs`), and is left to the other
//! run.

/// Set where the tests' daemons are to have a device process for each device.
pub(crate) const ISOLATE: &str = "MANYRING_TEST_ISOLATE";

/// A form of a module's run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Form {
    /// As the commands do it by default.
    #[default]
    Default,
    /// In device processes, beside a run as the commands do it.
    AlsoIsolated,
    /// In device processes, and in no other form.
    OnlyIsolated,
}

/// The modules that run in both forms.
const BOTH: [&str; 10] = [
    "blk/fault",
    "blk/limits",
    "control/change",
    "control/held",
    "front_end/blkio",
    "hostile/doorbells",
    "net/switch",
    "net/switch_rules",
    "net/switch_uplink",
    "start/stop",
];
/// The modules that run in device processes alone. A device process does for them all that a daemon
/// does, and more, and they take long.
const ISOLATED: [&str; 4] =
    ["blk/live", "front_end/migrate", "front_end/reconnect", "front_end/replayed"];

impl Form {
    /// The forms in which a module of the test program at `source` runs.
    pub(crate) fn of(source: &str, module: &str) -> &'static [Self] {
        let name = source.strip_prefix("manyring/tests/").and_then(|s| s.strip_suffix("/main.rs"));
        let is_in = |list: &[&str]| {
            let is = |entry: &&str| name.zip(Some(module)) == entry.split_once('/');
            list.iter().any(is)
        };
        if is_in(&BOTH) {
            &[Self::Default, Self::AlsoIsolated]
        } else if is_in(&ISOLATED) {
            &[Self::OnlyIsolated]
        } else {
            &[Self::Default]
        }
    }

    /// Whether the tests' daemons have device processes.
    pub(crate) fn is_isolated(self) -> bool {
        self != Self::Default
    }

    /// Behind the module's name in reports.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Default => "",
            Self::AlsoIsolated => ", in device processes",
            Self::OnlyIsolated => ", in device processes alone",
        }
    }
}

/// Whether a module with these words behind its name runs in the default form as well: a test of
/// that form may be left to that run.
pub(crate) fn runs_by_default_too(part: &str) -> bool {
    part.ends_with(Form::AlsoIsolated.words())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_of_the_daemon_runs_in_the_forms_that_it_is_listed_for() {
        let blk = "manyring/tests/blk/main.rs";
        assert_eq!(Form::of(blk, "fault"), [Form::Default, Form::AlsoIsolated]);
        assert_eq!(Form::of(blk, "idle"), [Form::Default]);
        assert_eq!(Form::of("manyring/tests/front_end/main.rs", "migrate"), [Form::OnlyIsolated]);
        assert_eq!(Form::of("queue/tests/blk/main.rs", "fault"), [Form::Default]);
        assert!(!Form::Default.is_isolated() && Form::OnlyIsolated.is_isolated());
    }

    #[test]
    fn every_listed_module_is_there() {
        let tests = std::path::Path::new(crate::cargo::ROOT).join("crates/manyring/tests");
        for module in BOTH.iter().chain(&ISOLATED) {
            let file = tests.join(format!("{module}.rs"));
            assert!(file.exists(), "{}", file.display());
        }
    }

    #[test]
    fn a_test_of_the_default_form_may_be_left_to_a_run_that_there_is() {
        assert!(runs_by_default_too(", a, in device processes"));
        assert!(!runs_by_default_too(", a, in device processes alone"));
    }
}

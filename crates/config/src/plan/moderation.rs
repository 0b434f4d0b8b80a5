//! How the used buffer notifications of a device are held back: the key `moderation`.

use super::{Place, PlanError};
use manyring_protocol::spec::ModerationSpec;
use serde::{Serialize, Serializer};
use std::fmt::{Display, Formatter};

/// How notifications are held back, unless the driver sets values of its own
/// (`VIRTIO_NET_F_NOTF_COAL`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModerationPlan(ModerationSpec);

/// The most requests or frames for which one notification is held back: the largest ring.
const COUNT_MAX: u32 = 32_768;
/// The longest delay of a notification, in microseconds. A longer one would look like an outage.
const DELAY_US_MAX: u32 = 10_000;

impl ModerationPlan {
    pub(super) fn new(raw: Option<&str>, place: &Place) -> Result<Self, PlanError> {
        let moderation = match raw {
            None | Some("off") => ModerationSpec::Off,
            Some(text) => match parse_limits(text) {
                Some(fixed) => fixed,
                None => {
                    let problem = format!(
                        "{text:?} is neither \"off\" nor N/Tus like \"32/100us\" (N 1 to \
                         {COUNT_MAX}, T 1 to {DELAY_US_MAX})"
                    );
                    return place.error("moderation", problem);
                }
            },
        };
        Ok(Self(moderation))
    }

    /// The moderation with which the queues are started.
    pub fn spec(self) -> ModerationSpec {
        self.0
    }
}

/// Parses a moderation like `32/100us`.
fn parse_limits(text: &str) -> Option<ModerationSpec> {
    let (count, delay) = text.split_once('/')?;
    let number = |text: &str, max| {
        let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|number| is_plain && (1..=max).contains(number))
    };
    let count_max = number(count, COUNT_MAX)?;
    let delay_us_max = number(delay.strip_suffix("us")?, DELAY_US_MAX)?;
    Some(ModerationSpec::Fixed { count_max, delay_us_max })
}

impl Display for ModerationPlan {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            ModerationSpec::Off => f.write_str("off"),
            ModerationSpec::Fixed { count_max, delay_us_max } => {
                write!(f, "{count_max}/{delay_us_max}us")
            }
        }
    }
}

/// Written as a user types it.
impl Serialize for ModerationPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Source;

    fn plan(text: Option<&str>, source: Source) -> Result<ModerationPlan, String> {
        let place = source.device("[[blk]]", "a");
        ModerationPlan::new(text, &place).map_err(|error| error.to_string())
    }

    #[test]
    fn a_mode_is_shown_as_it_is_typed() {
        for text in ["off", "1/1us", "32/100us", "32768/10000us"] {
            assert_eq!(plan(Some(text), Source::File).unwrap().to_string(), text);
        }
        assert_eq!(plan(None, Source::File).unwrap().spec(), ModerationSpec::Off);
        let expected = ModerationSpec::Fixed { count_max: 32, delay_us_max: 100 };
        let fixed = plan(Some("32/100us"), Source::File).unwrap();
        assert_eq!(fixed.spec(), expected);
    }

    #[test]
    fn what_is_no_mode_is_refused_with_its_key_and_what_there_is() {
        for text in [
            "",
            "on",
            "auto",
            "32",
            "32/100",
            "32/us",
            "/100us",
            "0/100us",
            "32/0us",
            "32769/1us",
            "1/10001us",
            "+1/1us",
            "1/+1us",
            " 1/1us",
            "1/1us ",
            "1/1ms",
            "1/1/1us",
            "4294967297/1us",
        ] {
            let error = plan(Some(text), Source::File).expect_err(text);
            let words = format!("[[blk]] a: moderation: {text:?} is neither \"off\" nor N/Tus");
            assert!(error.starts_with(&words), "{error}");
        }
        let error = plan(Some("on"), Source::CommandLine).expect_err("on");
        assert!(error.starts_with("--moderation: \"on\" is neither"), "{error}");
    }
}

//! Parses and prints a choice of moderation, in a configuration and in messages: `off`, or limits
//! like `32/100us`.

use crate::policy::moderation::{Limits, Moderation};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// The maximum of the count: a ring has no more entries.
const COUNT_MAX: u32 = 32_768;
/// The maximum of the delay: longer delays are outages.
const DELAY_US_MAX: u32 = 10_000;

/// A text that is neither `off` nor limits.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is neither \"off\" nor COUNT/TIMEus like \"32/100us\" (COUNT 1 to {COUNT_MAX}, \
     TIME 1 to {DELAY_US_MAX})"
)]
pub struct NoModeration(String);

impl FromStr for Moderation {
    type Err = NoModeration;

    fn from_str(text: &str) -> Result<Self, NoModeration> {
        match text {
            "off" => Ok(Self::Off),
            text => parse_limits(text).map(Self::Fixed).ok_or_else(|| NoModeration(text.into())),
        }
    }
}

/// Parses limits like `32/100us`.
fn parse_limits(text: &str) -> Option<Limits> {
    let (count, delay) = text.split_once('/')?;
    let number = |text: &str, max| {
        let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|number| is_plain && (1..=max).contains(number))
    };
    let count_max = number(count, COUNT_MAX)?;
    let delay_us_max = number(delay.strip_suffix("us")?, DELAY_US_MAX)?;
    Some(Limits { count_max, delay_us_max })
}

impl Display for Moderation {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Fixed(Limits { count_max, delay_us_max }) => {
                write!(f, "{count_max}/{delay_us_max}us")
            }
        }
    }
}

impl Serialize for Moderation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Moderation {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_shown_as_it_is_typed() {
        for text in ["off", "1/1us", "32/100us", "32768/10000us"] {
            assert_eq!(text.parse::<Moderation>().unwrap().to_string(), text);
        }
        let expected = Moderation::Fixed(Limits { count_max: 32, delay_us_max: 100 });
        assert_eq!("32/100us".parse(), Ok(expected));
    }

    #[test]
    fn what_is_no_mode_is_refused_with_what_there_is() {
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
            let error = text.parse::<Moderation>().unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{text:?} is neither \"off\" nor COUNT/TIMEus")),
                "{error}"
            );
        }
    }
}

//! The keys of a limit as they are written. Any scalar is accepted here, so that the error for a
//! wrong value can quote it.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt::Formatter;
use std::str::FromStr;

/// `limit = { .. }` of a device, or `[[limit]]`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct RawLimit(pub BTreeMap<String, RawScalar>);

/// A number, a string or a boolean, kept as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct RawScalar(pub String);

/// One key and value of the option `--limit KEY=VALUE`.
#[derive(Clone, Debug)]
pub struct RawLimitOption(String, String);

impl FromStr for RawLimitOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("is not like read_iops=5000")?;
        Ok(Self(key.to_owned(), value.to_owned()))
    }
}

impl RawLimit {
    /// The limit that the `--limit` options of a command describe; `None` without such options. If
    /// a key is given twice, the last value counts.
    pub fn of_options(options: Vec<RawLimitOption>) -> Option<Self> {
        let keys = options.into_iter().map(|RawLimitOption(key, value)| (key, RawScalar(value)));
        let keys: BTreeMap<_, _> = keys.collect();
        (!keys.is_empty()).then_some(Self(keys))
    }
}

impl<'de> Deserialize<'de> for RawScalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyScalar).map(Self)
    }
}

struct AnyScalar;

impl Visitor<'_> for AnyScalar {
    type Value = String;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("a number or a text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<String, E> {
        Ok(format!("{number:?}"))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<String, E> {
        Ok(value.to_string())
    }
}

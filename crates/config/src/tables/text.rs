//! Values that a file may give as a string or as a number: accounts, sizes and queue lengths.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::convert::Infallible;
use std::fmt::Formatter;
use std::str::FromStr;

/// A user or group: its name or its number. A file may give the number without quotes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct RawAccount(pub String);

impl FromStr for RawAccount {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

/// A size: a string with a unit, or a number of bytes. A file may give the number without quotes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct RawSize(pub String);

impl FromStr for RawSize {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

/// The length of an interface's queues (`txqueuelen`): a word, or a number of frames.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct RawQueueLength(pub String);

impl FromStr for RawQueueLength {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for RawQueueLength {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wanted = TextOrNumber("\"auto\", \"host\", or a whole number from 1 to 1000000");
        deserializer.deserialize_any(wanted).map(Self)
    }
}

/// The pairs to which the host delivers (`receive_pairs`): a word, or a number of pairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct RawReceivePairs(pub String);

impl FromStr for RawReceivePairs {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for RawReceivePairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wanted = TextOrNumber("\"all\", \"auto\", or a whole number from 1 to 127");
        deserializer.deserialize_any(wanted).map(Self)
    }
}

impl<'de> Deserialize<'de> for RawAccount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrNumber("a name or a number")).map(Self)
    }
}

impl<'de> Deserialize<'de> for RawSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wanted = TextOrNumber("a size like \"64G\", or a number of bytes");
        deserializer.deserialize_any(wanted).map(Self)
    }
}

/// Deserializes a string, or a whole number as its decimal digits. The field is the text of the
/// error for any other type.
struct TextOrNumber(&'static str);

impl Visitor<'_> for TextOrNumber {
    type Value = String;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
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
}

//! What the house and a room say to each other: a byte for the version, then JSON.
//!
//! A room may be taken by its guest. So what comes from it is short, names only devices that it
//! was given, and asks for nothing.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of all messages. House and room are one program: another version is refused.
pub const VERSION: u8 = 1;
/// Longest message, in bytes.
pub const SIZE_MAX: usize = 4096;
/// Most file descriptors of a message.
pub const FDS_MAX: usize = 240;

/// What the house tells a room.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Told {
    /// A device to serve, by its keys as the control API takes them. File descriptors: one for the
    /// counters; if it `has_image`, one for transfers and all others for flushes.
    Device {
        /// Its name.
        device: String,
        /// Its keys, as JSON.
        keys: String,
        /// Its bytes are in a file.
        has_image: bool,
    },
    /// Somebody has connected to a device. One file descriptor: the socket.
    Client {
        /// The device's name.
        device: String,
    },
    /// A device goes.
    Remove {
        /// Its name.
        device: String,
    },
    /// The size of a device's file has changed.
    Measure {
        /// The device's name.
        device: String,
    },
    /// Counters are to be written down.
    Count {
        /// The answer names it.
        number: u64,
    },
}

/// What a room tells the house. None of it has file descriptors.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Heard {
    /// It serves from now on.
    Ready {},
    /// A front-end of a device has come or gone.
    Session {
        /// The device's name.
        device: String,
        /// It has come.
        is_open: bool,
    },
    /// A device has stopped, and all that it had is closed.
    Removed {
        /// Its name.
        device: String,
    },
    /// The counters are written down.
    Counted {
        /// That of the question.
        number: u64,
    },
}

/// Why bytes are no message.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum MessageError {
    #[error("an empty message")]
    Empty,
    #[error("version {found} of the messages, not {VERSION}")]
    Version { found: u8 },
    #[error("a message of {size} bytes: more than {SIZE_MAX}")]
    Long { size: usize },
    #[error("no message: {0}")]
    Text(#[from] serde_json::Error),
}

/// A message as bytes.
///
/// # Errors
/// [`MessageError::Long`].
pub fn emit<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    let mut bytes = vec![VERSION];
    serde_json::to_writer(&mut bytes, message)?;
    if bytes.len() > SIZE_MAX {
        return Err(MessageError::Long { size: bytes.len() });
    }
    Ok(bytes)
}

/// Bytes as a message.
///
/// # Errors
/// [`MessageError`], one for each reason.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    match bytes {
        [] => Err(MessageError::Empty),
        bytes if bytes.len() > SIZE_MAX => Err(MessageError::Long { size: bytes.len() }),
        [VERSION, text @ ..] => Ok(serde_json::from_slice(text)?),
        [found, ..] => Err(MessageError::Version { found: *found }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudo-random bits (xorshift).
    fn next(seed: &mut u64) -> u64 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed
    }

    fn text(seed: &mut u64) -> String {
        (0..next(seed) % 40).filter_map(|_| char::from_u32((next(seed) % 0x3000) as u32)).collect()
    }

    #[test]
    fn every_message_is_read_as_it_was_written() {
        let seed = &mut 0x9e37_79b9_7f4a_7c15;
        for round in 0..2000 {
            let (device, keys, number) = (text(seed), text(seed), next(seed));
            let is_open = number % 2 == 0;
            let told = match number % 5 {
                0 => Told::Device { device, keys, has_image: is_open },
                1 => Told::Client { device },
                2 => Told::Remove { device },
                3 => Told::Measure { device },
                _ => Told::Count { number },
            };
            assert_eq!(parse::<Told>(&emit(&told).unwrap()).unwrap(), told, "round {round}");
            let heard = match number % 4 {
                0 => Heard::Ready {},
                1 => Heard::Session { device: text(seed), is_open },
                2 => Heard::Removed { device: text(seed) },
                _ => Heard::Counted { number },
            };
            let bytes = emit(&heard).unwrap();
            assert_eq!(parse::<Heard>(&bytes).unwrap(), heard, "round {round}");
            // A spoiled one is another message, or none; a part of one is none.
            let mut spoiled = bytes.clone();
            let at = usize::try_from(next(seed)).unwrap() % spoiled.len();
            spoiled[at] ^= 1 << (next(seed) % 8);
            let _ = parse::<Heard>(&spoiled);
            assert!(parse::<Heard>(&bytes[..at]).is_err(), "round {round}");
        }
    }

    #[test]
    fn what_is_no_message_is_refused_and_named() {
        let said = |bytes: &[u8]| parse::<Heard>(bytes).unwrap_err().to_string();
        assert_eq!(said(&[]), "an empty message");
        assert_eq!(said(b"\x02{}"), "version 2 of the messages, not 1");
        assert!(said(&[1; SIZE_MAX + 1]).contains("more than 4096"));
        assert!(said(b"\x01{\"counted\":{\"number\":1,\"more\":2}}").contains("unknown field"));
        assert!(said(b"\x01{\"remove\":{\"device\":\"a\"}}").contains("unknown variant"));
        let long = Told::Remove { device: "x".repeat(SIZE_MAX) };
        assert!(matches!(emit(&long), Err(MessageError::Long { .. })));
    }
}

//! THE TABLE of the nodes of a Xen block device: name, folder, writer, form, default, limits.
//!
//! A row is a [`Key`]. Every node is read through its row, so that an error names a missing or
//! wrong value as it stands in xenstore ([`KeyError`]). The names and rules are those of Xen's
//! `io/blkif.h`; the nodes of the tool stack are those that `xl` writes. [`super::device`] makes
//! one record of the nodes of one end.

use super::blkif::RING_PAGE_ORDER_MAX;
use super::store::number;

/// Who writes a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The tool stack, before either end looks.
    Toolstack,
    /// The back-end.
    Back,
    /// The front-end.
    Front,
}

/// The folder in which a node lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Folder {
    /// The back-end's, `backend/<kind>/<domain>/<device>` below its domain.
    Back,
    /// The front-end's, `device/<kind>/<device>` below its domain.
    Front,
    /// The front-end's too if it has one queue, else `queue-<n>` below it.
    Queue,
}

/// The form that the value of a node must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `0` or `1`.
    Flag,
    /// A decimal number.
    Number {
        /// The smallest permitted number.
        min: u64,
        /// The largest permitted number.
        max: u64,
        /// Only powers of two.
        power_of_two: bool,
    },
    /// One of these words.
    Word(&'static [&'static str]),
    /// Any text.
    Text,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The name in its folder.
    pub name: &'static str,
    /// The folder in which the node lies.
    pub folder: Folder,
    /// Who writes the node.
    pub writer: Writer,
    /// The form of the node's value.
    pub form: Form,
    /// The value of a node that does not exist. `None`: the node must exist, or its record has a
    /// rule of its own for that case.
    pub default: Option<&'static str>,
}

const fn number_from(min: u64, max: u64) -> Form {
    Form::Number { min, max, power_of_two: false }
}

const fn power_from(min: u64, max: u64) -> Form {
    Form::Number { min, max, power_of_two: true }
}

const U32: u64 = u32::MAX as u64;
const RING_PAGES_MAX: u64 = 1 << RING_PAGE_ORDER_MAX;

/// Defines the rows, each as a constant of its own, once.
macro_rules! keys {
    ($($(#[$doc:meta])* $constant:ident = $name:literal, $folder:ident by $writer:ident,
        $form:expr, $default:expr;)*) => {
        $(
            $(#[$doc])*
            pub const $constant: Key = Key {
                name: $name,
                folder: Folder::$folder,
                writer: Writer::$writer,
                form: $form,
                default: $default,
            };
        )*
        /// Every row.
        pub const KEYS: &[Key] = &[$($constant),*];
    };
}

keys! {
    /// Path of the front-end's folder.
    FRONTEND = "frontend", Back by Toolstack, Form::Text, None;
    /// Domain of the front-end.
    FRONTEND_ID = "frontend-id", Back by Toolstack, number_from(0, 0x7fef), None;
    /// 0: the device is to be removed for good.
    ONLINE = "online", Back by Toolstack, Form::Flag, Some("1");
    /// Whether the front-end may write: `w`; `w!`: although other domains may write too.
    MODE = "mode", Back by Toolstack, Form::Word(&["r", "w", "w!"]), Some("w");
    /// The image to serve: free text, most often a file's name.
    PARAMS = "params", Back by Toolstack, Form::Text, Some("");
    /// Device number of the served block device, in hexadecimal, as `major:minor`.
    PHYSICAL_DEVICE = "physical-device", Back by Toolstack, Form::Text, Some("");
    /// Path of the block device or file that is served.
    PHYSICAL_DEVICE_PATH = "physical-device-path", Back by Toolstack, Form::Text, Some("");
    /// Kind of the image to serve: `file`, `phy`, `tap`.
    TYPE = "type", Back by Toolstack, Form::Text, Some("phy");
    /// The name that the guest's disk shall have.
    DEV = "dev", Back by Toolstack, Form::Text, Some("");
    /// The medium can be removed.
    REMOVABLE = "removable", Back by Toolstack, Form::Flag, Some("0");
    /// The pages of guests may be used for I/O of host devices directly.
    DIRECT_IO_SAFE = "direct-io-safe", Back by Toolstack, Form::Flag, Some("0");
    /// 0: the back-end must not offer discards.
    DISCARD_ENABLE = "discard-enable", Back by Toolstack, Form::Flag, Some("1");

    /// The state of the back-end ([`super::state`]).
    BACK_STATE = "state", Back by Back, number_from(0, 8), Some("0");
    /// Write barriers are served.
    FEATURE_BARRIER = "feature-barrier", Back by Back, Form::Flag, Some("0");
    /// Flushes are served.
    FEATURE_FLUSH_CACHE = "feature-flush-cache", Back by Back, Form::Flag, Some("0");
    /// Discards are served.
    FEATURE_DISCARD = "feature-discard", Back by Back, Form::Flag, Some("0");
    /// The back-end keeps grants mapped.
    BACK_PERSISTENT = "feature-persistent", Back by Back, Form::Flag, Some("0");
    /// Most segments of an indirect request; 0: none are served.
    FEATURE_MAX_INDIRECT_SEGMENTS = "feature-max-indirect-segments", Back by Back,
        number_from(0, U32), Some("0");
    /// Largest ring, in log2 of its pages.
    MAX_RING_PAGE_ORDER = "max-ring-page-order", Back by Back, number_from(0, U32), Some("0");
    /// Largest ring in pages; an older name of `max-ring-page-order`.
    MAX_RING_PAGES = "max-ring-pages", Back by Back, power_from(1, U32), Some("1");
    /// Most queues.
    MULTI_QUEUE_MAX_QUEUES = "multi-queue-max-queues", Back by Back, number_from(1, U32), Some("1");
    /// Offset in bytes of the first extent that can be discarded.
    DISCARD_ALIGNMENT = "discard-alignment", Back by Back, number_from(0, U32), Some("0");
    /// Bytes of an extent that can be discarded; without it, those of a sector.
    DISCARD_GRANULARITY = "discard-granularity", Back by Back, number_from(1, U32), None;
    /// Discards that erase are served.
    DISCARD_SECURE = "discard-secure", Back by Back, Form::Flag, Some("0");
    /// `VDISK_*`
    INFO = "info", Back by Back, number_from(0, U32), Some("0");
    /// Bytes of a logical block.
    SECTOR_SIZE = "sector-size", Back by Back, power_from(512, U32), Some("512");
    /// Bytes of a physical block; without it, those of a logical one.
    PHYSICAL_SECTOR_SIZE = "physical-sector-size", Back by Back, number_from(512, U32), None;
    /// Size of the disk in sectors of 512 bytes, whatever `sector-size` is.
    SECTORS = "sectors", Back by Back, number_from(0, u64::MAX >> 9), None;

    /// Path of the back-end's folder.
    BACKEND = "backend", Front by Toolstack, Form::Text, None;
    /// Domain of the back-end.
    BACKEND_ID = "backend-id", Front by Toolstack, number_from(0, 0x7fef), Some("0");
    /// The number of the disk in the guest.
    VIRTUAL_DEVICE = "virtual-device", Front by Toolstack, number_from(0, U32), Some("0");
    /// The kind of disk that the guest shall see: `disk`, `cdrom`, `floppy`.
    DEVICE_TYPE = "device-type", Front by Toolstack, Form::Text, Some("disk");
    /// 0: the front-end must not trust the back-end.
    TRUSTED = "trusted", Front by Toolstack, Form::Flag, Some("1");

    /// The state of the front-end ([`super::state`]).
    FRONT_STATE = "state", Front by Front, number_from(0, 8), Some("0");
    /// The ABI of the requests; without the node, the ABI of this machine.
    PROTOCOL = "protocol", Front by Front, Form::Text, None;
    /// Size of each ring, in log2 of its pages.
    RING_PAGE_ORDER = "ring-page-order", Front by Front,
        number_from(0, RING_PAGE_ORDER_MAX as u64), Some("0");
    /// Size of each ring in pages; an older name of `ring-page-order`.
    NUM_RING_PAGES = "num-ring-pages", Front by Front, power_from(1, RING_PAGES_MAX), Some("1");
    /// Number of queues that the front-end uses.
    MULTI_QUEUE_NUM_QUEUES = "multi-queue-num-queues", Front by Front, number_from(1, U32),
        Some("1");
    /// The front-end uses the same grants again and again.
    FRONT_PERSISTENT = "feature-persistent", Front by Front, Form::Flag, Some("0");
    /// The front-end counts sectors in logical blocks. Not supported: the node is ignored.
    FEATURE_LARGE_SECTOR_SIZE = "feature-large-sector-size", Front by Front, Form::Flag, Some("0");

    /// The event channel of a queue, for both directions.
    EVENT_CHANNEL = "event-channel", Queue by Front, number_from(1, U32), None;
    /// Grant reference of the only page of a ring. A ring of several pages has a node `ring-ref<n>`
    /// for page n.
    RING_REF = "ring-ref", Queue by Front, number_from(0, U32), None;
}

/// A value that is missing or wrong, with the name of its node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {fault}")]
pub struct KeyError {
    /// The node, relative to the folder of its end: `queue-3/ring-ref1`.
    pub key: String,
    /// What is wrong with the value.
    pub fault: KeyFault,
}

/// Why the value of a node is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum KeyFault {
    #[error("there is no such node")]
    Missing,
    #[error("\"{value}\" is neither 0 nor 1")]
    NotAFlag { value: String },
    #[error("\"{value}\" is not a decimal number")]
    NotANumber { value: String },
    #[error("{value} is not from {min} to {max}")]
    Range { value: u64, min: u64, max: u64 },
    #[error("{value} is not a power of two")]
    NotAPower { value: u64 },
    #[error("\"{value}\" is not one of {}", .words.join(", "))]
    NotAWord { value: String, words: &'static [&'static str] },
    #[error("\"{value}\" is not text")]
    NotText { value: String },
    #[error("\"{value}\" is no ABI that is served")]
    NotAnAbi { value: String },
    #[error("{value} is what {other} has already")]
    Taken { value: u64, other: String },
    #[error("{value} contradicts {other}")]
    Contradiction { value: u64, other: &'static str },
    #[error("{value} is no multiple of {of}")]
    NotAMultiple { value: u64, of: u64 },
}

/// A value as a message shows it: its first characters, without control characters.
pub(super) fn shown(value: &[u8]) -> String {
    const SHOWN_MAX: usize = 40;
    let cut = &value[..value.len().min(SHOWN_MAX)];
    let more = if cut.len() < value.len() { "..." } else { "" };
    format!("{}{more}", cut.escape_ascii())
}

impl KeyFault {
    /// This fault as the error of the node `key`.
    pub(super) fn of(self, key: impl Into<String>) -> KeyError {
        KeyError { key: key.into(), fault: self }
    }
}

impl Key {
    /// The value of the node, or the default of the row.
    fn value<'a>(&self, value: Option<&'a [u8]>) -> Result<&'a [u8], KeyFault> {
        value.or(self.default.map(str::as_bytes)).ok_or(KeyFault::Missing)
    }

    /// Reads a number; without a value, the default's.
    ///
    /// # Errors
    /// [`KeyFault::Missing`], [`KeyFault::NotANumber`], [`KeyFault::Range`],
    /// [`KeyFault::NotAPower`].
    pub fn number(&self, value: Option<&[u8]>) -> Result<u64, KeyFault> {
        let value = self.value(value)?;
        let number = number(value).ok_or_else(|| KeyFault::NotANumber { value: shown(value) })?;
        self.check(number)?;
        Ok(number)
    }

    /// Fails unless the key may have this number.
    ///
    /// # Errors
    /// [`KeyFault::Range`], [`KeyFault::NotAPower`].
    pub fn check(&self, number: u64) -> Result<(), KeyFault> {
        let Form::Number { min, max, power_of_two } = self.form else { return Ok(()) };
        if number < min || number > max {
            return Err(KeyFault::Range { value: number, min, max });
        }
        if power_of_two && !number.is_power_of_two() {
            return Err(KeyFault::NotAPower { value: number });
        }
        Ok(())
    }

    /// Reads a flag; without a value, the default's.
    ///
    /// # Errors
    /// [`KeyFault::Missing`], [`KeyFault::NotAFlag`].
    pub fn flag(&self, value: Option<&[u8]>) -> Result<bool, KeyFault> {
        match self.value(value)? {
            b"0" => Ok(false),
            b"1" => Ok(true),
            value => Err(KeyFault::NotAFlag { value: shown(value) }),
        }
    }

    /// Reads text; without a value, the default's. In a row of words, the text must be one of them.
    ///
    /// # Errors
    /// [`KeyFault::Missing`], [`KeyFault::NotText`] if there are control characters or bytes that
    /// are not UTF-8, [`KeyFault::NotAWord`].
    pub fn text<'a>(&self, value: Option<&'a [u8]>) -> Result<&'a str, KeyFault> {
        let value = self.value(value)?;
        let is_clean = |text: &&str| !text.chars().any(char::is_control);
        let text = std::str::from_utf8(value).ok().filter(is_clean);
        let text = text.ok_or_else(|| KeyFault::NotText { value: shown(value) })?;
        match self.form {
            Form::Word(words) if !words.contains(&text) => {
                Err(KeyFault::NotAWord { value: shown(value), words })
            }
            _ => Ok(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_of_every_row_is_a_value_that_it_takes() {
        for key in KEYS.iter().filter(|key| key.default.is_some()) {
            let fits = match key.form {
                Form::Flag => key.flag(None).is_ok(),
                Form::Number { .. } => key.number(None).is_ok(),
                Form::Word(_) | Form::Text => key.text(None).is_ok(),
            };
            assert!(fits, "{}", key.name);
        }
    }

    #[test]
    fn name_occurs_once_in_its_folder() {
        for (n, key) in KEYS.iter().enumerate() {
            let is_same = |other: &&Key| other.name == key.name && other.folder == key.folder;
            assert_eq!(KEYS[n..].iter().filter(is_same).count(), 1, "{}", key.name);
        }
    }

    #[test]
    fn value_that_is_wrong_is_told_with_what_would_be_right() {
        let text = |fault: KeyFault, key: Key| fault.of(key.name).to_string();
        let number = |key: Key, value: &[u8]| text(key.number(Some(value)).unwrap_err(), key);
        assert_eq!(number(RING_PAGE_ORDER, b"5"), "ring-page-order: 5 is not from 0 to 4");
        assert_eq!(number(NUM_RING_PAGES, b"3"), "num-ring-pages: 3 is not a power of two");
        for wrong in [&b""[..], b"-1", b"+1", b"0x1", b"1 ", b"18446744073709551616"] {
            let value = shown(wrong);
            let expected = format!("event-channel: \"{value}\" is not a decimal number");
            assert_eq!(number(EVENT_CHANNEL, wrong), expected);
        }
        let missing = text(SECTORS.number(None).unwrap_err(), SECTORS);
        assert_eq!(missing, "sectors: there is no such node");
        let flag = text(BACK_PERSISTENT.flag(Some(b"2")).unwrap_err(), BACK_PERSISTENT);
        assert_eq!(flag, "feature-persistent: \"2\" is neither 0 nor 1");
        let word = text(MODE.text(Some(b"x")).unwrap_err(), MODE);
        assert_eq!(word, "mode: \"x\" is not one of r, w, w!");
    }

    #[test]
    fn value_in_a_message_is_short_and_has_no_control_characters() {
        let fault = PARAMS.text(Some(b"a\n\x1b[2J")).unwrap_err();
        assert_eq!(fault.to_string(), "\"a\\n\\x1b[2J\" is not text");
        let long = vec![0xff; 4096];
        assert!(PARAMS.text(Some(&long)).unwrap_err().to_string().len() < 200);
    }

    #[test]
    fn numbers_are_taken_from_the_smallest_to_the_largest() {
        let is_taken =
            |key: Key, number: u64| key.number(Some(number.to_string().as_bytes())).is_ok();
        for (key, least, most) in [
            (RING_PAGE_ORDER, 0, 4),
            (NUM_RING_PAGES, 1, 16),
            (EVENT_CHANNEL, 1, u64::from(u32::MAX)),
            (FRONTEND_ID, 0, 0x7fef),
            (SECTORS, 0, u64::MAX / 512),
        ] {
            assert!(is_taken(key, least) && is_taken(key, most), "{}", key.name);
            assert!(!is_taken(key, most + 1) && (least == 0 || !is_taken(key, 0)), "{}", key.name);
        }
        assert!(!is_taken(NUM_RING_PAGES, 32));
        assert_eq!(shown(&[b'a'; 40]), "a".repeat(40));
        assert_eq!(shown(&[b'a'; 41]), "a".repeat(40) + "...");
    }
}

//! What is said of a key where it is defined (`raw.rs`): when a change takes effect, and the
//! numbers that it takes.

/// When another value of a key takes effect while the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// At once, whoever is connected.
    Live,
    /// At the next session: a front-end that is connected keeps what it has seen.
    Reconnect,
    /// The device is removed and added again; refused while a front-end is connected.
    Replace,
}

impl Class {
    /// Its name in answers and documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Reconnect => "reconnect",
            Self::Replace => "replace",
        }
    }
}

/// A key of a device.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) class: Class,
    /// `None`: it takes no number.
    pub(crate) numbers: Option<Numbers>,
}

/// The numbers of a key.
#[derive(Debug)]
pub(crate) struct Numbers {
    pub(crate) min: u64,
    pub(crate) max: u64,
    /// Unless every whole number between the two is meant.
    pub(crate) words: Option<&'static str>,
}

pub(crate) const fn all(min: u64, max: u64) -> Numbers {
    Numbers { min, max, words: None }
}

pub(crate) const fn some(min: u64, max: u64, words: &'static str) -> Numbers {
    Numbers { min, max, words: Some(words) }
}

/// The largest number of a signed type of the kernel, which is that of a file descriptor too.
pub(crate) const INT_MAX: u64 = 0x7fff_ffff;

/// The numbers that a key was given. Those of descriptors are none: whoever adopts a descriptor
/// says what is wrong with it.
pub(crate) trait Given {
    fn given(&self) -> Vec<u64>;
}

/// A value of a key that bounds its numbers.
pub(crate) trait Number: Copy {
    fn number(self) -> Option<u64>;
}

impl<T: Number> Given for Option<T> {
    fn given(&self) -> Vec<u64> {
        self.iter().filter_map(|value| value.number()).collect()
    }
}

impl<T: Number> Given for Option<Vec<T>> {
    fn given(&self) -> Vec<u64> {
        self.iter().flatten().filter_map(|value| value.number()).collect()
    }
}

impl Number for u16 {
    fn number(self) -> Option<u64> {
        Some(self.into())
    }
}

impl Number for u32 {
    fn number(self) -> Option<u64> {
        Some(self.into())
    }
}

impl Number for u64 {
    fn number(self) -> Option<u64> {
        Some(self)
    }
}

impl Number for usize {
    fn number(self) -> Option<u64> {
        Some(self as u64)
    }
}

impl Number for i32 {
    fn number(self) -> Option<u64> {
        None
    }
}

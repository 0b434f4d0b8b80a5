//! The properties of a key: when a change of the key takes effect, and which numbers the key
//! accepts. `tables.rs` gives them beside the definition of each key.

/// When a new value of a key takes effect while the daemon runs. Ordered by the cost for the guest,
/// the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// At once, also for a connected front-end.
    Live,
    /// At the next session: a connected front-end continues with the old value.
    Reconnect,
    /// The device is removed and added again; refused while a front-end is connected.
    Replace,
}

impl Class {
    /// Returns the name of the class in answers of the API and in documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Reconnect => "reconnect",
            Self::Replace => "replace",
        }
    }
}

/// A key of a device: its name, its class, and the numbers that it accepts.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) class: Class,
    /// The range of the key's numbers; `None`: its value is no number.
    pub(crate) numbers: Option<Numbers>,
}

/// The range of the numbers of a key.
#[derive(Debug)]
pub(crate) struct Numbers {
    pub(crate) min: u64,
    pub(crate) max: u64,
    /// The allowed values in words, if some numbers between `min` and `max` are not allowed.
    pub(crate) words: Option<&'static str>,
}

/// Makes a range of which every number is allowed.
pub(crate) const fn all(min: u64, max: u64) -> Numbers {
    Numbers { min, max, words: None }
}

/// Makes a range of which only the numbers that `words` describes are allowed.
pub(crate) const fn some(min: u64, max: u64, words: &'static str) -> Numbers {
    Numbers { min, max, words: Some(words) }
}

/// The largest value of a C `int`, and so the largest number of a file descriptor.
pub(crate) const INT_MAX: u64 = 0x7fff_ffff;

/// Lists the numbers in a key's value, to check them against the key's range. File descriptors
/// (`i32`) are left out: the code that adopts a descriptor reports errors of it.
pub(crate) trait Given {
    fn given(&self) -> Vec<u64>;
}

/// A type of number that a key can have. `number` returns `None` for a type that is not checked
/// against a range.
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

//! `XenbusState`: the state of one end of a device's connection (Xen `io/xenbus.h`).

use super::store::number;

/// Defines the states with their numbers, once.
macro_rules! states {
    ($($(#[$doc:meta])* $name:ident = $number:literal;)*) => {
        /// The state of one end, which it writes into its node `state` as a decimal number.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum XenbusState { $($(#[$doc])* $name = $number),* }

        impl XenbusState {
            /// Every state.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The name, as the specification writes it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name)),* }
            }
        }
    };
}

states! {
    /// There is no `state` node. This is not the same as `Closed`: the end may still begin.
    #[default]
    Unknown = 0;
    /// The end is starting.
    Initialising = 1;
    /// The end has written its offer, and waits for the other end or for the tool stack.
    InitWait = 2;
    /// The end has written the nodes that a connection needs.
    Initialised = 3;
    /// Requests may flow.
    Connected = 4;
    /// The end is closing, because of an error or because the device is unplugged.
    Closing = 5;
    /// The end has closed.
    Closed = 6;
    /// The device is being changed.
    Reconfiguring = 7;
    /// The device was changed.
    Reconfigured = 8;
}

impl XenbusState {
    /// Parses the value of a `state` node. `None`: the specification has no such state.
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Self> {
        let number: usize = number(value)?;
        Self::ALL.get(number).copied()
    }

    /// The value of the `state` node.
    #[must_use]
    pub fn emit(self) -> String {
        (self as u8).to_string()
    }
}

impl std::fmt::Display for XenbusState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_its_number_in_text_and_nothing_else() {
        for (number, state) in XenbusState::ALL.iter().enumerate() {
            assert_eq!(XenbusState::parse(number.to_string().as_bytes()), Some(*state));
            assert_eq!(state.emit(), number.to_string());
        }
        assert_eq!(XenbusState::parse(b"4"), Some(XenbusState::Connected));
        assert_eq!(XenbusState::Connected.to_string(), "Connected");
        for wrong in [&b"9"[..], b"", b"-1", b"+1", b"4 ", b"4\n", b"Connected", b"256"] {
            assert_eq!(XenbusState::parse(wrong), None, "{wrong:?}");
        }
    }
}

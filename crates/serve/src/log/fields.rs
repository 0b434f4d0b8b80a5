//! Writes the fields of a line of text, each as one word. A value that a peer chose (a path, the
//! name of a program, the text of an error) is escaped, so that it cannot begin another word or
//! line, or send control sequences to a terminal. All fields are written here, so that no call of
//! the log has to escape. A log in JSON uses JSON's own escapes.

use std::fmt::{self, Debug};
use tracing::field::{Field, Visit};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;

/// Writes `message name=value name="a value"`.
#[derive(Debug)]
pub(super) struct Fields;

impl<'w> FormatFields<'w> for Fields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut words = Words { writer, is_first: true, written: Ok(()) };
        fields.record(&mut words);
        words.written
    }
}

struct Words<'w> {
    writer: Writer<'w>,
    is_first: bool,
    written: fmt::Result,
}

impl Visit for Words<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field.name(), value, true);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.put(field.name(), &format!("{value:?}"), false);
    }
}

impl Words<'_> {
    fn put(&mut self, name: &str, value: &str, is_quoted: bool) {
        // Fields of these names say which file of another crate logged the line: left out.
        if name.starts_with("log.") || self.written.is_err() {
            return;
        }
        let pad = if std::mem::take(&mut self.is_first) { "" } else { " " };
        self.written = match name {
            "message" => write!(self.writer, "{pad}{}", shown(value)),
            _ if is_quoted || !is_word(value) => write!(self.writer, "{pad}{name}={value:?}"),
            _ => write!(self.writer, "{pad}{name}={value}"),
        };
    }
}

/// True if the value needs no quotes: it has no blanks, quotes, `=` or characters that a terminal
/// would not show.
fn is_word(value: &str) -> bool {
    let is_plain = |c: char| !c.is_whitespace() && !matches!(c, '"' | '\\' | '=');
    !value.is_empty() && value.chars().all(is_plain) && shown(value) == value
}

/// Escapes text for a terminal: control and invisible characters, line ends included, are shown as
/// in Rust.
pub fn shown(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' | '\'' | '\\' => shown.push(c),
            c => shown.extend(c.escape_debug()),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What the lines say that `work` logs.
    fn logged(work: impl FnOnce()) -> String {
        let log = Log::default();
        let writer = log.clone();
        let text = tracing_subscriber::fmt().fmt_fields(Fields).with_ansi(false);
        let text = text.without_time().with_target(false).with_level(false);
        let subscriber = text.with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, work);
        let bytes = log.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_plain_value_is_a_word_and_any_other_is_quoted() {
        let text = logged(|| {
            let (device, error) = ("a", "No such file");
            let (path, empty) = ("/run/a", "");
            tracing::warn!(device, count = 3, path = %path, %error, %empty, "it \"has\" failed");
        });
        let expected = " it \"has\" failed device=\"a\" count=3 path=/run/a \
            error=\"No such file\" empty=\"\"\n";
        assert_eq!(text.trim_start(), expected.trim_start());
    }

    #[test]
    fn no_value_ends_its_word_or_line_or_orders_a_terminal() {
        let lies = [
            "/x\n2026-11-29T06:00:00Z  INFO changed uid=0",
            "/x\r WARN",
            "/x\x1b[2J",
            "/x\u{9b}2J",
            "/x uid=0",
            "/x\" uid=\"0",
            "/x=y",
            "/x\u{202e}y",
            "/x\u{2028}y",
            "/x\\",
        ];
        for lie in lies {
            let text = logged(|| {
                tracing::warn!(path = %lie, comm = lie, error = ?lie, end = 1, "said {lie}");
            });
            assert_eq!(text.matches('\n').count(), 1, "{text}");
            let is_shown =
                |c: char| c == '\n' || !(c.is_control() || "\u{202e}\u{2028}".contains(c));
            assert!(text.chars().all(is_shown), "{text:?}");
            let quoted = format!("{lie:?}");
            assert!(text.contains(&format!(" path={quoted} comm={quoted} error=")), "{text}");
            assert!(text.ends_with(" end=1\n"), "{text}");
        }
    }
}

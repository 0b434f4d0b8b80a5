//! `Text`: metrics as Prometheus reads them, in its own text format (0.0.4) or as OpenMetrics 1.0.
//!
//! ```text
//!                 text format                    OpenMetrics
//! a counter       # TYPE x_total counter         # TYPE x counter      both: x_total{..} 1
//! an info         # TYPE x_info gauge            # TYPE x info         both: x_info{..} 1
//! the unit        -                              # UNIT x_seconds seconds
//! the end         -                              # EOF
//! ```

use std::fmt::{Display, Write};

/// The format of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// The text format of Prometheus, 0.0.4: the default.
    Plain,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// Chooses the format by the `Accept` header of the request.
    pub(crate) fn of(accept: &str) -> Self {
        let is_open = |range: &str| {
            let mut parts = range.split(';').map(str::trim);
            let is_named = parts.next() == Some("application/openmetrics-text");
            let is_refused = |part: &str| {
                let q = part.strip_prefix("q=").and_then(|q| q.parse::<f32>().ok());
                q == Some(0.0) || part.strip_prefix("version=").is_some_and(|v| v != "1.0.0")
            };
            is_named && !parts.any(is_refused)
        };
        if accept.split(',').any(|range| is_open(range.trim())) {
            Self::OpenMetrics
        } else {
            Self::Plain
        }
    }

    /// Returns the media type of the answer.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The type of a metric family, which decides the suffix of its samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Counter,
    Gauge,
    Histogram,
    Info,
}

/// Writes the text of an answer: call `family`, then `line`, `alone` or `part` for each sample of
/// the family, then `family` for the next one, and `end` last.
#[derive(Debug)]
pub(super) struct Text {
    out: String,
    format: Format,
    /// The name of the samples of the current family, without the suffix that the samples of a
    /// histogram get (`_bucket`, `_count`, `_sum`).
    sample: String,
}

impl Text {
    pub(super) fn new(format: Format) -> Self {
        Self { out: String::new(), format, sample: String::new() }
    }

    /// Begins a family. `name` is without `_total` or `_info`, `help` without a full stop.
    pub(super) fn family(&mut self, name: &str, sort: Sort, unit: Option<&str>, help: &str) {
        let (kind, suffix) = match sort {
            Sort::Counter => ("counter", "_total"),
            Sort::Gauge => ("gauge", ""),
            Sort::Histogram => ("histogram", ""),
            Sort::Info => ("info", "_info"),
        };
        self.sample.clear();
        self.sample.extend([name, suffix]);
        let (family, kind) = match (self.format, sort) {
            (Format::Plain, Sort::Info) => (self.sample.as_str(), "gauge"),
            (Format::Plain, _) => (self.sample.as_str(), kind),
            (Format::OpenMetrics, _) => (name, kind),
        };
        let _ = writeln!(self.out, "# TYPE {family} {kind}");
        if let (Format::OpenMetrics, Some(unit)) = (self.format, unit) {
            let _ = writeln!(self.out, "# UNIT {family} {unit}");
        }
        let _ = writeln!(self.out, "# HELP {family} {help}.");
    }

    /// Writes a sample of the current family. `labels` is written as it is, between braces.
    pub(super) fn line(&mut self, labels: impl Display, value: impl Display) {
        self.part("", labels, value);
    }

    /// Writes the only sample of the current family, without labels.
    pub(super) fn alone(&mut self, value: impl Display) {
        let _ = writeln!(self.out, "{} {value}", self.sample);
    }

    /// Writes a sample of a histogram. `part` is `_bucket`, `_count` or `_sum`.
    pub(super) fn part(&mut self, part: &str, labels: impl Display, value: impl Display) {
        let _ = writeln!(self.out, "{}{part}{{{labels}}} {value}", self.sample);
    }

    /// Returns the text, with the end mark that OpenMetrics demands.
    pub(super) fn end(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.out.push_str("# EOF\n");
        }
        self.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_for_those_who_ask_for_it() {
        // As Prometheus 2.42 and 3.0 ask, curl, a browser, and one that refuses it.
        let prometheus = "application/openmetrics-text;version=1.0.0,\
            application/openmetrics-text;version=0.0.1;q=0.75,\
            text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, format) in [
            (prometheus, Format::OpenMetrics),
            ("application/openmetrics-text", Format::OpenMetrics),
            (
                "text/plain;version=0.0.4;q=0.5, application/openmetrics-text; q=0.1",
                Format::OpenMetrics,
            ),
            ("application/openmetrics-text; q=0, text/plain", Format::Plain),
            ("application/openmetrics-text;version=0.0.1", Format::Plain),
            ("text/html,application/xhtml+xml,*/*;q=0.8", Format::Plain),
            ("*/*", Format::Plain),
            ("", Format::Plain),
        ] {
            assert_eq!(Format::of(accept), format, "{accept}");
        }
    }

    #[test]
    fn each_format_names_families_its_own_way() {
        let write = |format| {
            let mut out = Text::new(format);
            out.family("a_seconds", Sort::Counter, Some("seconds"), "A");
            out.alone(1);
            out.family("b", Sort::Info, None, "B");
            out.line("v=\"2\"", 1);
            out.family("c", Sort::Gauge, None, "C");
            out.line("d=\"x\"", 3);
            out.end()
        };
        assert_eq!(
            write(Format::Plain),
            "# TYPE a_seconds_total counter\n# HELP a_seconds_total A.\na_seconds_total 1\n\
             # TYPE b_info gauge\n# HELP b_info B.\nb_info{v=\"2\"} 1\n\
             # TYPE c gauge\n# HELP c C.\nc{d=\"x\"} 3\n"
        );
        assert_eq!(
            write(Format::OpenMetrics),
            "# TYPE a_seconds counter\n# UNIT a_seconds seconds\n# HELP a_seconds A.\n\
             a_seconds_total 1\n# TYPE b info\n# HELP b B.\nb_info{v=\"2\"} 1\n\
             # TYPE c gauge\n# HELP c C.\nc{d=\"x\"} 3\n# EOF\n"
        );
    }
}

//! `Absence`: since when the server is unreachable. This decides when requests fail (`reconnect`)
//! and how long the pauses between attempts are. Pure: the time is an argument.

use std::time::Duration;

/// A connection that lasted for this long proves that the server was back, even if no request was
/// sent on it. If a server crashes at its first request, its connection ends sooner.
const STOOD: Duration = Duration::from_secs(5);

/// The time since which the server is unreachable.
#[derive(Debug, Default)]
pub(super) struct Absence {
    /// When the server became unreachable; `None`: it is reachable, as far as is known.
    since: Option<Duration>,
    /// When a queue got a connection last; `None` after a loss or a failed attempt.
    granted: Option<Duration>,
}

impl Absence {
    /// Called when a connection is lost on which the server had answered: a new absence begins.
    pub(super) fn begin(&mut self, now: Duration) {
        (self.since, self.granted) = (Some(now), None);
    }

    /// Called when an attempt has failed, or a connection is lost on which the server had not
    /// answered. The present absence continues, unless the last connection lasted for [`STOOD`].
    pub(super) fn go_on(&mut self, now: Duration) {
        if self.granted.take().is_some_and(|at| now.saturating_sub(at) >= STOOD) {
            self.since = None;
        }
        self.since.get_or_insert(now);
    }

    /// Called when a queue gets a connection.
    pub(super) fn grant(&mut self, now: Duration) {
        self.granted = Some(now);
    }

    /// Called when the server has answered, or when no queue asks for a connection.
    pub(super) fn end(&mut self) {
        self.since = None;
    }

    /// Returns for how long the server has been unreachable.
    pub(super) fn lasts(&self, now: Duration) -> Duration {
        now.saturating_sub(self.since.unwrap_or(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn an_absence_goes_on_while_each_connection_ends_before_an_answer() {
        let mut absence = Absence::default();
        absence.begin(at(100));
        for now in (101..130).step_by(4) {
            absence.grant(at(now));
            absence.go_on(at(now + 1));
            absence.go_on(at(now + 3));
        }
        assert_eq!(absence.lasts(at(130)), at(30));
        // Tries that fail for long after such a connection change nothing.
        (132..200).for_each(|now| absence.go_on(at(now)));
        assert_eq!(absence.lasts(at(200)), at(100));
    }

    #[test]
    fn an_absence_ends_with_an_answer_or_a_connection_that_stands() {
        let mut absence = Absence::default();
        assert_eq!(absence.lasts(at(1)), at(0));
        absence.begin(at(100));
        absence.grant(at(101));
        absence.end();
        absence.go_on(at(102));
        assert_eq!(absence.lasts(at(103)), at(1));
        absence.grant(at(104));
        absence.go_on(at(3600));
        assert_eq!(absence.lasts(at(3601)), at(1));
        absence.begin(at(3700));
        assert_eq!(absence.lasts(at(3701)), at(1));
    }
}

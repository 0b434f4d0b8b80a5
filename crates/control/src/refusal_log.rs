//! Logs each refused request of the control socket: user and process, method and path, and the
//! reason. The lines are limited for each user: after [`AT_ONCE`] lines, a user gets one line each
//! [`REFUSAL_LINE_EACH`], with the number of lines that were left out. One user's refusals do not
//! suppress the lines of another user.

use axum::http::{Method, StatusCode};
use manyring_engine::Rate;
use manyring_serve::times::REFUSAL_LINE_EACH;
use manyring_supervisor::model::Who;
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use tokio::time::Instant;

/// The number of lines of one user that are logged without a pause.
const AT_ONCE: u32 = 10;
/// Users whose lines are counted apart, at most. All further users share one count.
const USERS_MAX: usize = 64;
const OTHERS: u32 = u32::MAX;
/// The most bytes of method, path and reason in a line: the client chooses their length.
const METHOD_MAX: usize = 32;
const PATH_MAX: usize = 200;
const ERROR_MAX: usize = 500;

/// The refusals that were logged lately, by user.
#[derive(Debug, Default)]
pub(super) struct Refused(Mutex<HashMap<u32, Lines>>);

#[derive(Debug)]
struct Lines {
    rate: Rate,
    left_out: u64,
}

/// Why a request was refused: the sentence of the answer, which the log shows too.
#[derive(Clone, Debug)]
pub(super) struct Why(pub(super) String);

impl Refused {
    /// Logs a request that was answered with `status`, if the status is an error.
    pub(super) fn log(
        &self,
        who: &Who,
        (method, path): (&Method, &str),
        status: StatusCode,
        why: Option<&Why>,
    ) {
        if !status.is_client_error() && !status.is_server_error() {
            return;
        }
        let Some(left_out) = self.admit(who.uid, Instant::now()) else { return };
        let Who { uid, pid, comm } = who;
        let error = why.map_or_else(|| status.to_string(), |Why(why)| why.clone());
        let status = status.as_u16();
        let left_out = (left_out > 0).then_some(left_out);
        let (path, error) = (&*shortened(path, PATH_MAX), shortened(&error, ERROR_MAX));
        let is_look = [Method::GET, Method::HEAD].contains(method);
        let what = &*shortened(method.as_str(), METHOD_MAX);
        let said = "control request refused";
        if is_look {
            tracing::info!(uid, pid, comm, method = what, path, status, %error, left_out, "{said}");
        } else {
            tracing::warn!(uid, pid, comm, method = what, path, status, %error, left_out, "{said}");
        }
    }

    /// Charges the user for one line. Returns how many lines of the user were left out before this
    /// one, or `None` if this line must be left out too.
    fn admit(&self, uid: u32, now: Instant) -> Option<u64> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Lines { rate: Rate::of(AT_ONCE, REFUSAL_LINE_EACH, now), left_out: 0 };
        let mut uid = uid;
        if users.len() >= USERS_MAX && !users.contains_key(&uid) {
            let rested = users.extract_if(|_, lines| lines.rate.is_rested(now));
            // The table is full: the entries of users without recent refusals are removed. The
            // lines that were left out for them are added to the count that all further users
            // share, and the next line of these users reports it.
            let left_out: u64 = rested.map(|(_, lines)| lines.left_out).sum();
            if left_out > 0 {
                users.entry(OTHERS).or_insert_with(new).left_out += left_out;
            }
            uid = if users.len() < USERS_MAX { uid } else { OTHERS };
        }
        let lines = users.entry(uid).or_insert_with(new);
        if lines.rate.due() > now {
            lines.left_out += 1;
            return None;
        }
        lines.rate.charge(REFUSAL_LINE_EACH, now);
        Some(std::mem::take(&mut lines.left_out))
    }
}

/// Returns the first `max` bytes of a text, followed by `..` if the text is longer.
fn shortened(text: &str, max: usize) -> Cow<'_, str> {
    if text.len() <= max {
        return text.into();
    }
    format!("{}..", &text[..text.floor_char_boundary(max)]).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_is_refused_without_end_takes_no_line_from_another() {
        let (refused, start) = (Refused::default(), Instant::now());
        let flood = |at: Instant| (0..1000).filter_map(|_| refused.admit(1000, at)).count();
        assert_eq!(flood(start), 10);
        assert_eq!(refused.admit(1001, start), Some(0));
        assert_eq!(refused.admit(1000, start + REFUSAL_LINE_EACH), Some(990));
        assert_eq!(refused.admit(1000, start + REFUSAL_LINE_EACH), None);
    }

    #[test]
    fn many_users_are_not_kept_for_ever() {
        let (refused, start) = (Refused::default(), Instant::now());
        let lines = (0..1000).filter_map(|uid| refused.admit(uid, start)).count();
        assert!((USERS_MAX..=USERS_MAX + 10).contains(&lines), "{lines}");
        assert!(refused.0.lock().unwrap().len() <= USERS_MAX + 1);
        let later = start + REFUSAL_LINE_EACH * 100;
        assert_eq!(refused.admit(5000, later), Some(0), "those before are forgotten");
        assert!(refused.0.lock().unwrap().len() <= 2, "but for what was left out");
    }

    #[test]
    fn users_whose_lines_were_left_out_make_room_for_those_who_come_later() {
        let (refused, start) = (Refused::default(), Instant::now());
        for uid in (0..64).flat_map(|uid| [uid; 12]) {
            refused.admit(uid, start);
        }
        let later = start + REFUSAL_LINE_EACH * 100;
        // All those are forgotten: two later users have ten lines each, and do not share ten.
        let lines = |uid| (0..20).filter_map(|_| refused.admit(uid, later)).count();
        assert_eq!((lines(5000), lines(5001)), (10, 10));
        let left_out: u64 = refused.0.lock().unwrap().values().map(|lines| lines.left_out).sum();
        assert_eq!(left_out, 64 * 2 + 2 * 10, "no line that was left out is uncounted");
    }

    #[test]
    fn a_long_path_has_its_first_bytes_in_the_line() {
        assert_eq!(shortened("/v1/devices", PATH_MAX), "/v1/devices");
        let path = format!("/v1/devices/{}", "\u{fc}".repeat(5000));
        let short = shortened(&path, PATH_MAX - 1);
        assert_eq!((short.len(), short.ends_with("\u{fc}..")), (PATH_MAX, true), "{short}");
    }
}

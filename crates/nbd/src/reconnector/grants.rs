//! Decides which queue has which connection: one of its own, or, if the server accepts fewer
//! connections than there are queues, one that it shares with other queues.

use super::share::Share;
use super::{BACKOFF_MIN, EXTRA_LIMIT, Reconnector, State};
use crate::channel::Channel;
use crate::clock::now;
use crate::join::JoinedConnection;
use crate::queue_connection::{News, QueueConnection};
use manyring_wire::nbd::{CAN_MULTI_CONN, Export};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// The shortest and the longest pause between attempts to get one more connection while queues
/// share one.
pub(super) const MORE_MIN: Duration = Duration::from_secs(1);
const MORE_MAX: Duration = Duration::from_secs(60);
/// If a queue has not yielded its connection after this time, another queue is asked.
pub(super) const YIELD_LIMIT: Duration = Duration::from_secs(1);
/// The connection that a queue has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Holds {
    Nothing,
    /// A connection of its own, on which the server offers this export.
    Own(Export),
    Shared,
}

impl Reconnector {
    /// Takes the old connection of a queue that has switched to another one, with nothing in
    /// flight. If the queue was asked to yield it, it becomes the shared one; else it is closed.
    pub(crate) fn release(&self, line: &Arc<QueueConnection>, mut channel: Channel) {
        let mut state = self.lock();
        let is_yielded = state.yielding.as_ref().is_some_and(|(other, _)| Arc::ptr_eq(other, line));
        match &state.share {
            Some(share) if is_yielded && !channel.stream.has_ended() => {
                share.serve(channel);
                state.yielding = None;
                self.tell_limit(&mut state);
            }
            // The server has closed the connection while it was idle, so it cannot be shared.
            Some(_) if is_yielded => state.yields_no_more(line),
            _ => channel.leave(),
        }
    }

    /// True if the thread of `share`, which has no queues left, may end: no queue was added to it
    /// meanwhile.
    pub(super) fn end_share(&self, share: &Arc<Share>) -> bool {
        let mut state = self.lock();
        share.is_obeyed() && state.forget_share(share)
    }

    /// Called when the connection of `share` is lost for `reason`.
    pub(super) fn lost_share(&self, share: &Arc<Share>, reason: &str) {
        let mut state = self.lock();
        if state.forget_share(share) {
            state.warn(now(), &self.options.name, reason);
        }
    }

    /// Lets the queues that ask share one of the present connections, because the server accepts no
    /// more.
    pub(super) fn share_out(self: &Arc<Self>, state: &mut State) {
        let (now, open) = (now(), state.open());
        state.put_off(now);
        if state.limit.replace(open) != Some(open) {
            (state.more_at, state.more_pause) = (now + MORE_MIN, MORE_MIN);
        }
        if let Err(errno) = self.find_share(state, now) {
            return self.cannot_share(state, now, errno);
        }
        let Some(share) = state.share.clone() else { return };
        while let Some(line) = state.asking.front().cloned() {
            if let Err(errno) = state.let_share(&share, &line) {
                return self.cannot_share(state, now, errno);
            }
            state.asking.pop_front();
            state.absence.grant(now);
            self.tell_back(state);
        }
        state.backoff = BACKOFF_MIN;
        if state.yielding.is_none() {
            self.tell_limit(state);
        }
    }

    /// Handles the failure of sharing: the host has no descriptor or thread. The queues that ask
    /// wait for the next attempt, and fail their requests after `reconnect`.
    pub(super) fn cannot_share(&self, state: &mut State, now: Duration, errno: Errno) {
        state.absence.go_on(now);
        state.warn(now, &self.options.name, &format!("cannot share one: {errno}"));
        self.give_up_after(state, now);
    }

    /// Asks another queue to yield its connection, because the first one still waits for replies.
    /// If the host refuses a descriptor or thread, this is tried again after [`YIELD_LIMIT`].
    pub(super) fn ask_another(self: &Arc<Self>) {
        let mut state = self.lock();
        let now = now();
        if state.yielding.is_none() {
            return;
        }
        if let Err(errno) = self.find_share(&mut state, now) {
            state.yielding.iter_mut().for_each(|(_, since)| *since = now);
            let reason = format!("cannot share another one: {errno}");
            state.warn(now, &self.options.name, &reason);
        }
    }

    /// Finds a queue whose connection can be shared, and asks the queue to yield it. Does nothing
    /// if there is a shared connection, or a queue was asked less than [`YIELD_LIMIT`] ago.
    fn find_share(self: &Arc<Self>, state: &mut State, now: Duration) -> Result<(), Errno> {
        let is_coming = |(_, since): &(Arc<QueueConnection>, Duration)| now < *since + YIELD_LIMIT;
        if state.share.is_some() && state.yielding.as_ref().is_none_or(is_coming) {
            return Ok(());
        }
        let owner = state.lines.iter().rev().find_map(|(line, holds)| match holds {
            Holds::Own(export) if line.is_told() => Some((line.clone(), *export)),
            _ => None,
        });
        // No queue has taken its connection yet, so none can yield it: a later attempt finds one.
        let Some((line, export)) = owner else {
            state.yielding.iter_mut().for_each(|(_, since)| *since = now);
            return Ok(());
        };
        let share = match &state.share {
            Some(share) => share.clone(),
            None => state.start_share(self, export)?,
        };
        let is_let = state.let_share(&share, &line);
        if is_let.is_ok() {
            (state.share, state.yielding) = (Some(share), Some((line, now)));
        } else if state.share.is_none() {
            // The thread was just started, and no queue will yield a connection to it.
            share.end();
        }
        is_let
    }

    /// Logs how many connections the server accepts, if that has changed.
    fn tell_limit(&self, state: &mut State) {
        let (device, limit, queues) = (&self.options.name, state.open(), state.lines.len());
        if state.told_limit.replace(limit) != Some(limit) {
            let s = if limit == 1 { "" } else { "s" };
            tracing::warn!(
                device,
                "the server takes {limit} connection{s}; {queues} queues share them"
            );
        }
    }

    /// Tries to get a connection of its own for one of the queues that share one.
    pub(super) fn attempt_more(&self) {
        let joined = self.options.join(EXTRA_LIMIT);
        let mut state = self.lock();
        let fit = joined.ok().filter(|joined| {
            self.fits(&state.told, &joined.export).is_ok() && !state.lacks_multi(&joined.export)
        });
        let shares = |(line, holds): &&(Arc<QueueConnection>, Holds)| {
            matches!(holds, Holds::Shared) && line.is_told()
        };
        let line = state.lines.iter().find(shares).map(|(line, _)| line.clone());
        match (fit, line) {
            (Some(joined), Some(line)) if state.share.is_some() && state.yielding.is_none() => {
                state.limit = Some(state.open() + 1);
                state.give(&line, joined);
                (state.more_at, state.more_pause) = (now(), MORE_MIN);
                state.told_limit = state.limit;
                let (device, limit) = (&self.options.name, state.open());
                tracing::info!(device, "the server takes {limit} connections now");
            }
            (fit, _) => {
                state.more_at = now() + state.more_pause;
                state.more_pause = (state.more_pause * 2).min(MORE_MAX);
                drop(state);
                fit.into_iter().for_each(|mut joined| joined.channel.leave());
            }
        }
    }
}

impl State {
    /// Returns the number of connections to the server that queues have.
    pub(super) fn open(&self) -> usize {
        let own = self.lines.iter().filter(|(_, holds)| matches!(holds, Holds::Own(_)));
        own.count() + usize::from(self.share.is_some())
    }

    /// True if the guest was told an export that allows several connections, and `export` does not.
    pub(super) fn lacks_multi(&self, export: &Export) -> bool {
        self.told.flags & CAN_MULTI_CONN > export.flags & CAN_MULTI_CONN
    }

    pub(super) fn holds(&mut self, line: &Arc<QueueConnection>, holds: Holds) {
        let own = self.lines.iter_mut().find(|(other, _)| Arc::ptr_eq(other, line));
        own.into_iter().for_each(|own| own.1 = holds);
    }

    /// Gives a queue a connection of its own.
    pub(super) fn give(&mut self, line: &Arc<QueueConnection>, joined: JoinedConnection) {
        self.holds(line, Holds::Own(joined.export));
        self.absence.grant(now());
        line.tell(News::Joined(joined));
    }

    /// Starts the thread that will share a connection among queues.
    pub(super) fn start_share(
        &mut self,
        reconnector: &Arc<Reconnector>,
        export: Export,
    ) -> Result<Arc<Share>, Errno> {
        #[cfg(test)]
        self.ask_the_host()?;
        Share::start(reconnector, export)
    }

    /// Lets a queue share a connection.
    fn let_share(&mut self, share: &Share, line: &Arc<QueueConnection>) -> Result<(), Errno> {
        #[cfg(test)]
        self.ask_the_host()?;
        let (socket, export) = (share.add()?, share.export);
        self.holds(line, Holds::Shared);
        let channel = Channel::new(socket, None);
        line.tell(News::Joined(JoinedConnection { channel, export, is_shared: true }));
        Ok(())
    }

    /// Called when a queue has no connection to yield any more. If it was asked to yield, the
    /// thread for sharing ends, so the queues that were to share the connection ask again.
    pub(super) fn yields_no_more(&mut self, line: &Arc<QueueConnection>) {
        if self.yielding.take_if(|(other, _)| Arc::ptr_eq(other, line)).is_some() {
            self.share.take().into_iter().for_each(|share| share.end());
        }
    }

    /// Forgets `share`, whose thread ends. Returns false if it was forgotten before.
    fn forget_share(&mut self, share: &Arc<Share>) -> bool {
        let is_present = self.share.as_ref().is_some_and(|other| Arc::ptr_eq(other, share));
        if is_present {
            (self.share, self.yielding) = (None, None);
        }
        is_present
    }
}

//! `Task`: the remaining part of a request. `Backlog`: the tasks of a queue that continue in its
//! next turns.

use super::quota::{PIECE, Quota, Retries};
use super::{Completion, Op, Request};
use manyring_memory::{Pieces, SliceList};
use rustix::io::Errno;
use std::collections::VecDeque;

/// The remaining part of a request.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) token: u32,
    pub(crate) op: Op,
    /// Offset on the disk of the first byte that is not done.
    pub(crate) offset: u64,
    /// How many bytes are not done.
    pub(crate) len: u64,
    /// The remaining slices. Their memory stays mapped while they are listed here.
    pub(crate) rest: SliceList,
    pub(crate) retries: Retries,
}

/// The queue's next step for a task after a piece of it was served.
#[derive(Debug)]
pub(crate) enum Step {
    /// Serve the rest of the task.
    More,
    /// The task has ended.
    Done(Result<(), Errno>),
    /// The disk's thread serves the rest of the task, and sends its completion.
    Left,
}

impl Task {
    pub(crate) fn new(request: &Request, pieces: Pieces<'_>) -> Self {
        let mut task = Self::default();
        task.begin(request, pieces);
        task
    }

    /// Starts `request`, and reuses the list of slices of an earlier one.
    pub(crate) fn begin(&mut self, request: &Request, pieces: Pieces<'_>) {
        self.token = request.token;
        self.op = request.op;
        self.offset = request.offset;
        self.len = request.len;
        self.rest.clear();
        self.rest.extend(pieces);
        self.retries = Retries::default();
    }

    /// Returns the task, to be served elsewhere.
    pub(crate) fn take(&mut self) -> Self {
        Self { rest: std::mem::take(&mut self.rest), ..*self }
    }

    /// Records that `n` more bytes are done.
    pub(crate) fn went_on(&mut self, n: u64) {
        self.rest.advance(usize::try_from(n).unwrap_or(usize::MAX));
        self.offset += n;
        self.len = self.len.saturating_sub(n);
        self.retries.renew();
    }

    /// Returns [`Step::More`], or [`Step::Done`] if nothing is left.
    pub(crate) fn step(&self) -> Step {
        if self.len == 0 { Step::Done(Ok(())) } else { Step::More }
    }
}

/// Replaces the content of `out` by the first `bytes` bytes of `list`.
pub(crate) fn head(list: &SliceList, bytes: u64, out: &mut SliceList) {
    out.clear();
    out.extend_part(list.all(), 0, usize::try_from(bytes).unwrap_or(usize::MAX));
}

impl Default for Task {
    fn default() -> Self {
        Self {
            token: 0,
            op: Op::Flush,
            offset: 0,
            len: 0,
            rest: SliceList::new(),
            retries: Retries::default(),
        }
    }
}

/// The tasks of a queue that do not fit into one turn, in order. Each turn serves [`Quota`] bytes
/// of them. The queue's ring bounds their number.
#[derive(Debug)]
pub(crate) struct Backlog {
    quota: Quota,
    tasks: VecDeque<Task>,
}

impl Default for Backlog {
    fn default() -> Self {
        Self { quota: Quota::new(PIECE), tasks: VecDeque::new() }
    }
}

impl Backlog {
    /// True if a request of `bytes` may be served at once: no task waits, and the quota of this
    /// turn covers it. Then charges the quota.
    pub(crate) fn takes_at_once(&mut self, bytes: u64) -> bool {
        self.tasks.is_empty() && self.quota.take(bytes)
    }

    /// Puts a task at the end.
    pub(crate) fn push(&mut self, task: Task) {
        self.tasks.push_back(task);
    }

    /// Removes the task of a token from the backlog. Returns false if there is no such task.
    pub(crate) fn recall(&mut self, token: u32) -> bool {
        let at = self.tasks.iter().rposition(|task| task.token == token);
        at.and_then(|at| self.tasks.remove(at)).is_some()
    }

    /// Serves as much of the tasks as the turn's quota allows, and ends the turn. Calls `serve`
    /// with a task and the number of its bytes to serve. Returns true if tasks are left for the
    /// next turn.
    pub(crate) fn run(
        &mut self,
        done: &mut Vec<Completion>,
        mut serve: impl FnMut(&mut Task, u64) -> Step,
    ) -> bool {
        while let Some(task) = self.tasks.front_mut() {
            let bytes = self.quota.take_part(task.len);
            if bytes == 0 && task.len > 0 {
                break;
            }
            match serve(task, bytes) {
                Step::More => {}
                Step::Done(result) => {
                    done.push(Completion { token: task.token, result });
                    self.tasks.pop_front();
                }
                Step::Left => drop(self.tasks.pop_front()),
            }
        }
        self.quota.renew();
        !self.tasks.is_empty()
    }
}

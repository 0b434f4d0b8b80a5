//! `Task`: a request as far as it is done; `Backlog`: the tasks of a queue that go on with its next
//! turns.

use super::quota::{PIECE, Patience, Quota};
use super::{Completion, Op, Request};
use manyring_memory::{Pieces, SliceList};
use rustix::io::Errno;
use std::collections::VecDeque;

/// A request, and what is left of it.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) token: u32,
    pub(crate) op: Op,
    /// Where it goes on.
    pub(crate) offset: u64,
    /// Bytes left.
    pub(crate) len: u64,
    /// What is left of its memory, which stays mapped as long as it is listed here.
    pub(crate) rest: SliceList,
    pub(crate) patience: Patience,
}

/// What came of a piece of a task.
#[derive(Debug)]
pub(crate) enum Step {
    /// The rest is for the next turn.
    More,
    /// It has ended.
    Done(Result<(), Errno>),
    /// It goes on elsewhere, and its completion comes from there.
    Left,
}

impl Task {
    pub(crate) fn new(request: &Request, pieces: Pieces<'_>) -> Self {
        let mut task = Self::default();
        task.begin(request, pieces);
        task
    }

    /// Begins `request`, in the list of an earlier one.
    pub(crate) fn begin(&mut self, request: &Request, pieces: Pieces<'_>) {
        self.token = request.token;
        self.op = request.op;
        self.offset = request.offset;
        self.len = request.len;
        self.rest.clear();
        self.rest.extend(pieces);
        self.patience = Patience::default();
    }

    /// Moves what is left of the task elsewhere.
    pub(crate) fn take(&mut self) -> Self {
        Self { rest: std::mem::take(&mut self.rest), ..*self }
    }

    /// `n` bytes more are done.
    pub(crate) fn went_on(&mut self, n: u64) {
        self.rest.advance(usize::try_from(n).unwrap_or(usize::MAX));
        self.offset += n;
        self.len = self.len.saturating_sub(n);
        self.patience.renew();
    }

    /// [`Step::More`], or done if nothing is left.
    pub(crate) fn step(&self) -> Step {
        if self.len == 0 { Step::Done(Ok(())) } else { Step::More }
    }
}

/// Fills `out` with the first `bytes` bytes of `list`.
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
            patience: Patience::default(),
        }
    }
}

/// The tasks of a queue that do not fit in one turn, in order: as many as its ring has entries at
/// most. Each turn does a [`Quota`] of them.
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
    /// True if `bytes` may be done at once: nothing waits, and they fit in this turn.
    pub(crate) fn takes_at_once(&mut self, bytes: u64) -> bool {
        self.tasks.is_empty() && self.quota.take(bytes)
    }

    /// Puts a task at the end.
    pub(crate) fn push(&mut self, task: Task) {
        self.tasks.push_back(task);
    }

    /// Does what the turn still allows: `serve` is given the first task and a number of bytes.
    /// Ends the turn. True if there is more to do in the next one.
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

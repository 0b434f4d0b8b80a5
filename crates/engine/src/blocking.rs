//! Makes calls that may block outside the control thread: each on a new thread, except for the
//! calls of an [`AsideRow`], which share threads.
//!
//! A pool of threads would be cheaper, but these calls are rare. More important: the system may
//! have no thread to spare (a limit of processes). Then a call here waits until there is a thread,
//! whereas the runtime's own pool panics, and a panic ends the guests of all devices.

use crate::watch::{Post, Serves};
use manyring_backend::sys::starter::{self, ThreadRole};
use manyring_memory::{Duty, take_duty};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Pause before the next attempt to start a thread.
const RETRY: Duration = Duration::from_millis(100);

/// Makes `call` on a thread of its own, and returns the result; `None` if `call` panicked. A call
/// that has begun is made to its end, even if the returned future is dropped. Needs a tokio runtime
/// with time.
pub async fn aside<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    apart(None, call).await
}

/// Makes `call`, whose duration depends on the host (an access to a network file system, for
/// example), on a thread of its own, as [`aside`] does. While the call is blocked, the log names
/// the thread with the `device`, and [`held`] lists the thread. The call may use the runtime of the
/// caller: to register a socket with it, for example.
///
/// [`held`]: crate::held
pub async fn aside_for<T: Send + 'static>(
    device: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (post, runtime) = (Post::new(Serves::Host(device.to_owned())), Handle::current());
    let call = move || {
        let _entered = runtime.enter();
        call()
    };
    apart(Some(post), call).await
}

async fn apart<T: Send + 'static>(
    post: Option<Arc<Post>>,
    call: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    // If no thread can be started, the call must not be lost: the next attempt needs it.
    let call = Arc::new(Mutex::new(Some((call, reply))));
    let work = || {
        let (theirs, post) = (call.clone(), post.clone());
        move || {
            let _at_work = post.map(AtWork::new);
            let call = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some((call, reply)) = call {
                drop(reply.send(call()));
            }
        }
    };
    let device = post.as_ref().map(|post| post.device()).filter(|device| !device.is_empty());
    let thread = start(device, work).await;
    // A copy that stayed here would keep the call and its reply, so that `answer` would never end.
    drop(call);
    let answer = answer.await.ok();
    // LeakSanitizer reports memory as lost that a thread frees at its very end, if the check comes
    // while the thread ends. Only fuzzing waits for the end: a join blocks.
    if cfg!(fuzzing) {
        let _ = thread.join();
    }
    answer
}

/// Starts a thread for the closure that `work` makes; waits until the system has a thread. A log
/// line about that wait names `device`.
async fn start<F: FnOnce() + Send + 'static>(
    device: Option<String>,
    work: impl Fn() -> F,
) -> JoinHandle<()> {
    let mut is_told = false;
    loop {
        let work = work();
        let work = move || {
            take_duty(Duty::Both);
            work();
        };
        let thread = std::thread::Builder::new().name("aside".to_owned());
        match starter::spawn(ThreadRole::Control, thread, work) {
            Ok(thread) => return thread,
            Err(error) if !std::mem::replace(&mut is_told, true) => {
                let problem = "no thread available for a call that may block; retrying";
                tracing::warn!(device, %error, "{problem}");
            }
            Err(_) => {}
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// A queue of calls for many devices, each of which may block. One thread makes them all, in their
/// order, while the host answers: with a thousand devices, starting a thread for each would take
/// most of the start's time. A caller that has waited too long for an answer calls [`Self::go_on`],
/// so that another thread makes the next calls. Dropping this drops the calls that no thread has
/// begun.
#[derive(Debug, Default)]
pub struct AsideRow(Arc<Mutex<VecDeque<BlockingCall>>>);

/// A call, and the device for which the call is made.
struct BlockingCall {
    device: String,
    call: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for BlockingCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Call").field(&self.device).finish()
    }
}

impl AsideRow {
    /// Adds a call at the end of the queue. While the call is blocked, the log names its thread
    /// with the `device`, as for [`aside_for`].
    pub fn add(&self, device: &str, call: impl FnOnce() + Send + 'static) {
        let (device, call) = (device.to_owned(), Box::new(call));
        lock(&self.0).push_back(BlockingCall { device, call });
    }

    /// Starts one more thread, which makes the calls that no thread has begun, one after the other,
    /// until none is left; a call that panics does not stop it. Needs a tokio runtime with time.
    pub fn go_on(&self) {
        let (calls, runtime) = (Arc::downgrade(&self.0), Handle::current());
        let work = move || {
            let (calls, runtime) = (calls.clone(), runtime.clone());
            move || {
                let _entered = runtime.enter();
                let next = || lock(&*calls.upgrade()?).pop_front();
                while let Some(BlockingCall { device, call }) = next() {
                    let _at_work = AtWork::new(Post::new(Serves::Host(device)));
                    // The caller that waits for the call's answer sees that its channel is closed.
                    let _ = catch_unwind(AssertUnwindSafe(call));
                }
            }
        };
        let first = lock(&self.0).front().map(|call| call.device.clone());
        tokio::spawn(start(first, work));
    }
}

fn lock(calls: &Mutex<VecDeque<BlockingCall>>) -> MutexGuard<'_, VecDeque<BlockingCall>> {
    calls.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has the current thread watched (`watch.rs`) until this is dropped, even if the call panics.
#[derive(Debug)]
struct AtWork(Arc<Post>);

impl AtWork {
    fn new(post: Arc<Post>) -> Self {
        post.enter();
        post.at_work();
        Self(post)
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.at_rest();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_answered_and_one_that_panics_is_none() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        assert_eq!(runtime.block_on(aside(|| 7)), Some(7));
        assert_eq!(runtime.block_on(aside(|| -> u8 { panic!("as the test wants it") })), None);
    }

    #[test]
    fn a_call_that_the_host_does_not_end_is_named_with_its_device_until_it_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (lets_go, waits) = std::sync::mpsc::channel::<()>();
        let held = || crate::held().into_iter().find(|held| held.device == "aside_for");
        runtime.block_on(async {
            let call = tokio::spawn(aside_for("aside_for", move || waits.recv().is_err()));
            while held().is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert_eq!(held().map(|held| held.thread), Some("aside".to_owned()));
            drop(lets_go);
            assert_eq!(call.await.unwrap(), Some(true));
        });
        while held().is_some() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(runtime.block_on(aside_for("a", || -> u8 { panic!("as it is to") })), None);
    }

    #[test]
    fn calls_of_a_row_are_done_in_order_by_one_thread_and_by_another_if_it_does_not_come_back() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (lets_go, waits) = std::sync::mpsc::channel::<()>();
        let (tells, mut told) = tokio::sync::mpsc::unbounded_channel();
        let row = AsideRow::default();
        let add = |number: u32| {
            let tells = tells.clone();
            let tell = move || tells.send((number, std::thread::current().id())).unwrap();
            row.add("row", tell);
        };
        add(0);
        row.add("row", || panic!("as the test wants it"));
        add(1);
        row.add("stuck", move || assert!(waits.recv().is_err(), "it is let go"));
        add(2);
        runtime.block_on(async {
            row.go_on();
            let (first, second) = (told.recv().await.unwrap(), told.recv().await.unwrap());
            assert_eq!((first.0, second), (0, (1, first.1)), "one thread, also after a panic");
            while !crate::held().iter().any(|held| held.device == "stuck") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert!(told.try_recv().is_err(), "nobody goes on unless he is told to");
            row.go_on();
            let third = told.recv().await.unwrap();
            assert_eq!(third.0, 2);
            assert_ne!(third.1, first.1);
        });
        drop(lets_go);
    }

    #[test]
    fn calls_that_nobody_has_begun_go_with_their_row() {
        let (tells, told) = std::sync::mpsc::channel::<()>();
        let row = AsideRow::default();
        row.add("dropped", move || tells.send(()).unwrap());
        drop(row);
        assert!(told.recv().is_err(), "it was done");
    }
}

//! Calls that may block, beside the control thread: each on a thread of its own.
//!
//! A pool of threads would be cheaper, but these calls are rare. What counts is what happens where
//! the system has no thread to give (a limit of processes): the call waits until there is one. The
//! runtime's own pool panics there, and a panic ends the guests of all devices.

use crate::watch::{Post, Serves};
use manyring_memory::{Duty, take_duty};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Pause before a thread is asked for again.
const RETRY: Duration = Duration::from_millis(100);

/// Does `call` on a thread of its own; goes on with it to the end once it has begun, also if the
/// answer is no longer awaited. `None` if it panicked. Needs a tokio runtime with time.
pub async fn aside<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    apart(None, call).await
}

/// The same for a call whose end the host chooses, such as a look at a file system of the network:
/// while it does not come back, the thread is named with the `device` in the log, and [`held`] has
/// it. The call may use the runtime that waits for it: to have a socket watched, for example.
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
    // A thread that cannot be had must not take the call with it.
    let call = Arc::new(Mutex::new(Some((call, reply))));
    let mut is_told = false;
    let thread = loop {
        let theirs = call.clone();
        let post = post.clone();
        let work = move || {
            take_duty(Duty::Both);
            let _at_work = post.map(AtWork::new);
            let call = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some((call, reply)) = call {
                drop(reply.send(call()));
            }
        };
        match std::thread::Builder::new().name("aside".to_owned()).spawn(work) {
            Ok(thread) => break thread,
            Err(error) if !std::mem::replace(&mut is_told, true) => {
                tracing::warn!(%error, "no thread for a call that may block: it waits for one");
            }
            Err(_) => {}
        }
        tokio::time::sleep(RETRY).await;
    };
    // Else the call and its reply would live as long as this does, and so for ever.
    drop(call);
    let answer = answer.await.ok();
    // LeakSanitizer takes what a thread frees at its very end for lost while the thread ends. The
    // daemon does not wait for that: a join blocks.
    if cfg!(fuzzing) {
        let _ = thread.join();
    }
    answer
}

/// The thread is under watch until this is dropped, also by a call that panics.
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
}

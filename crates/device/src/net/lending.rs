//! Lends the queues of a port to the process that serves them, one call after the other.
//!
//! A call of the host that lends, takes back or joins may take long, and the task that waits for it
//! may be dropped: its device process died, or the interface was deleted. The call goes on, on its
//! thread. So the next call begins when the one before has ended, whether or not somebody waits for
//! that one, and a lending that nobody waits for ends soon and lends nothing.

use super::port::HostPort;
use manyring_backend::net::Port;
use manyring_engine::aside;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Turns false when the future that waits for a call ends.
struct Waits(Arc<AtomicBool>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Makes a call of the port that concerns its lent queues, once the one before has ended. `then` is
/// done before the next call begins, unless nobody waits. `None`: the call panicked.
pub(super) async fn in_turn<T: Send + 'static, R>(
    host: &HostPort,
    call: impl FnOnce(&dyn Port, &dyn Fn() -> bool) -> T + Send + 'static,
    then: impl FnOnce(T) -> R,
) -> Option<R> {
    let turn = host.lending.clone().lock_owned().await;
    let port = host.port.clone();
    let waits = Waits(Arc::new(AtomicBool::new(true)));
    let is_wanted = waits.0.clone();
    // The turn comes back with the answer: if nobody waits, both are dropped, the answer first.
    let (answer, turn) = aside(move || {
        let answer = call(&*port, &|| is_wanted.load(Ordering::Relaxed));
        drop(port);
        (answer, turn)
    })
    .await?;
    let result = then(answer);
    drop(turn);
    Some(result)
}

//! Calls that lend a port's queues, on a host that takes its time.

use super::*;
use crate::net::NetOptions;
use manyring_backend::net::tap::TapError;
use manyring_backend::net::{PortRx, PortTx};
use manyring_wire::net::Offloads;
use std::pin::pin;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::task::{Context, Waker};
use std::time::Duration;
use tokio::time::timeout;

/// Far longer than any of these tests takes.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A port whose host answers when the test lets it.
#[derive(Debug, Default)]
struct SlowHost {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<&'static str>,
    holds: bool,
    is_gone: bool,
}

impl SlowHost {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// The call begins, and ends when the host answers or nobody wants the answer.
    fn call(&self, begins: &'static str, ends: &'static str, is_wanted: &dyn Fn() -> bool) {
        self.set(|state| state.calls.push(begins));
        let mut state = self.state();
        while state.holds && is_wanted() {
            let wait = Duration::from_millis(1);
            state = self.changed.wait_timeout(state, wait).unwrap().0;
        }
        drop(state);
        self.set(|state| state.calls.push(ends));
    }

    fn waits_for(&self, call: &str) {
        let begins = |state: &mut State| !state.calls.contains(&call);
        let waited = self.changed.wait_timeout_while(self.state(), TIMEOUT, begins).unwrap();
        assert!(!waited.1.timed_out(), "{call}");
    }
}

impl Port for SlowHost {
    fn kind(&self) -> &'static str {
        "slow"
    }
    fn queue_pairs(&self) -> usize {
        1
    }
    fn taken(&self) -> Offloads {
        Offloads::default()
    }
    fn given(&self) -> Offloads {
        Offloads::default()
    }
    fn mtu(&self) -> Option<u16> {
        None
    }
    fn open_tx(&self, _: usize) -> Result<Box<dyn PortTx>, Errno> {
        Err(Errno::INVAL)
    }
    fn open_rx(&self, _: usize) -> Result<Box<dyn PortRx>, Errno> {
        Err(Errno::INVAL)
    }
    fn set_offloads(&self, _: Offloads) -> Result<(), Errno> {
        Ok(())
    }
    fn set_attached(&self, _: usize, _: bool) -> Result<(), Errno> {
        Ok(())
    }
    fn set_mtu(&self, _: u16) -> Result<(), Errno> {
        Ok(())
    }
    fn set_link(&self, _: bool) {}
    fn transmit(&self, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }
    fn is_gone(&self) -> bool {
        self.state().is_gone
    }
    fn join_again(&self) -> Result<(), TapError> {
        self.call("joins", "has joined", &|| true);
        self.set(|state| state.is_gone = false);
        Ok(())
    }
    fn lend(&self, is_wanted: &dyn Fn() -> bool) -> Option<Result<Lent, Errno>> {
        self.call("lends", "has lent", is_wanted);
        None
    }
    fn is_let_go(&self) -> Result<bool, Errno> {
        self.call("takes back", "has taken back", &|| true);
        Ok(true)
    }
}

fn with_port<F: Future<Output = ()>>(test: impl FnOnce(Arc<SlowHost>, Arc<OwnedPort>) -> F) {
    let host = Arc::new(SlowHost::default());
    let options = NetOptions { queue_pairs: 1, ..NetOptions::default() };
    let port = Arc::new(OwnedPort::new(options, host.clone()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(test(host, port));
}

/// Has the call begin, and nobody wait for it any more.
fn is_dropped(host: &SlowHost, call: &str, future: impl Future) {
    let mut future = Box::pin(future);
    let is_ready = future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
    assert!(!is_ready, "the host does not answer yet");
    host.waits_for(call);
}

#[test]
fn a_lending_that_nobody_waits_for_ends_before_the_next_call_begins() {
    with_port(|host, port| async move {
        host.set(|state| state.holds = true);
        is_dropped(&host, "lends", port.lend());
        host.waits_for("has lent");
        host.set(|state| state.holds = false);
        assert!(matches!(port.lend().await, (0, Ok(None))));
        assert_eq!(host.state().calls, ["lends", "has lent", "lends", "has lent"]);
    });
}

#[test]
fn a_call_that_takes_queues_back_takes_nothing_from_a_later_lending() {
    with_port(|host, port| async move {
        host.set(|state| state.holds = true);
        is_dropped(&host, "takes back", port.is_let_go());
        let mut lends = pin!(port.lend());
        let context = &mut Context::from_waker(Waker::noop());
        assert!(lends.as_mut().poll(context).is_pending());
        assert!(pin!(port.lends_nothing()).poll(context).is_pending(), "the host has it open");
        assert_eq!(host.state().calls, ["takes back"]);
        host.set(|state| state.holds = false);
        assert!(matches!(lends.await, (0, Ok(None))));
        let calls = ["takes back", "has taken back", "lends", "has lent"];
        assert_eq!(host.state().calls, calls);
        port.lends_nothing().await;
    });
}

#[test]
fn queues_that_are_lent_while_an_interface_is_joined_are_those_of_that_interface() {
    use crate::net::NetSide;
    with_port(|host, port| async move {
        let looks = tokio::spawn({
            let port = port.clone();
            async move { port.look_after_port().await }
        });
        host.set(|state| (state.is_gone, state.holds) = (true, true));
        port.port_may_have_changed();
        while !host.state().calls.contains(&"joins") {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut lends = pin!(port.lend());
        assert!(lends.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(host.state().calls, ["joins"], "while another interface is joined");
        host.set(|state| state.holds = false);
        assert!(matches!(lends.await, (1, Ok(None))));
        looks.abort();
    });
}

#[test]
fn an_interface_that_was_joined_while_nobody_looked_is_seen_by_who_looks_next() {
    use crate::net::NetSide;
    with_port(|host, port| async move {
        let look = || {
            let port = port.clone();
            tokio::spawn(async move { port.look_after_port().await })
        };
        let looks = look();
        host.set(|state| (state.is_gone, state.holds) = (true, true));
        port.port_may_have_changed();
        while !host.state().calls.contains(&"joins") {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        looks.abort();
        let _ = looks.await;
        host.set(|state| state.holds = false);
        host.waits_for("has joined");
        assert!(port.outside().is_gone);
        let looks = look();
        port.port_may_have_changed();
        let mut changes = port.changes();
        while port.outside().is_gone {
            timeout(TIMEOUT, changes.changed()).await.expect("it is joined").unwrap();
        }
        assert_eq!(port.outside().joins, 1);
        looks.abort();
    });
}

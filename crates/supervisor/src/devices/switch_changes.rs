//! Adds, changes and removes switches for a change of the configuration.

use super::DeviceManager;
use super::prepare::refused;
use crate::model::Refused;
use manyring_backend::net::Port;
use manyring_config::diff::{Step, What};
use manyring_config::plan::SwitchPlan;
use manyring_engine::aside;
use manyring_serve::assemble::AssembleError;
use manyring_serve::times::{DEVICE_CLOSE, DEVICE_CLOSE_LOOK};
use std::sync::Weak;
use std::time::Duration;
use tokio::time::{sleep, timeout};

impl DeviceManager {
    /// Creates the switches that the change adds, and gives changed switches their new settings.
    ///
    /// # Errors
    /// An uplink cannot be opened, or not in time; no switch has changed.
    pub(super) async fn add_switches(&self, steps: &[Step]) -> Result<(), Refused> {
        let comes = |step: &Step| match &step.what {
            What::AddSwitch(plan) => Some(plan.clone()),
            _ => None,
        };
        let comes: Vec<_> = steps.iter().filter_map(comes).collect();
        if !comes.is_empty() {
            let switches = self.shared.host.switches.clone();
            opened(DEVICE_CLOSE, move || switches.made(&comes)).await?();
        }
        for (at, step) in steps.iter().enumerate() {
            let What::ChangeSwitch(plan, _) = &step.what else { continue };
            if let Err(error) = self.change_switch(plan.clone()).await {
                self.remove_switches(&steps[..at], false).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// After a change that is done, removes the switches that it removes. After a change that
    /// failed, removes the switches that it added, and gives changed switches their former
    /// settings.
    pub(super) async fn remove_switches(&self, steps: &[Step], is_done: bool) {
        let goes = |step: &&Step| match &step.what {
            What::AddSwitch(_) => !is_done,
            What::RemoveSwitch => is_done,
            _ => false,
        };
        let gone: Vec<_> = steps.iter().filter(goes).map(|step| step.name.clone()).collect();
        if !gone.is_empty() {
            for name in &gone {
                // Bounded: a device process that the kernel does not end must not block later
                // changes.
                let _ = timeout(DEVICE_CLOSE, self.shared.processes.end_switch(name)).await;
            }
            let switches = self.shared.host.switches.clone();
            let left = aside(move || switches.remove(&gone)).await;
            closed(left.into_iter().flatten()).await;
        }
        let changes = |step: &&Step| matches!(step.what, What::ChangeSwitch(..));
        for step in steps.iter().filter(changes) {
            let (switches, name) = (self.shared.host.switches.clone(), step.name.clone());
            let left = aside(move || switches.settle(&name, is_done)).await;
            if !is_done {
                self.shared.processes.restart_switch(&step.name);
            }
            closed(left.flatten()).await;
        }
    }

    /// Gives a switch other settings. They apply to a new device process, which replaces the
    /// running one at once.
    async fn change_switch(&self, plan: SwitchPlan) -> Result<(), Refused> {
        let (switches, name) = (self.shared.host.switches.clone(), plan.name.clone());
        opened(DEVICE_CLOSE, move || switches.changed(&plan)).await?();
        self.shared.processes.restart_switch(&name);
        Ok(())
    }
}

/// Returns when the interfaces are closed, so that their next user can open them; or after a
/// timeout, as a device process that the kernel does not end keeps its interface.
async fn closed(interfaces: impl IntoIterator<Item = Weak<dyn Port>>) {
    let all: Vec<_> = interfaces.into_iter().collect();
    let are_closed = async {
        while all.iter().any(|interface| interface.strong_count() > 0) {
            sleep(DEVICE_CLOSE_LOOK).await;
        }
    };
    if timeout(DEVICE_CLOSE, are_closed).await.is_err() {
        tracing::warn!("the interface of a former uplink is still in use by a device process");
    }
}

/// Runs a call that opens resources of the host, and waits for `max` at most. A call that takes
/// longer continues, and its result is dropped: so the call must have no other effect than its
/// result.
async fn opened<T: Send + 'static>(
    max: Duration,
    opens: impl FnOnce() -> Result<T, AssembleError> + Send + 'static,
) -> Result<T, Refused> {
    let opened = timeout(max, aside(opens)).await.ok().flatten();
    let slow = || Refused::Host("timed out; a host call is blocked".to_owned());
    opened.ok_or_else(slow)?.map_err(|error| refused(&error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_backend::net::null::NullPort;
    use manyring_config::parse;
    use manyring_config::plan::Domains;
    use manyring_serve::assemble::AdoptedFds;
    use manyring_serve::assemble::Switches;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    const NET: &str = "[[net]]\nsocket_path = '/s'\nnull = true\n";

    fn plan(name: &str, age: u64) -> SwitchPlan {
        let keys = format!("[[switch]]\nname = '{name}'\nage = {age}\n{NET}");
        parse(&keys).unwrap().switch.remove(0)
    }

    /// Refuses `call`, which the host holds up until it was refused; returns when it has ended.
    fn refused_while_it_goes_on<T: Send + 'static>(
        call: impl FnOnce() -> Result<T, AssembleError> + Send + 'static,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (lets_go, waits) = channel::<()>();
        let (ends, has_ended) = channel::<bool>();
        let held = move || {
            let _ = waits.recv();
            let opened = call();
            ends.send(opened.is_ok()).unwrap();
            opened
        };
        let answer = runtime.block_on(opened(Duration::from_millis(10), held));
        assert!(matches!(answer, Err(Refused::Host(_))), "it waits for the host");
        drop(lets_go);
        assert!(has_ended.recv().unwrap(), "the host has opened it");
    }

    #[test]
    fn a_switch_has_gone_when_nobody_has_its_uplink_open() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let port: Arc<dyn Port> = Arc::new(NullPort::new(1, 0));
            let mut waits = Box::pin(closed([Arc::downgrade(&port)]));
            let look = Duration::from_millis(20);
            assert!(timeout(look, waits.as_mut()).await.is_err(), "a call has it open");
            drop(port);
            waits.await;
        });
    }

    #[test]
    fn a_change_of_a_switch_that_was_refused_for_a_slow_host_stays_refused() {
        let switches = Switches::new(&[plan("s0", 7)], Domains::Device, &AdoptedFds::default());
        let switches = switches.unwrap();
        let age = || switches.apart("s0").unwrap().given().0.age;
        let before = age();
        let (of, other) = (switches.clone(), plan("s0", 9));
        refused_while_it_goes_on(move || of.changed(&other));
        assert_eq!(age(), before, "it has what the plan lacks");
        let (of, more) = (switches.clone(), plan("s1", 7));
        refused_while_it_goes_on(move || of.made(&[more]));
        assert!(switches.apart("s1").is_none(), "it is in no plan");
        // One that the host opens in time.
        switches.changed(&plan("s0", 9)).unwrap()();
        assert_ne!(age(), before);
        switches.settle("s0", false);
        assert_eq!(age(), before);
    }
}

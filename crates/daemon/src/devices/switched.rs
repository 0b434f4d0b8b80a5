//! Switches that come, change and go with a change of the configuration.

use super::DeviceManager;
use super::prepare::refused;
use crate::assemble::AssembleError;
use crate::model::Refused;
use crate::times::DEVICE_CLOSE;
use manyring_config::diff::{Step, What};
use manyring_config::plan::SwitchPlan;
use manyring_engine::aside;
use tokio::time::timeout;

impl DeviceManager {
    /// Makes the switches that come, and gives those that change their other settings.
    ///
    /// # Errors
    /// Nothing has changed: an uplink cannot be opened.
    pub(super) async fn add_switches(&self, steps: &[Step]) -> Result<(), Refused> {
        let comes = |step: &Step| match &step.what {
            What::AddSwitch(plan) => Some(plan.clone()),
            _ => None,
        };
        let comes: Vec<_> = steps.iter().filter_map(comes).collect();
        if !comes.is_empty() {
            let switches = self.shared.host.switches.clone();
            opened(move || switches.add(&comes)).await?;
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

    /// Removes the switches that go; or those that came, if the change has failed, which gives the
    /// others their former settings.
    pub(super) async fn remove_switches(&self, steps: &[Step], is_done: bool) {
        let goes = |step: &&Step| match &step.what {
            What::AddSwitch(_) => !is_done,
            What::RemoveSwitch => is_done,
            _ => false,
        };
        let gone: Vec<_> = steps.iter().filter(goes).map(|step| step.name.clone()).collect();
        if !gone.is_empty() {
            for name in &gone {
                let _ = timeout(DEVICE_CLOSE, self.shared.processes.end_switch(name)).await;
            }
            let switches = self.shared.host.switches.clone();
            aside(move || switches.remove(&gone)).await;
        }
        let changes = |step: &&Step| matches!(step.what, What::ChangeSwitch(..));
        for step in steps.iter().filter(changes) {
            let (switches, name) = (self.shared.host.switches.clone(), step.name.clone());
            aside(move || switches.settle(&name, is_done)).await;
            if !is_done {
                self.shared.processes.restart_switch(&step.name);
            }
        }
    }

    /// Gives a switch other settings, with its next device process, which follows at once.
    async fn change_switch(&self, plan: SwitchPlan) -> Result<(), Refused> {
        let (switches, name) = (self.shared.host.switches.clone(), plan.name.clone());
        opened(move || switches.change(&plan)).await?;
        self.shared.processes.restart_switch(&name);
        Ok(())
    }
}

/// What opens interfaces, as long as the host takes for that, up to a bound.
async fn opened(
    opens: impl FnOnce() -> Result<(), AssembleError> + Send + 'static,
) -> Result<(), Refused> {
    let opened = timeout(DEVICE_CLOSE, aside(opens)).await.ok().flatten();
    let slow = || Refused::Host("timed out; a host call is blocked".to_owned());
    opened.ok_or_else(slow)?.map_err(|error| refused(&error))
}

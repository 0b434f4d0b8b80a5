//! The vhost-user devices of a plan: finds, adds and removes them by name.

use super::{DevicePlan, Plan, Wanted};

impl Plan {
    /// Returns all vhost-user devices of the plan; disks of Xen guests are not among them.
    pub fn wanted(&self) -> impl Iterator<Item = Wanted> {
        let blks = self.blk.iter().map(|blk| Wanted::Blk(blk.clone().into()));
        blks.chain(self.net.iter().map(|net| Wanted::Net(net.clone().into())))
    }

    /// Returns the vhost-user device of this name.
    pub fn device(&self, name: &str) -> Option<Wanted> {
        let blk = self.blk.iter().find(|blk| blk.device.name == name);
        let net = || self.net.iter().find(|net| net.device.name == name);
        let wanted = blk.map(|blk| Wanted::Blk(blk.clone().into()));
        wanted.or_else(|| net().map(|net| Wanted::Net(net.clone().into())))
    }

    /// Returns the plan without the devices for which `goes` is true.
    pub fn without(mut self, goes: impl Fn(&DevicePlan) -> bool) -> Self {
        self.blk.retain(|blk| !goes(&blk.device));
        self.net.retain(|net| !goes(&net.device));
        self
    }

    /// Returns the plan with this device added, in place of a device of the same name.
    pub fn with(self, device: &Wanted) -> Self {
        let mut plan = self.without(|other| other.name == device.plan().name);
        match device {
            Wanted::Blk(blk) => plan.blk.push((**blk).clone()),
            Wanted::Net(net) => plan.net.push((**net).clone()),
        }
        plan
    }
}

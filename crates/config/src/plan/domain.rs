//! Which process serves a device: the key `domain`, and what a device process cannot serve.

use super::{BlkPlan, DevicePlan, Domains, NetPlan, Plan, PlanError, PortPlan, XenBlkPlan};
use super::{SwitchPlan, Wanted, is_device_name};
use std::collections::{BTreeMap, HashSet};

/// The domain of a device that is served for whichever user connects to it.
pub const ANY_USER: &str = "user:";
/// Prefix of the domains of switches: all ports of one share a device process, since one copy
/// needs the memory of all their guests.
pub const SWITCH: &str = "switch:";
/// Workers of a device process at most.
pub const PROCESS_WORKERS_MAX: usize = 16;
/// Prefix of the domains of Xen guests. A domain that a configuration names has no colon.
pub const XEN: &str = "xen:";

impl DevicePlan {
    /// The device in the domain that it names, if it names one.
    pub(super) fn within(self, domain: Option<String>) -> Result<Self, PlanError> {
        if let Some(domain) = domain.as_ref().filter(|domain| !is_device_name(domain)) {
            let problem = format!(
                "{domain:?} is not 1 to 64 letters, digits, '-', '_' or '.', or is \".\" or \"..\""
            );
            return self.place.error("domain", problem);
        }
        Ok(Self { domain, ..self })
    }

    /// Checks that nothing of the device needs the daemon itself, if it names a domain.
    fn check_domain(&self, needs: Option<&str>) -> Result<(), PlanError> {
        match needs.filter(|_| self.domain.is_some()) {
            Some(key) => self
                .place
                .error("domain", format!("cannot be combined with {}", self.place.key(key))),
            None => Ok(()),
        }
    }

    /// The key, if any, for which only the supervisor can serve the device.
    fn needs_the_supervisor(&self) -> Option<&'static str> {
        let is_beyond = |worker: &usize| *worker >= PROCESS_WORKERS_MAX;
        self.queue_workers.iter().any(is_beyond).then_some("queue_workers")
    }
}

impl BlkPlan {
    /// Checks the domain that the disk names, if it names one.
    pub(super) fn check_domain(&self) -> Result<(), PlanError> {
        self.device.check_domain(self.needs_the_supervisor())
    }

    fn needs_the_supervisor(&self) -> Option<&'static str> {
        self.device.needs_the_supervisor()
    }
}

impl NetPlan {
    /// Checks the domain that the device names, if it names one.
    pub(super) fn check_domain(&self) -> Result<(), PlanError> {
        self.device.check_domain(self.needs_the_supervisor())
    }

    fn needs_the_supervisor(&self) -> Option<&'static str> {
        self.device.needs_the_supervisor().or(match &self.port {
            // The daemon itself serves its switch.
            PortPlan::Switch(port) if !port.is_apart => Some("switch"),
            // A guest's memory is registered where it is mapped, and the supervisor maps none.
            PortPlan::Xdp { zero_copy: true, .. } => Some("zero_copy"),
            PortPlan::Switch(_)
            | PortPlan::Xdp { .. }
            | PortPlan::Null { .. }
            | PortPlan::Tap { .. }
            | PortPlan::TapFds(_)
            | PortPlan::Macvtap { .. } => None,
        })
    }
}

impl Wanted {
    /// The domain in whose device process the device is served; `None`: the daemon serves it.
    pub fn domain(&self, domains: Domains) -> Option<String> {
        let device = self.plan();
        match (&device.domain, domains) {
            (Some(domain), _) => Some(domain.clone()),
            (None, Domains::Device | Domains::User) if self.switch_apart().is_some() => {
                self.switch_apart().map(domain_of_switch)
            }
            (None, Domains::One) => None,
            (None, Domains::Device | Domains::User) => {
                // No domain that is named has a colon.
                self.needs_the_supervisor().is_none().then(|| match domains {
                    Domains::User => ANY_USER.to_owned(),
                    _ => format!("device:{}", device.name),
                })
            }
        }
    }

    /// The switch whose device process serves the device.
    fn switch_apart(&self) -> Option<&str> {
        match self {
            Self::Net(net) => match &net.port {
                PortPlan::Switch(port) if port.is_apart => Some(&port.switch),
                _ => None,
            },
            Self::Blk(_) => None,
        }
    }

    /// The key for which no device process serves a device that names no domain.
    fn needs_the_supervisor(&self) -> Option<&'static str> {
        match self {
            // A device process would count for itself alone what the group may pass.
            _ if self.plan().limit.group.is_some() => Some("limit.group"),
            Self::Blk(blk) => blk.needs_the_supervisor(),
            Self::Net(net) => net.needs_the_supervisor(),
        }
    }
}

impl XenBlkPlan {
    /// The domain in whose device process the disks of a guest, the Xen domain `guest`, are served;
    /// `None`: the daemon serves them.
    pub fn domain(&self, domains: Domains, guest: u16) -> Option<String> {
        let name = &self.name;
        match domains {
            _ if self.needs_the_supervisor().is_some() => None,
            Domains::One => None,
            Domains::User => Some(format!("{XEN}{name}")),
            Domains::Device => Some(format!("{XEN}{name}:{guest}")),
        }
    }

    fn needs_the_supervisor(&self) -> Option<&'static str> {
        self.limit.group.as_ref().map(|_| "limit.group")
    }
}

/// The domain of a switch.
#[must_use]
pub fn domain_of_switch(name: &str) -> String {
    format!("{SWITCH}{name}")
}

impl Plan {
    /// Notes at each port of a switch whether a device process can serve the switch.
    pub(crate) fn place_ports(&mut self) {
        let is_apart = |switch: &&SwitchPlan| switch.is_apart();
        let apart: HashSet<_> = self.switch.iter().filter(is_apart).map(|s| &s.name).collect();
        for net in &mut self.net {
            if let PortPlan::Switch(port) = &mut net.port {
                port.is_apart = apart.contains(&port.switch);
            }
        }
    }

    /// Checks that the device process of a switch can serve each of its ports.
    pub(super) fn check_ports(&self) -> Result<(), PlanError> {
        if self.daemon.domains == Domains::One {
            return Ok(());
        }
        for net in &self.net {
            let PortPlan::Switch(port) = &net.port else { continue };
            let key = net.needs_the_supervisor().filter(|_| port.is_apart);
            if let Some(key) = key {
                let problem = "the device process of a switch cannot serve it, which serves all \
                               ports of the switch";
                return net.device.place.error(key, problem);
            }
        }
        Ok(())
    }

    /// The devices that the daemon itself serves although its guests are to be apart, each with the
    /// key that no device process can serve.
    pub fn unisolated(&self) -> Vec<(String, &'static str)> {
        let domains = self.daemon.domains;
        if domains == Domains::One {
            return Vec::new();
        }
        let of = |wanted: Wanted| {
            let key = wanted.needs_the_supervisor().filter(|_| wanted.domain(domains).is_none())?;
            Some((wanted.plan().name.clone(), key))
        };
        let of_xen = |xen: &XenBlkPlan| Some((xen.name.clone(), xen.needs_the_supervisor()?));
        let xens = self.xen_blk.iter().filter_map(of_xen);
        self.wanted().filter_map(of).chain(xens).collect()
    }

    /// Checks that all devices of a group of limits are served by one process: each process counts
    /// by itself what its devices pass.
    pub(super) fn check_groups(&self) -> Result<(), PlanError> {
        let mut domains = BTreeMap::new();
        for xen in &self.xen_blk {
            xen.limit.group.iter().for_each(|group| _ = domains.insert(group.clone(), None));
        }
        for wanted in self.wanted() {
            let DevicePlan { place, limit, .. } = wanted.plan();
            let Some(group) = &limit.group else { continue };
            let domain = wanted.domain(self.daemon.domains);
            let others = domains.entry(group.clone()).or_insert_with(|| domain.clone());
            if *others != domain {
                let problem = format!("{group:?} has devices of another domain");
                return place.error("limit.group", problem);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Domains;
    use crate::parse;

    #[test]
    fn a_device_is_served_where_its_domain_says_or_else_where_the_daemon_says() {
        let domain_of = |daemon: &str, device: &str| {
            let head = "name = 'a'\nsocket_path = '/a'\n";
            let is_net = ["null = true", "xdp"].iter().any(|key| device.contains(key));
            let kind = if is_net { "net" } else { "blk" };
            let text = format!("[daemon]\n{daemon}\n[[{kind}]]\n{head}{device}");
            let plan = parse(&text)?;
            Ok::<_, String>(plan.wanted().next().unwrap().domain(plan.daemon.domains))
        };
        let is = |domain: &str| Ok(Some(domain.to_owned()));
        assert_eq!(domain_of("", "null = '1G'"), is("user:"));
        assert_eq!(domain_of("domains = 'one'", "null = '1G'"), Ok(None));
        assert_eq!(domain_of("domains = 'device'", "null = '1G'"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "null = true"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "null = true\npcap = '/p'"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "xdp = 'x'"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "memory = '1G'"), is("device:a"));
        let limited = "null = '1G'\nlimit = { iops = 5 }\n";
        assert_eq!(domain_of("domains = 'device'", limited), is("device:a"));
        assert_eq!(domain_of("domains = 'user'", "null = '1G'"), is("user:"));
        assert_eq!(domain_of("domains = 'user'", "null = '1G'\ndomain = 'b'"), is("b"));
        assert_eq!(domain_of("domains = 'one'", "null = '1G'\ndomain = 'b'"), is("b"));
        for (daemon, device, key) in [
            ("domains = 'users'", "null = '1G'", "domains"),
            ("", "null = '1G'\ndomain = 'a:b'", "domain"),
            ("workers = 17", "null = '1G'\nqueue_workers = [16]\ndomain = 'b'", "queue_workers"),
            ("", "xdp = 'x'\nzero_copy = true\ndomain = 'b'", "zero_copy"),
        ] {
            let error = domain_of(daemon, device).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn what_no_device_process_serves_is_told_with_its_key() {
        let devices = "[[blk]]\nname = 'a'\nsocket_path = '/a'\nnull = '1G'\n\
            [[blk]]\nname = 'b'\nsocket_path = '/b'\nqueue_workers = [16]\nnull = '1G'\n\
            [[net]]\nname = 'c'\nsocket_path = '/c'\nxdp = 'x'\nzero_copy = true\npcap = '/p'\n\
            [[limit]]\nname = 'g'\niops = 5\n[[xen_blk]]\nname = 'd'\nsimulated = '/d'\n\
            [[xen_blk]]\nname = 'e'\nsimulated = '/e'\nlimit = { group = 'g' }\n";
        let unisolated = |daemon: &str| {
            parse(&format!("[daemon]\nworkers = 17\n{daemon}\n{devices}")).unwrap().unisolated()
        };
        assert_eq!(unisolated("domains = 'one'"), []);
        let apart = [("b", "queue_workers"), ("c", "zero_copy"), ("e", "limit.group")];
        let apart = apart.map(|(name, key)| (name.to_owned(), key));
        for daemon in ["", "domains = 'user'", "domains = 'device'"] {
            assert_eq!(unisolated(daemon), apart, "{daemon}");
        }
    }

    #[test]
    fn guests_of_a_xen_are_one_domain_or_one_each() {
        let domains = |key: &str, domains: Domains| {
            let groups = "[[limit]]\nname = 'g'\niops = 5\n";
            let plan = parse(&format!("{groups}[[xen_blk]]\nsimulated = '/s'\n{key}")).unwrap();
            [7, 8].map(|guest| plan.xen_blk[0].domain(domains, guest))
        };
        let is = |names: [&str; 2]| names.map(|name| Some(name.to_owned()));
        assert_eq!(domains("", Domains::One), [None, None]);
        assert_eq!(domains("", Domains::User), is(["xen:xen", "xen:xen"]));
        assert_eq!(domains("", Domains::Device), is(["xen:xen:7", "xen:xen:8"]));
        let shared = "limit = { group = 'g' }";
        assert_eq!(domains(shared, Domains::Device), [None, None]);
    }

    #[test]
    fn a_group_of_limits_is_in_one_domain() {
        let plan = |daemon: &str, domains: [&str; 2]| {
            let mut text = format!("[daemon]\n{daemon}\n[[limit]]\nname = 'g'\niops = 5\n");
            for (name, domain) in ["a", "b"].into_iter().zip(domains) {
                let domain = match domain {
                    "" => String::new(),
                    domain => format!("domain = '{domain}'\n"),
                };
                text += &format!(
                    "[[blk]]\nname = '{name}'\nsocket_path = '/{name}'\nnull = '1G'\n\
                     limit = {{ group = 'g' }}\n{domain}"
                );
            }
            parse(&text).map(drop)
        };
        assert_eq!(plan("", ["x", "x"]), Ok(()));
        assert_eq!(plan("", ["", ""]), Ok(()));
        // The daemon serves what would have domains of its own.
        assert_eq!(plan("domains = 'device'", ["", ""]), Ok(()));
        for domains in [["x", "y"], ["x", ""], ["", "y"]] {
            let error = plan("", domains).unwrap_err();
            assert!(error.contains("\"g\" has devices of another domain"), "{error}");
        }
    }
}

//! Which process serves a device: the keys `domain` and `domains`, and the ports that no device
//! process serves.

use super::{DevicePlan, Domains, NetPlan, Plan, PlanError, PortPlan, XenBlkPlan};
use super::{Wanted, is_device_name};
use std::collections::BTreeSet;

/// The domain of a device whose process depends on the user that connects: it becomes `user:` and
/// the user's number.
pub const ANY_USER: &str = "user:";
/// Prefix of the domains of switches. All ports of a switch share a device process, since copying a
/// frame from port to port needs the memory of both guests in one process.
pub const SWITCH: &str = "switch:";
/// The error for `zero_copy = true` of a device in a device process. The process that maps the
/// guest's memory must register that memory with a socket of AF_XDP before the socket is bound. So
/// a device process would have an unbound socket, and could bind it to any interface.
const UNBOUND: &str = "true is not served by a device process: it would have a socket of AF_XDP \
                       that is not bound yet, which can be bound to any interface of the host; use \
                       manyring net, or domains = \"one\"";
/// Prefix of the domains of Xen guests. A domain that a configuration names contains no colon, so
/// it differs from all of these.
pub const XEN: &str = "xen:";

impl DevicePlan {
    /// Sets the trust domain that the key `domain` names. Fails if the name is not valid.
    pub(super) fn within(self, domain: Option<String>) -> Result<Self, PlanError> {
        if let Some(domain) = domain.as_ref().filter(|domain| !is_device_name(domain)) {
            let problem = format!(
                "{domain:?} is not 1 to 64 letters, digits, '-', '_' or '.', or is \".\" or \"..\""
            );
            return self.place.error("domain", problem);
        }
        Ok(Self { domain, ..self })
    }
}

impl NetPlan {
    /// Checks that a port of a switch names no domain: all ports of a switch are in the domain of
    /// the switch.
    pub(super) fn check_domain(&self) -> Result<(), PlanError> {
        let DevicePlan { domain: Some(_), place, .. } = &self.device else { return Ok(()) };
        match self.port {
            PortPlan::Switch(_) => {
                place.error("domain", format!("cannot be combined with {}", place.key("switch")))
            }
            _ => Ok(()),
        }
    }
}

impl Wanted {
    /// Returns the domain whose device process serves the device; `None`: the daemon serves it.
    pub fn domain(&self, domains: Domains) -> Option<String> {
        let device = self.plan();
        match (&device.domain, domains) {
            (Some(domain), _) => Some(domain.clone()),
            (None, Domains::One) => None,
            (None, Domains::Device | Domains::User) if self.switch().is_some() => {
                self.switch().map(|name| domain_of_switch(name))
            }
            // The colon keeps these domains apart from those that the key `domain` names.
            (None, Domains::User) => Some(ANY_USER.to_owned()),
            (None, Domains::Device) => Some(format!("device:{}", device.name)),
        }
    }
}

impl XenBlkPlan {
    /// Returns the trust domain whose device process serves the disks of the Xen guest with the
    /// number `guest`; `None`: the daemon serves them.
    pub fn domain(&self, domains: Domains, guest: u16) -> Option<String> {
        let name = &self.name;
        match domains {
            Domains::One => None,
            Domains::User => Some(format!("{XEN}{name}")),
            Domains::Device => Some(format!("{XEN}{name}:{guest}")),
        }
    }
}

/// Returns the trust domain of a switch.
#[must_use]
pub fn domain_of_switch(name: &str) -> String {
    format!("{SWITCH}{name}")
}

impl Plan {
    /// Checks that each device which no device process can serve is planned for the daemon itself.
    pub(super) fn check_domains(&self) -> Result<(), PlanError> {
        let is_apart = |net: &NetPlan| {
            let wanted = Wanted::Net(net.clone().into());
            wanted.domain(self.daemon.domains).is_some()
        };
        let lends_pages =
            |net: &&NetPlan| matches!(net.port, PortPlan::Xdp { zero_copy: true, .. });
        match self.net.iter().filter(lends_pages).find(|net| is_apart(net)) {
            None => Ok(()),
            Some(net) => net.device.place.error("zero_copy", UNBOUND),
        }
    }

    /// Checks that no group of limits has both devices that the daemon serves and devices of device
    /// processes. The supervisor divides a group's rates among device processes, and does not
    /// account for requests that the daemon serves itself.
    pub(super) fn check_groups(&self) -> Result<(), PlanError> {
        let domains = self.daemon.domains;
        let apart = |xen: &&XenBlkPlan| xen.domain(domains, 0).is_some();
        let of_xen = self.xen_blk.iter().filter(apart).filter_map(|xen| xen.limit.group.clone());
        let in_group = |wanted: &Wanted| wanted.plan().limit.group.clone();
        let is_apart = |wanted: &Wanted| wanted.domain(domains).is_some();
        let divided: BTreeSet<_> = self
            .wanted()
            .filter(is_apart)
            .filter_map(|wanted| in_group(&wanted))
            .chain(of_xen)
            .collect();
        let is_mixed =
            |wanted: &Wanted| in_group(wanted).is_some_and(|name| divided.contains(&name));
        let mut mixed = self.wanted().filter(|wanted| !is_apart(wanted) && is_mixed(wanted));
        if let Some(wanted) = mixed.next() {
            let DevicePlan { place, limit, .. } = wanted.plan();
            let reason = match wanted.switch() {
                Some(_) => "with domains = \"one\", the daemon itself serves its switch",
                None => "give it a domain, too",
            };
            let group = limit.group.as_deref().unwrap_or_default();
            let problem = format!("{group:?} has devices that device processes serve: {reason}");
            return place.error("limit.group", problem);
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
        assert_eq!(domain_of("domains = 'one'", "xdp = 'x'\nzero_copy = true"), Ok(None));
        assert_eq!(domain_of("domains = 'device'", "null = '1G'"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "null = true"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "null = true\npcap = '/p'"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "xdp = 'x'"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "memory = '1G'"), is("device:a"));
        let last = "null = '1G'\nqueue_workers = [255]";
        assert_eq!(domain_of("workers = 256\ndomains = 'device'", last), is("device:a"));
        let limited = "null = '1G'\nlimit = { iops = 5 }\n";
        assert_eq!(domain_of("domains = 'device'", limited), is("device:a"));
        assert_eq!(domain_of("domains = 'user'", "null = '1G'"), is("user:"));
        assert_eq!(domain_of("domains = 'user'", "null = '1G'\ndomain = 'b'"), is("b"));
        assert_eq!(domain_of("domains = 'one'", "null = '1G'\ndomain = 'b'"), is("b"));
        for (daemon, device, key) in [
            ("domains = 'users'", "null = '1G'", "domains"),
            ("", "null = '1G'\ndomain = 'a:b'", "domain"),
            ("", "xdp = 'x'\nzero_copy = true", "zero_copy"),
            ("domains = 'device'", "xdp = 'x'\nzero_copy = true", "zero_copy"),
            ("domains = 'one'", "xdp = 'x'\nzero_copy = true\ndomain = 'b'", "zero_copy"),
        ] {
            let error = domain_of(daemon, device).unwrap_err();
            assert!(error.contains(key), "{error}");
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
        assert_eq!(domains(shared, Domains::Device), is(["xen:xen:7", "xen:xen:8"]));
    }

    #[test]
    fn a_group_of_limits_has_any_domains_but_not_the_daemon_beside_them() {
        let plan = |daemon: &str, devices: [&str; 2]| {
            let mut text = format!("[daemon]\n{daemon}\n[[limit]]\nname = 'g'\niops = 5\n");
            for (name, more) in ["a", "b"].into_iter().zip(devices) {
                text += &format!(
                    "[[blk]]\nname = '{name}'\nsocket_path = '/{name}'\nnull = '1G'\n\
                     limit = {{ group = 'g' }}\n{more}\n"
                );
            }
            parse(&text).map(drop)
        };
        let (x, y, wide) = ("domain = 'x'", "domain = 'y'", "queue_workers = [16]");
        for daemon in ["", "domains = 'device'", "workers = 17"] {
            for devices in [[x, x], ["", ""], [x, y], [x, ""], ["", y]] {
                assert_eq!(plan(daemon, devices), Ok(()), "{daemon} {devices:?}");
            }
        }
        assert_eq!(plan("domains = 'one'", ["", ""]), Ok(()));
        let said = |daemon, devices| plan(daemon, devices).unwrap_err();
        assert_eq!(plan("workers = 17", [x, wide]), Ok(()));
        let error = said("domains = 'one'", ["", y]);
        assert!(error.contains("a: limit.group") && error.contains("a domain, too"), "{error}");
    }
}

//! Which process serves a device: the key `domain`, and what a room cannot serve.

use super::{BlkPlan, DevicePlan, DiskPlan, Domains, NetPlan, PlanError, SocketPlan};
use super::{Wanted, is_device_name};

impl DevicePlan {
    /// The device in the domain that it names, if it names one.
    pub(super) fn within(self, domain: Option<String>) -> Result<Self, PlanError> {
        if let Some(domain) = domain.as_ref().filter(|domain| !is_device_name(domain)) {
            let problem = format!("{domain:?} is not 1 to 64 letters, digits, '-', '_' or '.'");
            return self.place.error("domain", problem);
        }
        Ok(Self { domain, ..self })
    }

    /// Checks that nothing of the device needs the daemon itself, if it names a domain.
    fn check_domain(&self, needs: Option<&str>) -> Result<(), PlanError> {
        match needs.filter(|_| self.domain.is_some()) {
            Some(key) => self.place.error("domain", format!("contradicts {}", self.place.key(key))),
            None => Ok(()),
        }
    }

    /// The key that makes the device one which only the daemon itself can serve.
    fn needs_the_house(&self) -> Option<&'static str> {
        match &self.socket {
            SocketPlan::Connect { .. } => Some("client"),
            SocketPlan::Fd(_) => Some("fd"),
            // What a group shares, and what an operator changes, is in the daemon.
            _ if !self.limit.is_none() => Some("limit"),
            _ if self.one_off => Some("one_off"),
            _ if !self.queue_workers.is_empty() => Some("queue_workers"),
            SocketPlan::Listen { .. } => None,
        }
    }
}

impl BlkPlan {
    /// Checks the domain that the disk names, if it names one.
    pub(super) fn check_domain(&self) -> Result<(), PlanError> {
        self.device.check_domain(self.needs_the_house())
    }

    fn needs_the_house(&self) -> Option<&'static str> {
        self.device.needs_the_house().or(match &self.disk {
            DiskPlan::Memory { .. } => Some("memory"),
            // A room may not connect to anything.
            DiskPlan::Nbd(_) => Some("nbd"),
            // Its lock goes with the rings of a session, and the daemon sees no session.
            DiskPlan::File { lock_with_rings: true, .. } => Some("lock_with_rings"),
            _ => None,
        })
    }
}

impl NetPlan {
    /// Checks the domain that the device names, if it names one.
    pub(super) fn check_domain(&self) -> Result<(), PlanError> {
        self.device.check_domain(self.needs_the_house())
    }

    fn needs_the_house(&self) -> Option<&'static str> {
        // A room writes no file, and one that it was given could be filled by whoever takes it.
        self.device.needs_the_house().or(self.pcap.as_ref().map(|_| "pcap"))
    }
}

impl Wanted {
    /// The domain in whose room the device is served; `None`: the daemon serves it.
    pub(crate) fn domain(&self, domains: Domains) -> Option<String> {
        let device = self.plan();
        match (&device.domain, domains) {
            (Some(domain), _) => Some(domain.clone()),
            (None, Domains::One) => None,
            // No domain that is named has a colon.
            (None, Domains::Device) => {
                let needs = match self {
                    Self::Blk(blk) => blk.needs_the_house(),
                    Self::Net(net) => net.needs_the_house(),
                };
                needs.is_none().then(|| format!("device:{}", device.name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::parse;

    #[test]
    fn a_device_is_served_where_its_domain_says_or_else_where_the_daemon_says() {
        let domain_of = |daemon: &str, device: &str| {
            let head = "name = 'a'\nsocket_path = '/a'\n";
            let kind = if device.contains("null = true") { "net" } else { "blk" };
            let text = format!("[daemon]\n{daemon}\n[[{kind}]]\n{head}{device}");
            let plan = parse(&text)?;
            Ok::<_, String>(plan.wanted().next().unwrap().domain(plan.daemon.domains))
        };
        let is = |domain: &str| Ok(Some(domain.to_owned()));
        assert_eq!(domain_of("", "null = '1G'"), Ok(None));
        assert_eq!(domain_of("domains = 'device'", "null = '1G'"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "null = true"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "null = true\npcap = '/p'"), Ok(None));
        assert_eq!(domain_of("domains = 'device'", "memory = '1G'"), Ok(None));
        assert_eq!(domain_of("domains = 'one'", "null = '1G'\ndomain = 'b'"), is("b"));
        for (daemon, device, key) in [
            ("domains = 'user'", "null = '1G'", "domains"),
            ("", "null = '1G'\ndomain = 'a:b'", "domain"),
            ("", "memory = '1G'\ndomain = 'b'", "memory"),
            ("", "null = '1G'\none_off = true\ndomain = 'b'", "one_off"),
            ("", "null = '1G'\nlimit = { iops = 5 }\ndomain = 'b'", "limit"),
            ("", "file = '/f'\nlock_with_rings = true\ndomain = 'b'", "lock_with_rings"),
            ("", "null = '1G'\nqueue_workers = [0]\ndomain = 'b'", "queue_workers"),
            ("", "null = true\npcap = '/p'\ndomain = 'b'", "pcap"),
        ] {
            let error = domain_of(daemon, device).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}

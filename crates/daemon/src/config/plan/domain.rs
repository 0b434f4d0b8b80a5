//! Which process serves a disk: the key `domain`, and what a room cannot serve.

use super::{BlkPlan, DiskPlan, Domains, PlanError, SocketPlan, is_device_name};

impl BlkPlan {
    /// Checks the domain that the disk names, if it names one.
    pub(super) fn check_domain(&self) -> Result<(), PlanError> {
        let Some(domain) = &self.domain else { return Ok(()) };
        let place = &self.device.place;
        if !is_device_name(domain) {
            let problem = format!("{domain:?} is not 1 to 64 letters, digits, '-', '_' or '.'");
            return place.error("domain", problem);
        }
        match self.needs_the_house() {
            Some(key) => place.error("domain", format!("contradicts {}", place.key(key))),
            None => Ok(()),
        }
    }

    /// The domain in whose room the disk is served; `None`: the daemon serves it.
    pub(crate) fn domain(&self, domains: Domains) -> Option<String> {
        match (&self.domain, domains) {
            (Some(domain), _) => Some(domain.clone()),
            (None, Domains::One) => None,
            // No domain that is named has a colon.
            (None, Domains::Device) => {
                self.needs_the_house().is_none().then(|| format!("device:{}", self.device.name))
            }
        }
    }

    /// The key that makes the disk one which only the daemon itself can serve.
    fn needs_the_house(&self) -> Option<&'static str> {
        match (&self.device.socket, &self.disk) {
            (SocketPlan::Connect { .. }, _) => Some("client"),
            (SocketPlan::Fd(_), _) => Some("fd"),
            (_, DiskPlan::Memory { .. }) => Some("memory"),
            // Its lock goes with the rings of a session, and the daemon sees no session.
            (_, DiskPlan::File { lock_with_rings: true, .. }) => Some("lock_with_rings"),
            // What a group shares, and what an operator changes, is in the daemon.
            _ if !self.device.limit.is_none() => Some("limit"),
            _ if self.device.one_off => Some("one_off"),
            _ if !self.device.queue_workers.is_empty() => Some("queue_workers"),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::parse;

    #[test]
    fn a_disk_is_served_where_its_domain_says_or_else_where_the_daemon_says() {
        let domain_of = |daemon: &str, disk: &str| {
            let head = "[[blk]]\nname = 'a'\nsocket_path = '/a'\n";
            let plan = parse(&format!("[daemon]\n{daemon}\n{head}{disk}"))?;
            Ok::<_, String>(plan.blk[0].domain(plan.daemon.domains))
        };
        let is = |domain: &str| Ok(Some(domain.to_owned()));
        assert_eq!(domain_of("", "null = '1G'"), Ok(None));
        assert_eq!(domain_of("domains = 'device'", "null = '1G'"), is("device:a"));
        assert_eq!(domain_of("domains = 'device'", "memory = '1G'"), Ok(None));
        assert_eq!(domain_of("domains = 'one'", "null = '1G'\ndomain = 'b'"), is("b"));
        for (daemon, disk, key) in [
            ("domains = 'user'", "null = '1G'", "domains"),
            ("", "null = '1G'\ndomain = 'a:b'", "domain"),
            ("", "memory = '1G'\ndomain = 'b'", "memory"),
            ("", "null = '1G'\none_off = true\ndomain = 'b'", "one_off"),
            ("", "null = '1G'\nlimit = { iops = 5 }\ndomain = 'b'", "limit"),
            ("", "file = '/f'\nlock_with_rings = true\ndomain = 'b'", "lock_with_rings"),
            ("", "null = '1G'\nqueue_workers = [0]\ndomain = 'b'", "queue_workers"),
        ] {
            let error = domain_of(daemon, disk).unwrap_err();
            assert!(error.contains(key), "{error}");
        }
    }
}

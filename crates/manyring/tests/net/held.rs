//! A tap that another process has costs the device that needs it, and is taken as soon as that
//! process lets go. Needs root.

use crate::support::process::{Daemon, wait_until};
use crate::support::program::shown;
use crate::support::space::{RIGHT, in_own_space, queue};

#[test]
fn tap_that_another_process_has_costs_its_own_device_until_it_is_free() {
    in_own_space(|| {
        let held = queue("mr0", RIGHT);
        let config = "[daemon]\ncontrol = '@/control'\n\
            [[net]]\nname = 'held'\nsocket_path = '@/held'\ntap = 'mr0'\n\
            [[net]]\nname = 'good'\nsocket_path = '@/good'\ntap = 'mr1'\n";
        let daemon = Daemon::run(config, &["good", "control"]);
        let control = daemon.socket_of("control");
        let device = shown(&control, "/v1/devices/held");
        assert_eq!(
            (device["state"].as_str(), device["waits_for"].as_str()),
            (Some("waiting"), Some("tap"))
        );
        let reason = "[[net]] held: tap: mr0 is in use by another process";
        assert_eq!(device["reason"], reason);
        assert!(!daemon.socket_of("held").exists());
        drop(held);
        assert!(wait_until(|| daemon.socket_of("held").exists()), "{}", daemon.log());
        let device = shown(&control, "/v1/devices/held");
        assert_eq!(
            (device["state"].as_str(), device["interface"].as_str()),
            (Some("serving"), Some("mr0"))
        );
        assert!(daemon.terminate().success());
    });
}

//! Taps of the daemon that is taken over: the next one has the same interfaces.

use crate::support::datagram::{Host, datagram};
use crate::support::process::{Daemon, TIMEOUT, end_of, wait_until};
use crate::support::space::{in_own_space, link, queues};
use crate::takeover::{die_after, has_ended, log, take_over};
use manyring_driver::{NetDriver, NetDriverOptions};
use manyring_wire::net::RawNetHeader;
use rustix::process::{Pid, Signal, kill_process};

/// Two taps, one of a single queue and one of two.
const TAPS: &str = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
    [[net]]\nname = 'one'\nsocket_path = '@/one'\ntap = 'one0'\ndomain = 'a'\n\
    [[net]]\nname = 'two'\nsocket_path = '@/two'\ntap = 'two%d'\nqueue_pairs = 2\n\
    txqueuelen = 'auto'\ndomain = 'b'\n";

/// A datagram leaves by each pair.
fn sends(driver: &mut NetDriver, host: &Host) {
    for pair in &mut driver.pairs {
        assert!(pair.tx.send(&RawNetHeader::default(), &datagram(1, b"hello")).unwrap());
        pair.tx.publish(0).unwrap();
        pair.tx.drain(TIMEOUT).unwrap();
        assert_eq!(host.receive(), b"hello");
    }
}

#[test]
fn taps_go_to_the_daemon_that_takes_over_and_stay_where_it_dies() {
    in_own_space(|| {
        let daemon = Daemon::run(TAPS, &["one", "two", "control"]);
        let host = Host::on("two0");
        let connect = |name: &str, queue_pairs| {
            let options = NetDriverOptions { queue_pairs, ..NetDriverOptions::default() };
            let mut driver = NetDriver::connect(&daemon.socket_of(name), &options).unwrap();
            driver.set_queue_pairs(queue_pairs).unwrap();
            driver
        };
        let mut drivers = [connect("one", 1), connect("two", 2)];
        let mut all_send = || {
            drivers.iter_mut().for_each(|driver| sends(driver, &host));
            assert!(wait_until(|| queues("two0") == (2, 0)), "{:?}", queues("two0"));
            // The two queues share the length of one, whichever daemon has them, unless nothing was
            // lost for long.
            let length = || link("two0").unwrap().txqueuelen;
            assert!(wait_until(|| [500, 1000].contains(&length())), "{}", length());
        };
        all_send();
        let indexes = ["one0", "two0"].map(|name| link(name).unwrap().index);
        assert!(die_after(&daemon, usize::MAX, None) > 0);
        all_send();
        // It dies when it has opened both.
        let wrong = std::fs::read_to_string(daemon.folder().join("manyring.toml")).unwrap()
            + "[[blk]]\nname = 'z'\nsocket_path = '/none'\nfile = '/none'\n";
        std::fs::write(daemon.folder().join("wrong.toml"), wrong).unwrap();
        assert!(!end_of(&mut take_over(&daemon, "wrong.toml")).success());
        all_send();
        let mut before = daemon.pid();
        let mut running = Vec::new();
        for _ in 0..3 {
            running.push(take_over(&daemon, "manyring.toml"));
            let said = || format!("{} {}", daemon.log(), log(&daemon));
            assert!(wait_until(|| has_ended(before)), "{}", said());
            before = running.last().unwrap().id();
            all_send();
        }
        let said = daemon.log() + &log(&daemon);
        assert!(!said.contains("steer:") && !said.contains("fault"), "{said}");
        let is_there = |name: &str| link(name).map(|link| link.index);
        assert_eq!(["one0", "two0"].map(|name| is_there(name).unwrap()), indexes);
        let last = running.last_mut().unwrap();
        let pid = Pid::from_child(last);
        kill_process(pid, Signal::TERM).unwrap();
        assert!(end_of(last).success(), "{}", log(&daemon));
        // Its device processes end with it, and the kernel closes their queues after that.
        let are_gone = || is_there("one0").is_none() && is_there("two0").is_none();
        assert!(wait_until(are_gone), "{}", log(&daemon));
    });
}

#[test]
fn a_tap_goes_with_the_daemon_that_is_taken_over_if_the_next_one_has_other_use_for_its_device() {
    in_own_space(|| {
        let config = "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
            [[net]]\nname = 'n'\nsocket_path = '@/n'\ntap = 'n0'\ndomain = 'a'\n";
        let daemon = Daemon::run(config, &["n", "control"]);
        assert!(link("n0").is_some());
        let text = std::fs::read_to_string(daemon.folder().join("manyring.toml")).unwrap();
        let other = text.replace("tap = 'n0'", "null = true");
        assert_ne!(text, other);
        std::fs::write(daemon.folder().join("other.toml"), other).unwrap();
        let mut next = take_over(&daemon, "other.toml");
        assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
        assert!(wait_until(|| link("n0").is_none()), "somebody has its queues");
        let pid = Pid::from_child(&next);
        kill_process(pid, Signal::TERM).unwrap();
        assert!(end_of(&mut next).success(), "{}", log(&daemon));
    });
}

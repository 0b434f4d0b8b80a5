//! A hundred guests that do nothing cost nothing: no timer ticks, no thread runs, and each takes
//! less than a mebibyte. So do a thousand ports of a switch, which take some KiB each. A device
//! without a front-end has allocated some KiB.

use crate::support::process::{Daemon, wait_until};
use crate::support::program::http;
use manyring_driver::{BlkDriver, BlkDriverOptions, NetDriver, NetDriverOptions};
use std::time::Duration;

const DEVICES: usize = 100;
/// Longer than any pause of a daemon that looks again and again.
const QUIET: Duration = Duration::from_millis(2500);

/// A daemon with `count` disks.
fn daemon(count: usize, more: &str) -> (Daemon, Vec<String>) {
    let names: Vec<_> = (0..count).map(|n| format!("disk{n}")).collect();
    let config: String = names
        .iter()
        .map(|n| format!("[[blk]]\nname = '{n}'\nsocket_path = '@/{n}'\nmemory = '16M'\n{more}"))
        .collect();
    // One device process has all of them.
    let config = format!("[daemon]\ndomains = 'user'\nworkers = 2\n{config}");
    let sockets: Vec<_> = names.iter().map(String::as_str).collect();
    (Daemon::run(&config, &sockets), names)
}

/// A guest on each disk, which has read once.
fn guests(daemon: &Daemon, names: &[String]) -> Vec<BlkDriver> {
    let connect = |name: &String| {
        let options = BlkDriverOptions { queues: 2, ..BlkDriverOptions::default() };
        let mut guest = BlkDriver::connect(&daemon.socket_of(name), &options).unwrap();
        guest.queues.iter_mut().for_each(|queue| queue.read(0, &mut [0; 4096]).unwrap());
        guest
    };
    names.iter().map(connect).collect()
}

/// The number behind `key` in a file of `/proc`, of each thread of the daemon and of its device
/// processes.
fn of_threads(daemon: &Daemon, key: &str) -> Vec<u64> {
    let tasks = |process: u32| std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    daemon
        .processes()
        .into_iter()
        .flat_map(tasks)
        // A thread may end while it is looked at.
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok())
        .map(|text| number_in(&text, key))
        .collect()
}

/// KiB of private memory of the daemon and of its device processes: guest memory and that of disks
/// are shared mappings.
fn anonymous(daemon: &Daemon) -> u64 {
    let status = |process| std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    daemon.processes().into_iter().map(|process| number_in(&status(process), "RssAnon:")).sum()
}

fn number_in(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn no_thread_runs_while_a_hundred_guests_do_nothing() {
    // All queues on one worker, and queues that stay on two.
    for (count, more) in [(DEVICES, ""), (1, ""), (DEVICES, "queue_workers = [0, 1]\n")] {
        let (daemon, names) = daemon(count, more);
        let _guests = guests(&daemon, &names);
        // A thread that was woken has gone to sleep once more than before.
        let woken = || of_threads(&daemon, "voluntary_ctxt_switches:");
        let quiet = wait_until(|| {
            let before = woken();
            std::thread::sleep(QUIET);
            woken() == before
        });
        assert!(quiet, "threads are woken: {:?}", woken());
    }
}

#[test]
fn a_guest_takes_less_than_a_mebibyte() {
    let of = |count| {
        let (daemon, names) = daemon(count, "");
        let _guests = guests(&daemon, &names);
        let has_spare = || daemon.processes().len() == 3;
        assert!(
            wait_until(has_spare),
            "the device process, and the process that waits to be the next one"
        );
        anonymous(&daemon)
    };
    let (one, many) = (of(1), of(DEVICES));
    let each = many.saturating_sub(one) / (DEVICES as u64 - 1);
    assert!(each < 1024, "{each} KiB each: {one} KiB with one guest, {many} KiB with {DEVICES}");
}

/// A daemon with a switch, and a thousand network devices of this kind of port.
fn ports(port: &str) -> Daemon {
    let names: Vec<_> = (0..PORTS).map(|n| format!("port{n}")).collect();
    let device =
        |name: &String| format!("[[net]]\nname = '{name}'\nsocket_path = '@/{name}'\n{port}\n");
    let devices: String = names.iter().map(device).collect();
    // A switch is in the daemon itself, so what it is compared with is too.
    let head = "domains = 'one'\nworkers = 2";
    let config =
        format!("[daemon]\ncontrol = '@/control'\n{head}\n[[switch]]\nname = 's0'\n{devices}");
    let sockets: Vec<_> = names.iter().map(String::as_str).chain(["control"]).collect();
    Daemon::run(&config, &sockets)
}

const PORTS: usize = 1000;
/// KiB that the daemon may allocate for an idle port of a switch, beside its device.
const PORT_KIB: u64 = 3;

#[test]
fn a_thousand_idle_ports_of_a_switch_take_little_memory_and_no_time() {
    let null = heap(&ports("null = true"));
    let daemon = ports("switch = 's0'");
    let switched = heap(&daemon);
    let each = switched.saturating_sub(null) / PORTS as u64;
    assert!(each <= PORT_KIB << 10, "{each} bytes each: {null} without a switch, {switched} with");
    // Two of them have guests, who are connected and silent.
    let guest =
        |name| NetDriver::connect(&daemon.socket_of(name), &NetDriverOptions::default()).unwrap();
    let _guests = [guest("port0"), guest("port999")];
    let woken = || of_threads(&daemon, "voluntary_ctxt_switches:");
    let quiet = wait_until(|| {
        let before = woken();
        std::thread::sleep(QUIET);
        woken() == before
    });
    assert!(quiet, "threads are woken: {:?}", woken());
}

/// Bytes that a daemon with this many such devices has allocated, without a front-end.
fn allocated(count: usize, head: &str, kind: &str) -> u64 {
    let names: Vec<_> = (0..count).map(|n| format!("d{n:03}")).collect();
    let (section, keys) = kind.split_once(' ').unwrap();
    let device = |name: &String| {
        format!("[[{section}]]\nname = '{name}'\nsocket_path = '@/{name}'\n{keys}\n")
    };
    let devices: String = names.iter().map(device).collect();
    let config = format!("[daemon]\ncontrol = '@/control'\n{head}\n{devices}");
    let sockets: Vec<_> = names.iter().map(String::as_str).chain(["control"]).collect();
    heap(&Daemon::run(&config, &sockets))
}

/// Bytes that a daemon has allocated, as it counts them itself.
fn heap(daemon: &Daemon) -> u64 {
    let (status, _, text) = http(&daemon.socket_of("control"), "GET", "/metrics", "");
    assert_eq!(status, 200);
    let line = text.lines().find_map(|line| line.strip_prefix("manyring_heap_bytes "));
    line.unwrap().parse().unwrap()
}

#[test]
fn a_device_without_a_front_end_has_allocated_a_few_kib() {
    const MORE: u64 = 100;
    // A disk has eight queues, a network device one pair, each by default. The second form is that
    // of the supervisor of device processes.
    for (kind, kib_max) in [("blk null = '1G'", 28), ("net null = true", 24)] {
        for head in ["domains = 'one'", "domains = 'device'"] {
            let [few, many] = [10, 10 + MORE].map(|n| allocated(n.try_into().unwrap(), head, kind));
            let each = many.saturating_sub(few) / MORE;
            assert!(each > 1000 && each < kib_max << 10, "{kind}, {head}: {each} bytes");
        }
    }
}

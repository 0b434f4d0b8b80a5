//! Disks that fail and disks that hang: the guest hears of it, its queue goes on, and other
//! devices of the same daemon never notice.

use crate::support::foreign::Client;
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::program::http;
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use manyring_wire::blk::VIRTIO_BLK_F_SECURE_ERASE;
use std::path::Path;
use std::time::Duration;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// A daemon with one memory disk that has this fault.
fn faulty(fault: &str) -> Daemon {
    let config = format!(
        "[[blk]]\nname = 'blk0'\nsocket_path = '@/blk0'\nmemory = '16M'\nfault = {{ {fault} }}\n"
    );
    Daemon::run(&config, &["blk0"])
}

fn connect(socket: &Path) -> BlkDriver {
    let mut options = BlkDriverOptions::default();
    options.features |= VIRTIO_BLK_F_SECURE_ERASE;
    BlkDriver::connect(socket, &options).unwrap()
}

/// Runs one request alone; its status.
fn status(driver: &mut BlkDriver, op: DriverOp<'_>) -> u8 {
    let queue = &mut driver.queues[0];
    queue.submit(op).unwrap().unwrap();
    queue.publish().unwrap();
    queue.wait(TIMEOUT).expect("an answer").status
}

#[test]
fn a_read_error_reaches_the_guest_and_the_queue_goes_on() {
    let daemon = faulty("read_error_every = 3");
    let mut driver = connect(&daemon.socket());
    for n in 1..=30 {
        let expected = if n % 3 == 0 { IOERR } else { OK };
        assert_eq!(status(&mut driver, DriverOp::Read { sector: 8, len: 4096 }), expected, "{n}");
    }
    assert_eq!(status(&mut driver, DriverOp::Write { sector: 8, data: &[7; 512] }), OK);
}

#[test]
fn the_operator_is_told_of_an_error_of_the_host_once_and_can_count_them() {
    let daemon = Daemon::run(
        "[daemon]\ncontrol = '@/control'\n[[blk]]\nname = 'blk0'\nsocket_path = '@/blk0'\n\
         memory = '16M'\nfault = { write_error_every = 1 }\n",
        &["blk0", "control"],
    );
    let mut driver = connect(&daemon.socket());
    for _ in 0..20 {
        assert_eq!(status(&mut driver, DriverOp::Write { sector: 24, data: &[1; 512] }), IOERR);
    }
    // A request beyond the end is the guest's own fault, not an error of the host.
    assert_eq!(status(&mut driver, DriverOp::Read { sector: 1 << 40, len: 512 }), IOERR);
    let (_, _, metrics) = http(&daemon.socket_of("control"), "GET", "/metrics", "");
    let counted = "manyring_queue_host_errors_eio_total{device=\"blk0\",queue=\"0\"} 20\n";
    assert!(metrics.contains(counted), "{metrics}");
    assert!(wait_until(|| daemon.log().contains("has failed a request")));
    let log = daemon.log();
    let told: Vec<_> = log.lines().filter(|line| line.contains("has failed a request")).collect();
    assert_eq!(told.len(), 1, "{log}");
    for word in ["WARN", "device=\"blk0\"", "operation=\"write\"", "sector=24", "os error 5"] {
        assert!(told[0].contains(word), "{word}: {log}");
    }
}

#[test]
fn a_write_error_reaches_the_guest_and_changes_nothing() {
    let daemon = faulty("write_error_every = 2");
    let mut driver = connect(&daemon.socket());
    // Requests are counted from 1: the second and the fourth fail if they are writes.
    assert_eq!(status(&mut driver, DriverOp::Write { sector: 0, data: &[1; 512] }), OK);
    assert_eq!(status(&mut driver, DriverOp::Write { sector: 0, data: &[2; 512] }), IOERR);
    let mut found = [0; 512];
    driver.queues[0].read(0, &mut found).unwrap();
    assert_eq!(found, [1; 512]);
    assert_eq!(status(&mut driver, DriverOp::Write { sector: 0, data: &[3; 512] }), IOERR);
    assert_eq!(status(&mut driver, DriverOp::Write { sector: 0, data: &[4; 512] }), OK);
}

#[test]
fn a_flush_that_fails_is_not_told_as_done() {
    let daemon = faulty("flush_errors = true");
    let mut driver = connect(&daemon.socket());
    assert_eq!(status(&mut driver, DriverOp::Flush), IOERR);
    assert_eq!(status(&mut driver, DriverOp::Read { sector: 0, len: 512 }), OK);
    assert_eq!(status(&mut driver, DriverOp::Flush), IOERR);
}

#[test]
fn libblkio_sees_eio_for_exactly_the_requests_that_failed() {
    let daemon = faulty("read_error_every = 1");
    let mut client = Client::connect(&daemon.socket(), false);
    let lanes = &mut client.lanes(5);
    for lane in lanes {
        for token in 0..8 {
            lane.submit(token % 2 == 0, lane.start + 4096 * token as u64, 4096, token);
        }
        for _ in 0..8 {
            let (token, result) = lane.reap();
            assert_eq!(result, if token % 2 == 0 { 0 } else { -5 }, "request {token}");
        }
    }
}

#[test]
fn secure_erase_is_offered_where_the_disk_has_it_and_erases() {
    let daemon = faulty("secure_erase = true");
    let mut driver = connect(&daemon.socket());
    assert_ne!(driver.features & VIRTIO_BLK_F_SECURE_ERASE, 0);
    assert!(driver.config.max_secure_erase_sectors.get() >= 8);
    driver.queues[0].write(16, &[9; 16 * 512]).unwrap();
    assert_eq!(status(&mut driver, DriverOp::SecureErase { sector: 20, count: 8 }), OK);
    let mut found = [0; 16 * 512];
    driver.queues[0].read(16, &mut found).unwrap();
    let expected = |sector: usize| if (4..12).contains(&sector) { [0; 512] } else { [9; 512] };
    for sector in 0..16 {
        assert_eq!(found[sector * 512..][..512], expected(sector), "sector {}", 16 + sector);
    }
}

#[test]
fn secure_erase_is_refused_where_the_disk_has_none() {
    let daemon = Daemon::blk(&["--memory=16M"]);
    let mut driver = connect(&daemon.socket());
    assert_eq!(driver.features & VIRTIO_BLK_F_SECURE_ERASE, 0);
    assert_eq!(driver.config.max_secure_erase_sectors.get(), 0);
    driver.queues[0].write(16, &[9; 512]).unwrap();
    assert_eq!(status(&mut driver, DriverOp::SecureErase { sector: 16, count: 1 }), UNSUPP);
    let mut found = [0; 512];
    driver.queues[0].read(16, &mut found).unwrap();
    assert_eq!(found, [9; 512]);
}

#[test]
fn a_disk_that_hangs_does_not_hold_another_device_up() {
    for daemon_table in ["", "[daemon]\nworkers = 1\n", "[daemon]\nio_uring = false\n"] {
        let config = format!(
            "{daemon_table}\
             [[blk]]\nname = 'hung'\nsocket_path = '@/hung'\nmemory = '16M'\n\
             fault = {{ hold_every = 1 }}\n\
             [[blk]]\nname = 'well'\nsocket_path = '@/well'\nmemory = '16M'\n"
        );
        let daemon = Daemon::run(&config, &["hung", "well"]);
        let mut hung = connect(&daemon.socket_of("hung"));
        for sector in 0..8 {
            hung.queues[0].submit(DriverOp::Read { sector, len: 512 }).unwrap().unwrap();
        }
        hung.queues[0].publish().unwrap();
        let well = || {
            let mut driver = connect(&daemon.socket_of("well"));
            for sector in 0..100 {
                let data = [u8::try_from(sector).unwrap() ^ 0x5a; 512];
                driver.queues[0].write(sector, &data).unwrap();
                let mut found = [0; 512];
                driver.queues[0].read(sector, &mut found).unwrap();
                assert_eq!(found, data);
            }
        };
        well();
        assert!(hung.queues[0].wait(Duration::from_millis(50)).is_err(), "it does hang");
        // The hung device is being stopped, which cannot end; then its guest is gone.
        let stopping = hung.front.send_message(11, &[0; 8], &[]);
        assert!(stopping.is_ok());
        well();
        drop(hung);
        well();
    }
}

#[test]
fn a_write_past_the_hosts_limit_for_files_fails_and_ends_nothing() {
    // The host sends SIGXFSZ to whoever writes there, whose default ends a process.
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(4 << 20).unwrap();
    let file = image.path().to_str().unwrap();
    for more in ["--cache=writeback", "--no-io-uring"] {
        // 1 MiB, in units of 512 bytes.
        let mut daemon = Daemon::blk_under("ulimit -f 2048", &["--blk-file", file, more]);
        let mut driver = connect(&daemon.socket());
        let sector = 2 << 11;
        for _ in 0..3 {
            assert_eq!(status(&mut driver, DriverOp::Write { sector, data: &[1; 512] }), IOERR);
            assert_eq!(status(&mut driver, DriverOp::Write { sector: 8, data: &[1; 512] }), OK);
            assert_eq!(status(&mut driver, DriverOp::Read { sector, len: 512 }), OK);
        }
        assert!(daemon.is_running(), "{more}");
    }
}

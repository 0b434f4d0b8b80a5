//! The journal of a session lies in memory that the device process writes: whatever it writes there
//! costs its own session at most, and a session that begins sends few reports.

use crate::domain::{disk, pid, process, serve, works};
use crate::support::foreign::Client;
use crate::support::process::{Daemon, copies_of, is_root_or_left_out, wait_until};
use manyring_driver::{BlkDriver, BlkDriverOptions};
use rustix::fd::OwnedFd;
use rustix::io::{pread, pwrite};
use rustix::process::{Signal, kill_process};
use std::path::Path;

/// Spoils a journal.
type Spoil = fn(&OwnedFd);

/// The journals that the device process of a domain has, by their inodes.
fn journals(daemon: &Daemon, domain: &str) -> Vec<(u64, OwnedFd)> {
    let process = pid(daemon, domain).as_raw_nonzero().get();
    let all = copies_of(process, Path::new("/memfd:journal (deleted)")).into_iter();
    all.map(|fd| (rustix::fs::fstat(&fd).unwrap().st_ino, fd)).collect()
}

/// Kills the device process of a domain, and returns when the next one serves.
fn dies(daemon: &Daemon, domain: &str) {
    let starts = process(daemon, domain)["starts"].as_u64().unwrap();
    kill_process(pid(daemon, domain), Signal::KILL).unwrap();
    let serves = || {
        let process = process(daemon, domain);
        process["state"] == "serving" && process["starts"] == starts + 1
    };
    assert!(wait_until(serves), "{}", daemon.log());
}

#[test]
fn a_journal_that_a_device_process_has_spoiled_costs_its_own_session_and_one_line() {
    if !is_root_or_left_out() {
        return;
    }
    let table = |name: &str| disk(name, "memory = '16M'\ndomain = 'vm'\n");
    let daemon = serve("", &[table("odd"), table("a")].concat(), &["odd", "a"]);
    let spoils: [(&str, Spoil); 4] = [
        ("layout version 7 instead of 1", |file| {
            write_heads(file, &[7, 0, 0, 0]);
        }),
        ("its device process failed to write a later state", |file| {
            write_heads(file, &[0xff; 24]);
        }),
        ("a list is longer than its record", |file| {
            // The number of entries of the first record, whose checksum fits.
            write_record(file, |bytes| bytes[32..36].copy_from_slice(&[0xff; 4]));
        }),
        ("an entry names descriptors that are not there", |file| {
            let entry = [1_u32, 0, 99, 0].map(u32::to_le_bytes).concat();
            write_record(file, |bytes| {
                bytes.truncate(24);
                bytes.extend([0_u32, 0, 1].map(u32::to_le_bytes).concat());
                bytes.extend(entry);
            });
        }),
    ];
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    for (round, (problem, spoil)) in spoils.into_iter().enumerate() {
        let others: Vec<_> = journals(&daemon, "vm").into_iter().map(|(inode, _)| inode).collect();
        let options = BlkDriverOptions { queues: 4, ..BlkDriverOptions::default() };
        let mut odd = BlkDriver::connect(&daemon.socket_of("odd"), &options).unwrap();
        odd.queues[0].write(0, &[7; 512]).unwrap();
        let all = journals(&daemon, "vm");
        let (_, file) = all.iter().find(|(inode, _)| !others.contains(inode)).unwrap();
        spoil(file);
        dies(&daemon, "vm");
        // Its connection has ended, and the other front-end notices nothing.
        assert!(odd.front.features().is_err(), "{problem}");
        works(&mut client, 2 + round as u64);
        let is_said = |line: &&str| line.contains("the journal of its session is invalid");
        let is_logged = || daemon.log().lines().filter(is_said).count() > round;
        assert!(wait_until(is_logged), "{problem}: {}", daemon.log());
        let log = daemon.log();
        let said: Vec<_> = log.lines().filter(is_said).collect();
        assert_eq!(said.len(), round + 1, "{log}");
        assert!(said[round].contains(problem) && said[round].contains("device=\"odd\""), "{log}");
    }
    assert_eq!(process(&daemon, "vm")["state"], "serving");
    assert!(daemon.terminate().success());
}

/// Writes over the begin of both halves of a journal.
fn write_heads(file: &OwnedFd, bytes: &[u8]) {
    let size = u64::try_from(rustix::fs::fstat(file).unwrap().st_size).unwrap();
    for at in [0, size / 2] {
        pwrite(file, bytes, at).unwrap();
    }
}

/// Replaces the first record of a journal by another one with a size and a checksum that fit.
fn write_record(file: &OwnedFd, change: impl FnOnce(&mut Vec<u8>)) {
    let mut head = [0; 8];
    pread(file, &mut head, 0).unwrap();
    let size = u32::from_le_bytes(head[4..].try_into().unwrap()) as usize;
    let mut bytes = vec![0; size];
    pread(file, &mut bytes, 0).unwrap();
    change(&mut bytes);
    let size = u32::try_from(bytes.len()).unwrap();
    bytes[4..8].copy_from_slice(&size.to_le_bytes());
    let sum = [&bytes[4..16], &bytes[24..]]
        .concat()
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    bytes[16..24].copy_from_slice(&sum.to_le_bytes());
    pwrite(file, &bytes, 0).unwrap();
    // The other half holds no later state.
    let size = rustix::fs::fstat(file).unwrap().st_size;
    pwrite(file, &[0; 24], u64::try_from(size / 2).unwrap()).unwrap();
}

#[test]
fn nobody_changes_the_size_of_a_journal() {
    if !is_root_or_left_out() {
        return;
    }
    let daemon = serve("", &disk("a", "memory = '16M'\ndomain = 'vm'\n"), &["a"]);
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let [(_, file)] = &journals(&daemon, "vm")[..] else { panic!("{}", daemon.log()) };
    let size = u64::try_from(rustix::fs::fstat(file).unwrap().st_size).unwrap();
    for other in [0, size - 1, size + 1, 1 << 30] {
        assert_eq!(rustix::fs::ftruncate(file, other), Err(rustix::io::Errno::PERM));
    }
    dies(&daemon, "vm");
    works(&mut client, 2);
    assert!(daemon.terminate().success());
}

#[test]
fn a_session_that_begins_sends_its_descriptors_to_the_supervisor_and_little_else() {
    let daemon = serve("", &disk("a", "memory = '16M'\ndomain = 'vm'\n"), &["a"]);
    let first = BlkDriver::connect(&daemon.socket_of("a"), &BlkDriverOptions::default()).unwrap();
    drop(first);
    let is_left = || daemon.log().contains("front-end disconnected");
    assert!(wait_until(is_left));
    let reports = || process(&daemon, "vm")["reports"].as_u64().unwrap();
    let before = reports();
    let options = BlkDriverOptions { queues: 4, ..BlkDriverOptions::default() };
    let mut driver = BlkDriver::connect(&daemon.socket_of("a"), &options).unwrap();
    driver.queues[3].write(0, &[7; 512]).unwrap();
    let began = reports() - before;
    // Kick, call and error of four queues, memory, an in-flight region, and the session itself.
    assert!((12..=20).contains(&began), "{began} reports");
    assert!(daemon.terminate().success());
}

//! Captures of devices in device processes: the supervisor writes the files, whatever becomes of
//! the processes.
#![cfg(target_arch = "x86_64")]

use crate::domain::{counted, pid, process};
use crate::support::process::{Daemon, TIMEOUT, end_of, is_root_or_left_out, wait_until};
use crate::support::program::http_json;
use crate::support::space::run;
use crate::support::taken::Taken;
use crate::takeover::{has_ended, log, take_over};
use manyring_driver::{NetDriver, NetDriverOptions};
use manyring_wire::net::RawNetHeader;
use rustix::fs::{CWD, Mode, OFlags, mkfifoat};
use rustix::net::sockopt::socket_send_buffer_size;
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
};
use serde_json::json;
use std::path::{Path, PathBuf};

const HEADER_SIZE: usize = 24;

/// Networks that keep nothing, each in its own domain, whose frames are captured.
fn serve(names: &[&str]) -> Daemon {
    let net = |name: &&str| {
        format!(
            "[[net]]\nname = '{name}'\nsocket_path = '@/{name}'\nnull = true\ndomain = '{name}'\n\
             pcap = '@/{name}.pcap'\n"
        )
    };
    let nets: String = names.iter().map(net).collect();
    let sockets = [names, &["control"]].concat();
    Daemon::run(&format!("[daemon]\ncontrol = '@/control'\nworkers = 1\n{nets}"), &sockets)
}

fn connect(daemon: &Daemon, name: &str) -> NetDriver {
    NetDriver::connect(&daemon.socket_of(name), &NetDriverOptions::default()).unwrap()
}

fn frame(number: usize) -> Vec<u8> {
    let len = 60 + number * 7919 % 9000;
    number.to_be_bytes().into_iter().chain(std::iter::repeat(7)).take(len).collect()
}

fn send(guest: &mut NetDriver, numbers: std::ops::Range<usize>) {
    let tx = &mut guest.pairs[0].tx;
    for number in numbers {
        assert!(tx.send(&RawNetHeader::default(), &frame(number)).unwrap());
        tx.publish(0).unwrap();
        tx.drain(TIMEOUT).unwrap();
    }
}

/// The frames of a capture, by its own lengths. It must have one header and end with a whole frame.
fn captured(path: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes[..4], 0xa1b2_3c4d_u32.to_le_bytes());
    let (mut rest, mut frames) = (&bytes[HEADER_SIZE..], Vec::new());
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        frames.push(rest[16..16 + len].to_vec());
        rest = &rest[16 + len..];
    }
    frames
}

fn size_of(numbers: std::ops::Range<usize>) -> u64 {
    (HEADER_SIZE + numbers.map(|number| 16 + frame(number).len()).sum::<usize>()) as u64
}

/// Waits until the file has these frames, and checks them.
fn has(path: &Path, numbers: std::ops::Range<usize>) {
    let size = size_of(numbers.clone());
    let len = || std::fs::metadata(path).unwrap().len();
    assert!(wait_until(|| len() >= size), "{} of {size}", len());
    let frames = captured(path);
    assert_eq!(frames.len(), numbers.len());
    assert!(frames.iter().zip(numbers).all(|(is, number)| *is == frame(number)));
}

/// The stream by which a device process sends its capture: its one socket with as much room.
fn stream_of(process: i32) -> u64 {
    let pidfd = pidfd_open(Pid::from_raw(process).unwrap(), PidfdFlags::empty()).unwrap();
    let fds = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let numbers = fds.filter_map(|fd| fd.file_name().to_str()?.parse().ok());
    let is_stream = |number: &i32| {
        let fd = pidfd_getfd(&pidfd, *number, PidfdGetfdFlags::empty());
        fd.is_ok_and(|fd| socket_send_buffer_size(fd) == Ok(1 << 20))
    };
    let streams: Vec<i32> = numbers.filter(is_stream).collect();
    assert_eq!(streams.len(), 1, "{streams:?}");
    streams[0].cast_unsigned().into()
}

#[test]
fn a_capture_goes_on_behind_the_last_frame_when_a_device_process_dies_and_foreign_tools_read_it() {
    let daemon = serve(&["a"]);
    let path = daemon.folder().join("a.pcap");
    let mut guest = connect(&daemon, "a");
    for round in 0..3 {
        send(&mut guest, round * 50..(round + 1) * 50);
        has(&path, 0..(round + 1) * 50);
        kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
        let starts = u64::try_from(round).unwrap() + 2;
        assert!(wait_until(|| process(&daemon, "a")["starts"] == starts), "{}", daemon.log());
    }
    // In the midst of frames: whole ones are in the file, however many.
    send(&mut guest, 150..200);
    kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
    assert!(wait_until(|| process(&daemon, "a")["starts"] == 5), "{}", daemon.log());
    let before = captured(&path).len();
    assert!((150..=200).contains(&before), "{before}");
    send(&mut guest, 200..201);
    assert!(wait_until(|| captured(&path).last() == Some(&frame(200))));
    let frames = captured(&path).len();
    let shown = run(&format!("capinfos -c -M {}", path.display()));
    assert!(shown.split_whitespace().any(|word| word == frames.to_string()), "{frames}: {shown}");
    drop(guest);
    assert!(daemon.terminate().success());
}

#[test]
fn a_device_process_that_is_taken_breaks_its_own_capture_until_its_end_and_no_other() {
    if !is_root_or_left_out() {
        return;
    }
    let daemon = serve(&["a", "b"]);
    let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
    let [of_a, of_b] = ["a", "b"].map(|name| daemon.folder().join(format!("{name}.pcap")));
    send(&mut a, 0..10);
    send(&mut b, 0..10);
    has(&of_a, 0..10);
    let its_pid = pid(&daemon, "a").as_raw_nonzero().get();
    let stream = stream_of(its_pid);
    let mut thread = Taken::take(its_pid, its_pid);
    let scratch = thread.scratch();
    // A record without an end, which nobody must wait for or make room for.
    (0..16).step_by(4).for_each(|at| thread.store(scratch + at, u32::MAX));
    assert_eq!(thread.call(libc::SYS_write, [stream, scratch, 16, 0, 0, 0]), 16);
    let says = "sends what is no frame";
    assert!(wait_until(|| daemon.log().contains(says)), "{}", daemon.log());
    let again = thread.call(libc::SYS_write, [stream, scratch, 16, 0, 0, 0]);
    assert_eq!(again, -i64::from(libc::EPIPE));
    // No way to the file, nor to the stream of the other one.
    let at = |path: &Path| path.display().to_string();
    let path = thread.text(&at(&of_a));
    let folder = i64::from(libc::AT_FDCWD).cast_unsigned();
    let write = u64::from(libc::O_WRONLY.unsigned_abs());
    let refused = thread.call(libc::SYS_openat, [folder, path, write, 0, 0, 0]);
    assert_eq!(refused, -i64::from(libc::EACCES));
    drop(thread);
    // Its guest goes on without a capture, and the other one with its own.
    send(&mut a, 10..20);
    send(&mut b, 10..20);
    has(&of_b, 0..20);
    has(&of_a, 0..10);
    assert_eq!(counted(&daemon, "a", "packets"), 20);
    // The next device process captures again.
    kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
    assert!(wait_until(|| process(&daemon, "a")["starts"] == 2), "{}", daemon.log());
    send(&mut a, 10..15);
    has(&of_a, 0..15);
    assert_eq!(daemon.log().matches(says).count(), 1);
}

#[test]
fn a_file_that_takes_nothing_costs_its_own_frames_alone() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
    // Nobody reads it.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    let reader = rustix::fs::open(&pipe, flags, Mode::empty()).unwrap();
    let config = format!(
        "[daemon]\ncontrol = '@/control'\nworkers = 1\n\
         [[net]]\nname = 'a'\nsocket_path = '@/a'\nnull = true\ndomain = 'd'\npcap = '{}'\n\
         [[net]]\nname = 'b'\nsocket_path = '@/b'\nnull = true\ndomain = 'd'\n\
         pcap = '@/b.pcap'\n",
        pipe.display()
    );
    let daemon = Daemon::run(&config, &["a", "b", "control"]);
    let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
    // More than the streams and the buffer of the process hold.
    send(&mut a, 0..5000);
    send(&mut b, 0..100);
    has(&daemon.folder().join("b.pcap"), 0..100);
    assert_eq!(counted(&daemon, "a", "packets"), 5000);
    let says = "frames are missing from it";
    assert!(wait_until(|| daemon.log().contains(says)), "{}", daemon.log());
    drop((a, b));
    let (mut daemon, _reader) = (daemon, reader);
    let (status, took) = daemon.stop();
    assert!(status.success() && took.as_secs() < 10, "{status} after {took:?}");
}

#[test]
fn a_change_of_the_file_begins_another_one_and_leaves_the_first_whole() {
    let daemon = serve(&["a"]);
    let control = daemon.socket_of("control");
    let [first, other]: [PathBuf; 2] = ["c.pcap", "d.pcap"].map(|at| daemon.folder().join(at));
    let put = |path: &Path| {
        let body = json!({
            "kind": "net", "socket_path": daemon.socket_of("c"), "null": true, "domain": "a",
            "pcap": path,
        });
        http_json(&control, "PUT", "/v1/devices/c", &body.to_string())
    };
    assert_eq!(put(&first).0, 201);
    let mut guest = connect(&daemon, "c");
    send(&mut guest, 0..30);
    drop(guest);
    // It is refused while the front-end is connected.
    assert!(wait_until(|| put(&other).0 == 200), "{:?}", put(&other));
    has(&first, 0..30);
    let mut guest = connect(&daemon, "c");
    send(&mut guest, 0..20);
    has(&other, 0..20);
    has(&first, 0..30);
    assert!(daemon.terminate().success());
}

#[test]
fn the_daemon_that_takes_over_goes_on_with_the_capture() {
    let daemon = serve(&["a"]);
    let path = daemon.folder().join("a.pcap");
    let mut guest = connect(&daemon, "a");
    let (mut before, mut running) = (daemon.pid(), Vec::new());
    for round in 0..3 {
        send(&mut guest, round * 20..(round + 1) * 20);
        running.push(take_over(&daemon, "manyring.toml"));
        assert!(wait_until(|| has_ended(before)), "{} {}", daemon.log(), log(&daemon));
        before = running.last().unwrap().id();
    }
    send(&mut guest, 60..80);
    has(&path, 0..80);
    drop(guest);
    let last = running.last_mut().unwrap();
    kill_process(Pid::from_child(last), Signal::TERM).unwrap();
    assert!(end_of(last).success(), "{}", log(&daemon));
    has(&path, 0..80);
}

//! Front-ends that come, go, and are killed; a daemon that is killed and started again. The client
//! is libblkio, or a bare socket.

use crate::support::foreign::{Client, DEPTH, Lane, Random, SIZE_MAX};
use crate::support::process::{Daemon, Holdings, Running, TIMEOUT, end_of, wait_until};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use manyring_wire::virtio::VIRTIO_F_RING_PACKED;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Set in a child of a test: the socket that it is to drive until it is killed.
const KILLED: &str = "MANYRING_TEST_KILLED_CLIENT";
const IN_FLIGHT: &str = "in flight";

/// A file of 16 MiB, on a file system that knows O_DIRECT if any here does.
fn image() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(16 << 20).unwrap();
    file
}

/// Writes and reads back on all four queues.
fn client_works(socket: &Path, seed: u64) {
    let mut client = Client::connect(socket, false);
    let mut lanes = client.lanes(seed);
    for lane in &mut lanes {
        lane.end = lane.start + 4 * SIZE_MAX as u64;
        lane.transfer(true);
        lane.transfer(false);
    }
}

/// Keeps all queues full, for ever.
fn drive(lanes: &mut [Lane]) -> ! {
    let mut random = Random(u64::from(std::process::id()));
    for lane in lanes.iter_mut() {
        (0..DEPTH).for_each(|token| submit(lane, token, &mut random));
    }
    // The queues are kicked when they are first waited on.
    let mut told = false;
    loop {
        for lane in lanes.iter_mut() {
            let (token, result) = lane.reap();
            assert_eq!(result, 0);
            submit(lane, token, &mut random);
        }
        if !told {
            println!("{IN_FLIGHT}");
            std::io::stdout().flush().unwrap();
            told = true;
        }
    }
}

fn submit(lane: &mut Lane, token: usize, random: &mut Random) {
    let units = (lane.end - lane.start) / 4096;
    let offset = lane.start + random.below(units) * 4096;
    lane.submit(random.below(2) == 0, offset, 4096, token);
}

/// A child that drives `socket`; its requests are in flight.
fn doomed_client(socket: &Path) -> Running {
    let mut child = Running::start(
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "reconnect::a_client_that_stays_is_served", "--nocapture"])
            .env(KILLED, socket)
            .stdout(Stdio::piped()),
    );
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let told = lines.map_while(Result::ok).any(|line| line.ends_with(IN_FLIGHT));
    assert!(told, "the client ended: {:?}", child.wait());
    child
}

#[test]
fn a_client_that_stays_is_served() {
    // Started again by the tests below, this test is the client that is killed.
    if let Some(socket) = std::env::var_os(KILLED) {
        drive(&mut Client::connect(Path::new(&socket), false).lanes(1));
    }
    let daemon = Daemon::blk(&["--memory=16M", "--num-queues=4"]);
    client_works(&daemon.socket(), 1);
}

/// The kernel keeps the last two idle threads of a worker that has used its io_uring: one for what
/// has an end, one for what has none. A daemon has two workers here at most.
const KERNEL_THREADS_MAX: usize = 4;
/// Threads of a device that may live at one moment beside those of the moment before: a janitor
/// that begins while the ones before it are ending. Each has a stack and may have an arena.
const STACKS_MORE_MAX: usize = 8;
const ARENAS_MORE_MAX: usize = 8;

/// Kills client after client with requests in flight; nothing of them stays behind.
fn killed_clients_leave_nothing(arguments: &[&str], cycles: usize, seed: u64) {
    println!("seed {seed}");
    let mut all = vec!["--num-queues=4"];
    all.extend(arguments);
    let mut daemon = Daemon::blk(&all);
    let mut random = Random(seed);
    let mut cycle = |daemon: &Daemon| {
        let mut client = doomed_client(&daemon.socket());
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        client.kill().unwrap();
        end_of(&mut client);
    };
    // The first ones start workers and grow the heap.
    (0..5).for_each(|_| cycle(&daemon));
    client_works(&daemon.socket(), seed);
    let (before, mapped) = (settled(&daemon, None), daemon.mappings());
    for _ in 0..cycles {
        cycle(&daemon);
    }
    client_works(&daemon.socket(), seed + 1);
    let (after, still_mapped) = (settled(&daemon, Some(before)), daemon.mappings());
    let case = format!("after {cycles} clients, seed {seed}");
    assert_eq!((after.fds, after.threads), (before.fds, before.threads), "{case}");
    assert!(after.kernel_threads <= KERNEL_THREADS_MAX, "{case}: {after:?}");
    // Guest memory, rings of io_uring, files: none more and none less. The allocator's arenas and
    // the stacks of threads that have ended are kept for the next threads.
    assert_eq!(still_mapped.others, mapped.others, "{case}");
    let (arenas, stacks) = (ARENAS_MORE_MAX, STACKS_MORE_MAX);
    assert!(still_mapped.arenas <= mapped.arenas + arenas, "{case}: {still_mapped:?}, {mapped:?}");
    assert!(still_mapped.stacks <= mapped.stacks + stacks, "{case}: {still_mapped:?}, {mapped:?}");
    assert!(daemon.is_running());
    assert!(daemon.terminate().success());
}

/// Looks, 5 ms apart, in which nothing must change before it counts as settled: if it is not known
/// what is to come, more than the second for which a disk keeps its descriptions of the file for
/// the next queue.
const LOOKS: u32 = 20;
const LOOKS_UNKNOWN: u32 = 400;

/// Returns the daemon's holdings when they have stopped changing after the last session.
fn settled(daemon: &Daemon, expected: Option<Holdings>) -> Holdings {
    let (mut last, mut same) = (daemon.holdings(), 0);
    let looks = if expected.is_none() { LOOKS_UNKNOWN } else { LOOKS };
    wait_until(|| {
        let now = daemon.holdings();
        same = if now == last { same + 1 } else { 0 };
        last = now;
        let is_expected = |e: Holdings| {
            (e.fds, e.threads) == (now.fds, now.threads) && now.kernel_threads <= KERNEL_THREADS_MAX
        };
        same >= looks && expected.is_none_or(is_expected)
    });
    last
}

#[test]
fn two_hundred_killed_clients_leave_nothing_behind() {
    let image = image();
    let file = format!("--blk-file={}", image.path().display());
    killed_clients_leave_nothing(&[&file, "--direct"], 200, 7);
}

#[test]
fn killed_clients_leave_nothing_behind_without_io_uring() {
    killed_clients_leave_nothing(&["--memory=16M", "--no-io-uring"], 30, 8);
}

/// `VHOST_USER_GET_FEATURES`: version 1, no payload.
const GET_FEATURES: [u32; 3] = [1, 1, 0];

/// True if the back-end answers on this connection, false if it closes it.
fn answers(mut stream: &UnixStream) -> bool {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let request: Vec<u8> = GET_FEATURES.iter().flat_map(|word| word.to_ne_bytes()).collect();
    if stream.write_all(&request).is_err() {
        return false;
    }
    match stream.read_exact(&mut [0; 20]) {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("neither answer nor end"),
        Err(_) => false,
    }
}

#[test]
fn a_second_client_is_refused_at_once_and_the_first_goes_on() {
    let daemon = Daemon::blk(&["--null=1G"]);
    let first = UnixStream::connect(daemon.socket()).unwrap();
    assert!(answers(&first));
    for _ in 0..5 {
        assert!(!answers(&UnixStream::connect(daemon.socket()).unwrap()));
        assert!(answers(&first));
    }
    first.shutdown(Shutdown::Both).unwrap();
    let served = || answers(&UnixStream::connect(daemon.socket()).unwrap());
    assert!(wait_until(served), "the next client is served");
}

#[test]
fn a_client_that_comes_when_the_first_has_left_is_served_never_refused() {
    // QEMU never talks again to a socket that closed on it. That the first has left and that the
    // second has come is learned in one moment, after messages that were still to be answered.
    let daemon = Daemon::blk(&["--null=1G"]);
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap()).unwrap();
    let mut client = UnixStream::connect(daemon.socket()).unwrap();
    for round in 0..50 {
        assert!(answers(&client), "round {round}");
        kill_process(pid, Signal::STOP).unwrap();
        let request: Vec<u8> = GET_FEATURES.iter().flat_map(|word| word.to_ne_bytes()).collect();
        (0..round % 4).for_each(|_| client.write_all(&request).unwrap());
        // Closing alone would leave it open in a child that another test is just starting.
        client.shutdown(Shutdown::Both).unwrap();
        client = UnixStream::connect(daemon.socket()).unwrap();
        kill_process(pid, Signal::CONT).unwrap();
    }
    assert!(answers(&client));
}

#[test]
fn a_client_that_comes_while_the_killed_one_is_torn_down_waits() {
    let image = image();
    let daemon = Daemon::blk(&["--num-queues=4", "--blk-file", image.path().to_str().unwrap()]);
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap()).unwrap();
    for round in 0..10 {
        let mut first = doomed_client(&daemon.socket());
        kill_process(pid, Signal::STOP).unwrap();
        first.kill().unwrap();
        end_of(&mut first);
        let second = UnixStream::connect(daemon.socket()).unwrap();
        kill_process(pid, Signal::CONT).unwrap();
        assert!(answers(&second), "round {round}");
    }
    assert!(wait_until(|| answers(&UnixStream::connect(daemon.socket()).unwrap())));
}

#[test]
fn a_killed_daemon_starts_again_at_once_on_its_image() {
    let image = image();
    let file = format!("--blk-file={}", image.path().display());
    for round in 0..5 {
        // The kernel takes the io_uring of a killed process down after the process has ended, and
        // the image stays locked until then.
        let daemon = Daemon::blk(&[file.as_str(), "--direct", "--num-queues=4"]);
        let mut client = doomed_client(&daemon.socket());
        std::thread::sleep(Duration::from_millis(20));
        drop(daemon);
        client.kill().unwrap();
        end_of(&mut client);
        println!("round {round}");
    }
    let daemon = Daemon::blk(&[file.as_str(), "--direct", "--num-queues=4"]);
    client_works(&daemon.socket(), 3);
}

/// The test's own driver stays while the daemon is killed. Its rings have available requests that
/// the killed daemon has not popped; the next daemon serves them.
#[test]
fn a_guest_goes_on_at_the_next_daemon_where_its_rings_stand_whatever_their_format() {
    let image = image();
    let file = format!("--blk-file={}", image.path().display());
    for ring in [0, VIRTIO_F_RING_PACKED] {
        let features = BlkDriverOptions::default().features | ring;
        let options = BlkDriverOptions { queue_size: 8, features, ..BlkDriverOptions::default() };
        let mut daemon = Daemon::blk(&[&file]);
        let mut guest = BlkDriver::connect(&daemon.socket(), &options).unwrap();
        assert_eq!(guest.features & VIRTIO_F_RING_PACKED, ring);
        // Each daemon has its rings begin at another place, on both laps.
        for round in 1..6u8 {
            guest.queues[0].write(0, &[round; 512]).unwrap();
            drop(daemon);
            let mut back = [0; 512];
            for _ in 0..2 {
                let queue = &mut guest.queues[0];
                queue.submit(DriverOp::Read { sector: 0, len: 512 }).unwrap().unwrap();
                queue.publish().unwrap();
            }
            daemon = Daemon::blk(&[&file]);
            guest.reconnect(&daemon.socket()).unwrap();
            for _ in 0..2 {
                let done = guest.queues[0].wait(TIMEOUT).unwrap();
                guest.queues[0].read_data(done.tag, &mut back).unwrap();
                assert_eq!((done.status, back), (0, [round; 512]), "{ring:#x} {round}");
            }
        }
    }
}

//! The waits of other users while one user holds up his own device process by changes of his own
//! memory, of his doorbells or of his session: those of a guest, of the control API and of a new
//! session of theirs, each measured by the prober. And the effect of SIGKILL on a device process
//! that the kernel does not end: its own devices wait for its end, and nobody else.
//!
//! No fault here is made by a debugger's means: any user can cause it. A process of the kernel's
//! idle class that shares its CPU with a busy one takes seconds for work of milliseconds, and keeps
//! the kernel's locks for that time. Needs root, to be two users.

use crate::support::prober::{Prober, RETRY_DELAY, STALL_MAX, Stalls, check};
use crate::support::process::{Daemon, Running, TIMEOUT, end_of, wait_until};
use crate::support::program::{manyring, shown};
use crate::support::rings::{Restart, replace_table};
use crate::walls::{PAGE, Ring};
use manyring_driver::{Arena, BlkDriver, BlkDriverOptions, DriverOp, FrontEnd};
use manyring_wire::vhost_user::Region;
use rustix::event::epoll;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, memfd_create};
use rustix::process::{Pid, Signal, Uid, kill_process};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

const NOBODY: u32 = 65534;
/// The device process of [`NOBODY`].
const PROCESS: &str = "user:65534";
/// Bytes of memory whose pages the kernel takes some ten milliseconds to release.
const LARGE: u64 = 512 << 20;
/// How often the bad front-end maps [`LARGE`] bytes: the kernel has to go through all mappings.
const MAPPINGS: usize = 8;
/// Bytes at the beginning of a guest's memory that nobody takes away: its ring is there.
const KEPT: u64 = 1 << 20;

/// Everybody can connect to the devices of the bad guest, and the rest is root's.
const CONFIGURATION: &str = "
[daemon]
control = '@/control'
workers = 1
domains = 'user'
[[blk]]
name = 'bad'
socket_path = '@/bad'
socket_mode = '0666'
memory = '64M'
num_queues = 8
handshake_timeout = 1
[[blk]]
name = 'bad1'
socket_path = '@/bad1'
socket_mode = '0666'
memory = '64M'
";
/// Devices of root, one for each socket that the prober uses.
const OTHERS: [&str; 5] = ["good", "other0", "other1", "other2", "other3"];

/// A daemon with a device process for each user, and the prober, who is root.
struct Walled {
    daemon: Daemon,
    prober: Prober,
}

impl Walled {
    fn new() -> Self {
        let table = |name: &str| {
            format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nnull = '16M'\n")
        };
        let text: String =
            [CONFIGURATION.to_owned()].into_iter().chain(OTHERS.map(table)).collect();
        let names = [&["control", "bad", "bad1"], &OTHERS[..]].concat();
        let daemon = Daemon::run(&text, &names);
        std::fs::set_permissions(daemon.folder(), PermissionsExt::from_mode(0o755)).unwrap();
        let prober = Prober::at(&daemon, daemon.folder());
        Self { daemon, prober }
    }

    /// The bad guest's device process, as the API shows it.
    fn process(&self) -> serde_json::Value {
        let processes = shown(&self.daemon.socket_of("control"), "/v1/processes");
        let all = processes["processes"].as_array().unwrap();
        all.iter().find(|process| process["process"] == PROCESS).cloned().unwrap_or_default()
    }

    /// Returns when the API shows that this thread of the bad guest's device process does not come
    /// back.
    fn wait_until_shown_stuck(&self, thread: &str) {
        let is_stuck = || {
            let workers = shown(&self.daemon.socket_of("control"), "/v1/workers");
            let stuck = workers["stuck"].as_array().cloned().unwrap_or_default();
            stuck.iter().any(|stuck| stuck["process"] == PROCESS && stuck["thread"] == thread)
        };
        assert!(wait_until(is_stuck), "{}", self.daemon.log());
    }

    /// Returns when the kernel keeps this thread of the bad guest's device process. The thread that
    /// would tell of it may be kept too: it touches memory of the same address space.
    fn wait_until_stuck(&self, name: &str) {
        let tasks = format!("/proc/{}/task", self.process()["pid"]);
        let is_stuck = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.contains(&format!("({name}) D "))
        };
        let threads = || std::fs::read_dir(&tasks).into_iter().flatten().flatten();
        assert!(wait_until(|| threads().any(is_stuck)), "{}", self.daemon.log());
    }

    /// A guest of the other user whose worker has touched a page of a hole that is being punched,
    /// and waits until that is done.
    fn held_by_a_hole(&self) -> (Ring, Punch) {
        let bad = self.daemon.socket_of("bad");
        let file = large("punched");
        let mut ring = as_nobody(|| Ring::in_file(&bad, file.try_clone().unwrap(), 0, LARGE));
        ring.start();
        ring.offer();
        assert!(ring.is_answered());
        // Buffers that are allocated from now on lie in the memory that is taken away.
        ring.arena.alloc(KEPT, PAGE).unwrap();
        let blocks = fstat(&file).unwrap().st_blocks;
        let punch = Punch::start(&file, KEPT, || fstat(&file).unwrap().st_blocks < blocks);
        ring.offer();
        self.wait_until_shown_stuck("worker-0");
        (ring, punch)
    }

    /// Does `abuse` again and again as the other user while the prober looks. As in `beside.rs`, a
    /// stall counts only if three tries in a row see one.
    fn bear(&mut self, name: &str, mut abuse: impl FnMut() + Send) {
        let mut worst = Stalls::default();
        for _ in 0..3 {
            worst = self.prober.beside(|is_over| {
                become_nobody();
                while !is_over.load(Ordering::Relaxed) {
                    abuse();
                }
            });
            if worst.worst() < STALL_MAX {
                break;
            }
        }
        check(name, worst);
        assert_eq!(self.process()["state"], "serving", "{}", self.daemon.log());
    }

    /// Probes while the device process of the other user is held up, and after it is killed; then
    /// lets it go.
    fn holds_its_own_devices_alone(&mut self, name: &str, mut holds: Punch) {
        check(name, self.prober.worst(12));
        let process = self.process();
        let killed = i32::try_from(process["pid"].as_i64().unwrap()).unwrap();
        assert!(holds.is_under_way(), "the device process was let go of too early");
        kill_process(Pid::from_raw(killed).unwrap(), Signal::KILL).unwrap();
        let is_stuck = || self.process()["state"] == "stuck";
        assert!(wait_until(is_stuck), "{name}: {}", self.daemon.log());
        check(name, self.prober.worst(12));
        std::thread::scope(|scope| {
            let socket = self.daemon.socket_of("bad1");
            let next =
                scope.spawn(move || as_nobody(|| FrontEnd::connect(&socket, TIMEOUT)?.features()));
            check(name, self.prober.worst(6));
            assert!(!next.is_finished(), "{name}: its devices wait for its end");
            assert!(holds.is_under_way() && self.process()["state"] == "stuck");
            holds.release();
            next.join().unwrap().expect("the next device process serves");
        });
        assert_eq!(self.process()["starts"], 2, "{}", self.daemon.log());
    }
}

fn become_nobody() {
    let user = Uid::from_raw(NOBODY);
    rustix::thread::set_thread_res_uid(user, user, user).unwrap();
}

/// Runs `act` on a thread of the other user: the kernel notes for each thread who connects.
fn as_nobody<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let run = || {
        become_nobody();
        act()
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

/// A process of the other user which takes the pages of a file away, and gets a CPU so seldom that
/// it does not come to an end.
struct Punch {
    /// Ended before the process that gets no CPU beside them.
    hogs: Vec<Running>,
    puncher: Running,
    /// Two of them on one CPU would hold up each other.
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Punch {
    /// Takes the pages from `from` on away, and returns when `is_begun`.
    fn start(file: &OwnedFd, from: u64, is_begun: impl Fn() -> bool) -> Self {
        let size = u64::try_from(fstat(file).unwrap().st_size).unwrap();
        let mut command = bound(&["chrt", "--idle", "0", "fallocate", "--punch-hole"]);
        command.args(["--offset", &from.to_string(), "--length", &(size - from).to_string()]);
        command.arg("/proc/self/fd/0").stdin(file.try_clone().unwrap()).uid(NOBODY);
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let hogs = vec![hog(0)];
        let mut punch = Self { hogs, puncher: Running::start(&mut command), _alone };
        assert!(wait_until(is_begun));
        // The rest of the hole takes minutes: its process gets very little of the CPU.
        punch.hogs.push(hog(-20));
        assert!(punch.is_under_way(), "the kernel was faster");
        punch
    }

    fn is_under_way(&mut self) -> bool {
        self.puncher.try_wait().unwrap().is_none()
    }

    /// Lets it come to its end.
    fn release(&mut self) {
        for mut hog in self.hogs.drain(..) {
            hog.kill().unwrap();
            end_of(&mut hog);
        }
        let pid = self.puncher.id().to_string();
        assert!(run(&["chrt", "--other", "--pid", "0", &pid]));
        assert!(run(&["renice", "-n", "-20", "-p", &pid]));
        assert!(end_of(&mut self.puncher).success());
    }
}

/// A program with arguments, bound to the last CPU that this process may use.
fn bound(words: &[&str]) -> Command {
    let cpus = rustix::thread::sched_getaffinity(None).unwrap();
    let last = (0..rustix::thread::CpuSet::MAX_CPU).rev().find(|cpu| cpus.is_set(*cpu)).unwrap();
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", &last.to_string()]).args(words);
    command.stdin(Stdio::null());
    command
}

/// A process that takes all of the CPU that it can get.
fn hog(niceness: i32) -> Running {
    let niceness = niceness.to_string();
    let mut hog = bound(&["nice", "-n", &niceness, "sh", "-c", "while :; do :; done"]);
    Running::start(&mut hog)
}

/// Runs a program to its end: true if it has done what it was to do.
fn run(words: &[&str]) -> bool {
    Command::new(words[0]).args(&words[1..]).stdout(Stdio::null()).status().unwrap().success()
}

/// A file in memory, all of whose pages are there.
fn large(name: &str) -> OwnedFd {
    let file = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, LARGE).unwrap();
    file
}

/// KiB of the files of this name that are in memory and mapped by this process. Other tests of this
/// process map and unmap their memory at the same time.
fn resident(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let is_meant = format!("/memfd:{name} ");
    let mut is_of_it = false;
    let of_line = |line: &str| {
        if let Some(size) = line.strip_prefix("Rss:").filter(|_| is_of_it) {
            return size.trim().trim_end_matches(" kB").parse().unwrap();
        }
        // The head of a mapping begins with its addresses, and each other line with a name.
        if line.split(' ').next().is_some_and(|word| !word.ends_with(':')) {
            is_of_it = line.contains(&is_meant);
        }
        0
    };
    text.lines().map(of_line).sum()
}

/// All pages of a file, in the memory of this process. A look at one page brings its neighbours.
fn mapped_and_touched(file: &OwnedFd) -> Arena {
    let mapped = Arena::in_file(file.try_clone().unwrap(), LARGE).unwrap();
    let from = mapped.table()[0].0.guest_addr;
    let pages = (from..from + LARGE).step_by(usize::try_from(4 * PAGE).unwrap());
    pages.for_each(|at| mapped.read(at, &mut [0]).unwrap());
    mapped
}

/// The front-end takes pages away that it has mapped itself, so the kernel holds the file's lock of
/// mappings. Its device process maps the file then, and waits with the lock of its address space.
#[test]
fn a_user_whose_file_cannot_be_mapped_holds_his_own_device_process_alone() {
    let mut walled = Walled::new();
    let bad = walled.daemon.socket_of("bad");
    let small = || memfd_create("small", MemfdFlags::CLOEXEC).unwrap();
    let mut ring = as_nobody(|| Ring::in_file(&bad, small(), 0, KEPT));
    ring.start();
    ring.offer();
    assert!(ring.is_answered());
    let file = large("mapped");
    let mapped: Vec<_> = (0..MAPPINGS).map(|_| mapped_and_touched(&file)).collect();
    let before = resident("mapped");
    assert!(before > LARGE / 1024, "{before}");
    let punch = Punch::start(&file, 0, || resident("mapped") < before);
    let user_addr = 1 << 44;
    let region = Region { guest_addr: 1 << 40, size: LARGE, user_addr, mmap_offset: 0 };
    ring.send_region(region, &file);
    walled.wait_until_stuck("janitor");
    walled.holds_its_own_devices_alone("a lock of a file that is mapped", punch);
    drop(mapped);
    ring.offer();
    assert!(ring.is_answered(), "the guest goes on in the next device process");
    assert!(walled.daemon.terminate().success());
}

#[test]
fn a_user_who_takes_memory_away_holds_his_own_device_process_alone() {
    let mut walled = Walled::new();
    let (mut ring, punch) = walled.held_by_a_hole();
    walled.holds_its_own_devices_alone("a hole that is being punched", punch);
    assert!(ring.is_answered(), "the guest goes on in the next device process");
    ring.offer();
    assert!(ring.is_answered());
    assert!(walled.daemon.terminate().success());
}

/// A worker is held while two daemons take over, one after the other. The first of them tells the
/// second one which device process is held, and neither lets another process serve that device.
#[test]
fn a_user_who_holds_his_own_device_process_keeps_no_other_from_the_daemons_that_take_over() {
    let walled = Walled::new();
    let (mut ring, mut punch) = walled.held_by_a_hole();
    let mut running: Vec<Running> = Vec::new();
    let mut before = walled.daemon.pid();
    for _ in 0..2 {
        let mut next = manyring();
        next.arg("run").arg("--config").arg(walled.daemon.folder().join("manyring.toml"));
        next.arg("--takeover").arg(walled.daemon.socket_of("control"));
        running.push(Running::start(next.stderr(Stdio::null())));
        let stat = || std::fs::read_to_string(format!("/proc/{before}/stat"));
        let has_ended = || stat().map_or(true, |stat| stat.contains(") Z "));
        assert!(wait_until(has_ended), "{}", walled.daemon.log());
        before = running.last().unwrap().id();
        let other =
            BlkDriver::connect(&walled.daemon.socket_of("other0"), &BlkDriverOptions::default());
        other.unwrap().queues[0].run(DriverOp::Flush).unwrap();
        let devices = walled.process()["devices"].clone();
        assert!(devices.is_null() || devices == serde_json::json!([]), "{devices}");
    }
    assert!(punch.is_under_way(), "the device process was let go of too early");
    punch.release();
    assert!(ring.is_answered(), "the guest goes on in the next device process");
    ring.offer();
    assert!(ring.is_answered());
    let last = running.last_mut().unwrap();
    kill_process(Pid::from_child(last), Signal::TERM).unwrap();
    assert!(end_of(last).success());
}

/// So many waiters that the kernel takes milliseconds to wake them all.
fn watched_by_many(fd: impl AsFd) -> (Vec<OwnedFd>, Vec<OwnedFd>) {
    const COPIES: usize = 100;
    let copies: Vec<_> = (0..COPIES).map(|_| fd.as_fd().try_clone_to_owned().unwrap()).collect();
    let watch = |_| {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        for copy in &copies {
            epoll::add(&set, copy, epoll::EventData::new_u64(0), epoll::EventFlags::IN).unwrap();
        }
        set
    };
    let sets = (0..300).map(watch).collect();
    (copies, sets)
}

#[test]
fn users_wait_for_nothing_beside_the_doorbells_and_messages_of_another_one() {
    let mut walled = Walled::new();
    let bad = walled.daemon.socket_of("bad");
    let connect = || BlkDriver::connect(&bad, &BlkDriverOptions::default()).unwrap();
    let mut guest = as_nobody(connect);
    // A call or a message that takes too long ends the session: on some hosts these do.
    let sets = watched_by_many(guest.queues[0].vring().call_fd());
    walled.bear("a call with thirty thousand waiters", || {
        let _ = guest.queues[0].run(DriverOp::Flush);
    });
    drop((sets, guest));
    guest = as_nobody(connect);
    let sets = watched_by_many(guest.front.stream());
    walled.bear("a session with thirty thousand waiters", || {
        let _ = guest.front.features();
    });
    drop((sets, guest));
    guest = as_nobody(connect);
    let (arena, mut round) = (guest.arena.clone(), 0);
    walled.bear("memory tables that are replaced", || {
        round += 1;
        replace_table(&mut guest.front, &arena, round);
    });
    let restart = Restart::of(guest.queues[0].vring());
    walled.bear("rings that stop and start", || restart.run(&mut guest.front));
    drop(guest);
    walled.bear("messages that do not end", || {
        let mut front = FrontEnd::connect(&bad, TIMEOUT).unwrap();
        front.send_bytes(&[1, 0, 0, 0, 1, 0], &[]).unwrap();
        std::thread::sleep(RETRY_DELAY);
    });
    walled.bear("clients that come and go", || drop(FrontEnd::connect(&bad, TIMEOUT)));
    assert!(walled.daemon.terminate().success());
}

/// Memory that a device process has touched everywhere, and that goes with its front-end.
#[test]
fn users_wait_for_nothing_beside_the_large_requests_and_memory_of_another_one() {
    const LEN: usize = 48 << 20;
    let mut walled = Walled::new();
    let bad = walled.daemon.socket_of("bad");
    let options = BlkDriverOptions {
        queue_size: 4,
        buffer_size: u32::try_from(LEN).unwrap(),
        segment_size: 1 << 20,
        ..BlkDriverOptions::default()
    };
    walled.bear("large memory that is cut away while a request is under way", || {
        let mut guest = BlkDriver::connect(&bad, &options).unwrap();
        let queue = &mut guest.queues[0];
        while queue.submit(DriverOp::Read { sector: 0, len: LEN }).unwrap().is_some() {}
        queue.publish().unwrap();
        let cut = |file| rustix::fs::ftruncate(file, 0).unwrap();
        guest.arena.table().iter().for_each(|(_, file)| cut(file));
        let _ = guest.front.is_closed_within(TIMEOUT);
        // The driver's own memory is gone as well: nothing of it may be touched here any more.
        std::mem::forget(guest);
    });
    walled.bear("large requests whose front-end leaves", || {
        let mut guest = BlkDriver::connect(&bad, &options).unwrap();
        let queue = &mut guest.queues[0];
        while queue.submit(DriverOp::Read { sector: 0, len: LEN }).unwrap().is_some() {}
        queue.publish().unwrap();
    });
    assert!(walled.daemon.terminate().success());
}

//! A device process that a guest has taken: what its threads do then is denied and told, and it
//! sees nothing of other domains.
#![cfg(target_arch = "x86_64")]

use crate::domain::{disk, pid, process, serve, two_domains, works};
use crate::support::foreign::Client;
use crate::support::process::{Daemon, copies_of, wait_until};
use crate::support::program::{self, http};
use crate::support::taken::Taken;
use manyring_driver::{BlkDriver, BlkDriverOptions};
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

/// The threads of a process: their names and numbers.
pub(crate) fn threads(process: i32) -> Vec<(String, i32)> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
    let thread = |task: fs::DirEntry| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        Some((name.trim_end().to_owned(), task.file_name().to_str()?.parse().ok()?))
    };
    tasks.filter_map(thread).collect()
}

/// Tries forbidden calls on a taken thread of this name. Returns the numbers of the calls that the
/// log names.
pub(crate) fn misbehaves(thread: &mut Taken, name: &str) -> Vec<i64> {
    let path = thread.text("/etc/passwd");
    let (folder, scratch) = (i64::from(libc::AT_FDCWD).cast_unsigned(), thread.scratch());
    let executable = u64::from((libc::PROT_READ | libc::PROT_EXEC).unsigned_abs());
    let private = u64::from((libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).unsigned_abs());
    let none = u64::MAX;
    // A worker opens no file at all, others look into /proc. What other threads of the device
    // process do is on the list of the process, and not on this thread's.
    let (refused, of_others) = match name {
        "worker-0" | "uplink-s0" => (libc::EPERM, libc::SYS_recvmsg),
        "janitor" => (libc::EACCES, libc::SYS_recvmsg),
        _ => (libc::EACCES, libc::SYS_io_uring_enter),
    };
    let tried = [
        (libc::SYS_openat, [folder, path, 0, 0, 0, 0], refused),
        (of_others, [none, 0, 0, 0, 0, 0], libc::EPERM),
        (libc::SYS_socket, [2, 1, 0, 0, 0, 0], libc::EPERM),
        (libc::SYS_mmap, [0, 4096, executable, private, none, 0], libc::EPERM),
        (libc::SYS_execve, [path, 0, 0, 0, 0, 0], libc::EPERM),
        (libc::SYS_io_uring_setup, [1, scratch, 0, 0, 0, 0], libc::EPERM),
    ];
    for (call, arguments, error) in tried {
        assert_eq!(thread.call(call, arguments), -i64::from(error), "call {call}");
    }
    tried.map(|(call, ..)| call).to_vec()
}

/// Has the worker of a device process ask its io_uring to open a file.
fn asks_its_ring(worker: &mut Taken, process: i32) {
    let (call, ring) = worker.was_in();
    assert_eq!(call, libc::SYS_io_uring_enter, "it sleeps in its ring");
    // `struct io_rings`, of which kernels have two forms: where the tail and the mask of the
    // submission queue are, which has 256 entries.
    const FORMS: [[u64; 2]; 2] = [[4, 16], [64, 256]];
    const SIZE: u32 = 256;
    const ENTRIES_AT: u64 = 0x1000_0000;
    const ENTRY_SIZE: u64 = 64;
    const OPENAT: u32 = 18;
    // `Source::Ended`: the worker expects nothing of it.
    const USER_DATA: [u32; 2] = [0, 4 << 24];
    let (rings, entries) = (mapped(process, 0), mapped(process, ENTRIES_AT));
    let form = FORMS.into_iter().find(|[_, mask]| worker.load(rings + mask) == SIZE - 1);
    let [tail_at, _] = form.expect("a third form");
    let tail = worker.load(rings + tail_at);
    let entry = entries + u64::from(tail % SIZE) * ENTRY_SIZE;
    (0..ENTRY_SIZE).step_by(4).for_each(|at| worker.store(entry + at, 0));
    worker.store(entry, OPENAT);
    worker.store(entry + 4, libc::AT_FDCWD.cast_unsigned());
    let path = worker.text("/etc/passwd");
    worker.store(entry + 16, u32::try_from(path & 0xffff_ffff).unwrap());
    worker.store(entry + 20, u32::try_from(path >> 32).unwrap());
    worker.store(entry + 32, USER_DATA[0]);
    worker.store(entry + 36, USER_DATA[1]);
    worker.store(rings + tail_at, tail.wrapping_add(1));
    assert_eq!(worker.call(libc::SYS_io_uring_enter, [ring, 1, 0, 0, 0, 0]), 1);
}

/// Has a thread take the locks off its descriptors, by which the supervisor sees that requests are
/// under way.
fn unlocks_its_image(thread: &mut Taken) {
    let (unlock, scratch) = (u64::from(libc::F_OFD_SETLK.unsigned_abs()), thread.scratch());
    let unlocked = thread.call(libc::SYS_fcntl, [u64::MAX, unlock, scratch, 0, 0, 0]);
    assert_eq!(unlocked, -i64::from(libc::EPERM));
}

/// Where the only io_uring of a process is mapped with this offset.
fn mapped(process: i32, offset: u64) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let rings: Vec<_> = maps
        .lines()
        .filter(|line| line.contains("[io_uring]"))
        .filter(|line| {
            let field = line.split_whitespace().nth(2).unwrap();
            u64::from_str_radix(field, 16).unwrap() == offset
        })
        .collect();
    assert_eq!(rings.len(), 1, "{maps}");
    u64::from_str_radix(rings[0].split('-').next().unwrap(), 16).unwrap()
}

#[test]
fn threads_of_a_device_process_that_are_taken_reach_nothing_and_are_told_of_and_guests_go_on() {
    let table = |name: &str, domain: &str| {
        disk(name, &format!("file = '@/{name}.img'\ndomain = '{domain}'\n"))
    };
    let devices = [table("a", "a"), table("b", "b"), table("odd", "a")].concat();
    let daemon = serve("workers = 1\n", &devices, &["a", "b", "odd"]);
    let mut clients = ["a", "b"].map(|name| Client::connect(&daemon.socket_of(name), false));
    clients.iter_mut().for_each(|client| works(client, 1));
    // A janitor stays as long as it passes the calls of a front-end on that gives a pipe.
    let mut odd =
        BlkDriver::connect(&daemon.socket_of("odd"), &BlkDriverOptions::default()).unwrap();
    let (_calls, call) = std::io::pipe().unwrap();
    odd.front.set_vring_call(0, Some(call.as_fd())).unwrap();
    let its_pid = pid(&daemon, "a").as_raw_nonzero().get();
    let of = |name: &str| threads(its_pid).into_iter().find(|(known, _)| known == name);
    assert!(wait_until(|| of("janitor").is_some()), "{:?}", threads(its_pid));
    let [worker, janitor] = ["worker-0", "janitor"].map(|name| of(name).unwrap().1);
    // The first thread of a device process is its control thread.
    for (name, thread) in [("manyring-device", its_pid), ("worker-0", worker), ("janitor", janitor)]
    {
        let mut taken = Taken::take(its_pid, thread);
        let mut calls = misbehaves(&mut taken, name);
        if thread == worker {
            asks_its_ring(&mut taken, its_pid);
            unlocks_its_image(&mut taken);
            calls.extend([libc::SYS_io_uring_enter, libc::SYS_fcntl]);
        }
        drop(taken);
        for call in calls {
            // One line, which names the device process, the call and the thread.
            let line = format!("call={call} thread={thread} name=\"{name}\"");
            let is_told = || {
                let log = daemon.log();
                let mut lines = log.lines().filter(|told| told.contains(&line));
                lines.next().is_some_and(|told| told.starts_with("process=a "))
                    && lines.next().is_none()
            };
            assert!(wait_until(is_told), "{line}\n{}", daemon.log());
        }
        clients.iter_mut().for_each(|client| works(client, 2));
    }
    assert_eq!(process(&daemon, "a")["starts"], 1, "it goes on: {}", daemon.log());
    assert!(
        !daemon.log().lines().any(|line| line.starts_with("process=b ") && line.contains("denied"))
    );
    assert!(daemon.terminate().success());
}

#[test]
fn a_taken_device_process_keeps_no_image_of_a_disk_that_is_gone_though_it_only_read_it() {
    let only_read = disk("a", "file = '@/a.img'\nread_only = true\ndomain = 'a'\n");
    let other = disk("m", "memory = '1M'\ndomain = 'a'\n");
    let daemon = serve("", &[only_read.as_str(), &other].concat(), &["a", "m"]);
    let mut reader =
        BlkDriver::connect(&daemon.socket_of("a"), &BlkDriverOptions::default()).unwrap();
    let _other = BlkDriver::connect(&daemon.socket_of("m"), &BlkDriverOptions::default()).unwrap();
    reader.queues[0].read(0, &mut [0; 512]).unwrap();
    let process = pid(&daemon, "a").as_raw_nonzero().get();
    let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let is_image = |fd: &fs::DirEntry| {
        fs::read_link(fd.path()).is_ok_and(|path| path == daemon.folder().join("a.img"))
    };
    let image = open.into_iter().find(is_image).unwrap().file_name();
    let (image, copies) = (image.to_str().unwrap().parse().unwrap(), libc::F_DUPFD_CLOEXEC);
    let mut taken = Taken::take(process, process);
    assert!(taken.call(libc::SYS_fcntl, [image, copies.cast_unsigned().into(), 3, 0, 0, 0]) > 0);
    drop(taken);
    drop(reader);
    let file = daemon.folder().join("manyring.toml");
    let only_read = only_read.replace('@', &daemon.folder().display().to_string());
    fs::write(&file, fs::read_to_string(&file).unwrap().replace(&only_read, "")).unwrap();
    // As soon as its front-end is known to have left.
    let control = daemon.socket_of("control");
    assert!(wait_until(|| http(&control, "POST", "/v1/reload", "").0 == 200), "{}", daemon.log());
    // From now on another domain may write to it.
    let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    assert!(!open.into_iter().any(|fd| is_image(&fd)), "{}", daemon.log());
    assert!(daemon.terminate().success());
}

/// Has the control thread of a device process say this to the supervisor.
pub(crate) fn says_alone(thread: &mut Taken, text: &str) {
    let (at, len) = (thread.scratch(), text.len() as u64);
    let mut bytes: Vec<_> = [at + 16, len, 0, 0, at, 1, 0, 0, 0]
        .iter()
        .flat_map(|word: &u64| word.to_ne_bytes())
        .collect();
    // `struct iovec`, whose bytes are behind `struct msghdr`.
    bytes[..8].copy_from_slice(&(at + 72).to_ne_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    for (index, word) in bytes.chunks(4).enumerate() {
        thread.store(at + 4 * index as u64, u32::from_ne_bytes(word.try_into().unwrap()));
    }
    // The supervisor may kill it before the call returns.
    let sent = thread.call_or_end(libc::SYS_sendmsg, [0, at + 16, 0, 0, 0, 0]);
    assert!(sent.is_none_or(|sent| sent == i64::try_from(text.len()).unwrap()), "{sent:?}");
}

/// Has a thread of a device process say this to the supervisor, with a descriptor: the result of
/// its call.
fn says(thread: &mut Taken, text: &str, fd: u32) -> i64 {
    let (at, len) = (thread.scratch(), text.len() as u64);
    // `struct iovec`, `struct cmsghdr` with the descriptor, `struct msghdr`, and the text.
    let rights = [20, (1 << 32) | 1, u64::from(fd)];
    let message = [0, 0, at, 1, at + 16, 24, 0];
    let halves = [&[at + 96, len], &rights[..], &message[..]].concat();
    let mut bytes: Vec<_> = halves.into_iter().flat_map(u64::to_ne_bytes).collect();
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    for (index, word) in bytes.chunks(4).enumerate() {
        thread.store(at + 4 * index as u64, u32::from_ne_bytes(word.try_into().unwrap()));
    }
    thread.call(libc::SYS_sendmsg, [0, at + 40, 0, 0, 0, 0])
}

/// The supervisor keeps what a device process notes of a session, with its descriptors, for the
/// next device process.
#[test]
fn a_taken_device_process_has_the_supervisor_keep_no_image_of_a_disk_that_is_gone() {
    for read_only in [true, false] {
        let keys = format!("file = '@/a.img'\nread_only = {read_only}\ndomain = 'a'\n");
        let (goes, stays) = (disk("a", &keys), disk("m", "memory = '1M'\ndomain = 'a'\n"));
        let daemon = serve("", &[goes.as_str(), &stays].concat(), &["a", "m"]);
        let connect = |name: &str| {
            BlkDriver::connect(&daemon.socket_of(name), &BlkDriverOptions::default()).unwrap()
        };
        let (mut goer, _stayer) = (connect("a"), connect("m"));
        goer.queues[0].read(0, &mut [0; 512]).unwrap();
        let its_pid = pid(&daemon, "a").as_raw_nonzero().get();
        let path = daemon.folder().join("a.img");
        let images = |its_pid: i32| {
            let open = fs::read_dir(format!("/proc/{its_pid}/fd")).into_iter().flatten().flatten();
            let is_image = |fd: &fs::DirEntry| fs::read_link(fd.path()).is_ok_and(|of| of == path);
            let images = open.filter(is_image).map(|fd| fd.file_name().into_string().unwrap());
            images.collect::<Vec<_>>()
        };
        let mut taken = Taken::take(its_pid, its_pid);
        // Of either front-end: one of them is that of `m`.
        for number in 1..3 {
            let note = format!(
                "\u{2}{{\"session_fds\":{{\"device\":\"m\",\"number\":{number},\"keep\":4294901760,\
                 \"release\":[]}}}}"
            );
            let sent = says(&mut taken, &note, images(its_pid)[0].parse().unwrap());
            assert_eq!(sent, i64::try_from(note.len()).unwrap());
        }
        drop((taken, goer));
        let control = daemon.socket_of("control");
        let is_used = || program::shown(&control, "/v1/devices/a")["connected"] == true;
        assert!(wait_until(|| !is_used()), "{}", daemon.log());
        let file = daemon.folder().join("manyring.toml");
        let goes = goes.replace('@', &daemon.folder().display().to_string());
        fs::write(&file, fs::read_to_string(&file).unwrap().replace(&goes, "")).unwrap();
        for _ in 0..2 {
            assert_eq!(http(&control, "POST", "/v1/reload", "").0, 200, "{}", daemon.log());
        }
        let supervisor = i32::try_from(daemon.pid()).unwrap();
        assert!(wait_until(|| images(supervisor).is_empty()), "{:?}", images(supervisor));
        let next = process(&daemon, "a")["pid"].as_i64().unwrap_or_default();
        assert!(images(i32::try_from(next).unwrap()).is_empty(), "{}", daemon.log());
        assert!(daemon.terminate().success());
    }
}

/// A VMM that works with a device process which it has taken gets the image from it, and is in no
/// sandbox.
#[test]
fn an_image_that_a_vmm_has_stays_locked_and_the_change_that_removes_its_disk_goes_on() {
    let goes = disk("a", "file = '@/a.img'\ndomain = 'a'\n");
    let devices = [goes.clone(), disk("b", "memory = '1M'\ndomain = 'b'\n")];
    let daemon = serve("", &devices.concat(), &["a", "b"]);
    let connect = |name: &str| {
        BlkDriver::connect(&daemon.socket_of(name), &BlkDriverOptions::default()).unwrap()
    };
    let (mut goer, mut other) = (connect("a"), connect("b"));
    goer.queues[0].read(0, &mut [0; 512]).unwrap();
    let (process, path) = (pid(&daemon, "a").as_raw_nonzero().get(), daemon.folder().join("a.img"));
    let held = copies_of(process, &path);
    assert!(!held.is_empty());
    drop(goer);
    let control = daemon.socket_of("control");
    let is_used = || program::shown(&control, "/v1/devices/a")["connected"] == true;
    assert!(wait_until(|| !is_used()), "{}", daemon.log());
    let file = daemon.folder().join("manyring.toml");
    let all = fs::read_to_string(&file).unwrap();
    let goes = goes.replace('@', &daemon.folder().display().to_string());
    fs::write(&file, all.replace(&goes, "")).unwrap();
    assert_eq!(http(&control, "POST", "/v1/reload", "").0, 200, "{}", daemon.log());
    other.queues[0].read(0, &mut [0; 512]).unwrap();
    let own = format!("holder={}", std::process::id());
    let waits = |line: &&str| line.contains("device=\"a\"") && line.contains(&own);
    let log = daemon.log();
    assert!(log.lines().any(|line| waits(&line)), "{log}");
    let goes_on: Vec<_> = log.lines().filter(|line| line.contains("still open")).collect();
    assert!(goes_on.len() == 1 && goes_on[0].contains("devices=\"a\""), "{log}");
    // Nobody gets the image, this daemon's next disk of that name neither.
    let next = |name: &str| {
        let mut next = program::manyring();
        next.args(["blk", "--wait", "0", "--socket-path"]).arg(daemon.folder().join(name));
        next.arg("--blk-file").arg(&path);
        program::output_of(&mut next)
    };
    let refused = next("other");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("in use"), "{refused:?}");
    fs::write(&file, &all).unwrap();
    let (status, _, said) = http(&control, "POST", "/v1/reload", "");
    assert!(status == 409 && said.contains("a.img"), "{status} {said}");
    println!("{status} {said}\n{}", daemon.log());
    // Once the VMM has closed it, the disk is there again.
    drop(held);
    assert_eq!(http(&control, "POST", "/v1/reload", "").0, 200, "{}", daemon.log());
    connect("a").queues[0].read(0, &mut [0; 512]).unwrap();
    assert!(daemon.terminate().success());
}

#[test]
fn a_daemon_that_ends_while_a_vmm_has_an_image_names_the_disk() {
    let goes = disk("a", "file = '@/a.img'\ndomain = 'a'\n");
    let stays = disk("b", "memory = '1M'\ndomain = 'b'\n");
    let daemon = serve("", &[goes.clone(), stays].concat(), &["a", "b"]);
    let mut goer =
        BlkDriver::connect(&daemon.socket_of("a"), &BlkDriverOptions::default()).unwrap();
    goer.queues[0].read(0, &mut [0; 512]).unwrap();
    let (process, path) = (pid(&daemon, "a").as_raw_nonzero().get(), daemon.folder().join("a.img"));
    let held = copies_of(process, &path);
    drop(goer);
    let control = daemon.socket_of("control");
    let file = daemon.folder().join("manyring.toml");
    let goes = goes.replace('@', &daemon.folder().display().to_string());
    let all = fs::read_to_string(&file).unwrap();
    fs::write(&file, all.replace(&goes, "")).unwrap();
    let reloads = || http(&control, "POST", "/v1/reload", "").0 == 200;
    assert!(wait_until(reloads), "{}", daemon.log());
    let mut daemon = daemon;
    let (status, _) = daemon.stop();
    let log = daemon.log();
    let said = log.lines().find(|line| line.contains("closing devices timed out"));
    assert!(said.is_some_and(|line| line.contains("devices=\"a\"")), "{log}");
    assert!(status.success(), "{log}");
    drop(held);
}

#[test]
fn a_taken_device_process_sends_to_nobody_by_his_name() {
    let daemon = serve("", &disk("a", "memory = '1M'\ndomain = 'a'\n"), &["a"]);
    let _client = BlkDriver::connect(&daemon.socket_of("a"), &BlkDriverOptions::default()).unwrap();
    let process = pid(&daemon, "a").as_raw_nonzero().get();
    // Everybody may send to it, as to the log of the host.
    fs::set_permissions(daemon.folder(), fs::Permissions::from_mode(0o711)).unwrap();
    let name = daemon.folder().join("host-log");
    let log = std::os::unix::net::UnixDatagram::bind(&name).unwrap();
    fs::set_permissions(&name, fs::Permissions::from_mode(0o666)).unwrap();
    log.set_nonblocking(true).unwrap();
    let mut taken = Taken::take(process, process);
    let pair = taken.scratch();
    let [family, datagrams] = [libc::AF_UNIX, libc::SOCK_DGRAM].map(|n| n.unsigned_abs().into());
    let made = taken.call(libc::SYS_socketpair, [family, datagrams, 0, pair, 0, 0]);
    let socket = if made == 0 { taken.load(pair).into() } else { u64::MAX };
    let address = format!("\u{1}\0{}", name.display());
    let (at, len) = (taken.text(&address), address.len() as u64);
    let sent = taken.call(libc::SYS_sendto, [socket, at, len, 0, at, len]);
    drop(taken);
    assert!(log.recv(&mut [0; 512]).is_err(), "it has reached a name");
    assert_eq!([made, sent], [-i64::from(libc::EPERM); 2]);
    assert!(daemon.terminate().success());
}

/// A field of `/proc/PID/status`.
fn status(process: i32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap_or_else(|| unreachable!("{key}: {status}")).trim().to_owned()
}

/// The files in memory that a process has mapped or open: guest memory, in-flight regions.
fn memory_files(process: i32) -> BTreeSet<String> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let inode = |line: &str| line.split_whitespace().nth(4).unwrap().to_owned();
    maps.lines().filter(|line| line.contains("memfd:")).map(inode).collect()
}

/// The images that a process has open.
fn images(process: i32) -> BTreeSet<String> {
    let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let paths = open.filter_map(|fd| fs::read_link(fd.path()).ok());
    let images = paths.filter(|path| path.extension().is_some_and(|kind| kind == "img"));
    images.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
}

#[test]
fn a_device_process_has_no_right_a_user_of_its_own_and_no_memory_of_other_domains() {
    let daemon = two_domains();
    let mut clients = ["a", "b"].map(|name| Client::connect(&daemon.socket_of(name), false));
    clients.iter_mut().for_each(|client| works(client, 1));
    let supervisor = i32::try_from(daemon.pid()).unwrap();
    let [a, b] = ["a", "b"].map(|name| pid(&daemon, name).as_raw_nonzero().get());
    for process in [a, b] {
        for (key, value) in [
            ("Seccomp", "2"),
            ("NoNewPrivs", "1"),
            ("CapEff", "0000000000000000"),
            ("CapPrm", "0000000000000000"),
            ("CapInh", "0000000000000000"),
            ("CapBnd", "0000000000000000"),
            ("CapAmb", "0000000000000000"),
        ] {
            assert_eq!(status(process, key), value, "{key}");
        }
    }
    owners_differ(&daemon, supervisor, [a, b]);
    let [of_a, of_b] = [a, b].map(memory_files);
    assert!(!of_a.is_empty() && !of_b.is_empty(), "each maps its guest's memory");
    assert!(of_a.is_disjoint(&of_b), "{of_a:?} {of_b:?}");
    assert!(memory_files(supervisor).is_disjoint(&(&of_a | &of_b)), "the supervisor maps none");
    assert_eq!([a, b].map(images), ["a", "b"].map(|name| BTreeSet::from([name.to_owned()])));
    assert!(
        !daemon.log().contains("denied by the sandbox"),
        "it needs nothing else: {}",
        daemon.log()
    );
    clients.iter_mut().for_each(|client| works(client, 2));
    assert!(daemon.terminate().success());
}

/// Where the supervisor is root, each device process has a user and groups of its own; and a
/// namespace of users, if the kernel lets it.
fn owners_differ(daemon: &Daemon, supervisor: i32, [a, b]: [i32; 2]) {
    let users = [supervisor, a, b].map(|process| status(process, "Uid"));
    if rustix::process::geteuid().is_root() {
        assert!(users[0] != users[1] && users[1] != users[2] && users[0] != users[2], "{users:?}");
        let groups = [supervisor, a, b].map(|process| status(process, "Gid"));
        assert!(groups[0] != groups[1] && groups[1] != groups[2], "{groups:?}");
        assert_eq!([a, b].map(|process| status(process, "Groups")), ["", ""]);
    }
    if !daemon.log().contains("a namespace of users") {
        let of = |process| fs::read_link(format!("/proc/{process}/ns/user")).unwrap();
        assert!(of(supervisor) != of(a) && of(a) != of(b));
    }
}

//! Disks of NBD servers in device processes: the supervisor connects for them, and reads nothing
//! of a server.
#![allow(clippy::disallowed_methods, reason = "a server of a test has threads of its own")]

use crate::domain::{disk, pid, process, serve};
use crate::support::process::{Daemon, end_of, wait_until};
use crate::support::program::{http, http_json, shown};
use crate::support::taken::Taken;
use crate::takeover::{has_ended, log, take_over};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp};
use manyring_wire::nbd::{
    CAN_MULTI_CONN, COMMAND_SIZE, Command, CommandKind, HAS_FLAGS, Reply, SEND_FLUSH,
};
use rustix::process::{Signal, kill_process};
use serde_json::json;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A server of one disk, whose bytes it keeps.
struct Server {
    port: u16,
    size: Arc<AtomicU64>,
    /// Connections that have come.
    came: Arc<AtomicUsize>,
    /// Connections that are open.
    open: Arc<AtomicUsize>,
    /// Commands are read, and none is answered.
    is_silent: Arc<AtomicBool>,
    /// Connections that come are ended at once.
    is_deaf: Arc<AtomicBool>,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
}

const SIZE: usize = 1 << 20;

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Self {
            port,
            size: Arc::new(AtomicU64::new(SIZE as u64)),
            came: Arc::default(),
            open: Arc::default(),
            is_silent: Arc::default(),
            is_deaf: Arc::default(),
            sockets: Arc::default(),
        };
        let (came, sockets) = (server.came.clone(), server.sockets.clone());
        let (size, is_silent) = (server.size.clone(), server.is_silent.clone());
        let (is_deaf, open) = (server.is_deaf.clone(), server.open.clone());
        let bytes = Arc::new(Mutex::new(vec![0; 2 * SIZE]));
        let accept = move || {
            for socket in listener.incoming().flatten() {
                came.fetch_add(1, Ordering::SeqCst);
                if is_deaf.load(Ordering::SeqCst) {
                    continue;
                }
                sockets.lock().unwrap().push(socket.try_clone().unwrap());
                let (size, bytes, is_silent) = (size.clone(), bytes.clone(), is_silent.clone());
                let open = open.clone();
                open.fetch_add(1, Ordering::SeqCst);
                let serve = move || {
                    answer(socket, &size, &bytes, &is_silent);
                    open.fetch_sub(1, Ordering::SeqCst);
                };
                std::thread::Builder::new().spawn(serve).unwrap();
            }
        };
        std::thread::Builder::new().spawn(accept).unwrap();
        server
    }

    fn uri(&self) -> String {
        format!("nbd = 'nbd://127.0.0.1:{}/'\n", self.port)
    }

    fn came(&self) -> usize {
        self.came.load(Ordering::SeqCst)
    }

    fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    fn ends_connections(&self) {
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Negotiates, and serves commands. `None`: the client has ended the connection.
fn answer(
    mut socket: TcpStream,
    size: &AtomicU64,
    bytes: &Mutex<Vec<u8>>,
    is_silent: &AtomicBool,
) -> Option<()> {
    socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").ok()?;
    socket.read_exact(&mut [0; 4]).ok()?;
    loop {
        let mut head = [0; 16];
        socket.read_exact(&mut head).ok()?;
        let [option, len] =
            [8, 12].map(|at| u32::from_be_bytes(head[at..at + 4].try_into().unwrap()));
        socket.read_exact(&mut vec![0; len as usize]).ok()?;
        let mut reply = |kind: u32, data: &[u8]| {
            let head = [option, kind, u32::try_from(data.len()).unwrap()].map(u32::to_be_bytes);
            let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
            socket.write_all(&[&magic[..], &head.concat(), data].concat()).ok()
        };
        match option {
            // Structured replies: it has none.
            8 => reply(0x8000_0001, &[])?,
            7 => {
                let flags = HAS_FLAGS | SEND_FLUSH | CAN_MULTI_CONN;
                let size = size.load(Ordering::SeqCst).to_be_bytes();
                reply(3, &[&[0, 0][..], &size, &flags.to_be_bytes()].concat())?;
                reply(1, &[])?;
                break;
            }
            _ => reply(1, &[])?,
        }
    }
    loop {
        let mut head = [0; COMMAND_SIZE];
        socket.read_exact(&mut head).ok()?;
        let command = Command::parse(&head)?;
        let at = usize::try_from(command.offset).unwrap();
        let range = at..at + command.len as usize;
        let mut data = vec![0; command.len as usize];
        let mut reply = Reply::simple(0, command.cookie).to_vec();
        match command.kind {
            CommandKind::Write => {
                socket.read_exact(&mut data).ok()?;
                bytes.lock().unwrap()[range].copy_from_slice(&data);
            }
            CommandKind::Read => reply.extend_from_slice(&bytes.lock().unwrap()[range]),
            _ => {}
        }
        if !is_silent.load(Ordering::SeqCst) {
            socket.write_all(&reply).ok()?;
        }
    }
}

fn connect(daemon: &Daemon, name: &str, queues: u16) -> BlkDriver {
    let options = BlkDriverOptions { queues, ..BlkDriverOptions::default() };
    BlkDriver::connect(&daemon.socket_of(name), &options).unwrap()
}

/// Writes and reads back on each queue.
fn works(guest: &mut BlkDriver, round: u8) {
    for (queue, sector) in guest.queues.iter_mut().zip((0..).step_by(8)) {
        let data = [round; 4096];
        queue.run(DriverOp::Write { sector, data: &data }).unwrap();
        let mut read = [0; 4096];
        queue.read(sector, &mut read).unwrap();
        assert_eq!(read, data);
    }
}

#[test]
fn a_disk_of_a_server_is_served_in_its_device_process_and_outlives_it_and_the_connections() {
    let server = Server::start();
    let daemon = serve("", &disk("a", &format!("{}domain = 'a'\n", server.uri())), &["a"]);
    assert!(!daemon.log().contains("no device process"), "{}", daemon.log());
    assert_eq!(server.came(), 1, "the disk was measured");
    let mut guest = connect(&daemon, "a", 4);
    works(&mut guest, 1);
    let control = daemon.socket_of("control");
    let connections = || shown(&control, "/v1/devices/a")["connections"].clone();
    let up = |connection: &serde_json::Value| connection["up"] == true;
    let count = |all: &Vec<serde_json::Value>| all.iter().filter(|of| up(of)).count();
    let are_up = || connections().as_array().is_some_and(|all| count(all) == 4);
    assert!(wait_until(are_up), "{}", connections());
    assert!(wait_until(|| server.open() == 4), "{}", server.open());
    // Connections that end are made anew, and nothing is lost.
    server.ends_connections();
    works(&mut guest, 2);
    // The server sees the end of connections that a device process leaves.
    assert!(wait_until(|| server.open() == 4), "{}", server.open());
    // Requests in flight go again when the device process dies.
    server.is_silent.store(true, Ordering::SeqCst);
    let queue = &mut guest.queues[0];
    queue.submit(DriverOp::Write { sector: 64, data: &[7; 4096] }).unwrap();
    queue.publish().unwrap();
    kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
    server.is_silent.store(false, Ordering::SeqCst);
    assert_eq!(queue.wait(Duration::from_secs(30)).unwrap().status, 0, "{}", daemon.log());
    let mut read = [0; 4096];
    queue.read(64, &mut read).unwrap();
    assert_eq!(read, [7; 4096]);
    works(&mut guest, 3);
    assert!(process(&daemon, "a")["starts"].as_u64() >= Some(2));
    assert!(wait_until(are_up), "{}", connections());
    // Connections go with the device process.
    drop(guest);
    // The next process would serve a connection whose end the supervisor has not heard of.
    assert!(wait_until(|| shown(&control, "/v1/devices/a")["connected"] == false));
    kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
    assert!(wait_until(|| process(&daemon, "a")["state"] == "ended"), "{}", daemon.log());
    assert!(connections().is_null(), "{}", connections());
    assert!(daemon.terminate().success());
}

#[test]
fn a_disk_of_a_server_that_has_grown_is_measured_in_another_process() {
    let server = Server::start();
    let daemon = serve("", &disk("a", &format!("{}domain = 'a'\n", server.uri())), &["a"]);
    let mut guest = connect(&daemon, "a", 1);
    works(&mut guest, 1);
    server.size.store(2 * SIZE as u64, Ordering::SeqCst);
    let control = daemon.socket_of("control");
    let (status, said) = http_json(&control, "POST", "/v1/devices/a/resize", "{}");
    assert_eq!((status, &said["size"]), (200, &json!(2 * SIZE)), "{said}\n{}", daemon.log());
    // The guest reaches the new end, and so it does after a death of its device process.
    let end = (2 * SIZE / 512 - 8) as u64;
    let reaches = |guest: &mut BlkDriver| {
        guest.queues[0].run(DriverOp::Read { sector: end, len: 4096 }).is_ok()
    };
    assert!(wait_until(|| reaches(&mut guest)), "{}", daemon.log());
    kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
    assert!(wait_until(|| reaches(&mut guest)), "{}", daemon.log());
    assert!(daemon.terminate().success());
}

/// Has a thread of a device process send this message to the supervisor. False: it was ended.
fn says(thread: &mut Taken, text: &str) -> bool {
    let at = thread.scratch();
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    for (index, word) in bytes.chunks(4).enumerate() {
        thread.store(at + 4 * index as u64, u32::from_ne_bytes(word.try_into().unwrap()));
    }
    let sent = thread.call_or_end(libc::SYS_sendto, [0, at, text.len() as u64, 0, 0, 0]);
    sent == i64::try_from(text.len()).ok()
}

/// Has the control thread of a device process read commands until one has `word` as its second
/// word, and keep the descriptors that come with it.
fn hears(thread: &mut Taken, word: [u8; 4]) {
    const DONTWAIT: u64 = 0x40;
    let (bytes, head, parts, control) =
        (thread.scratch() + 512, thread.scratch() + 1024, thread.scratch() + 1104, 1152);
    let control = thread.scratch() + control;
    let words = |at: u64, values: &[u64], thread: &mut Taken| {
        for (at, value) in (at..).step_by(8).zip(values) {
            thread.store(at, u32::try_from(value & 0xffff_ffff).unwrap());
            thread.store(at + 4, u32::try_from(value >> 32).unwrap());
        }
    };
    let is_told = |thread: &mut Taken| {
        words(parts, &[bytes, 256], thread);
        words(head, &[0, 0, parts, 1, control, 64, 0], thread);
        let count = thread.call(libc::SYS_recvmsg, [0, head, DONTWAIT, 0, 0, 0]);
        count > 0 && thread.load(bytes + 4) == u32::from_ne_bytes(word)
    };
    assert!(wait_until(|| is_told(thread)), "no command");
}

#[test]
fn a_taken_device_process_is_connected_to_its_own_server_alone_and_at_a_bounded_rate() {
    let (own, other) = (Server::start(), Server::start());
    let devices = [
        disk("a", &format!("{}domain = 'a'\n", own.uri())),
        disk("b", &format!("{}domain = 'b'\n", other.uri())),
    ];
    let daemon = serve("workers = 1\n", &devices.concat(), &["a", "b"]);
    let mut guests = ["a", "b"].map(|name| connect(&daemon, name, 4));
    guests.iter_mut().for_each(|guest| works(guest, 1));
    let its_pid = pid(&daemon, "a").as_raw_nonzero().get();
    let (own_before, other_before) = (own.came(), other.came());
    let began = std::time::Instant::now();
    let asks = |taken: &mut Taken, device: &str, number: u64| {
        let request = "{\"connect\":{\"limit_ms\":4294967295}}";
        let asked = format!("\"number\":{number},\"request\":{request}");
        let text = format!("\u{2}{{\"request\":{{\"device\":\"{device}\",{asked}}}}}");
        says(taken, &text)
    };
    let mut taken = Taken::take(its_pid, its_pid);
    // No socket is connected anew by fast open, to an address of its choice.
    let at = taken.scratch();
    let denied = taken.call(libc::SYS_sendmsg, [0, at, 0x2000_0000, 0, 0, 0]);
    assert_eq!(denied, -i64::from(libc::EPERM));
    // One request after the other, each as soon as the one before was served, as fast as it can.
    const ASKED: u32 = 100;
    for number in 1..=ASKED {
        assert!(asks(&mut taken, "a", 1000 + u64::from(number)), "{}", daemon.log());
        // `{"connected": ..` behind the version.
        hears(&mut taken, *b"onne");
    }
    // 4 queues and 16 more at once; then one in 10 ms.
    let least = Duration::from_millis(10) * (ASKED - 4 - 16 - 1);
    assert!(began.elapsed() >= least, "{ASKED} connections in {:?}", began.elapsed());
    assert!(wait_until(|| own.came() - own_before == ASKED as usize), "{}", own.came());
    // It has kept all of them, and the server has no more than the disk may have.
    assert!(wait_until(|| own.open() == 4 + 16), "{}", own.open());
    // It has no device of this name, and is ended for the question.
    assert_eq!(other.came(), other_before, "nor is another server connected to");
    asks(&mut taken, "b", 5000);
    drop(taken);
    assert!(wait_until(|| process(&daemon, "a")["starts"] == 2), "{}", daemon.log());
    assert!(
        daemon.log().contains("it was not given \\\"b\\\"") || daemon.log().contains("not given")
    );
    assert_eq!(other.came(), other_before);
    guests.iter_mut().for_each(|guest| works(guest, 2));
    assert!(daemon.terminate().success());
}

#[test]
fn a_disk_of_a_server_and_its_requests_go_to_the_daemon_that_takes_over() {
    let server = Server::start();
    let daemon = serve("", &disk("a", &format!("{}domain = 'a'\n", server.uri())), &["a"]);
    let mut guest = connect(&daemon, "a", 2);
    works(&mut guest, 1);
    // The server answers nothing: the request goes along, and is sent again.
    server.is_silent.store(true, Ordering::SeqCst);
    let queue = &mut guest.queues[0];
    queue.submit(DriverOp::Write { sector: 64, data: &[7; 4096] }).unwrap();
    queue.publish().unwrap();
    let mut next = take_over(&daemon, "manyring.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
    server.is_silent.store(false, Ordering::SeqCst);
    server.ends_connections();
    assert_eq!(queue.wait(Duration::from_secs(60)).unwrap().status, 0, "{}", log(&daemon));
    works(&mut guest, 2);
    kill_process(rustix::process::Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", log(&daemon));
}

#[test]
fn a_disk_whose_server_is_away_or_another_is_taken_over_as_the_guest_was_told_of_it() {
    let server = Server::start();
    let daemon = serve("", &disk("a", &format!("{}domain = 'a'\n", server.uri())), &["a"]);
    let mut guest = connect(&daemon, "a", 1);
    works(&mut guest, 1);
    // The server takes no connection to the end, and has a smaller disk then.
    server.is_deaf.store(true, Ordering::SeqCst);
    server.size.store(SIZE as u64 / 2, Ordering::SeqCst);
    server.ends_connections();
    let mut next = take_over(&daemon, "manyring.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
    let queue = &mut guest.queues[0];
    queue.submit(DriverOp::Write { sector: 64, data: &[7; 4096] }).unwrap();
    queue.publish().unwrap();
    server.is_deaf.store(false, Ordering::SeqCst);
    // Its device process refuses the other disk, as it does when a connection is lost.
    assert!(wait_until(|| log(&daemon).contains("the guest was told")), "{}", log(&daemon));
    server.size.store(SIZE as u64, Ordering::SeqCst);
    let queue = &mut guest.queues[0];
    assert_eq!(queue.wait(Duration::from_secs(60)).unwrap().status, 0, "{}", log(&daemon));
    works(&mut guest, 2);
    kill_process(rustix::process::Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", log(&daemon));
}

#[test]
fn a_taken_device_process_keeps_no_connection_of_a_disk_that_is_gone() {
    let server = Server::start();
    let other = disk("b", "memory = '1M'\ndomain = 'a'\n");
    let daemon = serve("workers = 1\n", &other, &["b"]);
    let (control, socket) = (daemon.socket_of("control"), daemon.socket_of("a"));
    let uri = format!("nbd://127.0.0.1:{}/", server.port);
    let device = json!({
        "kind": "blk", "socket_path": socket, "nbd": uri, "num_queues": 4, "domain": "a",
    });
    let (status, said) = http_json(&control, "PUT", "/v1/devices/a", &device.to_string());
    assert_eq!(status, 201, "{said}");
    let mut guests = ["a", "b"].map(|name| connect(&daemon, name, 4));
    guests.iter_mut().for_each(|guest| works(guest, 1));
    let its_pid = pid(&daemon, "a").as_raw_nonzero().get();
    assert!(wait_until(|| server.open() == 4), "{}", server.open());
    let mut taken = Taken::take(its_pid, its_pid);
    std::thread::scope(|scope| {
        let removed = scope.spawn(|| http(&control, "DELETE", "/v1/devices/a?force=true", ""));
        // It says that it has stopped the disk, and keeps the sockets.
        hears(&mut taken, *b"emov");
        assert!(says(&mut taken, "\u{2}{\"removed\":{\"device\":\"a\"}}"));
        assert!(wait_until(|| server.open() == 0), "{} {}", server.open(), daemon.log());
        drop(taken);
        assert_eq!(removed.join().unwrap().0, 204, "{}", daemon.log());
    });
    works(&mut guests[1], 2);
    assert!(daemon.terminate().success());
}

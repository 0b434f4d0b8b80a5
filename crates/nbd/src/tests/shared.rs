//! Servers that take fewer connections than the disk has queues.

use super::bench::{Bench, both, options};
use super::server::{Act, Offer, Server};
use crate::clock::now;
use crate::{NbdDisk, NbdOptions};
use manyring_backend::blk::{Disk, Op};
use manyring_wire::host_size;
use manyring_wire::nbd::{CAN_MULTI_CONN, CommandKind, Reply};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

const WRITE: Op = Op::Write { durable: false };
/// Bytes of the disk that each queue uses, and of one request: more than a socket takes.
const PART: u64 = 512 << 10;
const LONG: u64 = 256 << 10;

/// Between two turns of all queues.
const PAUSE: Duration = Duration::from_micros(200);

/// The queues of one disk, each driven as by a worker of its own.
struct Queues(Vec<Bench>);

impl Queues {
    fn new(options: NbdOptions, count: usize, has_ring: bool) -> Self {
        let disk = Arc::new(NbdDisk::open(options).unwrap());
        Self((0..count).map(|_| Bench::on(&disk, has_ring)).collect())
    }

    /// Turns of all queues until `is_done`.
    fn until(&mut self, mut is_done: impl FnMut(&mut [Bench]) -> bool) {
        let deadline = now() + Duration::from_secs(60);
        while !is_done(&mut self.0) {
            assert!(now() < deadline, "{:?}", self.0[0].disk.connections());
            self.0.iter_mut().for_each(|bench| bench.turn(Duration::ZERO));
            // Other tests need the CPU too; a turn comes soon enough for a connection that waits.
            std::thread::sleep(PAUSE);
        }
    }

    /// Each queue does these requests, with offsets in its own part of the disk.
    fn run(&mut self, requests: &[(Op, u64, u64)]) {
        self.start(requests);
        self.end(requests.len());
    }

    fn start(&mut self, requests: &[(Op, u64, u64)]) {
        for (bench, part) in self.0.iter_mut().zip(0..) {
            let own = |(op, at, len): &(Op, u64, u64)| (*op, part * PART + at, *len);
            bench.start(&requests.iter().map(own).collect::<Vec<_>>());
        }
    }

    fn end(&mut self, count: usize) {
        self.until(|all| all.iter().all(|bench| bench.done.len() >= count));
        for bench in &mut self.0 {
            assert!(bench.done.iter().all(|done| done.result.is_ok()), "{:?}", bench.done);
            assert_eq!(std::mem::take(&mut bench.done).len(), count);
        }
    }

    /// Each queue writes a byte of its own to its part, and reads it.
    fn write_and_read(&mut self, server: &Server, round: u8) {
        let places: Vec<_> = (0..PART / LONG).map(|n| n * LONG).collect();
        let all = |op| places.iter().map(|at| (op, *at, LONG)).collect::<Vec<_>>();
        for (bench, part) in self.0.iter().zip(0..) {
            bench.fill(u64::from(part) * PART, PART, round + part);
        }
        self.run(&all(WRITE));
        for (bench, part) in self.0.iter().zip(0..) {
            let (at, len) = (host_size(u64::from(part) * PART), host_size(PART));
            let bytes = &server.bytes()[at..at + len];
            assert!(bytes.iter().all(|byte| *byte == round + part), "queue {part}");
            bench.fill(u64::from(part) * PART, PART, 0);
        }
        self.run(&all(Op::Read));
        for (bench, part) in self.0.iter().zip(0..) {
            let bytes = bench.bytes(u64::from(part) * PART, PART);
            assert!(bytes.iter().all(|byte| *byte == round + part), "queue {part}");
        }
    }

    /// Queues that share a connection, and queues with one of their own.
    fn shared_and_own(&self) -> (usize, usize) {
        let all = self.0[0].disk.connections();
        let up = all.iter().filter(|connection| connection.is_up);
        let shared = up.clone().filter(|connection| connection.is_shared).count();
        (shared, up.count() - shared)
    }
}

#[test]
fn queues_share_the_connections_that_the_server_takes() {
    both(|has_ring| {
        for (takes, lets_wait, structured) in [(2, true, true), (2, false, false), (1, false, true)]
        {
            let server = Server::new(Offer { structured, ..Offer::default() });
            server.limit(takes, lets_wait);
            let mut queues = Queues::new(options(&server), 8, has_ring);
            queues.write_and_read(&server, 1);
            queues.write_and_read(&server, 100);
            queues.run(&[(Op::Flush, 0, 0), (Op::Discard, 0, 4096)]);
            assert_eq!(queues.shared_and_own(), (9 - takes, takes - 1));
            assert_eq!(server.limits().most, takes);
        }
    });
}

#[test]
fn a_busy_queue_that_gives_its_connection_up_sends_nothing_twice() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        server.limit(1, false);
        let mut queues = Queues::new(options(&server), 2, has_ring);
        // The first queue has the only connection, and is busy until the second one shares it.
        let mut next = [0u64; 2];
        queues.until(|all| {
            for (bench, at) in all.iter_mut().zip(&mut next) {
                if *at == 0 || !bench.done.is_empty() {
                    assert!(bench.done.drain(..).all(|done| done.result.is_ok()));
                    bench.start_as(0, WRITE, (*at % 8) * 512, 512);
                    *at += 1;
                }
            }
            next.iter().all(|count| *count > 100)
        });
        queues.end(1);
        let writes = server.log().len() as u64;
        assert_eq!(writes, next.iter().sum::<u64>());
        assert_eq!(queues.shared_and_own(), (2, 0));
        assert_eq!(queues.0[0].disk.connections().iter().map(|c| c.losses).sum::<u64>(), 0);
    });
}

#[test]
fn a_server_that_takes_more_later_gives_each_queue_a_connection_again() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        server.limit(2, false);
        let mut queues = Queues::new(options(&server), 4, has_ring);
        queues.write_and_read(&server, 1);
        server.limit(usize::MAX, false);
        let disk = queues.0[0].disk.clone();
        queues.until(|_| disk.connections().iter().all(|c| c.is_up && !c.is_shared));
        queues.write_and_read(&server, 50);
        assert_eq!(disk.connections().iter().map(|c| c.losses).sum::<u64>(), 0);
        // The connection that was shared has no queue any more, and is ended.
        queues.until(|_| server.limits().open == 4);
    });
}

#[test]
fn without_multi_conn_all_queues_use_one_connection() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        let mut queues = Queues::new(options(&server), 4, has_ring);
        queues.write_and_read(&server, 1);
        assert_eq!(queues.shared_and_own(), (0, 4));
        server.die();
        queues.until(|_| server.limits().open == 0);
        let before = server.connections();
        let flags = Offer::default().flags & !CAN_MULTI_CONN;
        server.offer(Offer { flags, ..Offer::default() });
        queues.start(&[(WRITE, 0, LONG), (Op::Flush, 0, 0)]);
        server.listen();
        queues.end(2);
        queues.run(&[(Op::Read, 0, LONG), (Op::Flush, 0, 0)]);
        assert_eq!(queues.shared_and_own(), (4, 0));
        let mut used: Vec<_> = server.log().iter().map(|(number, _)| *number).collect();
        used.retain(|number| *number > before);
        used.dedup();
        assert_eq!(used.len(), 1, "a flush covers what this connection has written");
        // It comes back as it was at first.
        server.die();
        server.offer(Offer::default());
        server.listen();
        queues.write_and_read(&server, 7);
        assert_eq!(queues.shared_and_own(), (0, 4));
    });
}

#[test]
fn a_shared_server_that_dies_is_silent_or_lies_costs_no_request() {
    let forged = |cookie: u64| Reply::simple(0, cookie ^ 1 << 16).to_vec();
    let unknown = |cookie: u64| Reply::simple(0, cookie ^ 1 << 32).to_vec();
    type Fault = Box<dyn Fn(u64) -> Act + Send + Sync>;
    let faults: Vec<Fault> = vec![
        Box::new(|_| Act::Close),
        Box::new(|_| Act::Ignore),
        Box::new(|_| Act::Send(vec![0xff; 64])),
        Box::new(move |cookie| Act::Send(forged(cookie))),
        Box::new(move |cookie| Act::Send(unknown(cookie))),
    ];
    for fault in faults {
        let server = Server::new(Offer::default());
        server.limit(1, false);
        let request_timeout = Duration::from_millis(400);
        let mut queues = Queues::new(NbdOptions { request_timeout, ..options(&server) }, 3, true);
        queues.write_and_read(&server, 1);
        assert_eq!(queues.shared_and_own(), (3, 0));
        let used = || server.log().last().map(|(number, _)| *number);
        let first = used().unwrap();
        server.law(move |connection, _, command| {
            let is_hit = connection == first && command.kind == CommandKind::Read;
            if is_hit { fault(command.cookie) } else { Act::Serve }
        });
        queues.write_and_read(&server, 30);
        assert!(used() > Some(first), "it was connected to again");
        assert_eq!(server.limits().most, 1);
    }
}

#[test]
fn queues_that_share_hear_that_the_server_was_given_up_and_go_on_later() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        server.limit(1, false);
        let reconnect = Some(Duration::from_millis(50));
        let mut queues = Queues::new(NbdOptions { reconnect, ..options(&server) }, 3, has_ring);
        queues.write_and_read(&server, 1);
        server.die();
        queues.start(&[(Op::Read, 0, 512)]);
        queues.until(|all| all.iter().all(|bench| bench.done.len() == 1));
        for bench in &mut queues.0 {
            assert_eq!(bench.done.remove(0).result, Err(Errno::IO));
        }
        server.listen();
        queues.until(|all| all[0].disk.connections().iter().all(|c| c.is_up));
        queues.write_and_read(&server, 9);
    });
}

#[test]
fn a_queue_that_leaves_takes_nothing_from_those_that_share_with_it() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        server.limit(1, false);
        let mut queues = Queues::new(options(&server), 4, has_ring);
        queues.write_and_read(&server, 1);
        let disk = queues.0[0].disk.clone();
        queues.0.truncate(2);
        queues.write_and_read(&server, 20);
        queues.0.push(Bench::on(&disk, has_ring));
        queues.write_and_read(&server, 30);
        assert_eq!(queues.shared_and_own(), (3, 0));
        assert_eq!(disk.connections().iter().map(|c| c.losses).sum::<u64>(), 0);
        queues.0.clear();
        drop(disk);
        while server.limits().open > 0 {
            // Other tests need the CPU too; a turn comes soon enough for a connection that waits.
            std::thread::sleep(PAUSE);
        }
    });
}

#[test]
fn a_shared_server_that_stops_reading_is_left() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        server.limit(1, false);
        let request_timeout = Duration::from_millis(400);
        let options = NbdOptions { request_timeout, ..options(&server) };
        // The writes of eight queues are more than the thread of the shared connection takes.
        let mut queues = Queues::new(options, 8, has_ring);
        queues.write_and_read(&server, 1);
        let used = || server.log().last().map(|(number, _)| *number);
        let first = used().unwrap();
        server.law(move |connection, _, command| {
            let is_hit = connection == first && command.kind == CommandKind::Write;
            if is_hit { Act::Stall } else { Act::Serve }
        });
        queues.write_and_read(&server, 30);
        assert!(used() > Some(first), "it was connected to again");
        assert_eq!(server.limits().most, 1);
    });
}

#[test]
fn queues_share_once_the_host_has_descriptors_again() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        server.limit(1, false);
        let disk = Arc::new(NbdDisk::open(options(&server)).unwrap());
        // Neither the thread nor, with the second try, the pair of the first queue.
        disk.reconnector.refuse([false, true]);
        let mut queues = Queues((0..3).map(|_| Bench::on(&disk, has_ring)).collect());
        queues.write_and_read(&server, 1);
        assert_eq!(queues.shared_and_own(), (3, 0));
        assert_eq!(disk.connections().iter().map(|c| c.losses).sum::<u64>(), 0);
    });
}

#[test]
fn requests_fail_after_the_time_that_the_operator_allows_if_the_host_cannot_share() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        let reconnect = Some(Duration::from_millis(50));
        let disk = Arc::new(NbdDisk::open(NbdOptions { reconnect, ..options(&server) }).unwrap());
        let mut queues = Queues((0..2).map(|_| Bench::on(&disk, has_ring)).collect());
        queues.write_and_read(&server, 1);
        server.die();
        queues.until(|_| server.limits().open == 0);
        let flags = Offer::default().flags & !CAN_MULTI_CONN;
        server.offer(Offer { flags, ..Offer::default() });
        disk.reconnector.refuse([true; 1 << 16]);
        server.listen();
        queues.start(&[(Op::Read, 0, 512)]);
        queues.until(|all| all.iter().all(|bench| bench.done.len() == 1));
        for bench in &mut queues.0 {
            assert_eq!(bench.done.remove(0).result, Err(Errno::IO));
        }
        disk.reconnector.refuse([]);
        queues.until(|_| disk.connections().iter().all(|c| c.is_up));
        queues.write_and_read(&server, 9);
        assert_eq!(queues.shared_and_own(), (2, 0));
        // A queue that is new while the host refuses, beside one that has a connection.
        drop(queues);
        let server = Server::new(Offer::default());
        server.limit(1, false);
        let disk = Arc::new(NbdDisk::open(NbdOptions { reconnect, ..options(&server) }).unwrap());
        disk.reconnector.refuse([true; 1 << 16]);
        let mut queues = Queues((0..2).map(|_| Bench::on(&disk, has_ring)).collect());
        queues.start(&[(Op::Read, 0, 512)]);
        queues.until(|all| all.iter().all(|bench| bench.done.len() == 1));
        assert_eq!(queues.0[0].done.remove(0).result, Ok(()));
        assert_eq!(queues.0[1].done.remove(0).result, Err(Errno::IO));
        disk.reconnector.refuse([]);
        queues.until(|_| disk.connections().iter().all(|c| c.is_up));
        queues.write_and_read(&server, 9);
    });
}

#[test]
fn nothing_is_tried_while_a_queue_is_slow_to_give_its_connection_up() {
    let server = Server::new(Offer::default());
    server.limit(2, false);
    let mut queues = Queues::new(options(&server), 2, true);
    queues.write_and_read(&server, 1);
    server.law(|_, _, command| match command.kind {
        CommandKind::Read => Act::Ignore,
        _ => Act::Serve,
    });
    let disk = queues.0[0].disk.clone();
    // The last queue is asked first to give its connection up, and waits for this answer before.
    queues.0[1].start(&[(Op::Read, 0, 512)]);
    let is_read = |server: &Server| {
        server
            .log()
            .last()
            .is_some_and(|(_, command)| command.kind == CommandKind::Read && command.len == 512)
    };
    queues.until(|_| is_read(&server));
    queues.0.push(Bench::on(&disk, true));
    queues.until(|_| disk.connections()[2].is_up);
    queues.0.remove(0);
    queues.until(|_| server.limits().open == 1);
    server.limit(1, false);
    let (before, from) = (server.connections(), now());
    // Longer than the time after which another queue is asked.
    queues.until(|_| now() > from + Duration::from_millis(2500));
    assert_eq!(server.connections(), before);
    assert!(
        queues.0[0].done.is_empty() && disk.reconnector.jobs() < 16,
        "{}",
        disk.reconnector.jobs()
    );
}

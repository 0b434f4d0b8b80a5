//! Servers that end, and come back or do not.

use super::bench::{Bench, at_first, both, options, uri};
use super::server::{Act, Offer, SIZE, Server};
use crate::clock::now;
use crate::{Address, Connected, Host, JoinError, NbdDisk, NbdOptions, Uri, measure};
use manyring_backend::blk::{Disk, Op};
use rustix::io::Errno;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const WRITE: Op = Op::Write { durable: false };

#[test]
fn what_is_in_flight_is_sent_again_in_order() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        // The first connection ends with its sixth command, the second with its third.
        server.law(|connection, nth, command| match (connection, nth) {
            (1, 5) | (2, 2) => Act::Close,
            (1, _) if command.offset != 512 => Act::Ignore,
            _ => Act::Serve,
        });
        let mut bench = Bench::of(&server, has_ring);
        let requests: Vec<_> = (0..8).map(|n| (Op::Read, n * 512, 512)).collect();
        assert_eq!(bench.run(&requests), [Ok(()); 8]);
        assert_eq!(bench.bytes(0, 4096), at_first(0, 4096));
        assert_eq!(bench.losses(), 2);
        let of = |connection: usize| -> Vec<u64> {
            let log = server.log();
            let own = log.iter().filter(|(number, _)| *number == connection);
            own.map(|(_, command)| command.offset / 512).collect()
        };
        assert_eq!(of(1), [0, 1, 2, 3, 4, 5]);
        assert_eq!(of(2), [0, 2, 3], "all but the one that was answered");
        assert_eq!(of(3), [3, 4, 5, 6, 7]);
    });
}

#[test]
fn a_server_that_is_killed_costs_no_request() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        let mut bench = Bench::of(&server, has_ring);
        for round in 0..5u8 {
            bench.fill(0, 1 << 20, round);
            server.die();
            let writes: Vec<_> = (0..16).map(|n| (WRITE, n << 16, 1 << 16)).collect();
            bench.start(&writes);
            server.listen();
            assert_eq!(bench.results(16), [Ok(()); 16]);
            assert!(server.bytes()[..1 << 20].iter().all(|byte| *byte == round));
        }
        assert_eq!(bench.losses(), 5);
    });
}

#[test]
fn requests_fail_after_the_time_that_the_operator_allows_and_work_again_later() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        let reconnect = Some(Duration::from_millis(50));
        let mut bench = Bench::new(NbdOptions { reconnect, ..options(&server) }, has_ring);
        server.die();
        assert_eq!(bench.run(&[(Op::Read, 0, 512), (WRITE, 0, 512)]), [Err(Errno::IO); 2]);
        assert_eq!(bench.run(&[(Op::Read, 0, 512)]), [Err(Errno::IO)], "at once");
        server.listen();
        bench.until(|bench| bench.disk.connections()[0].is_up);
        assert_eq!(bench.run(&[(Op::Read, 0, 512)]), [Ok(())]);
    });
}

#[test]
fn another_disk_behind_the_same_name_is_not_taken() {
    for offer in [
        Offer { size: SIZE - 512, ..Offer::default() },
        Offer { flags: Offer::default().flags | 2, ..Offer::default() },
        Offer { flags: 1, ..Offer::default() },
        Offer { blocks: [512, 4096, 1 << 20], ..Offer::default() },
    ] {
        let server = Server::new(Offer::default());
        let mut bench = Bench::of(&server, true);
        server.die();
        server.offer(offer);
        server.listen();
        bench.start(&[(Op::Read, 0, 512)]);
        // Tried more than once, and refused each time.
        bench.until(|_| server.connections() > 3);
        assert!(bench.done.is_empty() && !bench.disk.connections()[0].is_up);
        server.offer(Offer { size: SIZE + 512, ..Offer::default() });
        assert_eq!(bench.results(1), [Ok(())], "a larger one is");
        assert_eq!(bench.disk.geometry().size, SIZE, "of which the guest has not heard");
    }
}

#[test]
fn a_queue_that_stops_takes_back_what_waits_for_the_server() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        let mut bench = Bench::of(&server, has_ring);
        server.law(|_, _, _| Act::Ignore);
        bench.start(&[(Op::Read, 0, 512), (WRITE, 0, 512)]);
        bench.until(|_| server.log().len() == 2);
        assert!(!bench.queue.recall(1, None), "the server has it");
        server.die();
        bench.until(|bench| bench.done.len() == 1);
        assert_eq!((bench.done[0].token, bench.done[0].result), (1, Err(Errno::CANCELED)));
        assert!(bench.queue.recall(0, None), "nobody has it");
        assert_eq!(bench.disk.connections()[0].in_flight, 1, "told with the next turn");
    });
}

#[test]
fn the_last_request_of_a_queue_that_stops_stays_while_the_kernel_sends() {
    let blocks = [1, 4096, 1 << 20];
    let server = Server::new(Offer { early: true, blocks, ..Offer::default() });
    let mut bench = Bench::of(&server, true);
    // More than a socket takes: it is answered while the kernel still sends it.
    bench.start(&[(WRITE, 0, 256 << 10)]);
    bench.until(|bench| bench.disk.connections()[0].bytes_received == 16);
    assert!(bench.done.is_empty(), "its completion is held back");
    bench.start_as(1, Op::Read, 512, 512);
    assert_eq!(bench.done.len(), 1, "another one stays behind");
    assert!(!bench.queue.recall(1, None), "the kernel would be left with an entry");
    server.open_gate();
    bench.until(|bench| bench.done.len() == 2);
    assert!(bench.done.iter().all(|done| done.result.is_ok()), "{:?}", bench.done);
}

#[test]
fn a_queue_that_stops_waits_a_quarter_of_the_time_for_a_silent_server() {
    let server = Server::new(Offer::default());
    server.law(|_, _, _| Act::Ignore);
    let request_timeout = Duration::from_secs(2);
    let mut bench = Bench::new(NbdOptions { request_timeout, ..options(&server) }, true);
    bench.start(&[(WRITE, 0, 512)]);
    bench.until(|_| server.log().len() == 1);
    assert!(!bench.queue.recall(0, None), "the server has it");
    assert_eq!(bench.results(1), [Err(Errno::CANCELED)]);
}

#[test]
fn a_silent_server_is_left_after_the_time_of_a_request() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        server.law(|connection, _, _| if connection == 1 { Act::Ignore } else { Act::Serve });
        let request_timeout = Duration::from_millis(80);
        let mut bench = Bench::new(NbdOptions { request_timeout, ..options(&server) }, has_ring);
        assert_eq!(bench.run(&[(Op::Read, 0, 512), (Op::Flush, 0, 0)]), [Ok(()); 2]);
        assert_eq!(bench.losses(), 1);
    });
}

#[test]
fn a_server_that_is_not_there_or_no_server_is_an_error_at_the_start() {
    let server = Server::new(Offer::default());
    let mut missing = options(&server);
    let host = Host::Unix("/nowhere/at.all".to_owned());
    missing.server = Arc::new(Address::of(&Uri { host, ..uri(&server) }));
    let error = NbdDisk::open(missing).unwrap_err();
    assert!(matches!(error, JoinError::Connect(_)), "{error}");
    assert_eq!(error.to_string(), "cannot be connected to: No such file or directory (os error 2)");
}

/// Another process that connects, and its answers that were taken so far.
#[derive(Debug)]
struct Elsewhere(Address, Mutex<Vec<Result<(), String>>>);

impl crate::Server for Elsewhere {
    fn connect(&self, limit: Duration) -> Result<Connected, JoinError> {
        let connected = crate::Server::connect(&self.0, limit);
        let result = connected.as_ref().map(drop).map_err(ToString::to_string);
        self.1.lock().unwrap().push(result);
        connected.map_err(|error| JoinError::Elsewhere {
            text: error.to_string(),
            is_limit: error.is_limit(),
            passes: error.passes(),
        })
    }
}

#[test]
fn a_disk_that_was_measured_before_waits_for_its_server_and_for_the_same_disk() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        let elsewhere = Arc::new(Elsewhere(Address::of(&uri(&server)), Mutex::default()));
        let options = NbdOptions { server: elsewhere.clone(), ..options(&server) };
        let connected = crate::Server::connect(&*elsewhere, Duration::from_secs(5)).unwrap();
        let told = measure(connected, &options.target, Duration::from_secs(5)).unwrap();
        assert_eq!(told.size, SIZE);
        server.die();
        // Nothing is asked before a queue is there, and a queue waits for the server.
        let disk = Arc::new(NbdDisk::told(options, told).unwrap());
        assert_eq!((disk.geometry().size, elsewhere.1.lock().unwrap().len()), (SIZE, 1));
        let mut bench = Bench::on(&disk, has_ring);
        bench.start(&[(Op::Read, 512, 512)]);
        bench.until(|_| elsewhere.1.lock().unwrap().iter().any(Result::is_err));
        server.offer(Offer { size: SIZE / 2, ..Offer::default() });
        server.listen();
        let connections = server.connections();
        bench.until(|_| server.connections() > connections + 1);
        assert!(bench.done.is_empty(), "another disk is not taken");
        server.offer(Offer::default());
        assert_eq!(bench.results(1), [Ok(())]);
        assert_eq!(bench.bytes(512, 512), at_first(512, 512));
    });
}

#[test]
fn an_old_loss_does_not_shorten_how_long_requests_wait() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        let limit = Duration::from_secs(3);
        let reconnect = Some(limit);
        let mut bench = Bench::new(NbdOptions { reconnect, ..options(&server) }, has_ring);
        assert_eq!(bench.run(&[(Op::Read, 0, 512)]), [Ok(())]);
        server.die();
        bench.start(&[(Op::Read, 0, 512)]);
        server.listen();
        assert_eq!(bench.results(1), [Ok(())]);
        let from = now();
        bench.until(|_| now() > from + limit);
        // A queue that is new has had no answer yet.
        let mut new = Bench::on(&bench.disk, has_ring);
        new.until(|new| new.disk.connections()[1].is_up);
        server.die();
        new.start(&[(Op::Read, 0, 512)]);
        // Long enough for several tries.
        let from = now();
        new.until(|_| now() > from + limit / 10);
        assert_eq!(new.done, []);
        server.listen();
        assert_eq!(new.results(1), [Ok(())]);
    });
}

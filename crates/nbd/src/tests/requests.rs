//! The commands and results of each request, with servers that offer more or less.

use super::bench::{Bench, at_first, both, options};
use super::server::{Act, Offer, SIZE, Server, error};
use crate::{JoinError, NbdDisk};
use manyring_backend::blk::{Disk, Op};
use manyring_wire::nbd::{
    CommandKind, FLAG_FUA, FLAG_NO_HOLE, HAS_FLAGS, READ_ONLY, Reply, SEND_FLUSH,
};
use rustix::io::Errno;

const WRITE: Op = Op::Write { durable: false };

fn kinds(server: &Server) -> Vec<(CommandKind, u16)> {
    server.log().iter().map(|(_, command)| (command.kind, command.flags)).collect()
}

#[test]
fn reads_and_writes_of_all_lengths_move_the_right_bytes() {
    for structured in [true, false] {
        both(|has_ring| {
            let server = Server::new(Offer { structured, ..Offer::default() });
            let mut bench = Bench::of(&server, has_ring);
            let reads = [(0, 512), (1 << 20, 4096), (2 << 20, 1 << 20), (SIZE - 1536, 1536)];
            let requests = reads.map(|(at, len)| (Op::Read, at, len));
            assert_eq!(bench.run(&requests), [Ok(()); 4]);
            for (at, len) in reads {
                assert!(bench.bytes(at, len) == at_first(at, len), "{at} {len} {structured}");
            }
            for (at, len) in reads {
                bench.fill(at, len, 0x5a);
            }
            assert_eq!(bench.run(&reads.map(|(at, len)| (WRITE, at, len))), [Ok(()); 4]);
            let bytes = server.bytes();
            for (at, len) in reads {
                let at = usize::try_from(at).unwrap();
                let range = at..at + usize::try_from(len).unwrap();
                assert!(bytes[range].iter().all(|byte| *byte == 0x5a));
            }
            assert_eq!(bytes[512..1 << 20], at_first(512, (1 << 20) - 512), "nothing else");
        });
    }
}

#[test]
fn no_command_is_longer_than_the_server_takes() {
    let server = Server::new(Offer::default());
    let mut bench = Bench::of(&server, true);
    assert_eq!(bench.run(&[(Op::Read, 0, 1 << 20), (WRITE, 1 << 20, 1 << 20)]), [Ok(()); 2]);
    let log = server.log();
    assert_eq!(log.len(), 32);
    assert!(log.iter().all(|(_, command)| command.len == 64 << 10));
}

#[test]
fn zeroes_and_discards_are_asked_for_and_holes_read_as_zeroes() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        let mut bench = Bench::of(&server, has_ring);
        bench.fill(0, SIZE, 1);
        let zeroes = |unmap, durable| Op::WriteZeroes { unmap, durable };
        let requests = [
            (zeroes(true, false), 0, 1 << 20),
            (zeroes(false, true), 1 << 20, 1 << 20),
            (Op::Discard, 2 << 20, 1 << 20),
        ];
        assert_eq!(bench.run(&requests), [Ok(()); 3]);
        assert_eq!(
            kinds(&server),
            [
                (CommandKind::WriteZeroes, 0),
                (CommandKind::WriteZeroes, FLAG_NO_HOLE | FLAG_FUA),
                (CommandKind::Trim, 0)
            ]
        );
        assert_eq!(bench.run(&[(Op::Read, 0, 2 << 20)]), [Ok(())]);
        assert!(bench.bytes(0, 2 << 20).iter().all(|byte| *byte == 0));
    });
}

#[test]
fn a_durable_write_has_the_servers_flag_or_a_flush_behind_it() {
    let durable = [(Op::Write { durable: true }, 0, 128 << 10)];
    let fua = Server::new(Offer::default());
    assert_eq!(Bench::of(&fua, true).run(&durable), [Ok(())]);
    assert_eq!(kinds(&fua), [(CommandKind::Write, FLAG_FUA); 2]);
    let flags = HAS_FLAGS | SEND_FLUSH;
    let flush = Server::new(Offer { flags, ..Offer::default() });
    assert_eq!(Bench::of(&flush, true).run(&durable), [Ok(())]);
    let write = (CommandKind::Write, 0);
    assert_eq!(kinds(&flush), [write, write, (CommandKind::Flush, 0)]);
}

#[test]
fn what_a_server_cannot_do_is_not_offered_and_not_asked() {
    let server = Server::new(Offer { flags: HAS_FLAGS | READ_ONLY, ..Offer::default() });
    let mut bench = Bench::of(&server, true);
    let geometry = bench.disk.geometry();
    assert!(geometry.read_only);
    assert_eq!((geometry.discard_max, geometry.write_zeroes_max), (0, 0));
    assert_eq!(bench.disk.queues_max(), 1);
    let zeroes = Op::WriteZeroes { unmap: false, durable: false };
    let results = bench.run(&[(Op::Flush, 0, 0), (Op::Discard, 0, 512), (zeroes, 0, 512)]);
    assert_eq!(results, [Ok(()), Err(Errno::OPNOTSUPP), Err(Errno::OPNOTSUPP)]);
    assert!(server.log().is_empty());
}

#[test]
fn block_sizes_of_the_server_are_those_of_the_guest() {
    let blocks = [4096, 8192, 1 << 20];
    let server = Server::new(Offer { blocks, size: SIZE + 512, ..Offer::default() });
    let mut bench = Bench::of(&server, true);
    let geometry = bench.disk.geometry();
    assert_eq!((geometry.size, geometry.block_size, geometry.min_io_size), (SIZE, 4096, 8192));
    let results = bench.run(&[(Op::Read, 512, 512), (Op::Discard, 0, 512), (Op::Read, 0, 4096)]);
    assert_eq!(results, [Err(Errno::INVAL), Ok(()), Ok(())]);
    let blocks = [8192, 8192, 1 << 20];
    let server = Server::new(Offer { blocks, ..Offer::default() });
    assert!(matches!(NbdDisk::open(options(&server)), Err(JoinError::Disk(_))));
}

#[test]
fn errors_of_the_server_are_the_requests() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        server.law(|_, nth, command| {
            let number = [1, 5, 12, 22, 28, 95, 4711][nth];
            Act::Send(match command.kind {
                CommandKind::Read => error(command.cookie, number, true),
                _ => Reply::simple(number, command.cookie).to_vec(),
            })
        });
        let mut bench = Bench::of(&server, has_ring);
        let requests = [(Op::Read, 0, 512), (WRITE, 0, 512)].repeat(4);
        let errors =
            [Errno::PERM, Errno::IO, Errno::NOMEM, Errno::INVAL, Errno::NOSPC, Errno::OPNOTSUPP];
        let expected: Vec<_> = errors.into_iter().chain([Errno::IO]).map(Err).collect();
        assert_eq!(bench.run(&requests[..7]), expected);
        assert_eq!(bench.losses(), 0);
    });
}

#[test]
fn an_error_of_one_piece_ends_its_request_alone() {
    let server = Server::new(Offer::default());
    server.law(|_, _, command| match command.offset {
        0x20000 => Act::Send(error(command.cookie, 5, true)),
        _ => Act::Serve,
    });
    let mut bench = Bench::of(&server, true);
    let results = bench.run(&[(Op::Read, 0, 1 << 20), (Op::Read, 2 << 20, 1 << 20)]);
    assert_eq!(results, [Err(Errno::IO), Ok(())]);
    assert!(bench.bytes(2 << 20, 1 << 20) == at_first(2 << 20, 1 << 20));
}

#[test]
fn a_queue_that_ends_says_so_to_the_server() {
    both(|has_ring| {
        let server = Server::new(Offer::default());
        let mut bench = Bench::of(&server, has_ring);
        assert_eq!(bench.run(&[(Op::Flush, 0, 0)]), [Ok(())]);
        assert_eq!(bench.disk.connections().len(), 1);
        let before = bench.disk.connections();
        drop(std::mem::replace(&mut bench.queue, bench.disk.open_queue(has_ring).unwrap()));
        let now = bench.disk.connections();
        assert_eq!((before.len(), now.len()), (1, 2), "the new one was opened first");
        assert!(!now[0].is_up && now[0].bytes_sent == before[0].bytes_sent, "its counts stay");
        let _third = bench.disk.open_queue(has_ring).unwrap();
        assert_eq!(bench.disk.connections().len(), 2, "and go on");
    });
}

#[test]
fn each_queue_has_a_connection_where_the_server_allows_several() {
    let server = Server::new(Offer::default());
    let bench = Bench::of(&server, true);
    assert_eq!(bench.disk.queues_max(), usize::MAX);
    let mut other = Bench::of(&server, true);
    let second = bench.disk.open_queue(true).unwrap();
    assert_eq!(other.run(&[(Op::Read, 0, 512)]), [Ok(())]);
    other.until(|_| server.connections() == 3);
    drop(second);
}

#[test]
fn a_disk_that_has_grown_is_measured_again() {
    let server = Server::new(Offer::default());
    let bench = Bench::of(&server, true);
    server.offer(Offer { size: SIZE * 2, ..Offer::default() });
    assert_eq!(bench.disk.geometry().size, SIZE);
    assert_eq!(bench.disk.resize(None).unwrap().size, SIZE * 2);
    assert_eq!(bench.disk.resize(Some(SIZE)), Err(Errno::OPNOTSUPP));
}

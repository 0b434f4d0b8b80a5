//! Servers that lie: each lie costs the connection, and no more.

use super::bench::{Bench, at_first, both};
use super::server::{Act, Offer, SIZE, Server, data, error};
use manyring_backend::blk::Op;
use manyring_wire::nbd::{Chunk, ChunkKind, Command, Reply};
use proptest::prelude::*;

const WRITE: Op = Op::Write { durable: false };
const READ_AT: u64 = 8192;

type Lie = fn(&Command) -> Act;

fn head(kind: ChunkKind, cookie: u64, len: u32, is_last: bool) -> Vec<u8> {
    Chunk { kind, is_last, cookie, len }.emit().to_vec()
}

/// The answers of a hostile server to a read of 4096 bytes at [`READ_AT`], each with a name.
const LIES: [(&str, Lie); 20] = [
    ("no reply at all", |_| Act::Send(vec![0; 64])),
    ("another cookie", |c| Act::Send(data(c.cookie + 1, c.offset, &[0; 4096], true))),
    ("a cookie without end", |_| Act::Send(Reply::simple(0, u64::MAX).to_vec())),
    ("an old cookie", |c| Act::Send(Reply::simple(0, c.cookie - (1 << 32)).to_vec())),
    ("too many bytes", |c| Act::Send(data(c.cookie, c.offset, &[9; 4097], true))),
    ("too few bytes", |c| Act::Send(data(c.cookie, c.offset, &[9; 4095], true))),
    ("bytes before", |c| Act::Send(data(c.cookie, c.offset - 1, &[9; 4096], true))),
    ("bytes behind", |c| Act::Send(data(c.cookie, c.offset + 1, &[9; 4096], true))),
    ("an offset at the end of all", |c| Act::Send(data(c.cookie, u64::MAX, &[9; 4096], true))),
    ("the same bytes twice", |c| {
        let half = data(c.cookie, c.offset, &[9; 4096], false);
        Act::Send([half.clone(), half].concat())
    }),
    ("nothing, as a whole", |c| Act::Send(head(ChunkKind::None, c.cookie, 0, true))),
    ("a hole that is too long", |c| {
        let hole = [&c.offset.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat();
        Act::Send([head(ChunkKind::Hole, c.cookie, 12, true), hole].concat())
    }),
    ("a hole of nothing", |c| {
        let hole = [&c.offset.to_be_bytes()[..], &[0; 4]].concat();
        Act::Send([head(ChunkKind::Hole, c.cookie, 12, true), hole].concat())
    }),
    ("a chunk of 4 GiB", |c| Act::Send(head(ChunkKind::Data, c.cookie, u32::MAX, true))),
    ("errors without end", |c| {
        Act::Send((0..100).flat_map(|_| error(c.cookie, 5, false)).collect())
    }),
    ("two kinds of replies", |c| {
        let half = data(c.cookie, c.offset, &[9; 2048], false);
        Act::Send([&half[..], &Reply::simple(0, c.cookie), &[9; 4096]].concat())
    }),
    ("half a head", |c| Act::SendAndClose(Reply::simple(0, c.cookie)[..9].to_vec())),
    ("half a frame", |c| {
        let whole = data(c.cookie, c.offset, &[9; 4096], true);
        Act::SendAndClose(whole[..2000].to_vec())
    }),
    ("its own end", |c| Act::Send(error(c.cookie, 108, true))),
    ("a flood", |c| {
        let flood = data(c.cookie, c.offset, &[9; 64], false).repeat(20_000);
        Act::SendAndClose(flood)
    }),
];

#[test]
fn every_lie_costs_the_connection_and_no_request() {
    for (name, lie) in LIES {
        both(|has_ring| {
            let server = Server::new(Offer::default());
            server.law(move |connection, _, command| {
                if connection == 1 && command.offset == READ_AT { lie(command) } else { Act::Serve }
            });
            let mut bench = Bench::of(&server, has_ring);
            bench.fill(0, SIZE, 7);
            let requests = [(WRITE, 0, 512), (Op::Read, READ_AT, 4096), (Op::Read, 0, 512)];
            assert_eq!(bench.run(&requests), [Ok(()); 3], "{name}");
            assert_eq!(bench.bytes(READ_AT, 4096), at_first(READ_AT, 4096), "{name}");
            assert_eq!(bench.losses(), 1, "{name}");
            let (before, behind) = (bench.bytes(READ_AT - 4096, 4096), bench.bytes(12288, 4096));
            assert!(before.iter().chain(&behind).all(|byte| *byte == 7), "{name}");
        });
    }
}

#[test]
fn data_for_a_command_that_reads_none_cost_the_connection() {
    let server = Server::new(Offer::default());
    server.law(|connection, _, command| match connection {
        1 => Act::Send(data(command.cookie, command.offset, &[9; 512], true)),
        _ => Act::Serve,
    });
    let mut bench = Bench::of(&server, true);
    bench.fill(0, 512, 3);
    assert_eq!(bench.run(&[(WRITE, 0, 512)]), [Ok(())]);
    assert_eq!((bench.losses(), bench.bytes(0, 1)), (1, vec![3]));
}

#[test]
fn a_server_that_answers_nothing_but_lies_is_not_asked_as_fast_as_it_can_lie() {
    let server = Server::new(Offer::default());
    server.law(|_, _, _| Act::Send(vec![0; 16]));
    let mut bench = Bench::of(&server, true);
    bench.start(&[(Op::Read, 0, 512)]);
    // The pauses of 10, 20, 40, 80 and 100 ms lie before the seventh connection.
    let began = super::super::clock::now();
    bench.until(|_| server.connections() == 7);
    assert!(super::super::clock::now() - began >= std::time::Duration::from_millis(250));
    assert!(bench.done.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_bytes_in_the_place_of_a_reply_cost_the_connection_at_most(
        structured: bool,
        cut in 0usize..5000,
        spoiled in proptest::collection::vec((0usize..4200, any::<u8>()), 0..4),
    ) {
        let server = Server::new(Offer { structured, ..Offer::default() });
        server.law(move |connection, _, command| {
            if connection > 1 {
                return Act::Serve;
            }
            let mut bytes = data(command.cookie, command.offset, &[9; 4096], true);
            for (at, byte) in &spoiled {
                let len = bytes.len();
                bytes[at % len] = *byte;
            }
            bytes.truncate(cut);
            Act::SendAndClose(bytes)
        });
        let mut bench = Bench::of(&server, true);
        bench.fill(0, SIZE, 7);
        prop_assert_eq!(bench.run(&[(Op::Read, READ_AT, 4096)]).len(), 1);
        let (before, behind) = (bench.bytes(READ_AT - 4096, 4096), bench.bytes(12288, 4096));
        prop_assert!(before.iter().chain(&behind).all(|byte| *byte == 7));
    }
}

//! Beside guests on a switch that flood it, move their addresses, take nothing or are killed. What
//! the guests of the switch itself feel is asked of a pair of them that talk.

use super::Beside;
use crate::support::prober::RETRY_DELAY;
use manyring_driver::{NetDriver, NetDriverOptions};
use manyring_wire::net::RawNetHeader;

const SWITCH: &str = "
[[switch]]
name = 's0'
[[net]]
name = 'sender'
socket_path = '@/sender'
switch = 's0'
mac = '02:00:00:00:00:01'
[[net]]
name = 'taker'
socket_path = '@/taker'
switch = 's0'
mac = '02:00:00:00:00:02'
";

/// A frame from `from` to `to`, of 1500 bytes.
fn frame(to: u64, from: u64) -> Vec<u8> {
    let mac = |number: u64| [&[2][..], &number.to_be_bytes()[3..]].concat();
    [&mac(to)[..], &mac(from), &[0x88, 0xb5], &[0x5a; 1486]].concat()
}

fn flood(guest: &mut NetDriver, mut next: impl FnMut() -> Vec<u8>) {
    let tx = &mut guest.pairs[0].tx;
    tx.reclaim();
    while tx.send(&RawNetHeader::default(), &next()).unwrap() {}
    tx.publish(0).unwrap();
}

#[test]
fn neighbours_of_guests_that_abuse_their_switch_wait_for_nothing() {
    let mut beside = Beside::with(&["sender", "taker"], SWITCH);
    let [sender, taker] = ["sender", "taker"].map(|name| beside.daemon.socket_of(name));
    let connect = |socket| NetDriver::connect(socket, &NetDriverOptions::default()).unwrap();
    let mut guest = connect(&sender);
    // It takes no frame: its buffers are full for ever.
    let mut other = connect(&taker);
    other.announce().unwrap();
    beside.bear("frames for a guest that takes none", || flood(&mut guest, || frame(2, 1)));
    beside.bear("broadcasts without end", || {
        let all = [&[0xff; 6][..], &frame(2, 1)[6..]].concat();
        flood(&mut guest, || all.clone());
    });
    let mut number = 0;
    beside.bear("frames from ever new addresses, to ever new ones", || {
        flood(&mut guest, || {
            number += 1;
            frame(1 << 20 | number, 1 << 21 | number)
        });
    });
    beside.bear("an address that moves to and fro", || {
        flood(&mut guest, || frame(1, 9));
        flood(&mut other, || frame(2, 9));
    });
    drop(other);
    beside.bear("receivers that are killed while frames are lent to them", || {
        let gone = connect(&taker);
        flood(&mut guest, || frame(2, 1));
        std::thread::sleep(RETRY_DELAY);
        drop(gone);
    });
    drop(guest);
    let _other = connect(&taker);
    beside.bear("senders whose memory is cut away while their frames are lent", || {
        let mut gone = connect(&sender);
        flood(&mut gone, || frame(2, 1));
        gone.arena.table().iter().for_each(|(_, file)| rustix::fs::ftruncate(file, 0).unwrap());
        let _ = gone.pairs[0].tx.vring().kick();
        let _ = gone.front.is_closed_within(RETRY_DELAY);
        // The driver's own memory is gone as well: nothing of it may be touched here any more.
        std::mem::forget(gone);
    });
}

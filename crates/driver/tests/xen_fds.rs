//! The simulated Xen gives back what its clients took. One test, so that nobody else opens any fds.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod xenstore;

use manyring_driver::{SimXen, XenCalls, XenDomain};
use manyring_memory::{GrantAccess, GrantMapper, GrantPages};
use std::sync::Arc;
use xenstore::XenStore;

fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn fds_and_mappings_go_with_clients_domains_and_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let nothing = fds();
    let xen = SimXen::start(&folder.path().join("xenstored")).unwrap();
    let mut store = XenStore::connect(xen.socket());
    store.watch("@releaseDomain", "out");
    store.watch("/ended", "ended");
    let before = fds();
    for round in 0..30_u16 {
        let domain = XenDomain::create(xen.socket(), round + 1, 16, 512).unwrap();
        let calls = XenCalls::connect(xen.socket()).unwrap();
        let gref = domain.grant(0, 2, GrantAccess::Write).unwrap();
        let grants = Arc::new(calls.attach(round + 1).unwrap());
        let pages = GrantPages::of_ring(GrantMapper::Simulated(grants), &[gref]).unwrap();
        let front = domain.event_channel(0).unwrap();
        let back = calls.bind(round + 1, front.port()).unwrap();
        back.notify();
        XenStore::connect(xen.socket()).write("/ended", round);
        store.next_event("ended");
        // One end leaves first in even rounds, the other in odd ones.
        if round % 2 == 0 {
            drop((domain, front));
            store.next_event("out");
            drop((pages, back, calls));
        } else {
            drop((pages, back, calls));
            drop((domain, front));
            store.next_event("out");
        }
        // The server closes what is left when it hears of it.
        let _ = (0..10_000).take_while(|_| fds() > before && store.read("/").is_some()).count();
        assert_eq!(fds(), before, "round {round}");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("memfd:domain"), "round {round}");
    }
    drop((store, xen));
    assert_eq!(fds(), nothing);
}

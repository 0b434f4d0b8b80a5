//! Tests of domains, seats and ports.

use super::*;

const BACK: u64 = 1;
const FRONT: u64 = 2;

fn create(domain: u16) -> Hypercall {
    Hypercall::Create { domain, pages: 16, entries: 512 }
}

fn errno(reply: &Reply) -> Option<Errno> {
    let errno = i32::try_from(reply.0.errno).unwrap();
    (errno != 0).then(|| Errno::from_raw_os_error(errno))
}

fn count(event: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::read(event, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
}

#[test]
fn a_domain_that_cannot_be_is_refused() {
    let mut xen = SimulatedHypervisor::default();
    for (domain, pages, entries) in
        [(0, 16, 512), (1, 16, 0), (1, 0, 512), (1, 1, 513), (1, u32::MAX, 512), (1, 999, 1 << 17)]
    {
        let refused = xen.serve(FRONT, Hypercall::Create { domain, pages, entries });
        assert_eq!(errno(&refused), Some(Errno::INVAL), "{domain} {pages} {entries}");
    }
    assert_eq!(errno(&xen.serve(FRONT, create(3))), None);
    assert_eq!(errno(&xen.serve(FRONT, create(4))), Some(Errno::EXIST), "it is a domain already");
    assert_eq!(errno(&xen.serve(BACK, create(3))), Some(Errno::EXIST), "there is one already");
    assert_eq!(xen.disconnect(FRONT), Some(3));
    assert_eq!((xen.disconnect(FRONT), errno(&xen.serve(BACK, create(3)))), (None, None));
}

#[test]
fn memory_of_a_domain_cannot_be_cut_away() {
    let mut xen = SimulatedHypervisor::default();
    let (_, fds) = xen.serve(FRONT, create(3));
    for size in [0, 4096, 1 << 30] {
        assert_eq!(ftruncate(&fds[0], size), Err(Errno::PERM), "{size}");
    }
}

#[test]
fn four_processes_map_pages_of_a_domain_and_only_those_of_domain_0() {
    let mut xen = SimulatedHypervisor::default();
    xen.serve(FRONT, create(3));
    xen.serve(9, create(4));
    assert_eq!(errno(&xen.serve(9, Hypercall::Attach { domain: 3 })), Some(Errno::PERM));
    assert_eq!(errno(&xen.serve(BACK, Hypercall::Attach { domain: 5 })), Some(Errno::SRCH));
    let seats: Vec<_> =
        (100..104).map(|caller| xen.serve(caller, Hypercall::Attach { domain: 3 }).0).collect();
    let wanted: Vec<_> = (0..4).map(|second| Outcome { errno: 0, first: 512, second }).collect();
    assert_eq!(seats, wanted);
    assert_eq!(errno(&xen.serve(BACK, Hypercall::Attach { domain: 3 })), Some(Errno::BUSY));
    xen.disconnect(102);
    assert_eq!(xen.serve(BACK, Hypercall::Attach { domain: 3 }).0.second, 2);
    xen.serve(BACK, Hypercall::Detach { domain: 3 });
    assert_eq!(xen.serve(104, Hypercall::Attach { domain: 3 }).0.second, 2);
}

#[test]
fn a_channel_signals_both_ways_and_is_bound_once() {
    let mut xen = SimulatedHypervisor::default();
    xen.serve(FRONT, create(3));
    let (outcome, front) = xen.serve(FRONT, Hypercall::AllocUnbound { remote: 0 });
    let bind = Hypercall::Bind { remote: 3, port: outcome.first };
    let (_, back) = xen.serve(BACK, bind);
    assert_eq!((count(&back[0]), count(&front[0])), (1, 0), "a new end may have missed something");
    signal(&front[1]);
    signal(&back[1]);
    assert_eq!((count(&back[0]), count(&front[0])), (1, 1));
    assert_eq!(errno(&xen.serve(BACK, bind)), Some(Errno::INVAL));
    for (remote, port) in [(3, outcome.first + 1), (4, outcome.first)] {
        assert_eq!(errno(&xen.serve(BACK, Hypercall::Bind { remote, port })), Some(Errno::INVAL));
    }
    // Nor does another domain bind to what was made for domain 0.
    xen.serve(9, create(4));
    let (outcome, _) = xen.serve(FRONT, Hypercall::AllocUnbound { remote: 0 });
    let bind = Hypercall::Bind { remote: 3, port: outcome.first };
    assert_eq!(errno(&xen.serve(9, bind)), Some(Errno::INVAL));
}

#[test]
fn a_back_end_that_is_gone_leaves_a_channel_that_another_one_joins() {
    let mut xen = SimulatedHypervisor::default();
    xen.serve(FRONT, create(3));
    let (outcome, front) = xen.serve(FRONT, Hypercall::AllocUnbound { remote: 0 });
    let bind = Hypercall::Bind { remote: 3, port: outcome.first };
    xen.serve(BACK, bind);
    xen.disconnect(BACK);
    let (outcome, back) = xen.serve(100, bind);
    assert_eq!(outcome.errno, 0);
    signal(&back[1]);
    assert_eq!(count(&front[0]), 1);
    // Closed by hand it is the same; a port of somebody else is not closed.
    let local = outcome.first;
    assert_eq!(errno(&xen.serve(101, Hypercall::Close { port: local })), Some(Errno::PERM));
    assert_eq!(errno(&xen.serve(100, Hypercall::Close { port: local })), None);
    assert_eq!(errno(&xen.serve(100, Hypercall::Close { port: local })), Some(Errno::INVAL));
    assert_eq!(errno(&xen.serve(101, bind)), None);
    // With its domain the channel is gone.
    xen.disconnect(FRONT);
    assert_eq!(errno(&xen.serve(100, bind)), Some(Errno::INVAL));
}

#[test]
fn ports_of_a_connection_are_bounded_and_each_is_the_lowest_that_is_free() {
    let mut xen = SimulatedHypervisor::default();
    let mut alloc = |caller| xen.serve(caller, Hypercall::AllocUnbound { remote: 3 }).0;
    let ports = (1..).take_while(|port| alloc(BACK).first == *port).count();
    assert_eq!(ports, PORTS_MAX);
    assert_eq!(alloc(100).first, u32::try_from(PORTS_MAX).unwrap() + 1, "others have their own");
    xen.serve(BACK, Hypercall::Close { port: 7 });
    assert_eq!(xen.serve(100, Hypercall::AllocUnbound { remote: 3 }).0.first, 7);
}

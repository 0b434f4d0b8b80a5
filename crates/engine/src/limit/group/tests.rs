//! The promise of docs/guide/limits.md in simulated time: members get equal parts of the bytes,
//! whatever their requests, queues and neighbours are.

mod leased;

use super::*;
use crate::limit::{Gate, Limit, Passed, Way};
use crate::stats::QueueStats;

const SECOND_NS: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;

/// How a queue asks its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Looks at up to 64 requests or frames, as the queue of a disk and a transmitq do.
    Looks(Way),
    /// Asks before each frame and charges it afterwards, as a receiveq does.
    Receives,
}

/// A queue that has requests of `size` bytes whenever `wants` says so.
struct Queue {
    member: usize,
    gate: Box<Gate>,
    kind: Kind,
    size: u64,
    next_ns: u64,
    late_ns: u64,
    stats: QueueStats,
}

/// What queues of the simulation have in common.
#[derive(Clone, Copy, Debug)]
struct Load {
    kind: Kind,
    queues: usize,
    size: u64,
    /// How late its worker wakes.
    late_ns: u64,
}

fn load(queues: usize, size: u64) -> Load {
    Load { kind: Kind::Looks(Way::Write), queues, size, late_ns: 50_000 }
}

/// A group, its devices and their queues.
struct Sim {
    group: Arc<Group>,
    limits: Vec<Arc<Limit>>,
    queues: Vec<Queue>,
    now_ns: u64,
    /// Bytes and requests that each member has passed.
    bytes: Vec<u64>,
    passed: Vec<u64>,
    looks: u64,
}

impl Sim {
    fn new(rates: Rates, loads: &[Load]) -> Self {
        let group = Group::new(rates, 1);
        let (limits, queues) = (Vec::new(), Vec::new());
        let (bytes, passed) = (Vec::new(), Vec::new());
        let mut sim = Self { group, limits, queues, now_ns: 1, bytes, passed, looks: 0 };
        loads.iter().for_each(|load| sim.add(*load));
        sim
    }

    fn add(&mut self, load: Load) {
        let limit = Arc::new(Limit::default());
        limit.set(Rates::default(), Some(&self.group), self.now_ns);
        for _ in 0..load.queues {
            self.queues.push(Queue {
                member: self.limits.len(),
                gate: limit.gate().unwrap(),
                kind: load.kind,
                size: load.size,
                next_ns: self.now_ns,
                late_ns: load.late_ns,
                stats: QueueStats::default(),
            });
        }
        self.limits.push(limit);
        self.bytes.push(0);
        self.passed.push(0);
    }

    /// Runs the queues of members that want something until `end_ns`, the first due one first.
    fn run(&mut self, end_ns: u64, wants: impl Fn(usize, u64) -> bool) {
        loop {
            let queue = self.queues.iter_mut().min_by_key(|queue| queue.next_ns).unwrap();
            self.now_ns = queue.next_ns.max(self.now_ns);
            if self.now_ns >= end_ns {
                self.now_ns = end_ns;
                return;
            }
            if !wants(queue.member, self.now_ns) {
                queue.next_ns = self.now_ns + 1_000_000;
                continue;
            }
            self.looks += 1;
            let count = queue.turn(self.now_ns);
            self.passed[queue.member] += count;
            self.bytes[queue.member] += count * queue.size;
        }
    }

    /// As on `Order::Refresh`: each queue takes its limit anew, and looks.
    fn refresh(&mut self) {
        for queue in &mut self.queues {
            queue.gate = self.limits[queue.member].gate().unwrap();
            queue.next_ns = self.now_ns;
        }
    }

    /// Runs everybody for this long from now on, and returns what each member has passed in it.
    fn shares(&mut self, time_ns: u64) -> Vec<u64> {
        let former = self.bytes.clone();
        self.run(self.now_ns + time_ns, |_, _| true);
        self.bytes.iter().zip(former).map(|(now, former)| now - former).collect()
    }
}

impl Queue {
    /// Takes a turn, and returns how many requests it has passed.
    fn turn(&mut self, now_ns: u64) -> u64 {
        let (gate, stats, size) = (&mut self.gate, &self.stats, self.size);
        self.next_ns = now_ns + 20_000;
        if gate.is_closed(now_ns) {
            return 0;
        }
        gate.open();
        let count = match self.kind {
            Kind::Looks(way) => {
                let admits = |_: &i32| gate.admits(way, size, now_ns, stats);
                let count = (0..64).take_while(admits).count() as u64;
                let mut passed = Passed::default();
                passed[way as usize] = (count, count * size);
                gate.settle(passed, now_ns);
                count
            }
            Kind::Receives => {
                let passes = |_: &i32| {
                    let passes = gate.passes(Way::Write, now_ns, stats);
                    if passes {
                        gate.charge(Way::Write, size, now_ns);
                    }
                    passes
                };
                (0..64).take_while(passes).count() as u64
            }
        };
        if let Some(due_ns) = gate.due_ns() {
            self.next_ns = due_ns.max(now_ns) + self.late_ns;
        }
        count
    }
}

fn bps(bytes: u64) -> Rates {
    Rates { bytes: [0, 0, bytes], ..Rates::default() }
}

/// Asserts that each member has its share of the bytes within a tenth, or a request, and all
/// together have what the rate gives, within a hundredth, the credit and a request of each.
fn assert_fair(bytes: &[u64], sizes: &[u64], rate: u64, time_ns: u64, case: &str) {
    let whole = u64::try_from(u128::from(rate) * u128::from(time_ns) / 1_000_000_000).unwrap();
    let share = whole / bytes.len() as u64;
    for (bytes, size) in bytes.iter().zip(sizes) {
        assert!(bytes.abs_diff(share) <= share / 10 + size, "{case}: {bytes} of {share}");
    }
    let (sum, ahead): (u64, u64) = (bytes.iter().sum(), sizes.iter().sum());
    assert!(sum.abs_diff(whole) <= whole / 100 + rate / 20 + ahead, "{case}: {sum} of {whole}");
}

#[test]
fn disks_share_the_bytes_whatever_their_requests_are() {
    let sizes = [512, 4096, 65_536, 1 << 18, MIB, 4 * MIB];
    for (rate, seconds) in [(20_000_000, 4), (100_000_000, 1)] {
        for (at, x) in sizes.iter().enumerate() {
            for y in &sizes[at..] {
                for (x_queues, y_queues) in [(1, 1), (1, 16), (16, 1)] {
                    let mut sim = Sim::new(bps(rate), &[load(x_queues, *x), load(y_queues, *y)]);
                    let bytes = sim.shares(seconds * SECOND_NS);
                    let case = format!("{rate}: {x} x{x_queues}, {y} x{y_queues}: {bytes:?}");
                    assert_fair(&bytes, &[*x, *y], rate, seconds * SECOND_NS, &case);
                }
            }
        }
    }
}

#[test]
fn networks_share_the_bytes_whatever_their_frames_are() {
    let sizes = [60, 512, 1514, 65_550];
    for kind in [Kind::Looks(Way::Read), Kind::Receives] {
        let way = if kind == Kind::Receives { 1 } else { 0 };
        for rate in [1_000_000, 20_000_000] {
            let mut rates = Rates::default();
            rates.bytes[way] = rate;
            for (at, x) in sizes.iter().enumerate() {
                for y in &sizes[at..] {
                    let of = |size, queues| Load { kind, ..load(queues, size) };
                    let mut sim = Sim::new(rates, &[of(*x, 1), of(*y, 4)]);
                    let bytes = sim.shares(4 * SECOND_NS);
                    let case = format!("{kind:?} {rate}: {x}, {y} x4: {bytes:?}");
                    assert_fair(&bytes, &[*x, *y], rate, 4 * SECOND_NS, &case);
                }
            }
        }
    }
}

#[test]
fn members_share_requests_however_many_queues_they_have_and_however_late_they_wake() {
    let ops = |ops| Rates { ops: [0, 0, ops], ..Rates::default() };
    let late = |late_ns| Load { late_ns, ..load(1, 4096) };
    for (rates, members, least) in [
        (ops(2000), vec![late(0), load(16, 4096)], 490),
        (ops(2000), vec![late(3_000_000), load(16, 4096)], 470),
        (ops(50), vec![late(100_000), load(16, 4096), load(16, 4096)], 320),
    ] {
        let mut sim = Sim::new(rates, &members);
        sim.run(20 * SECOND_NS, |_, _| true);
        let whole = rates.ops[2] * 20;
        let sum: u64 = sim.passed.iter().sum();
        assert!(sim.passed[0] * 1000 >= least * whole, "{members:?}: {:?}", sim.passed);
        assert!((whole * 99 / 100..=whole * 101 / 100 + 50).contains(&sum), "{:?}", sim.passed);
    }
}

#[test]
fn what_a_member_leaves_is_taken_by_the_others() {
    let mut sim = Sim::new(bps(20_000_000), &[load(4, 4096), load(4, MIB), load(1, 65_536)]);
    // The second one wants nothing, and the third one has a request in every 50 ms.
    let light = |now_ns: u64| now_ns % 50_000_000 < 1_000_000;
    sim.run(10 * SECOND_NS, |member, now_ns| member == 0 || (member == 2 && light(now_ns)));
    let bytes = &sim.bytes;
    assert!(sim.passed[2] >= 190, "{:?}", sim.passed);
    assert!(bytes[0] + bytes[2] >= 198_000_000, "{bytes:?}");
    assert!(bytes[0] + bytes[2] <= 202_000_000, "{bytes:?}");
    // The second one comes: each of the two has a part, beside what the third one still wants.
    let former = sim.bytes.clone();
    sim.run(20 * SECOND_NS, |member, now_ns| member != 2 || light(now_ns));
    let [small, large] = [0, 1].map(|member| sim.bytes[member] - former[member]);
    assert!(small.abs_diff(large) <= small / 10 + MIB, "{small} {large}");
    // It has saved nothing up while it was away, but for the credit.
    assert!(small + large <= 202_000_000 + MIB, "{small} {large}");
}

#[test]
fn a_member_that_comes_back_has_its_part_at_once_and_no_more() {
    let mut sim = Sim::new(bps(20_000_000), &[load(1, 4096), load(1, MIB)]);
    for round in 0..10 {
        let former = sim.bytes.clone();
        let end_ns = sim.now_ns + SECOND_NS;
        // The small one is away for every other second.
        sim.run(end_ns, |member, _| member == 1 || round % 2 == 0);
        let [small, large] = [0, 1].map(|member| sim.bytes[member] - former[member]);
        let part = if round % 2 == 0 { 10_000_000 } else { 0 };
        assert!(small.abs_diff(part) <= 1_500_000, "{round}: {small} {large}");
        assert!(large.abs_diff(20_000_000 - part) <= 2 * MIB, "{round}: {small} {large}");
    }
}

#[test]
fn a_rate_that_changes_counts_at_once_and_the_parts_stay_equal() {
    let mut sim = Sim::new(bps(20_000_000), &[load(1, 4096), load(8, MIB)]);
    sim.shares(3 * SECOND_NS);
    for rate in [200_000_000, 2_000_000, 50_000_000] {
        sim.group.set(bps(rate), sim.now_ns);
        sim.refresh();
        let bytes = sim.shares(8 * SECOND_NS);
        assert_fair(&bytes, &[4096, 2 * MIB], rate, 8 * SECOND_NS, &format!("{rate}: {bytes:?}"));
    }
    sim.group.set(Rates::default(), sim.now_ns);
    let queue = &mut sim.queues[0];
    queue.gate = sim.limits[0].gate().unwrap();
    assert_eq!(queue.turn(sim.now_ns), 64, "no limit, no wait");
}

#[test]
fn many_members_share_and_a_look_passes_something_or_is_rare() {
    let sizes = [4096, 65_536, 1 << 18, MIB];
    let loads: Vec<_> = (0..200).map(|at| load(1 + at % 3, sizes[at % 4])).collect();
    let (rate, seconds) = (400_000_000, 3);
    let mut sim = Sim::new(bps(rate), &loads);
    let bytes = sim.shares(seconds * SECOND_NS);
    let sizes: Vec<_> = loads.iter().map(|load| load.size).collect();
    assert_fair(&bytes, &sizes, rate, seconds * SECOND_NS, "many");
    let (queues, passed) = (sim.queues.len() as u64, sim.passed.iter().sum::<u64>());
    let looks = sim.looks;
    assert!(looks <= passed * 2 + queues * seconds * 50, "{looks} looks, {passed} passed");
}

#[test]
fn a_hostile_member_with_huge_requests_on_many_queues_takes_its_part_and_no_more() {
    for (queues, size) in [(64, 4 * MIB), (256, MIB), (1, 64 * MIB)] {
        let mut sim = Sim::new(bps(50_000_000), &[load(1, 4096), load(queues, size)]);
        let bytes = sim.shares(8 * SECOND_NS);
        let case = format!("{queues} of {size}: {bytes:?}");
        assert_fair(&bytes, &[4096, size], 50_000_000, 8 * SECOND_NS, &case);
    }
}

/// The limit sees huge requests, and the guest makes them small before they are popped; or it never
/// takes what it waits for, and begins anew.
#[test]
fn a_member_that_waits_for_what_it_does_not_take_leaves_the_others_their_parts() {
    let mut sim = Sim::new(bps(20_000_000), &[load(1, 4096), load(0, 0)]);
    let limit = sim.limits[1].clone();
    let stats = QueueStats::default();
    let mut gates: Vec<_> = (0..16).map(|_| limit.gate().unwrap()).collect();
    let mut taken = 0;
    while sim.now_ns < 8 * SECOND_NS {
        let now_ns = sim.now_ns;
        for (at, gate) in gates.iter_mut().enumerate() {
            if gate.is_closed(now_ns) {
                if at % 2 == 1 {
                    *gate = limit.gate().unwrap();
                }
                continue;
            }
            gate.open();
            while gate.admits(Way::Write, 4 * MIB, now_ns, &stats) {
                let mut passed = Passed::default();
                passed[Way::Write as usize] = (1, 512);
                gate.settle(passed, now_ns);
                taken += 512;
            }
        }
        sim.run(now_ns + 1_000_000, |_, _| true);
    }
    assert!(sim.bytes[0] >= 79_000_000, "{:?} {taken}", sim.bytes);
    assert!(sim.bytes[0] + taken <= 162_000_000, "{:?} {taken}", sim.bytes);
}

/// A guest shows requests of 4 GiB, and they are small when they are popped: what it waited for is
/// not saved up.
#[test]
fn what_is_given_back_is_kept_up_to_the_credit() {
    let sim = Sim::new(bps(50_000_000), &[load(1, MIB), load(0, 0)]);
    let way = Way::Write as usize;
    let limit = sim.limits[1].clone();
    let stats = QueueStats::default();
    let mut gate = limit.gate().unwrap();
    let mut turn = |now_ns, shown, popped| {
        gate.open();
        let count = (0..64).take_while(|_| gate.admits(Way::Write, shown, now_ns, &stats));
        let count = count.count() as u64;
        let mut passed = Passed::default();
        passed[way] = (count, count * popped);
        gate.settle(passed, now_ns);
        (count * popped, gate.due_ns().unwrap_or(now_ns + 1000))
    };
    let mut now_ns = 1;
    for _ in 0..10 {
        (_, now_ns) = turn(now_ns, 4 << 30, 512);
        // True requests follow, for a second.
        let (end_ns, mut bytes) = (now_ns + SECOND_NS, 0);
        while now_ns < end_ns {
            let (more, next_ns) = turn(now_ns, MIB, MIB);
            (bytes, now_ns) = (bytes + more, next_ns);
        }
        // Beside them the credit, the lead of a member that waits, and what begins or ends it.
        assert!(bytes <= 50_000_000 + 3_500_000 + 3 * MIB, "{bytes} in a second");
    }
    assert!(now_ns > 80 * SECOND_NS, "it has waited for what it showed");
}

#[test]
fn what_a_member_gives_back_pays_no_debt_of_another_beyond_the_credit() {
    let group = Group::new(bps(50_000_000), 1);
    let [one, other] = [group.join(), group.join()];
    let charges = Charges(Way::Write);
    one.charge_all(charges, 1, 4 << 30);
    assert!(one.due_ns(charges, None, 90 * SECOND_NS) <= 90 * SECOND_NS, "86 s are granted");
    one.give_back_all(charges, 1, 4 << 30);
    other.charge_all(charges, 1, 500_000_000);
    let due_ns = other.due_ns(charges, None, 90 * SECOND_NS + 1_000_000);
    assert!(due_ns > 99_800_000_000, "{due_ns}: it owes 10 s");
}

#[test]
fn time_in_which_nobody_came_pays_no_large_request() {
    for queues in [1, 4] {
        let size = 4 * MIB;
        let mut sim = Sim::new(bps(1_000_000), &[load(queues, size), load(queues, size)]);
        for _ in 0..3 {
            sim.now_ns += 60 * SECOND_NS;
            let former = sim.passed.clone();
            sim.run(sim.now_ns + SECOND_NS, |_, _| true);
            let passed: Vec<_> =
                sim.passed.iter().zip(former).map(|(now, was)| now - was).collect();
            // One request of each at most, and the second of each waits for 4.2 s.
            assert!(passed.iter().all(|passed| *passed <= 1), "{queues}: {passed:?}");
            // Nobody waits any more, and what has passed is paid for in the next minute.
            sim.refresh();
        }
    }
}

/// Requests that were booked while the bytes were free are not given back as bytes.
#[test]
fn a_limit_that_is_put_back_begins_without_time_to_spare() {
    let rate = 1_000_000;
    let mut sim = Sim::new(bps(rate), &[load(16, MIB), load(0, 0)]);
    sim.shares(60 * SECOND_NS);
    let ops = Rates { ops: [0, 0, 10], ..Rates::default() };
    for (rates, seconds, most) in [(ops, 2, u64::MAX), (bps(rate), 4, 4 * rate + rate / 20 + MIB)] {
        sim.group.set(rates, sim.now_ns);
        sim.refresh();
        let member = sim.queues[0].gate.member.clone().unwrap();
        assert_eq!(member.accounts[5].lead_ns(), 0);
        let bytes = sim.shares(seconds * SECOND_NS)[0];
        assert!(bytes <= most, "{bytes} of {most}");
    }
}

#[test]
fn a_member_that_waited_at_a_former_rate_wants_nothing_at_the_next_one() {
    let mut sim = Sim::new(bps(1), &[load(1, MIB), load(1, MIB)]);
    sim.shares(SECOND_NS);
    sim.group.set(bps(20_000_000), sim.now_ns);
    sim.refresh();
    // The second one has nothing to do any more.
    sim.run(sim.now_ns + SECOND_NS, |member, _| member == 0);
    let wanting = sim.group.wanting[5].load(Ordering::Relaxed);
    assert_eq!(wanting, 1);
}

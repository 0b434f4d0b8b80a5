//! A group whose members are in several processes, in simulated time: together they have the rate,
//! and each its part, as in one process.

use super::*;
use crate::limit::divide::{Account as Share, Claim, Divider, TICK};
use crate::limit::lease::Usages;
use std::iter::Cycle;
use std::vec::IntoIter;

const STEP_NS: u64 = 1_000_000;

/// What a process and the divider say to each other.
#[derive(Debug, Default)]
struct Said {
    granted_ns: [u64; CHARGES_MAX],
    usages: Usages,
    sleeps: bool,
    has_rung: bool,
    rings: u64,
}

#[derive(Debug, Default)]
struct SimLease(Mutex<Said>);

impl Lease for SimLease {
    fn granted_ns(&self) -> Option<[u64; CHARGES_MAX]> {
        Some(self.0.lock().unwrap().granted_ns)
    }

    fn tell(&self, usages: &Usages) {
        let mut said = self.0.lock().unwrap();
        said.usages = *usages;
        if said.sleeps && usages.iter().any(Usage::is_needy) {
            said.has_rung = true;
            said.rings += 1;
        }
    }
}

/// Processes with a part of a group each, and what divides the group.
struct Host {
    processes: Vec<(Sim, Arc<SimLease>, Share)>,
    divider: Divider,
    burst_ms: u64,
    /// `None`: it sleeps.
    tick_at_ns: Option<u64>,
    now_ns: u64,
    ticks: u64,
    /// How late a tick is, one after the other.
    late_ns: Cycle<IntoIter<u64>>,
}

impl Host {
    fn new(rates: Rates, processes: &[&[Load]]) -> Self {
        let of = |loads: &&[Load]| {
            let (sim, lease) = (Sim::new(rates, loads), Arc::new(SimLease::default()));
            sim.group.lease(lease.clone(), 1);
            (sim, lease, Share::default())
        };
        Self {
            processes: processes.iter().map(of).collect(),
            divider: Divider::new(1),
            burst_ms: rates.burst_ms,
            tick_at_ns: Some(1),
            now_ns: 1,
            ticks: 0,
            late_ns: vec![0].into_iter().cycle(),
        }
    }

    fn run(&mut self, end_ns: u64, wants: impl Fn(usize, usize, u64) -> bool) {
        while self.now_ns < end_ns {
            self.now_ns = (self.now_ns + STEP_NS).min(end_ns);
            for (at, (sim, _, _)) in self.processes.iter_mut().enumerate() {
                sim.run(self.now_ns, |member, now_ns| wants(at, member, now_ns));
            }
            let rung = |lease: &SimLease| std::mem::take(&mut lease.0.lock().unwrap().has_rung);
            if self.processes.iter().any(|(_, lease, _)| rung(lease)) {
                self.divider.wake();
                self.tick_at_ns.get_or_insert(self.now_ns);
            }
            if self.tick_at_ns.is_some_and(|at_ns| self.now_ns >= at_ns) {
                self.tick();
            }
        }
    }

    fn tick(&mut self) {
        self.ticks += 1;
        let of = |(sim, lease, share): &(Sim, Arc<SimLease>, Share)| {
            let (members, usages) = (sim.limits.len() as u64, lease.0.lock().unwrap().usages);
            (*share, Claim { members, usages })
        };
        let mut all: Vec<_> = self.processes.iter().map(of).collect();
        let goes_on = self.divider.tick(&mut all, self.burst_ms, self.now_ns);
        for ((_, lease, share), (now, _)) in self.processes.iter_mut().zip(all) {
            *share = now;
            let mut said = lease.0.lock().unwrap();
            (said.granted_ns, said.sleeps) = (now.granted_ns(), !goes_on);
        }
        let late_ns = self.late_ns.next().unwrap();
        let pause_ns = u64::try_from(TICK.as_nanos()).unwrap() + late_ns;
        self.tick_at_ns = goes_on.then_some(self.now_ns + pause_ns);
    }

    /// Runs everybody who wants something for this long, and returns what each member of each
    /// process has passed in it.
    fn shares(&mut self, time_ns: u64, wants: impl Fn(usize, usize, u64) -> bool) -> Vec<u64> {
        let bytes = |host: &Self| -> Vec<u64> {
            host.processes.iter().flat_map(|(sim, _, _)| sim.bytes.iter().copied()).collect()
        };
        let former = bytes(self);
        self.run(self.now_ns + time_ns, wants);
        bytes(self).iter().zip(former).map(|(now, former)| now - former).collect()
    }
}

/// Asserts that all together have had the rate, within 2 % and a request of each.
fn assert_whole(bytes: &[u64], rate: u64, time_ns: u64, ahead: u64, case: &str) {
    let whole = rate / 1000 * (time_ns / 1_000_000);
    let sum: u64 = bytes.iter().sum();
    assert!(sum.abs_diff(whole) <= whole / 50 + ahead, "{case}: {bytes:?}, {sum} of {whole}");
}

#[test]
fn two_processes_have_the_rate_together_and_half_of_it_each_whatever_their_requests_are() {
    let (rate, time_ns) = (50_000_000, 4 * SECOND_NS);
    for (x, y) in [(4096, 4096), (4096, MIB), (MIB, 4096), (MIB, MIB), (65_536, 1 << 18)] {
        for (x_queues, y_queues) in [(1, 1), (1, 16), (16, 1)] {
            let mut host = Host::new(bps(rate), &[&[load(x_queues, x)], &[load(y_queues, y)]]);
            let case = format!("{x} x{x_queues}, {y} x{y_queues}");
            let bytes = host.shares(time_ns, |_, _, _| true);
            assert_whole(&bytes, rate, time_ns, x + y, &case);
            assert_fair(&bytes, &[x, y], rate, time_ns, &case);
        }
    }
}

#[test]
fn members_have_equal_parts_whichever_processes_have_them() {
    let (rate, time_ns) = (100_000_000, 4 * SECOND_NS);
    let three = [load(1, 4096), load(4, 65_536), load(1, MIB)];
    let mut host = Host::new(bps(rate), &[&three, &[load(8, MIB)], &[load(2, 16_384)]]);
    let bytes = host.shares(time_ns, |_, _, _| true);
    assert_whole(&bytes, rate, time_ns, 3 * MIB, "three processes");
    assert_fair(&bytes, &[4096, 65_536, MIB, MIB, 16_384], rate, time_ns, "three processes");
}

#[test]
fn networks_of_two_processes_have_the_rate_together() {
    for kind in [Kind::Looks(Way::Read), Kind::Receives] {
        let mut rates = Rates::default();
        rates.bytes[usize::from(kind == Kind::Receives)] = 20_000_000;
        let of = |size, queues| Load { kind, ..load(queues, size) };
        let mut host = Host::new(rates, &[&[of(1514, 1)], &[of(65_550, 4)]]);
        let bytes = host.shares(4 * SECOND_NS, |_, _, _| true);
        assert_whole(&bytes, 20_000_000, 4 * SECOND_NS, 4 * 65_550, "networks");
        assert_fair(&bytes, &[1514, 4 * 65_550], 20_000_000, 4 * SECOND_NS, "networks");
    }
}

#[test]
fn a_process_that_is_alone_has_the_whole_rate_soon_and_the_other_its_part_as_soon_as_it_comes() {
    let rate = 50_000_000;
    let mut host = Host::new(bps(rate), &[&[load(1, 4096)], &[load(4, 65_536)]]);
    host.shares(SECOND_NS, |_, _, _| true);
    for round in 0..6 {
        // Within three ticks, the parts are as they will stay.
        let alone = round % 2 == 0;
        host.shares(30_000_000, |process, _, _| process == 0 || !alone);
        let bytes = host.shares(SECOND_NS, |process, _, _| process == 0 || !alone);
        assert_whole(&bytes, rate, SECOND_NS, 65_536 * 4, &format!("round {round}"));
        if !alone {
            assert!(bytes[0].abs_diff(bytes[1]) <= rate / 20, "{round}: {bytes:?}");
        }
    }
}

#[test]
fn a_load_below_the_rate_waits_for_nothing_and_leaves_the_rest_to_the_others() {
    let rate = 50_000_000;
    for is_alone in [false, true] {
        let mut host = Host::new(bps(rate), &[&[load(1, 65_536)], &[load(1, 4096)]]);
        let (sim, _, _) = &mut host.processes[1];
        // By its own limit it wants a tenth of the rate.
        sim.limits[0].set(bps(rate / 10), Some(&sim.group), sim.now_ns);
        sim.refresh();
        host.shares(SECOND_NS, |process, _, _| process == 1 || !is_alone);
        let bytes = host.shares(4 * SECOND_NS, |process, _, _| process == 1 || !is_alone);
        assert!(bytes[1] >= rate / 10 * 4 * 98 / 100, "{is_alone}: {bytes:?}");
        if !is_alone {
            assert_whole(&bytes, rate, 4 * SECOND_NS, 65_536, "a light one");
        }
    }
}

#[test]
fn a_group_that_nobody_uses_has_no_ticks_and_is_woken_by_the_first_that_needs_something() {
    let mut host = Host::new(bps(50_000_000), &[&[load(1, 65_536)], &[load(1, 65_536)]]);
    host.shares(SECOND_NS, |_, _, _| true);
    host.shares(SECOND_NS, |_, _, _| false);
    let ticks = host.ticks;
    host.shares(60 * SECOND_NS, |_, _, _| false);
    assert_eq!(host.ticks, ticks, "it ticks while nobody needs it");
    let rings = |host: &Host| -> u64 {
        host.processes.iter().map(|(_, lease, _)| lease.0.lock().unwrap().rings).sum()
    };
    let before = rings(&host);
    let bytes = host.shares(SECOND_NS, |_, _, _| true);
    // The credit comes first.
    assert_whole(&bytes, 50_000_000, SECOND_NS, 50_000_000 / 20 + 2 * 65_536, "woken");
    assert!(rings(&host) > before);
    assert!(host.ticks > ticks + 50);
}

#[test]
fn late_ticks_lose_nothing_while_members_wait() {
    let mut host = Host::new(bps(50_000_000), &[&[load(4, 4096)], &[load(1, MIB)]]);
    let late_ns = vec![0, 0, 15_000_000, 2_000_000, 0, 25_000_000, 0, 8_000_000];
    host.late_ns = late_ns.into_iter().cycle();
    let bytes = host.shares(4 * SECOND_NS, |_, _, _| true);
    assert_whole(&bytes, 50_000_000, 4 * SECOND_NS, 2 * MIB, "late");
}

#[test]
fn another_rate_counts_in_all_processes() {
    let mut host = Host::new(bps(20_000_000), &[&[load(1, 4096)], &[load(8, 65_536)]]);
    host.shares(SECOND_NS, |_, _, _| true);
    for rate in [200_000_000, 4_000_000, 50_000_000] {
        for (sim, _, _) in &mut host.processes {
            sim.group.set(bps(rate), sim.now_ns);
            sim.refresh();
        }
        host.shares(SECOND_NS / 4, |_, _, _| true);
        let bytes = host.shares(4 * SECOND_NS, |_, _, _| true);
        assert_whole(&bytes, rate, 4 * SECOND_NS, 9 * 65_536, &format!("{rate}"));
    }
}

//! The policy on a machine in a script: it leaves the wrong arm wherever one of them is wrong.

mod simulator;

use super::*;
use simulator::{CLIENT, Client, Machine, Outcome, WAKE_NS, run};

const ALWAYS: Polling = Polling { mode: Mode::Always, cap_ns: None };
const AUTO: Polling = Polling { mode: Mode::Auto, cap_ns: None };
const MS: u64 = 1_000_000;
/// How long the policy is watched, trials from the first on included.
const SPAN_NS: u64 = 1000 * MS;
/// Where requests are few, a trial takes longer, and so does the watch.
const LONG_SPAN_NS: u64 = 2 * SPAN_NS;
/// A fixed arm goes on as it began: a part of that tells its rate.
const FIXED_PART: u64 = 10;

const NOTHING: Machine =
    Machine { disk_ns: None, server: false, hog: false, preempts: false, balances: false };
const DISK: Machine = Machine { disk_ns: Some(50_000), ..NOTHING };
const POLLS: Client = Client { polls: true, ..CLIENT };
/// On the CPU of the worker.
const NEAR: Client = Client { cpu: 1, ..CLIENT };

fn thinks(think_ns: u64, client: Client) -> Client {
    Client { think_ns, ..client }
}

fn pauses(every: u64, pause_ns: u64, client: Client) -> Client {
    Client { pause: Some((every, pause_ns)), ..client }
}

/// Asserts that the policy reaches this part, in thousandths, of the better arm's rate, where that
/// arm is `better`; `None`: where they are alike.
#[track_caller]
fn reaches(least: u64, better: Option<Arm>, client: Client, machine: Machine) -> Outcome {
    reaches_within(SPAN_NS, least, better, client, machine)
}

#[track_caller]
fn reaches_within(
    span_ns: u64,
    least: u64,
    better: Option<Arm>,
    client: Client,
    machine: Machine,
) -> Outcome {
    let policy = run(client, machine, AUTO, span_ns);
    let fixed = |polling| run(client, machine, polling, span_ns / FIXED_PART);
    let (spins, sleeps) = (fixed(ALWAYS), fixed(Polling::NEVER));
    let (spinning, sleeping) = (spins.answers * FIXED_PART, sleeps.answers * FIXED_PART);
    let seen = (policy.answers, spinning, sleeping, policy.policies[0].numbers());
    let wins = |a: u64, b: u64| a * 20 >= b * 21;
    assert_eq!(wins(spinning, sleeping), better == Some(Arm::Spin), "the scenario: {seen:?}");
    assert_eq!(wins(sleeping, spinning), better == Some(Arm::Sleep), "the scenario: {seen:?}");
    let share = policy.answers * 1000 / spinning.max(sleeping);
    println!("{share} of {least}, {} ms of CPU: {seen:?}", policy.worker_ns / MS);
    assert!(share >= least, "{share}: {seen:?}");
    policy
}

#[test]
fn a_client_that_sleeps_is_spun_for_while_that_makes_it_faster() {
    let spin = Some(Arm::Spin);
    for think_ns in [0, 20_000, 60_000, 100_000] {
        reaches_within(LONG_SPAN_NS, 970, spin, thinks(think_ns, CLIENT), NOTHING);
    }
    reaches(970, spin, Client { depth: 64, ..CLIENT }, NOTHING);
}

#[test]
fn an_arm_that_pays_only_once_the_kernel_has_moved_the_threads_apart_is_found() {
    let moved = Machine { balances: true, preempts: true, ..NOTHING };
    for depth in [1, 8] {
        let guest = Client { depth, streams: true, ..thinks(30_000, NEAR) };
        let [policy, spins, sleeps] =
            [AUTO, ALWAYS, Polling::NEVER].map(|mode| run(guest, moved, mode, 3 * SPAN_NS));
        let seen = [policy.answers, spins.answers, sleeps.answers];
        println!("{depth}: {seen:?}");
        assert!(spins.answers * 4 > sleeps.answers * 5, "the scenario: {seen:?}");
        let (least, numbers) = (spins.answers * 93, policy.policies[0].numbers());
        assert!(policy.answers * 100 > least, "{seen:?}: {numbers:?}");
    }
}

/// Times of a request, each for a quarter of the time: the kernel lays the threads of a guest anew
/// every tenth of a second or two.
type Ways = [u64; 4];
/// CPU time that a request takes of a worker that sleeps.
const RAN_ASLEEP_NS: u64 = 12_000;

/// Five minutes of such a guest. Returns its requests, and the CPU time of the worker for each.
fn laid_anew(spinning_ns: Ways, sleeping_ns: Ways, polling: Polling, seed: u64) -> (u64, u64) {
    let mut policy = Policy::new(polling, WAKE_NS, seed);
    let (mut now_ns, mut ran_ns, mut requests) = (1, 0, 0);
    let (mut laid_until_ns, mut way, mut random) = (0, 0, seed);
    while now_ns < 300 * SPAN_NS {
        if now_ns >= laid_until_ns {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            way = (random % 4) as usize;
            laid_until_ns = now_ns + 75 * MS + random % (150 * MS);
        }
        let (took_ns, took_ran_ns) = match policy.numbers().arm {
            Arm::Spin => (spinning_ns[way], spinning_ns[way]),
            Arm::Sleep => (sleeping_ns[way], RAN_ASLEEP_NS),
        };
        now_ns += took_ns;
        ran_ns += took_ran_ns;
        requests += 1;
        if policy.on_burst(now_ns, 1) {
            policy.end_epoch(now_ns, ran_ns);
        }
    }
    (requests, ran_ns / requests)
}

/// Requests, and CPU time for each, of four such guests.
fn four_laid_anew(spinning_ns: Ways, sleeping_ns: Ways, polling: Polling) -> (u64, u64) {
    let guests = [1, 2, 3, 4].map(|n| laid_anew(spinning_ns, sleeping_ns, polling, n * 7919));
    guests.iter().fold((0, 0), |sum, guest| (sum.0 + guest.0, sum.1 + guest.1 / 4))
}

#[test]
fn the_arm_that_is_better_on_the_average_is_used_though_trials_find_this_and_that() {
    for (spinning, sleeping) in [
        ([60_000, 62_000, 85_000, 130_000], [100_000, 110_000, 115_000, 120_000]),
        ([60_000, 65_000, 90_000, 150_000], [65_000, 90_000, 130_000, 150_000]),
        ([80_000, 110_000, 125_000, 150_000], [110_000, 120_000, 140_000, 160_000]),
    ] {
        let [policy, spins] = [AUTO, ALWAYS].map(|mode| four_laid_anew(spinning, sleeping, mode));
        let share = policy.0 * 1000 / spins.0;
        println!("{share} of 1000, {} ns of CPU", policy.1);
        assert!(share > 960, "{spinning:?}: {policy:?} and {spins:?}");
    }
    // Where both are alike, it does not take much of a CPU to go on finding that out.
    let alike = [100_000, 110_000, 130_000, 150_000];
    let policy = four_laid_anew(alike, alike, AUTO);
    println!("{} ns of CPU", policy.1);
    assert!(policy.1 * 2 < RAN_ASLEEP_NS * 3, "{} ns of CPU", policy.1);
}

#[test]
fn a_guest_that_is_busy_with_each_answer_is_not_spun_for() {
    // Another program takes what CPU time the worker leaves. A kick of a worker that sleeps costs
    // the guest next to nothing then, and it has other answers while it waits.
    let others = Machine { hog: true, preempts: true, ..NOTHING };
    for (depth, think_ns) in [(2, 60_000), (8, 60_000), (32, 40_000)] {
        let guest = Client { depth, streams: true, ..thinks(think_ns, CLIENT) };
        reaches(970, None, guest, others);
        // Once it is known, what it costs is to find out now and then that nothing has changed.
        let [early, late] = [2, 6].map(|spans| run(guest, others, AUTO, spans * SPAN_NS));
        let policy = (late.worker_ns - early.worker_ns) * 1000 / (late.answers - early.answers);
        let [sleeps, spins] = [Polling::NEVER, ALWAYS].map(|fixed| {
            let outcome = run(guest, others, fixed, SPAN_NS / FIXED_PART);
            outcome.worker_ns * 1000 / outcome.answers
        });
        assert!(spins > 8 * sleeps, "the scenario: {spins} and {sleeps}");
        assert!(policy * 10 <= sleeps * 13, "{policy} ps of CPU for an answer, {sleeps} asleep");
    }
}

#[test]
fn nobody_spins_for_a_client_that_is_no_faster_for_it() {
    for (think_ns, cpu_ms) in [(400_000, 80), (2 * MS, 26)] {
        let policy = reaches_within(LONG_SPAN_NS, 990, None, thinks(think_ns, CLIENT), NOTHING);
        assert!(
            policy.worker_ns < cpu_ms * MS,
            "{think_ns}: {} ns of two seconds",
            policy.worker_ns
        );
    }
    // A gain of 7 % is not worth a CPU.
    let policy =
        reaches_within(LONG_SPAN_NS, 920, Some(Arm::Spin), thinks(200_000, CLIENT), NOTHING);
    assert_eq!(policy.policies[0].base, Arm::Sleep, "{:?}", policy.policies[0].numbers());
}

#[test]
fn a_client_that_polls_is_spun_for_unless_it_comes_seldom() {
    for client in [POLLS, thinks(20_000, POLLS), Client { depth: 32, ..POLLS }] {
        reaches(970, Some(Arm::Spin), client, NOTHING);
    }
    let policy = reaches(990, None, thinks(400_000, POLLS), NOTHING);
    assert!(policy.worker_ns < 50 * MS, "{} ns of a second", policy.worker_ns);
}

#[test]
fn a_client_on_the_workers_own_cpu_is_given_that_cpu() {
    let sleep = Some(Arm::Sleep);
    for client in [NEAR, thinks(20_000, NEAR)] {
        reaches_within(LONG_SPAN_NS, 950, sleep, client, NOTHING);
    }
    // To find out costs more where an epoch has to have whole pauses, and is done once.
    reaches_within(3 * LONG_SPAN_NS, 950, sleep, pauses(64, MS, NEAR), NOTHING);
    reaches(990, sleep, Client { polls: true, ..NEAR }, NOTHING);
    reaches(990, None, NEAR, Machine { preempts: true, ..NOTHING });
}

#[test]
fn a_chain_through_the_workers_cpu_is_spun_for_only_where_the_server_can_run() {
    let chain = Machine { server: true, preempts: true, ..NOTHING };
    reaches(970, Some(Arm::Spin), CLIENT, chain);
    reaches(970, None, POLLS, chain);
    reaches(970, Some(Arm::Sleep), CLIENT, Machine { preempts: false, ..chain });
}

#[test]
fn a_thread_that_takes_slices_is_outspun_where_sleepers_wait_for_their_slice() {
    let hog = Machine { hog: true, ..NOTHING };
    reaches(980, Some(Arm::Spin), CLIENT, hog);
    let policy = reaches(980, Some(Arm::Spin), POLLS, hog);
    assert!(policy.policies[0].numbers().stolen_looks > 5, "slices are seen");
    reaches(970, Some(Arm::Spin), CLIENT, Machine { hog: true, ..DISK });
    // Who sleeps here runs as soon as it is woken, and who spins uses up its claim to that.
    let hog = Machine { preempts: true, ..hog };
    reaches_within(LONG_SPAN_NS, 970, Some(Arm::Sleep), CLIENT, hog);
}

#[test]
fn a_disk_is_spun_for_while_it_answers_within_the_cap() {
    for client in [CLIENT, POLLS, Client { depth: 4, ..CLIENT }] {
        reaches(970, Some(Arm::Spin), client, DISK);
    }
    for disk_ns in [150_000, 1_000_000] {
        let slow = Machine { disk_ns: Some(disk_ns), ..NOTHING };
        // Spinning wins a little by the way: the next request comes soon behind an answer.
        let better = (disk_ns == 150_000).then_some(Arm::Spin);
        let policy = reaches(980, better, CLIENT, slow);
        assert!(policy.worker_ns < 150 * MS, "{} ns of a second", policy.worker_ns);
    }
}

#[test]
fn bursts_and_their_pauses_do_not_hide_the_better_arm() {
    for client in [pauses(64, MS, CLIENT), pauses(16, MS, CLIENT), pauses(200, 3 * MS, CLIENT)] {
        reaches_within(LONG_SPAN_NS, 970, Some(Arm::Spin), client, NOTHING);
    }
    reaches(970, None, pauses(64, MS, POLLS), NOTHING);
}

#[test]
fn two_workers_of_one_client_come_to_the_better_arm_beside_each_others_trials() {
    for client in [CLIENT, POLLS, NEAR] {
        let client = Client { workers: 2, ..client };
        let better = if client.cpu == 1 { Arm::Sleep } else { Arm::Spin };
        let policy = reaches(980, Some(better), client, NOTHING);
        let trials: Vec<_> = policy.policies.iter().map(|l| l.numbers().trials).collect();
        assert!(trials.iter().all(|n| (1..40).contains(n)), "{trials:?}");
    }
}

#[test]
fn a_client_that_moves_finds_the_other_arm_within_a_second() {
    for (from, to, arm) in [(0, 1, Arm::Sleep), (1, 0, Arm::Spin)] {
        let client = Client { cpu: from, moves: Some((600 * MS, to)), ..CLIENT };
        let policy = run(client, NOTHING, AUTO, 1600 * MS);
        assert_eq!(policy.policies[0].base, arm, "{:?}", policy.policies[0].numbers());
    }
}

#[test]
fn a_worker_that_sleeps_because_its_wakes_are_slow_finds_out() {
    let (mut policy, mut now_ns) = policy(AUTO, 3 * MS);
    assert_eq!(policy.on_idle(now_ns, false), Decision::Sleep, "the gaps are long");
    // From now on they are long for one reason: it takes 3 ms until a sleeper runs.
    let end_ns = now_ns + SPAN_NS;
    while now_ns < end_ns {
        let mut looks = (1..=20).map(|us| policy.on_idle(now_ns + us * 1000, false));
        let sees = looks.all(|decision| decision != Decision::Sleep);
        now_ns += if sees { 20_000 } else { 3 * MS };
        if !sees {
            policy.on_slept(now_ns, 3 * MS);
        }
        policy.on_burst(now_ns, 1);
    }
    assert!(policy.numbers().gap_ns < 100_000, "{:?}", policy.numbers());
}

/// A policy that has just had work, with gaps of `gap_ns` before.
fn policy(polling: Polling, gap_ns: u64) -> (Policy, u64) {
    let mut policy = Policy::new(polling, WAKE_NS, 1);
    let bursts = 64;
    for burst in 0..=bursts {
        policy.on_burst(1 + burst * gap_ns, 0);
    }
    (policy, 1 + bursts * gap_ns)
}

/// How long the worker looks on, to a microsecond.
fn looks_for(policy: &mut Policy, worked_at_ns: u64, awaits_disk: bool) -> u64 {
    let is_look =
        |us: &u64| policy.on_idle(worked_at_ns + us * 1000, awaits_disk) != Decision::Sleep;
    (0..).take_while(is_look).count() as u64
}

#[test]
fn a_spin_lasts_ten_wakes_or_as_long_as_the_operator_says() {
    for (polling, gap_ns, us) in [
        (AUTO, 1000, 250),
        (AUTO, 249_000, 250),
        (AUTO, 260_000, 0),
        (ALWAYS, 1000, 250),
        (ALWAYS, 10 * MS, 250),
        (Polling::NEVER, 1000, 0),
        (Polling::up_to_us(0), 1000, 0),
        (Polling::up_to_us(7), 1000, 7),
        (Polling { mode: Mode::Always, cap_ns: Some(400_000) }, MS, 400),
    ] {
        let (mut policy, at) = policy(polling, gap_ns);
        assert_eq!(looks_for(&mut policy, at, false), us, "{polling:?} {gap_ns}");
        assert_eq!(policy.numbers().spins_missed, u64::from(us > 0));
    }
}

#[test]
fn a_disk_has_a_cap_of_its_own_and_a_slow_one_is_slept_for() {
    for (service_ns, us) in [(50_000, 100), (90_000, 100), (120_000, 0)] {
        let mut policy = Policy::new(AUTO, 5000, 1);
        let mut now_ns = 1;
        for _ in 0..32 {
            policy.on_burst(now_ns, 1);
            policy.on_idle(now_ns + 1000, true);
            now_ns += service_ns;
        }
        policy.on_burst(now_ns, 0);
        assert_eq!(looks_for(&mut policy, now_ns, true), us, "{service_ns}");
    }
    let (mut policy, at) = policy(Polling::up_to_us(7), 1000);
    assert_eq!(looks_for(&mut policy, at, true), 7);
}

#[test]
fn a_queue_is_looked_at_again_while_its_own_work_is_within_reach() {
    let decision = Decision::Look { reach_ns: 100 };
    assert!(decision.looks(1099, 1000));
    assert!(!decision.looks(1100, 1000));
    assert!(!Decision::Sleep.looks(1000, 1000));
}

#[test]
fn looks_and_how_spins_ended_are_counted_for_the_arm_in_use() {
    let (mut policy, at) = policy(AUTO, 1000);
    let before = policy.numbers();
    policy.on_idle(at + 300, false);
    policy.on_burst(at + 1000, 1);
    policy.on_idle(at + 1700, false);
    // Who sleeps does not look, and is not robbed of its CPU.
    policy.on_slept(at + 10 * MS, 9 * MS);
    policy.on_idle(at + 10 * MS + 50, false);
    let after = policy.numbers();
    assert_eq!(after.looked_spinning_ns - before.looked_spinning_ns, 300 + 700 + 50);
    assert_eq!((after.spins_hit, after.spins_missed, after.stolen_looks), (1, 1, 0));
    policy.on_burst(at + 11 * MS, 1);
    policy.on_idle(at + 11 * MS + 100, false);
    policy.on_burst(at + 12 * MS, 1);
    assert_eq!(policy.numbers().stolen_looks, 1, "a look of 900 us");
    let (mut never, at) = self::policy(Polling::NEVER, 1000);
    never.on_idle(at + 40, false);
    assert_eq!(never.numbers().looked_sleeping_ns, 40);
}

#[test]
fn where_both_arms_serve_alike_the_one_that_takes_less_cpu_time_is_used() {
    // Requests come every 10 us whatever the worker does; it takes `ran` ns of CPU time for each.
    let settles_at = |spinning_ran: u64, sleeping_ran: u64| {
        let mut policy = Policy::new(AUTO, WAKE_NS, 1);
        let (mut now_ns, mut ran_ns) = (1, 0);
        while now_ns < SPAN_NS {
            now_ns += 10_000;
            ran_ns += if policy.numbers().arm == Arm::Spin { spinning_ran } else { sleeping_ran };
            if policy.on_burst(now_ns, 1) {
                policy.end_epoch(now_ns, ran_ns);
            }
        }
        (policy.base, policy.numbers().effort)
    };
    assert_eq!(settles_at(10_000, 5000).0, Arm::Sleep, "twice the CPU time for nothing");
    assert_eq!(settles_at(10_000, 9000).0, Arm::Spin, "hardly any, and a shorter latency");
    assert!((1400..=2000).contains(&settles_at(10_000, 5000).1), "it is measured");
}

#[test]
fn a_glance_says_something_against_the_arm_that_is_tried_and_nothing_for_it() {
    let epoch = |ns| Cost { ns, whole_ns: ns, requests: 100, ran_ns: 1 };
    let glance = |spinning, sleeping, lately| {
        let mut trial = Trial::new(Arm::Spin, epoch(lately));
        trial.note(Arm::Sleep, epoch(sleeping));
        trial.note(Arm::Spin, epoch(spinning));
        trial.end_pair(Arm::Sleep)
    };
    assert_eq!(glance(100, 310, 100), Next::Clear, "three times as slow");
    assert_eq!(glance(100, 210, 100), Next::Pair);
    assert_eq!(glance(100, 110, 100), Next::Pair);
    assert_eq!(glance(1000, 100, 1000), Next::Pair, "ten times as fast, and not yet believed");
    assert_eq!(glance(20, 310, 1000), Next::Pair, "spinning was not so fast before");
    let mut trial = Trial::new(Arm::Spin, epoch(1000));
    trial.note(Arm::Sleep, epoch(100));
    assert!(!trial.is_far_faster(Arm::Sleep), "a glance");
    trial.end_pair(Arm::Sleep);
    assert_eq!(Trial::epoch(Some(&trial)).1, 256, "long epochs follow");
    trial.note(Arm::Sleep, epoch(100));
    assert!(trial.is_far_faster(Arm::Sleep));
    assert_eq!(trial.end_pair(Arm::Sleep), Next::Clear);
}

#[test]
fn an_epoch_is_long_enough_to_have_several_time_slices_where_some_are_stolen() {
    let epoch_us = |policy: &mut Policy, from_ns: u64| {
        let us = (1..).find(|us| policy.on_burst(from_ns + us * 1000, 1)).unwrap_or(0);
        policy.end_epoch(from_ns + us * 1000, 0);
        us
    };
    let mut policy = Policy::new(AUTO, WAKE_NS, 1);
    policy.on_burst(1, 1);
    assert_eq!(epoch_us(&mut policy, 1), 1000);
    let now_ns = 1 + MS;
    let _ = policy.on_idle(now_ns + 1000, false);
    let _ = policy.on_idle(now_ns + MS, false);
    assert_eq!(policy.numbers().stolen_looks, 1);
    assert_eq!(epoch_us(&mut policy, now_ns + MS), 15_000, "16 ms since the last");
}

#[test]
fn a_pause_of_the_client_costs_twenty_wakes_however_long_it_is() {
    let (mut policy, at) = policy(AUTO, 1000);
    let before_ns = policy.epoch.ns;
    policy.on_slept(at + 50 * MS, 50 * MS);
    policy.on_burst(at + 50 * MS, 1);
    assert_eq!(policy.epoch.ns - before_ns, 20 * WAKE_NS);
    policy.on_slept(at + 50 * MS + 200_000, 200_000);
    policy.on_burst(at + 50 * MS + 200_000, 1);
    assert_eq!(policy.epoch.ns - before_ns, 20 * WAKE_NS + 200_000, "a short one as it is");
}

#[test]
fn bursts_that_are_shorter_than_a_trial_are_served_by_the_better_arm_for_the_most_part() {
    // Two thousand requests, each of which takes half as long again by the other arm, and a pause.
    for (better, pause_ns) in
        [(Arm::Spin, 300 * MS), (Arm::Spin, 1000 * MS), (Arm::Sleep, 300 * MS)]
    {
        let mut policy = Policy::new(AUTO, WAKE_NS, 1);
        let (mut now_ns, mut ran_ns, mut well) = (1, 0, 0);
        let bursts = 300;
        for _ in 0..bursts {
            for _ in 0..2000 {
                let arm = policy.numbers().arm;
                let took_ns = if arm == better { 10_000 } else { 15_000 };
                ran_ns += if arm == Arm::Spin { took_ns } else { 5000 };
                now_ns += took_ns;
                well += u64::from(arm == better);
                if policy.on_burst(now_ns, 1) {
                    policy.end_epoch(now_ns, ran_ns);
                }
            }
            now_ns += pause_ns;
            policy.on_slept(now_ns, pause_ns);
        }
        let share = well / (2 * bursts);
        assert!(share > 900, "{better:?} {pause_ns}: {share} of 1000, {:?}", policy.numbers());
    }
}

#[test]
fn a_clock_that_jumps_in_a_trial_keeps_nobody_from_the_next_one_for_long() {
    let mut policy = Policy::new(AUTO, WAKE_NS, 1);
    let (mut now_ns, mut jumps_ns) = (1, 3_600_000 * MS);
    let mut trials = 0;
    for _ in 0..200_000_000 / 1000 {
        now_ns += 10_000;
        if policy.trial.is_some() && policy.numbers().arm != policy.base {
            now_ns += std::mem::take(&mut jumps_ns);
        }
        if policy.on_burst(now_ns, 1) {
            policy.end_epoch(now_ns, now_ns);
        }
        trials = policy.numbers().trials;
    }
    assert!(jumps_ns == 0 && trials > 0);
    assert!(
        policy.next_trial_ns < now_ns + 600_000 * MS,
        "{} s",
        (policy.next_trial_ns - now_ns) / MS
    );
}

#[test]
fn intervals_between_trials_differ_by_up_to_a_quarter_and_from_worker_to_worker() {
    let intervals = |seed| -> Vec<u64> {
        let mut policy = Policy::new(AUTO, WAKE_NS, seed);
        (0..64).map(|_| policy.jittered(8000)).collect()
    };
    let of_one = intervals(0);
    assert!(of_one.iter().all(|ns| (6000..=10_000).contains(ns)), "{of_one:?}");
    assert!(of_one.iter().min() < Some(&6500) && of_one.iter().max() > Some(&9500), "{of_one:?}");
    assert_ne!(of_one, intervals(1));
    assert_eq!(of_one, intervals(0));
}

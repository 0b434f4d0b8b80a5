//! Processes that say what they like, and the clock of the test.

use super::*;
use crate::limit::lease::Usage;

const TICK_NS: u64 = 10_000_000;
/// The bucket that the tests use; all others need nothing.
const INDEX: usize = 5;

/// What a process with these members says, each of which needs this much.
fn claim(account: &Account, needs_ns: &[u64]) -> Claim {
    let mut usages = Usages::default();
    let granted_ns = account.granted_ns[INDEX];
    usages[INDEX] = Usage::new(granted_ns, 0, needs_ns.iter().copied());
    Claim { members: needs_ns.len() as u64, usages }
}

/// Ticks for a second, in which members always need this much. Returns what each process is
/// granted in the bucket, in that second.
fn second(needs_ns: &[&[u64]]) -> Vec<u64> {
    let (mut divider, mut accounts) = (Divider::new(0), vec![Account::default(); needs_ns.len()]);
    for tick in 1..=100 {
        let claims = accounts.iter().zip(needs_ns).map(|(account, needs)| claim(account, needs));
        let mut all: Vec<_> = accounts.iter().copied().zip(claims).collect();
        assert!(divider.tick(&mut all, 0, tick * TICK_NS));
        accounts = all.into_iter().map(|(account, _)| account).collect();
    }
    accounts.iter().map(|account| account.granted_ns[INDEX]).collect()
}

fn assert_near(granted_ns: &[u64], percent: &[u64]) {
    for (granted_ns, percent) in granted_ns.iter().zip(percent) {
        let expected_ns = percent * 10_000_000;
        assert!(granted_ns.abs_diff(expected_ns) <= 10_000_000, "{granted_ns} of {expected_ns}");
    }
    let sum: u64 = granted_ns.iter().sum();
    assert!((990_000_000..=1_000_000_000).contains(&sum), "{sum}");
}

#[test]
fn members_have_equal_parts_whichever_processes_have_them_and_nobody_gets_more_than_it_needs() {
    const ALL: u64 = 50_000_000;
    assert_near(&second(&[&[ALL], &[ALL]]), &[50, 50]);
    assert_near(&second(&[&[ALL, ALL, ALL], &[ALL]]), &[75, 25]);
    // A member that needs a twentieth leaves the rest to the two others, equally.
    assert_near(&second(&[&[500_000, ALL], &[ALL]]), &[53, 47]);
    assert_near(&second(&[&[1_000_000], &[ALL], &[]]), &[10, 90, 0]);
    assert_near(&second(&[&[], &[ALL]]), &[0, 100]);
    assert_near(&second(&[&[700; 100], &[70_000; 200]]), &[1, 99]);
}

#[test]
fn a_process_that_lies_has_its_fair_part_and_no_more() {
    let all = Usage { seen_ns: 0, held_ns: 0, needs_ns: [u64::MAX; LEVELS] };
    let spent = Usage { seen_ns: u64::MAX, ..all };
    let saves = Usage { held_ns: u64::MAX, ..spent };
    let falls = Usage { needs_ns: std::array::from_fn(|at| u64::MAX >> at), ..spent };
    for lie in [all, spent, saves, falls] {
        let (mut divider, mut accounts) = (Divider::new(0), [Account::default(); 2]);
        for tick in 1..=100 {
            let liar = Claim { members: 1, usages: [lie; CHARGES_MAX] };
            let honest = claim(&accounts[1], &[50_000_000; 3]);
            let mut all = [(accounts[0], liar), (accounts[1], honest)];
            divider.tick(&mut all, 0, tick * TICK_NS);
            accounts = all.map(|(account, _)| account);
        }
        let [liar_ns, honest_ns] = accounts.map(|account| account.granted_ns[INDEX]);
        assert!(liar_ns <= 260_000_000, "{lie:?}: {liar_ns}");
        assert!(honest_ns >= 740_000_000, "{lie:?}: {honest_ns}");
        assert!(liar_ns + honest_ns <= 1_000_000_000, "{lie:?}");
    }
}

#[test]
fn one_that_does_not_look_gets_what_it_needed_once_and_one_that_ends_leaves_its_part() {
    let (mut divider, mut accounts) = (Divider::new(0), [Account::default(); 2]);
    let silent = claim(&Account::default(), &[30_000_000]);
    for tick in 1..=100 {
        let mut all = [(accounts[0], silent), (accounts[1], claim(&accounts[1], &[50_000_000]))];
        divider.tick(&mut all, 0, tick * TICK_NS);
        accounts = all.map(|(account, _)| account);
    }
    assert!(accounts[0].granted_ns[INDEX] <= 30_000_000, "{accounts:?}");
    let before_ns = accounts[1].granted_ns[INDEX];
    assert!(before_ns >= 960_000_000, "{accounts:?}");
    for tick in 101..=200 {
        let mut all = [(accounts[1], claim(&accounts[1], &[50_000_000]))];
        divider.tick(&mut all, 0, tick * TICK_NS);
        accounts[1] = all[0].0;
    }
    assert!(accounts[1].granted_ns[INDEX] - before_ns >= 999_000_000);
}

#[test]
fn a_group_in_which_nothing_happens_needs_no_tick_and_keeps_no_more_than_its_credit() {
    let (mut divider, mut accounts) = (Divider::new(0), [Account::default(); 3]);
    let mut tick = |divider: &mut Divider, now_ns| {
        let of = |account: Account| {
            let mut claim = claim(&account, &[0]);
            // All that was granted is held.
            claim.usages.iter_mut().zip(account.granted_ns).for_each(|(usage, granted_ns)| {
                (usage.seen_ns, usage.held_ns) = (granted_ns, granted_ns);
            });
            (account, claim)
        };
        let mut all = accounts.map(of);
        let goes_on = divider.tick(&mut all, 80, now_ns);
        accounts = all.map(|(account, _)| account);
        (goes_on, accounts.iter().map(|account| account.granted_ns[INDEX]).sum::<u64>())
    };
    let mut now_ns = 0;
    let held_ns = loop {
        now_ns += TICK_NS;
        assert!(now_ns < 20 * TICK_NS, "it never rests");
        let (goes_on, held_ns) = tick(&mut divider, now_ns);
        if !goes_on {
            break held_ns;
        }
    };
    // A quarter of 80 ms, but for what cannot be divided by three.
    assert!((19_999_990..=20_000_000).contains(&held_ns), "{held_ns}");
    tick(&mut divider, now_ns + 3_600_000_000_000);
    assert_eq!(divider.left_ns[INDEX] + held_ns, 80_000_000);
    divider.wake();
    assert!(tick(&mut divider, now_ns + 3_600_010_000_000).0);
}

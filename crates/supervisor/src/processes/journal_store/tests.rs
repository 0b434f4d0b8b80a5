//! What the supervisor keeps of front-ends, and the bounds of it.

mod session;

use super::*;
use manyring_serve::outgoing::by_name;

fn journals() -> Arc<JournalStore> {
    JournalStore::new("d", 2)
}

fn add(journals: &JournalStore) -> u64 {
    journals.add(journals.hold(fd()), &Surplus::default()).unwrap()
}

/// Keeps this number of descriptors under a name.
fn keep(journals: &JournalStore, number: u64, name: u64, count: usize) -> Result<(), String> {
    let fds = (0..count).map(|_| fd()).collect();
    journals.keep(number, (Some(name), &[]), fds, &Surplus::default())
}

fn release(journals: &JournalStore, number: u64, names: &[u64]) -> Result<(), String> {
    journals.keep(number, (None, names), Vec::new(), &Surplus::default())
}

fn fd() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

#[test]
fn the_next_device_process_is_handed_what_is_named_and_then_the_socket_with_the_journal() {
    let journals = journals();
    let number = add(&journals);
    keep(&journals, number, 9, 2).unwrap();
    keep(&journals, number, 4, 1).unwrap();
    keep(&journals, number, 5, 3).unwrap();
    release(&journals, number, &[5, 77]).unwrap();
    for _ in 0..2 {
        let handing = journals.handings();
        let [(saved, fds), (client, pair)] = &handing[..] else { panic!("{handing:?}") };
        let named = [(4, 1), (9, 2)].map(|(name, count)| NamedFds { name, count });
        let device = "d".to_owned();
        assert_eq!(*saved, Command::SavedFds { device: device.clone(), named: named.into() });
        assert_eq!((fds.len(), pair.len()), (3, 2));
        assert_eq!(*client, Command::Client { device, number });
        // The second one is the journal, whose size nobody can change.
        let size = rustix::fs::fstat(&pair[1]).unwrap().st_size;
        assert_eq!(usize::try_from(size).unwrap(), journal_layout::file_size(entries_max(2)));
        assert!(rustix::fs::ftruncate(&pair[1], 0).is_err());
    }
    journals.forget(number);
    assert!(journals.handings().is_empty() && !journals.is_used());
}

#[test]
fn descriptors_of_a_message_belong_to_their_names_in_order() {
    let named = [(7, 1), (3, 2), (8, 4)].map(|(name, count)| NamedFds { name, count });
    let found: Vec<_> = by_name(named.into(), (0..5).map(|_| fd()).collect()).collect();
    let counts: Vec<_> = found.iter().map(|(name, fds)| (*name, fds.len())).collect();
    assert_eq!(counts, [(7, 1), (3, 2), (8, 2)]);
}

#[test]
fn a_number_is_given_once_also_when_a_device_is_put_together_again() {
    let before = journals();
    let number = add(&before);
    let again = journals();
    add(&again);
    // The report is about a removed device of the same name.
    again.forget(number);
    assert!(again.is_used());
}

#[test]
fn a_device_process_that_keeps_what_it_may_not_is_refused() {
    let journals = journals();
    let number = add(&journals);
    keep(&journals, number, 1, ENTRY_FDS_MAX).unwrap();
    assert!(keep(&journals, number, 1, 1).is_err(), "a name is in use");
    assert!(keep(&journals, number, 2, 0).is_err(), "a name of nothing");
    assert!(keep(&journals, number, 3, ENTRY_FDS_MAX + 1).is_err());
    let unnamed = journals.keep(number, (None, &[]), vec![fd()], &Surplus::default());
    assert!(unnamed.is_err(), "descriptors without a name");
    // Of a front-end that was released.
    keep(&journals, number + 1000, 1, 1).unwrap();
    let names = (2..).take_while(|name| keep(&journals, number, *name, 1).is_ok()).count();
    assert_eq!(names + 1, entries_max(2), "of one session");
}

/// The descriptors of a walk over all clients.
fn walked(journals: &JournalStore) -> usize {
    journals.lock().clients.values().map(Client::fds).sum()
}

#[test]
fn the_count_of_descriptors_is_that_of_a_walk_after_any_report() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let _entered = runtime.enter();
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |n: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % n
    };
    let (journals, mut most) = (journals(), 0);
    let (mut numbers, mut refused) = (Vec::new(), 0);
    for step in 0..20_000 {
        while numbers.len() < 3 {
            numbers.push(add(&journals));
        }
        let index = usize::try_from(next(3)).unwrap();
        match next(300) {
            0 => journals.forget(numbers.swap_remove(index)),
            // Those that are lost go, and others after 8 times.
            1 => journals.orphan(),
            2 if next(8) == 0 => journals.forget_all(),
            3 => {
                let mut kept = journals.lock();
                kept.clients.values_mut().take(1).for_each(|client| client.is_lost = true);
            }
            _ => {
                let released: Vec<_> = (0..next(3)).map(|_| next(64)).collect();
                let name = (next(3) > 0).then(|| next(64));
                let fds: Vec<_> = (0..next(4)).map(|_| fd()).collect();
                let kept = (name, &released[..]);
                let kept = journals.keep(numbers[index], kept, fds, &Surplus::default());
                refused += u32::from(kept.is_err());
            }
        }
        numbers.retain(|number| journals.lock().clients.contains_key(number));
        let fds = journals.lock().fds;
        assert_eq!(fds, walked(&journals), "step {step}");
        most = most.max(fds);
    }
    assert!(most > 30 && refused > 10, "{most} {refused}");
}

#[test]
fn what_a_device_keeps_is_bounded_over_all_its_front_ends() {
    let journals = journals();
    let all = (0..CLIENTS_MAX).map(|_| add(&journals));
    let all: Vec<_> = all.collect();
    // The next front-end waits while there are too many.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let place = journals.has_place();
        tokio::pin!(place);
        let ready = std::future::poll_fn(|context| {
            std::task::Poll::Ready(place.as_mut().poll(context).is_ready())
        });
        assert!(!ready.await);
        journals.forget(all[0]);
        place.await;
    });
    let most = SESSIONS_MAX * entries_max(journals.queues);
    let names = all[1..].iter().flat_map(|number| (1..=700).map(move |name| (*number, name)));
    let kept = names.take_while(|(number, name)| keep(&journals, *number, *name, 8).is_ok());
    let kept = 8 * kept.count();
    assert!((most..most + 2 * ENTRY_FDS_MAX).contains(&kept), "{kept} of {most}");
}

#[test]
fn a_front_end_whose_device_processes_die_at_once_is_let_go_of() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let journals = journals();
        add(&journals);
        for _ in 1..BRIEF_LIVES_MAX {
            journals.orphan();
            assert_eq!(journals.handings().len(), 1);
        }
        journals.orphan();
        assert!(journals.handings().is_empty() && !journals.is_used());
    });
}

/// Needs root.
#[test]
fn a_socket_of_af_xdp_is_not_kept_and_its_front_end_ends_with_the_device_process() {
    let journals = journals();
    let number = add(&journals);
    let (family, flags) = (AddressFamily::XDP, rustix::net::SocketFlags::CLOEXEC);
    let xdp = rustix::net::socket_with(family, rustix::net::SocketType::RAW, flags, None);
    let xdp = vec![xdp.expect("root makes sockets")];
    journals.keep(number, (Some(1), &[]), xdp, &Surplus::default()).unwrap();
    assert_eq!(journals.lock().fds, 0);
    journals.orphan();
    assert!(!journals.is_used());
}

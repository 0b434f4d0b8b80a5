//! The ring against real files and eventfds.

use super::*;
use io_uring::types::Fd;
use manyring_memory::Mapping;
use rustix::fd::AsFd;
use std::os::unix::fs::FileExt;

/// [`Ring::transfer`] of memory that outlives its completion.
fn transfer(
    ring: &mut Ring,
    op: FileOp,
    (file, offset): (RingFile, u64),
    slices: &[GuestSlice],
    punt: bool,
    user_data: u64,
) {
    let disk = ring.open_disk(1, 1);
    let submitter = if punt { Submitter::Kernel(Width::Narrow) } else { Submitter::Own };
    // SAFETY: every test waits for all its completions before its memory is unmapped.
    unsafe { ring.transfer(op, (disk, file), slices, offset, submitter, user_data) };
}

#[test]
fn a_write_and_a_read_pass_through_the_ring() {
    let mut ring = Ring::new().unwrap();
    let file = tempfile::tempfile().unwrap();
    let registered = ring.register_file(file.as_fd());
    let memory = Mapping::anonymous(8192).unwrap();
    let (source, target) = (memory.slice(0, 4096).unwrap(), memory.slice(4096, 4096).unwrap());
    source.write_from(&[7; 4096]);
    let mut events = Vec::new();
    transfer(&mut ring, FileOp::Write { dsync: true }, (registered, 512), &[source], true, 1);
    ring.wait(None).unwrap();
    ring.reap(&mut events);
    let plain = RingFile::Plain(file.as_raw_fd());
    transfer(&mut ring, FileOp::Read, (plain, 512), &[target], false, 2);
    ring.wait(None).unwrap();
    ring.reap(&mut events);
    assert_eq!(
        events.iter().map(|e| (e.user_data, e.result)).collect::<Vec<_>>(),
        [(1, 4096), (2, 4096)]
    );
    let mut byte = [0];
    target.read_into(&mut byte);
    assert_eq!(byte, [7]);
    ring.unregister_file(registered);
}

#[test]
fn every_write_to_a_watched_eventfd_is_an_event_though_it_is_never_read() {
    let mut ring = Ring::new().unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    ring.poll(event.as_fd(), 9);
    ring.submit().unwrap();
    for _ in 0..3 {
        rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
        let mut events = Vec::new();
        ring.wait(Some(Duration::from_secs(5))).unwrap();
        ring.reap(&mut events);
        assert!(events.iter().any(|e| e.user_data == 9 && e.more), "{events:?}");
    }
    let mut events = Vec::new();
    ring.wait(Some(Duration::from_millis(1))).unwrap();
    ring.reap(&mut events);
    assert!(events.is_empty());
}

/// Every transfer writes bytes of its own to a place of its own; `slices_of` says how many slices
/// the n-th has. Nothing is submitted in between, so the submission queue runs full.
fn every_transfer_writes_its_own_bytes(count: u16, slices_of: impl Fn(u16) -> usize) {
    let mut ring = Ring::new().unwrap();
    let file = tempfile::tempfile().unwrap();
    let plain = RingFile::Plain(file.as_raw_fd());
    let memory = Mapping::anonymous(u64::from(count) * 512).unwrap();
    for n in 0..count {
        let at = usize::from(n) * 512;
        memory.slice(at, 512).unwrap().write_from(&n.to_le_bytes().repeat(256));
        let pieces = slices_of(n);
        let piece = |i| memory.slice(at + i * (512 / pieces), 512 / pieces).unwrap();
        let slices: Vec<_> = (0..pieces).map(piece).collect();
        let op = FileOp::Write { dsync: false };
        transfer(&mut ring, op, (plain, u64::from(n) * 512), &slices, false, n.into());
    }
    let mut events = Vec::new();
    while events.len() < usize::from(count) {
        ring.wait(Some(Duration::from_secs(10))).unwrap();
        let before = events.len();
        ring.reap(&mut events);
        assert!(events.len() > before, "{before} of {count} completed");
    }
    let odd: Vec<_> = events.iter().filter(|e| e.result != 512).collect();
    assert!(odd.is_empty(), "{odd:?}");
    for n in 0..count {
        let mut bytes = [0; 512];
        file.read_exact_at(&mut bytes, u64::from(n) * 512).unwrap();
        assert_eq!(bytes[..], n.to_le_bytes().repeat(256), "transfer {n}");
    }
}

#[test]
fn a_transfer_that_finds_the_submission_queue_full_keeps_its_slices() {
    // The entry after a full queue has its slices where those of the next entries, which have
    // more of them, would be written if its own were forgotten with those of the full queue.
    every_transfer_writes_its_own_bytes(600, |n| if n <= 256 { 2 } else { 4 });
}

#[test]
fn a_transfer_that_finds_no_room_for_slices_keeps_those_of_the_others() {
    every_transfer_writes_its_own_bytes(200, |n| if n % 2 == 0 { 64 } else { 128 });
}

#[test]
fn a_task_that_was_parked_goes_out_with_its_own_slices_and_in_its_turn() {
    let mut ring = Ring::new().unwrap();
    let file = tempfile::tempfile().unwrap();
    let file_of_ring = RingFile::Plain(file.as_raw_fd());
    let memory = Mapping::anonymous(4096).unwrap();
    let piece = |at| memory.slice(at, 512).unwrap();
    memory.slice(0, 1024).unwrap().write_from(&[1; 1024]);
    memory.slice(1024, 1024).unwrap().write_from(&[2; 1024]);
    let op = FileOp::Write { dsync: false };
    // As if the kernel had taken nothing just now.
    let work = Work::Transfer { op, file: file_of_ring, offset: 0, submitter: Submitter::Own };
    let parked = as_iovecs(&[piece(0), piece(512)]).to_vec();
    ring.parked.push_back((UnwrittenEntry { work, user_data: 1, waits_for: None }, parked));
    transfer(&mut ring, op, (file_of_ring, 1024), &[piece(1024), piece(1536)], false, 2);
    let mut events = Vec::new();
    while events.len() < 2 {
        ring.wait(Some(Duration::from_secs(10))).unwrap();
        ring.reap(&mut events);
    }
    assert_eq!(events.iter().map(|e| e.result).collect::<Vec<_>>(), [1024, 1024]);
    let mut bytes = [0; 2048];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes[..1024].iter().all(|b| *b == 1) && bytes[1024..].iter().all(|b| *b == 2));
}

#[test]
fn a_transfer_of_more_slices_than_an_entry_takes_is_short() {
    let mut ring = Ring::new().unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let memory = Mapping::anonymous(1 << 20).unwrap();
    let slices: Vec<_> = (0..2000).map(|n| memory.slice(n * 512, 512).unwrap()).collect();
    let mut events = Vec::new();
    let plain = RingFile::Plain(file.as_raw_fd());
    transfer(&mut ring, FileOp::Read, (plain, 0), &slices, false, 1);
    ring.wait(Some(Duration::from_secs(10))).unwrap();
    ring.reap(&mut events);
    assert_eq!(events[0].result, 1024 * 512);
}

#[test]
fn a_flush_that_finds_its_lane_full_ends_with_the_result_of_a_call_of_its_own() {
    let mut ring = Ring::new().unwrap();
    let file = tempfile::tempfile().unwrap();
    let (disk, plain) = (ring.open_disk(1, 1), RingFile::Plain(file.as_raw_fd()));
    for n in 0..100 {
        // The fifth, which is the first to wait, names no file. Only that one may fail: the file of
        // each other one is asked itself whether it has lost anything.
        let file = if n == 4 { RingFile::Plain(-1) } else { plain };
        ring.flush(disk, file, n);
    }
    assert_eq!((ring.aside(), ring.slots.waiting()), (4, 96));
    let mut events = Vec::new();
    while events.len() < 100 {
        ring.wait(Some(Duration::from_secs(10))).unwrap();
        let before = events.len();
        ring.reap(&mut events);
        assert!(events.len() > before, "{before} of 100 completed");
    }
    let mut results: Vec<_> = events.iter().map(|e| (e.user_data, e.result)).collect();
    results.sort_unstable();
    let expected = |n| (n, if n == 4 { -libc::EBADF } else { 0 });
    assert_eq!(results, (0..100).map(expected).collect::<Vec<_>>());
    ring.flush(disk, plain, 100);
    ring.wait(Some(Duration::from_secs(10))).unwrap();
    ring.reap(&mut events);
    assert_eq!(events[100].result, 0, "nothing is left of the refused one");
}

#[test]
fn an_entry_is_watched_when_it_is_submitted_whoever_ends_a_call_before() {
    let mut ring = Ring::new().unwrap();
    let file = tempfile::tempfile().unwrap();
    let memory = Mapping::anonymous(4096).unwrap();
    let plain = RingFile::Plain(file.as_raw_fd());
    let others = ring.open_disk(2, 2);
    let piece = [memory.slice(0, 512).unwrap()];
    transfer(&mut ring, FileOp::Write { dsync: false }, (plain, 0), &piece, false, 1);
    let began = ring.begin();
    ring.calls(others);
    ring.took(began);
    assert!(ring.watch.has_placed(), "nobody would see how long it makes the worker wait");
    ring.submit().unwrap();
    assert!(!ring.watch.has_placed());
    ring.wait(None).unwrap();
}

#[test]
fn a_device_is_not_blamed_for_a_call_to_another() {
    let mut ring = Ring::new().unwrap();
    let file = tempfile::tempfile().unwrap();
    let memory = Mapping::anonymous(4096).unwrap();
    let plain = RingFile::Plain(file.as_raw_fd());
    let (mine, others) = (ring.open_disk(1, 1), ring.open_disk(2, 2));
    let piece = [memory.slice(0, 512).unwrap()];
    transfer(&mut ring, FileOp::Write { dsync: false }, (plain, 0), &piece, false, 1);
    let began = ring.begin();
    ring.calls(others);
    std::thread::sleep(Duration::from_millis(20));
    ring.took(began);
    assert!(ring.is_fast(mine) && !ring.is_fast(others));
    // Nor is a call blamed for entries that are submitted in the midst of it.
    let third = ring.open_disk(3, 3);
    let began = ring.begin();
    ring.calls(third);
    std::thread::sleep(Duration::from_millis(20));
    // However long that sleep was.
    ring.watch.submission_took(3_600_000_000_000);
    ring.took(began);
    assert!(ring.is_fast(third));
    ring.wait(None).unwrap();
}

#[test]
fn a_transfer_that_is_to_be_made_at_once_ends_where_it_would_have_to_wait() {
    let mut ring = Ring::new().unwrap();
    // Nothing was written to it.
    let (reader, _writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let memory = Mapping::anonymous(4096).unwrap();
    let (disk, plain) = (ring.open_disk(1, 1), RingFile::Plain(reader.as_raw_fd()));
    let pieces = [memory.slice(0, 512).unwrap(), memory.slice(512, 512).unwrap()];
    for count in [1, 2] {
        let slices = &pieces[..count];
        // SAFETY: it is waited for below, or this test fails.
        unsafe { ring.transfer(FileOp::Read, (disk, plain), slices, 0, Submitter::OwnAtOnce, 1) };
        let mut events = Vec::new();
        ring.wait(Some(Duration::from_secs(10))).unwrap();
        ring.reap(&mut events);
        assert_eq!(events.first().map(|event| event.result), Some(-libc::EAGAIN));
    }
}

#[test]
fn the_kernel_has_a_thread_for_each_entry_that_the_lanes_of_a_ring_let_in() {
    let mut ring = Ring::new().unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let memory = Mapping::anonymous(512).unwrap();
    let slices = [memory.slice(0, 512).unwrap()];
    let plain = RingFile::Plain(file.as_raw_fd());
    let (mut asked, mut ended) = (0, 0);
    for disk in 0..8 {
        let disk = ring.open_disk(disk, disk);
        for width in [Width::Narrow, Width::Wide] {
            for _ in 0..40 {
                let submitter = Submitter::Kernel(width);
                // SAFETY: all are waited for below, or this test fails.
                unsafe {
                    ring.transfer(FileOp::Read, (disk, plain), &slices, 0, submitter, asked);
                }
                asked += 1;
            }
        }
    }
    // Zeroes change nothing, and are answered with the numbers that are in force.
    let mut allowed = [0, 0];
    ring.uring.submitter().register_iowq_max_workers(&mut allowed).unwrap();
    let let_in = ring.aside();
    let mut events = Vec::new();
    while ended < asked {
        ring.wait(Some(Duration::from_secs(10))).unwrap();
        ring.reap(&mut events);
        assert!(!events.is_empty(), "{ended} of {asked} completed");
        ended += events.drain(..).count() as u64;
    }
    assert_eq!(let_in, 8 * 36);
    assert!(allowed[0] as usize >= let_in, "{allowed:?} threads");
}

/// True if the kernel refuses an entry that was written into a ring's submission queue.
fn refused(entry: &io_uring::squeue::Entry) -> bool {
    let mut ring = Ring::new().unwrap();
    // SAFETY: the entries of these tests name no memory.
    unsafe { ring.uring.submission().push(&entry.clone().user_data(7)).unwrap() };
    ring.wait(Some(Duration::from_secs(5))).unwrap();
    let mut events = Vec::new();
    ring.reap(&mut events);
    events.iter().any(|event| event.user_data == 7 && event.result == -libc::EACCES)
}

#[test]
fn a_ring_takes_no_request_but_those_that_it_is_made_for() {
    use io_uring::{opcode, squeue::Flags};
    let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_DGRAM, 0).build();
    let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), std::ptr::null()).build();
    let send = opcode::SendMsg::new(Fd(0), std::ptr::null()).build();
    // With TCP's fast open it connects a socket anew, to an address of the submitter's choice.
    let sends = opcode::Send::new(Fd(0), std::ptr::null(), 0).build();
    for entry in [opcode::Nop::new().build(), socket, open, send, sends] {
        assert!(refused(&entry), "{entry:?}");
    }
    let poll = || opcode::PollRemove::new(99).build();
    assert!(refused(&poll().flags(Flags::IO_LINK)), "nor a flag");
    assert!(!refused(&poll()));
}

#[test]
fn an_enabled_ring_takes_no_registration_but_files_and_a_number_of_threads() {
    let mut ring = Ring::new().unwrap();
    let events = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let refused = ring.uring.submitter().register_eventfd(events.as_raw_fd()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    let refused = ring.uring.submitter().register_personality().unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    assert!(matches!(ring.register_file(events.as_fd()), RingFile::Registered(_)));
    ring.uring.submitter().register_iowq_max_workers(&mut [1, 0]).unwrap();
}

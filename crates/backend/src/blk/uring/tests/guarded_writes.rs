//! Images of several guests on one ring: one of them waits, and the others do not.

#![allow(clippy::disallowed_methods, reason = "the test measures how long a write was kept")]

use super::*;
use std::time::{Duration, Instant};

/// Kernel threads tell files apart by 6 bits of a hash, so that 256 files share 64 numbers.
const IMAGES: u64 = 256;
/// Bytes of one write that keeps the file system busy for a few tenths of a second, during which it
/// writes to no other part of that file. A fast host needs more bytes for that.
const LONG: std::ops::RangeInclusive<usize> = 256 << 20..=1 << 30;

/// A write takes at least this long; the writes to all other files together take a tenth of it.
const LONG_ENOUGH: Duration = Duration::from_millis(150);

/// A queue of each image, all of them on `ring`.
fn queues(ring: &mut Ring) -> Vec<(tempfile::NamedTempFile, Box<dyn DiskQueue>)> {
    let queue_of = |number| {
        let file = image();
        let image = Image::open_again(file.path(), ImageOptions::default());
        let mut queue = UringDisk::new(image).unwrap().open_queue(true).unwrap();
        queue.attach(Some(ring), number << 32);
        (file, queue)
    };
    (0..IMAGES).map(queue_of).collect()
}

/// Writes to every image while a write of somebody else keeps the first one waiting. How many of
/// the others were not done before the first; `None` if it did not wait for long. That write has
/// `long` bytes.
fn late_ones(long: usize) -> Option<usize> {
    let mut ring = Ring::new().unwrap();
    let memory = Arc::new(Mapping::anonymous(4096).unwrap());
    let mut queues = queues(&mut ring);
    let (begins, begun) = std::sync::mpsc::channel();
    let path = queues[0].0.path().to_owned();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (bytes, file) = (vec![1; long], std::fs::File::options().write(true).open(path));
            begins.send(()).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file.unwrap(), &bytes, 0).unwrap();
        });
        begun.recv().unwrap();
        std::thread::sleep(Duration::from_millis(10));
        let (mut done, mut events) = (Vec::new(), Vec::new());
        for (_, queue) in &mut queues {
            let mut burst = Burst::default();
            burst.slices().extend(SliceList::of_mapping(&memory, &[(0, 4096)]).unwrap().all());
            burst.push(0, Op::Write { durable: false }, 0, 4096);
            queue.submit(&burst, Some(&mut ring), &mut done);
        }
        let (began, mut late) = (Instant::now(), None);
        while done.len() < queues.len() {
            // A wake may find nothing: what it tells of was taken with the wake before.
            ring.wait(Some(Duration::from_secs(60))).unwrap();
            ring.reap(&mut events);
            assert!(began.elapsed() < Duration::from_secs(60), "nobody answers");
            for event in events.drain(..) {
                let (at, before) = (usize::try_from(event.user_data >> 32).unwrap(), done.len());
                queues[at].1.on_event(0, event.result, Some(&mut ring), &mut done);
                if at == 0 && done.len() > before && began.elapsed() > LONG_ENOUGH {
                    late = Some(queues.len() - done.len());
                }
            }
        }
        assert!(done.iter().all(|completion| completion.result.is_ok()), "{done:?}");
        late
    })
}

#[test]
fn a_write_that_the_file_system_keeps_holds_up_no_write_to_another_image() {
    // On a busy host the long write may keep the first image for too short a time, or others may
    // have had no CPU until it was done: try again then. If images waited for each other, one try
    // in fifty would show none that is late, by chance, and three of twelve hardly ever would.
    let (mut found, mut long) = (Vec::new(), *LONG.start());
    for _ in 0..12 {
        match late_ones(long) {
            Some(count) => found.push(count),
            None => long = (long * 2).min(*LONG.end()),
        }
        if found.iter().filter(|late| **late == 0).count() == 3 {
            return;
        }
    }
    panic!("late in each try: {found:?}");
}

//! How long the host's own disk holds up whoever asks it, seen beside the daemon.
//!
//! A thread does again and again what the guest asks of the daemon, in a file of its own beside the
//! guest's image: it zeroes a block, writes it and makes it durable, through the page cache or past
//! it as the image is. The block turns from zeroes into data each time, so that the file system has
//! to write what it knows of the file as well as the data. Where it keeps that of several files in
//! one block of the disk, each flush waits for those of the others. A write over old data does not:
//! such a probe saw nothing of a flush that took 79 ms in a program beside it. A request of the
//! guest that was late while such a round was late is the disk's fault as far as the two overlap.
//! The time that the thread itself waited for a CPU is no delay of the disk.
//!
//! A slow round is followed by the next one at once. If the thread paused after it, a disk that is
//! slow for long would be seen for a part of that time only.

use super::late::run_delay;
use crate::{Context, Outcome};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Between two rounds, if the first was not slow.
const PAUSE: Duration = Duration::from_millis(5);
/// Quicker rounds explain nothing: a disk that nobody else uses takes a fifth of that.
const SLOW: Duration = Duration::from_millis(10);
/// Slow rounds that are kept: more than the longest request lasts.
const KEPT: usize = 10_000;

type Span = (Instant, Instant);

/// The slow rounds of late; the thread ends when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Probe {
    slow: Mutex<VecDeque<Span>>,
    /// How long all slow rounds took.
    late: Mutex<Duration>,
    /// The start of the round that is under way.
    begun: Mutex<Option<Instant>>,
}

impl Probe {
    /// Probes the disk below `image`, in a file of its own beside it: past the page cache if
    /// `is_direct`.
    pub(super) fn start(image: &Path, is_direct: bool) -> Outcome<Arc<Self>> {
        let file = open_beside(image, is_direct)?;
        let probe = Arc::new(Self::default());
        let weak = Arc::downgrade(&probe);
        let run = move || probe_until_dropped(&weak, &file);
        std::thread::Builder::new().name("probe".into()).spawn(run).context("a thread")?;
        Ok(probe)
    }

    /// Ends the round under way, whose wait lasted from `start` to `end`. A thread that looks at
    /// this time sees the round under way or ended.
    pub(super) fn ended(&self, start: Instant, end: Instant) {
        let mut slow = self.slow();
        *self.begun() = None;
        if end.saturating_duration_since(start) < SLOW {
            return;
        }
        if slow.len() == KEPT {
            slow.pop_front();
        }
        slow.push_back((start, end));
        *self.late.lock().unwrap_or_else(PoisonError::into_inner) += end - start;
    }

    fn slow(&self) -> MutexGuard<'_, VecDeque<Span>> {
        self.slow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never locked before [`Self::slow`] by whoever needs both.
    fn begun(&self) -> MutexGuard<'_, Option<Instant>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long the disk was late in all.
    pub(super) fn late(&self) -> Duration {
        *self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much of the time from `start` to `end` slow rounds took.
    pub(super) fn overlap(&self, start: Instant, end: Instant) -> Duration {
        let slow = self.slow();
        let begun = *self.begun();
        let under_way = begun.map(|begin| (begin, end)).filter(|(begin, _)| *begin + SLOW < end);
        slow.iter().copied().chain(under_way).map(|span| common((start, end), span)).sum()
    }
}

/// The time that two spans have in common.
fn common(one: Span, other: Span) -> Duration {
    one.1.min(other.1).saturating_duration_since(one.0.max(other.0))
}

/// The probe's file, opened as the daemon opens `image`.
fn open_beside(image: &Path, is_direct: bool) -> Outcome<File> {
    let path = image.with_extension("probe");
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let open = |more| rustix::fs::open(&path, flags | more, Mode::RUSR | Mode::WUSR);
    let past_the_cache = if is_direct { OFlags::DIRECT } else { OFlags::empty() };
    // Where there is no O_DIRECT the writes go to the page cache.
    let file = open(past_the_cache).or_else(|_| open(OFlags::empty()));
    Ok(File::from(file.context(path.display())?))
}

/// The calls that the guest asks of the daemon, made here.
fn one_round(file: &File, block: &Aligned) -> std::io::Result<()> {
    let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    // A file system that cannot zero a range has the daemon write zeroes, which is a write too.
    let _ = rustix::fs::fallocate(file, zero, 0, block.0.len() as u64);
    file.write_all_at(&block.0, 0)?;
    file.sync_data()
}

/// The rest after a round that took `took`.
fn pause_after(took: Duration) -> Duration {
    if took >= SLOW { Duration::ZERO } else { PAUSE }
}

fn probe_until_dropped(probe: &Weak<Probe>, file: &File) {
    let block = Aligned([0x5a; 4096]);
    while let Some(probe) = probe.upgrade() {
        let (start, delay) = (Instant::now(), own_delay());
        *probe.begun() = Some(start);
        // A disk that is full or refuses is seen by the guest itself.
        let _ = one_round(file, &block);
        let end = Instant::now();
        // At which moment it waited is not known: the span is cut at its start.
        let start = start + own_delay().saturating_sub(delay);
        probe.ended(start, end);
        drop(probe);
        std::thread::sleep(pause_after(end.saturating_duration_since(start)));
    }
}

/// How long the calling thread has waited for a CPU so far.
fn own_delay() -> Duration {
    Duration::from_nanos(run_delay("/proc/thread-self").unwrap_or(0))
}

/// A block as `O_DIRECT` wants it.
#[repr(align(4096))]
struct Aligned([u8; 4096]);

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cleanup::Folder;

    /// A folder on the disk of the build: what lies in memory is never late.
    pub(in super::super) fn folder() -> Folder {
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
        std::fs::create_dir_all(&target).unwrap();
        Folder::inside(&target).unwrap()
    }

    #[test]
    fn a_probe_takes_the_way_of_the_image_to_the_disk() {
        let folder = folder();
        let image = folder.path().join("image");
        let is_direct = |image_is| {
            let file = open_beside(&image, image_is).unwrap();
            one_round(&file, &Aligned([1; 4096])).unwrap();
            rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::DIRECT)
        };
        assert!(!is_direct(false), "the page cache is between");
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CREATE;
        let can = rustix::fs::open(&image, flags, Mode::RUSR | Mode::WUSR).is_ok();
        assert_eq!(is_direct(true), can);
    }

    #[test]
    fn a_disk_that_stays_slow_is_looked_at_without_a_pause() {
        assert_eq!(pause_after(SLOW), Duration::ZERO);
        assert_eq!(pause_after(SLOW - Duration::from_nanos(1)), PAUSE);
    }

    #[test]
    fn only_the_common_part_of_a_slow_round_and_a_request_is_the_disks_fault() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let probe = Probe::default();
        for (from, to) in [(0, 30), (40, 50), (90, 200)] {
            probe.ended(at(from), at(to));
        }
        let overlap = |from, to| probe.overlap(at(from), at(to)).as_millis();
        assert_eq!((overlap(20, 100), overlap(30, 40), overlap(95, 120)), (30, 0, 25));
        *probe.begun.lock().unwrap() = Some(at(210));
        assert_eq!((overlap(205, 250), overlap(205, 220)), (40, 0));
        assert_eq!(probe.late(), Duration::from_millis(150));
        // Whoever looks at the slow rounds sees the one under way until it is one of them.
        let slow = probe.slow();
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| probe.ended(at(210), at(300)));
            std::thread::sleep(Duration::from_millis(20));
            assert!(probe.begun().is_some() && !ended.is_finished());
            drop(slow);
        });
        assert!(probe.begun().is_none());
        assert_eq!(probe.overlap(at(205), at(310)), Duration::from_millis(90));
    }
}

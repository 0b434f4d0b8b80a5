//! How long the host's own disk holds up whoever asks it, seen beside the daemon.
//!
//! A thread writes a block past the page cache, and makes it durable, again and again. A request of
//! the guest that was late while such a write was late is the disk's fault as far as the two
//! overlap. The time that the thread itself waited for a CPU is no delay of the disk.

use super::late::run_delay;
use crate::{Context, Outcome};
use rustix::fs::{Mode, OFlags};
use std::collections::VecDeque;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Between two writes.
const PAUSE: Duration = Duration::from_millis(5);
/// Quicker writes explain nothing.
const SLOW: Duration = Duration::from_millis(5);
/// Slow writes that are kept: more than the longest request lasts.
const KEPT: usize = 10_000;

type Span = (Instant, Instant);

/// The slow writes of late; the thread ends when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Probe {
    slow: Mutex<VecDeque<Span>>,
    /// The start of the write that is under way.
    begun: Mutex<Option<Instant>>,
}

impl Probe {
    /// Probes the disk below `image`, in a file of its own beside it.
    pub(super) fn start(image: &Path) -> Outcome<Arc<Self>> {
        let path = image.with_extension("probe");
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
        let open = |more| rustix::fs::open(&path, flags | more, Mode::RUSR | Mode::WUSR);
        // Where there is no O_DIRECT the write goes to the page cache, and out of it below.
        let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty()));
        let file = std::fs::File::from(file.context(path.display())?);
        let probe = Arc::new(Self::default());
        let weak = Arc::downgrade(&probe);
        let run = move || probe_until_dropped(&weak, &file);
        std::thread::Builder::new().name("probe".into()).spawn(run).context("a thread")?;
        Ok(probe)
    }

    /// How much of the time from `start` to `end` slow writes took.
    pub(super) fn overlap(&self, start: Instant, end: Instant) -> Duration {
        let slow = self.slow.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = *self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let under_way = begun.map(|begin| (begin, end)).filter(|(begin, _)| *begin + SLOW < end);
        slow.iter().copied().chain(under_way).map(|span| common((start, end), span)).sum()
    }
}

/// The time that two spans have in common.
fn common(one: Span, other: Span) -> Duration {
    one.1.min(other.1).saturating_duration_since(one.0.max(other.0))
}

fn probe_until_dropped(probe: &Weak<Probe>, file: &std::fs::File) {
    let block = Aligned([0x5a; 4096]);
    while let Some(probe) = probe.upgrade() {
        let (start, delay) = (Instant::now(), own_delay());
        *probe.begun.lock().unwrap_or_else(PoisonError::into_inner) = Some(start);
        // A disk that is full or refuses is seen by the guest itself.
        let _ = file.write_all_at(&block.0, 0).and_then(|()| file.sync_data());
        let end = Instant::now();
        *probe.begun.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // At which moment it waited is not known: the span is cut at its start.
        let start = start + own_delay().saturating_sub(delay);
        if end.saturating_duration_since(start) >= SLOW {
            let mut slow = probe.slow.lock().unwrap_or_else(PoisonError::into_inner);
            if slow.len() == KEPT {
                slow.pop_front();
            }
            slow.push_back((start, end));
        }
        drop(probe);
        std::thread::sleep(PAUSE);
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
mod tests {
    use super::*;

    #[test]
    fn only_the_common_part_of_a_slow_write_and_a_request_is_the_disks_fault() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let probe = Probe::default();
        probe.slow.lock().unwrap().extend([(at(0), at(30)), (at(40), at(50)), (at(90), at(200))]);
        let overlap = |from, to| probe.overlap(at(from), at(to)).as_millis();
        assert_eq!((overlap(20, 100), overlap(30, 40), overlap(95, 120)), (30, 0, 25));
        *probe.begun.lock().unwrap() = Some(at(210));
        assert_eq!((overlap(205, 250), overlap(205, 212)), (40, 0));
    }
}

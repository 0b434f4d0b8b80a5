//! How long a ring waits for its image, on a clock that advances while all tasks wait.

use super::*;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::{DiskQueue, Geometry};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU32, Ordering};

/// A disk whose image another process has until `refusals` calls have asked for it.
#[derive(Debug)]
struct Held {
    disk: MemoryDisk,
    refusals: AtomicU32,
    /// The last of these calls fails because the image cannot be locked (`EIO`).
    is_gone: bool,
    acquired: AtomicU32,
    released: AtomicU32,
}

impl Held {
    fn new(refusals: u32, is_gone: bool) -> Arc<Self> {
        let (acquired, released) = (AtomicU32::new(0), AtomicU32::new(0));
        let disk = MemoryDisk::new(1 << 20).unwrap();
        Arc::new(Self { disk, refusals: refusals.into(), is_gone, acquired, released })
    }
}

impl Disk for Held {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        self.disk.open_queue(has_ring)
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        self.disk.resize(size)
    }

    fn acquire(&self) -> Result<(), ImageError> {
        let path = std::path::PathBuf::from("image");
        match self.refusals.load(Ordering::Relaxed) {
            0 => {
                self.acquired.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            1 if self.is_gone => Err(ImageError::Lock { path, errno: Errno::IO }),
            left => {
                self.refusals.store(left - 1, Ordering::Relaxed);
                Err(ImageError::InUse { path, holder: None })
            }
        }
    }

    fn release(&self) {
        self.released.fetch_add(1, Ordering::Relaxed);
    }

    fn kind(&self) -> &'static str {
        "held"
    }
}

/// Begins with a clock that goes on by itself while everybody waits for it. Returns how long
/// that took, too.
async fn begin(hold: &Hold, disk: &Arc<Held>) -> (bool, Duration) {
    let (began, shared) = (Instant::now(), disk.clone() as Arc<dyn Disk>);
    let is_begun = hold.begin(&shared, "disk").await.is_ok();
    (is_begun, began.elapsed())
}

async fn end(hold: &Hold, disk: &Arc<Held>) -> (u32, u32) {
    hold.end(&(disk.clone() as Arc<dyn Disk>)).await;
    (disk.acquired.load(Ordering::Relaxed), disk.released.load(Ordering::Relaxed))
}

#[tokio::test(start_paused = true)]
async fn a_ring_waits_for_the_image_up_to_five_seconds_and_then_does_not_begin() {
    let tries = u32::try_from(TIMEOUT.as_millis() / PAUSE.as_millis()).unwrap();
    // At once, after one pause, at the last try.
    for refusals in [0, 1, tries] {
        let (hold, disk) = (Hold::default(), Held::new(refusals, false));
        assert_eq!(begin(&hold, &disk).await, (true, PAUSE * refusals));
        assert_eq!(end(&hold, &disk).await, (1, 1));
    }
    let (hold, disk) = (Hold::default(), Held::new(u32::MAX, false));
    assert_eq!(begin(&hold, &disk).await, (false, TIMEOUT));
    assert_eq!(disk.refusals.load(Ordering::Relaxed), u32::MAX - tries - 1);
    // It holds nothing: the next ring tries again, once, since it has been waited for already.
    disk.refusals.store(1, Ordering::Relaxed);
    assert_eq!(begin(&hold, &disk).await, (false, Duration::ZERO));
    assert_eq!(begin(&hold, &disk).await, (true, Duration::ZERO));
    assert_eq!(end(&hold, &disk).await, (1, 1));
    // The image was held since then, so the next ring waits for it again.
    disk.refusals.store(1, Ordering::Relaxed);
    assert_eq!(begin(&hold, &disk).await, (true, PAUSE));
}

#[tokio::test(start_paused = true)]
async fn an_image_that_cannot_be_locked_is_not_waited_for() {
    let (hold, disk) = (Hold::default(), Held::new(3, true));
    assert_eq!(begin(&hold, &disk).await, (false, PAUSE * 2));
}

#[tokio::test(start_paused = true)]
async fn the_first_ring_takes_the_image_and_the_last_one_gives_it_back() {
    let (hold, disk) = (Hold::default(), Held::new(0, false));
    for _ in 0..3 {
        assert!(begin(&hold, &disk).await.0);
    }
    assert_eq!(end(&hold, &disk).await, (1, 0));
    assert_eq!(end(&hold, &disk).await, (1, 0));
    assert!(begin(&hold, &disk).await.0);
    assert_eq!(end(&hold, &disk).await, (1, 0));
    assert_eq!(end(&hold, &disk).await, (1, 1));
    // A ring that begins while another one waits takes its turn, and waits no longer.
    disk.refusals.store(10, Ordering::Relaxed);
    let both = async { tokio::join!(begin(&hold, &disk), begin(&hold, &disk)) };
    assert_eq!(both.await, ((true, PAUSE * 10), (true, PAUSE * 10)));
    assert_eq!(end(&hold, &disk).await, (2, 1));
    assert_eq!(end(&hold, &disk).await, (2, 2));
}

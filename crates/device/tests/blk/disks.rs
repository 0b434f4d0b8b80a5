//! A disk that finishes its requests later: through the worker's io_uring, or on its own thread.

use crate::guest::{DATA, Guest, OK, SECTORS, Start, USUAL, null};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, DiskQueue, Geometry, Image, ImageOptions};
use manyring_wire::blk::{VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES};
use rustix::io::Errno;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

/// Sectors of a request.
const COUNT: u32 = 8;
const BYTES: u32 = COUNT * 512;

/// A file of the disk's size, on a file system that may know O_DIRECT, and a disk on it.
pub(crate) fn disk(uring: bool) -> (tempfile::NamedTempFile, Arc<dyn Disk>) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(SECTORS * 512).unwrap();
    let options = ImageOptions { direct: uring, ..ImageOptions::default() };
    let image = Image::open(file.path(), options).unwrap();
    let disk: Arc<dyn Disk> = match uring {
        true => Arc::new(UringDisk::new(image).unwrap()),
        false => Arc::new(FileDisk::new(image)),
    };
    (file, disk)
}

#[test]
fn what_a_disk_finishes_later_comes_back_with_the_right_bytes() {
    for uring in [true, false] {
        let (file, disk) = disk(uring);
        let mut guest = Guest::new(disk, &Start { uring, ..USUAL });
        let written = [0x5a; BYTES as usize];
        for sector in [0, 64, SECTORS - u64::from(COUNT)] {
            rustix::io::pwrite(&guest.high, &written, 0).unwrap();
            let data = [(DATA, BYTES)];
            assert_eq!(guest.serve(VIRTIO_BLK_T_OUT, sector, &data, &[]), OK, "uring {uring}");
            assert_eq!(guest.flush(), OK, "uring {uring}");
            let mut found = [0; BYTES as usize];
            file.as_file().read_exact_at(&mut found, sector * 512).unwrap();
            assert_eq!(found, written, "uring {uring}, sector {sector}");
            rustix::io::pwrite(&guest.high, &[0; BYTES as usize], 0).unwrap();
            assert_eq!(guest.read(sector, BYTES), OK, "uring {uring}");
            rustix::io::pread(&guest.high, &mut found, 0).unwrap();
            assert_eq!(found, written, "uring {uring}, sector {sector}");
            for kind in [VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_T_DISCARD] {
                assert_eq!(guest.range(kind, sector, COUNT), OK, "uring {uring}, kind {kind}");
                file.as_file().read_exact_at(&mut found, sector * 512).unwrap();
                assert_eq!(found, [0; BYTES as usize], "uring {uring}, kind {kind}");
            }
        }
        assert_eq!((guest.stats().in_flight.value(), guest.stats().errors.value()), (0, 0));
        assert_eq!(guest.stop(), 15);
    }
}

/// A null disk that notes which thread opened its queue.
#[derive(Debug, Default)]
struct Noted(OnceLock<ThreadId>);

impl Disk for Noted {
    fn geometry(&self) -> Geometry {
        null().geometry()
    }

    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        self.0.set(std::thread::current().id()).unwrap();
        null().open_queue(has_ring)
    }

    fn resize(&self, _: Option<u64>) -> Result<Geometry, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn kind(&self) -> &'static str {
        "noted"
    }
}

#[test]
fn a_host_that_hangs_while_a_queue_is_opened_holds_up_no_other_session() {
    let disk = Arc::new(Noted::default());
    let mut guest = Guest::new(disk.clone(), &USUAL);
    assert_ne!(disk.0.get(), Some(&std::thread::current().id()), "the sessions' thread waits");
    assert_eq!(guest.stop(), 0);
}

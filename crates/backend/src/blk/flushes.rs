//! `Flushes`: the flushes of a queue, one at a time, through a description of the file of their
//! own.
//!
//! Linux tells each open file description once that pages could not be written. Of two calls of
//! `fdatasync` at a time through one description, one fails and the other succeeds, though the
//! bytes that it should make durable may be those that are lost. Its answer may be the first to be
//! seen, and its guest would rely on them. So no two flushes are under way through one description:
//! ```text
//! begin:  none is under way? this one is
//!         else it waits
//! end:    all that were under way end with the same result, which is remembered by the image
//!         all that have waited are under way now, by one call: it begins after they came
//! ```
//! Queues flush beside each other, each through its own description: each of them hears of every
//! loss. A Linux guest has one flush of a queue under way at a time, so none of its flushes waits
//! here.

use super::Image;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::Arc;

/// The flushes of a queue, by their tokens.
#[derive(Debug)]
pub(super) struct Flushes {
    image: Arc<Image>,
    file: Option<OwnedFd>,
    /// The first of them is what the kernel has.
    under_way: Vec<u32>,
    waiting: Vec<u32>,
}

impl Flushes {
    /// # Errors
    /// The system's, if there is no description to be had.
    pub(super) fn new(image: Arc<Image>) -> Result<Self, Errno> {
        let file = Some(image.lend_description()?);
        Ok(Self { image, file, under_way: Vec::new(), waiting: Vec::new() })
    }

    /// The file as flushes go to it.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_ref().map_or(self.image.file(), AsFd::as_fd)
    }

    /// True if the kernel is to be given the flush `token`, for the first time or again. False: it
    /// waits.
    pub(super) fn begin(&mut self, token: u32) -> bool {
        match self.under_way.first() {
            Some(first) => {
                let is_again = *first == token;
                if !is_again {
                    self.waiting.push(token);
                }
                is_again
            }
            None => {
                self.under_way.push(token);
                true
            }
        }
    }

    /// The flushes that end now. Empties the list that is given, and takes it in exchange.
    pub(super) fn end(&mut self, ended: &mut Vec<u32>) {
        ended.clear();
        std::mem::swap(&mut self.under_way, ended);
        std::mem::swap(&mut self.under_way, &mut self.waiting);
    }

    /// The flush that the kernel is to be given next.
    pub(super) fn next(&self) -> Option<u32> {
        self.under_way.first().copied()
    }
}

impl Drop for Flushes {
    fn drop(&mut self) {
        // What a flush takes that nobody hears of, the next one through this description would not
        // be told.
        if self.under_way.is_empty()
            && let Some(file) = self.file.take()
        {
            self.image.take_back(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blk::ImageOptions;

    #[test]
    fn flushes_of_a_queue_that_come_while_one_is_under_way_begin_together_after_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let image = Arc::new(Image::open(file.path(), ImageOptions::default()).unwrap());
        let mut flushes = Flushes::new(image).unwrap();
        let mut ended = Vec::new();
        assert!(flushes.begin(4));
        assert!([2, 7].iter().all(|token| !flushes.begin(*token)));
        assert!(flushes.begin(4), "again");
        flushes.end(&mut ended);
        assert_eq!((ended.as_slice(), flushes.next()), (&[4][..], Some(2)));
        assert!(flushes.begin(2));
        assert!(!flushes.begin(4), "it came after those had begun");
        flushes.end(&mut ended);
        assert_eq!((ended.as_slice(), flushes.next()), (&[2, 7][..], Some(4)));
        assert!(flushes.begin(4));
        flushes.end(&mut ended);
        assert_eq!((ended.as_slice(), flushes.next()), (&[4][..], None));
    }

    #[test]
    fn each_queue_has_a_description_that_none_else_has_until_it_ends() {
        use rustix::fs::{SeekFrom, seek};
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        for direct in [false, true] {
            let options = ImageOptions { direct, ..ImageOptions::default() };
            let image = Arc::new(Image::open(file.path(), options).unwrap());
            let queue = || Flushes::new(image.clone()).unwrap();
            let place = |file: BorrowedFd<'_>| seek(file, SeekFrom::Current(0)).unwrap();
            let (one, other) = (queue(), queue());
            // The place of a file belongs to its description.
            for (at, file) in (1..).zip([image.file(), image.buffered(), one.file(), other.file()])
            {
                seek(file, SeekFrom::Start(at)).unwrap();
            }
            assert_eq!((place(one.file()), place(other.file())), (3, 4), "direct {direct}");
            assert!(place(image.file()) < 3 && place(image.buffered()) < 3);
            drop(one);
            assert_eq!(place(queue().file()), 3, "it is used again");
            let mut ends = queue();
            assert!(ends.begin(0));
            drop(ends);
            assert_ne!(place(queue().file()), 3, "a flush is under way through that");
        }
    }
}

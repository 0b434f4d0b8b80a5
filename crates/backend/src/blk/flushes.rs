//! `Flushes`: the flushes of a queue, one at a time, through an open file description of their own.
//!
//! If pages could not be written, Linux reports the error once to each open file description. If
//! two calls of `fdatasync` run at the same time through one description, one of them fails and the
//! other succeeds, though the lost bytes may be those that the second should have made durable. The
//! guest may see the success first, and rely on these bytes. So one description never has two
//! flushes under way:
//! ```text
//! begin:  no flush is under way? this one is from now on
//!         else it waits
//! end:    all flushes under way end with the same result, which the image remembers;
//!         all flushes that waited are under way now, as one call, which begins after they came
//! ```
//! Different queues flush at the same time, each through its own description, so that each queue
//! gets the report of every loss. A Linux guest has one flush of a queue under way at a time: none
//! of its flushes waits here.

use super::Image;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::Arc;

/// The flushes of a queue, by their tokens.
#[derive(Debug)]
pub(super) struct Flushes {
    image: Arc<Image>,
    file: Option<OwnedFd>,
    /// Flushes that one call of the kernel serves, under the token of the first of them.
    under_way: Vec<u32>,
    waiting: Vec<u32>,
}

impl Flushes {
    /// Makes the flushes of a queue, with a description of the image.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: no further description can be opened.
    pub(super) fn new(image: Arc<Image>) -> Result<Self, Errno> {
        let file = Some(image.lend_description()?);
        Ok(Self { image, file, under_way: Vec::new(), waiting: Vec::new() })
    }

    /// Returns the open file description on which this queue's `fdatasync` must be called.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_ref().map_or(self.image.file(), AsFd::as_fd)
    }

    /// Begins the flush `token`, or continues it if it is under way already. Returns true if the
    /// caller must submit it to the kernel; false if it waits for the flush under way.
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

    /// Ends the call: replaces the content of `ended` by the flushes that end with it, and puts the
    /// waiting flushes under way.
    pub(super) fn end(&mut self, ended: &mut Vec<u32>) {
        ended.clear();
        std::mem::swap(&mut self.under_way, ended);
        std::mem::swap(&mut self.under_way, &mut self.waiting);
    }

    /// Returns the token of the flush that the caller must submit next.
    pub(super) fn next(&self) -> Option<u32> {
        self.under_way.first().copied()
    }
}

impl Drop for Flushes {
    fn drop(&mut self) {
        // A flush under way may get the report of a loss, which nobody would read: so the next
        // queue must not get this description.
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
        let image = Arc::new(Image::open_again(file.path(), ImageOptions::default()));
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
            let image = Arc::new(Image::open_again(file.path(), options));
            let queue = || Flushes::new(image.clone()).unwrap();
            let place = |file: BorrowedFd<'_>| seek(file, SeekFrom::Current(0)).unwrap();
            let (one, other) = (queue(), queue());
            // The place of a file belongs to its description.
            for (at, file) in (1..).zip([image.file(), image.holder(), one.file(), other.file()]) {
                seek(file, SeekFrom::Start(at)).unwrap();
            }
            assert_eq!((place(one.file()), place(other.file())), (3, 4), "direct {direct}");
            assert!(place(image.file()) < 3 && place(image.holder()) < 3);
            drop(one);
            assert_eq!(place(queue().file()), 3, "it is used again");
            let mut ends = queue();
            assert!(ends.begin(0));
            drop(ends);
            assert_ne!(place(queue().file()), 3, "a flush is under way through that");
        }
    }
}

//! Makes threads wait in the kernel, on pages that userfaultfd withholds, until they are released.
//! [`HeldLock`] has a thread of this process wait inside a system call while it holds a lock of the
//! kernel. [`Withheld`] makes every thread wait that touches a file which this process has mapped.
#![allow(unsafe_code, reason = "allow-listed: a page that is missing, and calls that touch it")]

use crate::DriverError;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap_anonymous, munmap, userfaultfd};
use std::mem::MaybeUninit;
use std::thread::JoinHandle;

/// `UFFDIO_API`: version, features, ioctls.
const API: rustix::ioctl::Opcode = opcode::read_write::<[u64; 3]>(0xaa, 0x3f);
/// `UFFDIO_REGISTER`: start, length, mode, ioctls.
const REGISTER: rustix::ioctl::Opcode = opcode::read_write::<[u64; 4]>(0xaa, 0x00);
/// `UFFD_API`
const VERSION: u64 = 0xaa;
/// `UFFDIO_REGISTER_MODE_MISSING`
const MISSING: u64 = 1;
const PAGE_SIZE: usize = 4096;
const TIMEOUT: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// A lock of the kernel, held until this is dropped. Needs root: the page fault happens in the
/// kernel.
#[derive(Debug)]
pub struct HeldLock {
    /// Closed first on drop: the kernel then supplies the page, and the system call ends.
    faults: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    page: usize,
}

impl HeldLock {
    /// Holds the lock of a pipe, by a write to its writing end. A write to a socket would wait as
    /// long, but hold no lock.
    ///
    /// # Errors
    /// [`DriverError::System`]: userfaultfd is refused; [`DriverError::Timeout`].
    pub fn pipe(writer: OwnedFd) -> Result<Self, DriverError> {
        Self::new(move |page| {
            // SAFETY: the page stays mapped until the thread that runs this has ended.
            let bytes = unsafe { std::slice::from_raw_parts(page as *const u8, PAGE_SIZE) };
            let _ = rustix::io::write(&writer, bytes);
        })
    }

    /// Holds the lock of an epoll instance in which a descriptor is ready.
    ///
    /// # Errors
    /// See [`Self::pipe`].
    pub fn epoll(set: OwnedFd) -> Result<Self, DriverError> {
        Self::new(move |page| {
            let events = page as *mut MaybeUninit<epoll::Event>;
            // SAFETY: the page stays mapped until the thread that runs this has ended, and nobody
            // else has it.
            let events = unsafe { std::slice::from_raw_parts_mut(events, 8) };
            let _ = epoll::wait(&set, events, None);
        })
    }

    fn new(call: impl FnOnce(usize) + Send + 'static) -> Result<Self, DriverError> {
        let faults = faults()?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the kernel chooses a free place for the mapping: no memory in use is replaced.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE_SIZE, protection, flags) }?;
        let page = page as usize;
        withhold(&faults, page as u64, PAGE_SIZE as u64)?;
        let thread = std::thread::Builder::new().spawn(move || call(page))?;
        let hold = Self { faults: Some(faults), thread: Some(thread), page };
        hold.wait_until_held()?;
        Ok(hold)
    }

    /// Returns when the system call waits for its page, and so holds the lock.
    fn wait_until_held(&self) -> Result<(), DriverError> {
        self.faults.as_ref().map_or(Ok(()), wait_for_fault)
    }
}

/// Missing pages of a file that this process has mapped. A thread that touches one waits until this
/// is dropped, as it would while another process punches a hole into the file.
#[derive(Debug)]
pub struct Withheld {
    faults: OwnedFd,
}

impl Withheld {
    /// Withholds the pages of all mappings of the memfd `name` from all threads that touch them.
    ///
    /// # Errors
    /// [`DriverError::System`]: `EFAULT` if the file is not mapped, or userfaultfd is refused;
    /// [`DriverError::Io`].
    pub fn of_memfd(name: &str) -> Result<Self, DriverError> {
        let faults = faults()?;
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        let of_file = |line: &&str| line.contains(&format!("/memfd:{name} "));
        let mut is_mapped = false;
        for line in maps.lines().filter(of_file) {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let (from, to) = range.ok_or(Errno::FAULT)?;
            let address = |text| u64::from_str_radix(text, 16).map_err(|_| Errno::FAULT);
            let (from, to) = (address(from)?, address(to)?);
            withhold(&faults, from, to - from)?;
            is_mapped = true;
        }
        if is_mapped { Ok(Self { faults }) } else { Err(Errno::FAULT.into()) }
    }

    /// Returns when a thread waits for one of the pages.
    ///
    /// # Errors
    /// [`DriverError::Timeout`]: no thread has touched a page after 20 seconds.
    pub fn wait_until_touched(&self) -> Result<(), DriverError> {
        wait_for_fault(&self.faults)
    }
}

/// A new userfaultfd.
fn faults() -> Result<OwnedFd, DriverError> {
    // SAFETY: the new fd is ours alone.
    let faults = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC) }?;
    let mut api = [VERSION, 0, 0];
    // SAFETY: the number and the three words are those of UFFDIO_API.
    let argument = unsafe { Updater::<API, _>::new(&mut api) };
    // SAFETY: the call changes nothing but the three words.
    unsafe { ioctl(&faults, argument) }?;
    Ok(faults)
}

/// Withholds the missing pages at `address` from all threads that touch them, until `faults` is
/// closed.
fn withhold(faults: &OwnedFd, address: u64, size: u64) -> Result<(), DriverError> {
    let mut range = [address, size, MISSING, 0];
    // SAFETY: the number and the four words are those of UFFDIO_REGISTER.
    let argument = unsafe { Updater::<REGISTER, _>::new(&mut range) };
    // SAFETY: no page changes; who touches one of these waits.
    unsafe { ioctl(faults, argument) }?;
    Ok(())
}

/// Returns when a thread waits for a page.
fn wait_for_fault(faults: &OwnedFd) -> Result<(), DriverError> {
    let mut fds = [PollFd::from_borrowed_fd(faults.as_fd(), PollFlags::IN)];
    loop {
        match poll(&mut fds, Some(&TIMEOUT)) {
            Ok(0) => return Err(DriverError::Timeout),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        self.faults = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // SAFETY: the mapping is that of `new`, and the only thread that used it has ended.
        let _ = unsafe { munmap(self.page as *mut core::ffi::c_void, PAGE_SIZE) };
    }
}

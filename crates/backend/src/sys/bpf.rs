//! BPF programs, which the kernel runs for this process, and the memory that they share with it
//! (`bpf(2)`).
//!
//! A program is a list of instructions ([`Insn`]). The kernel accepts them only after it has proved
//! that the program ends and touches no other memory.
#![allow(unsafe_code, reason = "allow-listed: the bpf call, and memory shared with the kernel")]

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::{c_long, c_uint};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

const BPF_MAP_CREATE: c_uint = 0;
const BPF_MAP_UPDATE_ELEM: c_uint = 2;
const BPF_MAP_DELETE_ELEM: c_uint = 3;
const BPF_PROG_LOAD: c_uint = 5;
#[cfg(test)]
const BPF_PROG_TEST_RUN: c_uint = 10;
const BPF_OBJ_GET_INFO_BY_FD: c_uint = 15;
const BPF_LINK_CREATE: c_uint = 28;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_F_MMAPABLE: u32 = 1 << 10;
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;
const BPF_PROG_TYPE_XDP: u32 = 6;
/// `BPF_XDP`: attach a program to an interface, for the frames that arrive there.
const BPF_ATTACH_XDP: u32 = 37;
/// `XDP_FLAGS_SKB_MODE`: the kernel runs the program behind the driver, which need not support XDP.
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
/// `bpf_redirect_map(map, key, otherwise)`: returns the verdict that passes the frame to the socket
/// at `key` of the map; `otherwise` if there is none.
pub const BPF_FUNC_REDIRECT_MAP: i32 = 51;
/// `bpf_skb_load_bytes(skb, offset, to, len)`: returns 0, or an error if the frame is too short.
pub const BPF_FUNC_SKB_LOAD_BYTES: i32 = 26;
/// Number of tries to load a program, if signals interrupt the kernel's verification.
const LOAD_TRIES: usize = 10;
/// The name of our programs and maps in the kernel's lists (`bpftool`).
const NAME: [u8; 16] = *b"manyring\0\0\0\0\0\0\0\0";

/// `struct bpf_insn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Insn {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

impl Insn {
    /// Makes an instruction: its opcode, the registers that it writes and reads, an offset and a
    /// number.
    #[must_use]
    pub const fn new(code: u8, (to, from): (u8, u8), offset: i16, immediate: i32) -> Self {
        // Two bit fields, whose order follows the host's byte order.
        let (low, high) = if cfg!(target_endian = "little") { (to, from) } else { (from, to) };
        Self { code, registers: low | high << 4, offset, immediate }
    }

    /// Returns this instruction with another offset.
    #[must_use]
    pub const fn with_offset(self, offset: i16) -> Self {
        Self { offset, ..self }
    }
}

/// The fields of `union bpf_attr` for `BPF_MAP_CREATE`.
#[derive(Default)]
#[repr(C)]
struct MapCreate {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_map: u32,
    numa_node: u32,
    name: [u8; 16],
}

/// The fields of `union bpf_attr` for `BPF_PROG_LOAD`.
#[derive(Default)]
#[repr(C, align(8))]
struct ProgLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
}

/// The fields of `union bpf_attr` by which an entry of a map is set or removed.
#[derive(Default)]
#[repr(C, align(8))]
struct MapElement {
    map: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// The fields of `union bpf_attr` for `BPF_LINK_CREATE`.
#[derive(Default)]
#[repr(C, align(8))]
struct LinkCreate {
    program: u32,
    target: u32,
    attach: u32,
    flags: u32,
    /// Fields for other kinds of links.
    more: [u64; 4],
}

/// The fields of `union bpf_attr` for `BPF_OBJ_GET_INFO_BY_FD`.
#[derive(Default)]
#[repr(C, align(8))]
struct InfoByFd {
    object: u32,
    len: u32,
    info: u64,
}

/// The fields of `union bpf_attr` for `BPF_PROG_TEST_RUN`.
#[cfg(test)]
#[derive(Default)]
#[repr(C, align(8))]
struct TestRun {
    program: u32,
    result: u32,
    size_in: u32,
    size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
}

/// Calls `bpf(2)`. `T` has the fields of the command. Each pointer in it must refer to memory that
/// outlives the call and has the length in the field beside it.
fn call<T>(command: c_uint, attributes: &mut T) -> Result<c_long, Errno> {
    let size = size_of::<T>();
    // SAFETY: the kernel reads and writes `size` bytes of the attributes, which are borrowed for
    // that; the callers of this private function promise that their pointers are valid.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size) };
    if result < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(result)
}

fn opened(result: c_long) -> Result<OwnedFd, Errno> {
    let fd = i32::try_from(result).map_err(|_| Errno::IO)?;
    // SAFETY: the call has made this file descriptor (close-on-exec) for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address<T>(of: &[T]) -> u64 {
    of.as_ptr().expose_provenance() as u64
}

/// Words that a program in the kernel shares with this process: an array map of one entry.
#[derive(Debug)]
pub struct Words {
    base: NonNull<AtomicU32>,
    count: usize,
}

// SAFETY: only atomic operations use the memory, which stays mapped until `Words` is dropped.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Makes `count` words of zero, and the map by which a program refers to them. The kernel frees
    /// them when both are dropped and no program uses the map any more.
    ///
    /// # Errors
    /// `EPERM`: the process lacks `CAP_BPF`. Any other: the kernel has no memory or no such maps.
    pub fn new(count: usize) -> Result<(Self, OwnedFd), Errno> {
        let len = count * size_of::<AtomicU32>();
        let mut attributes = MapCreate {
            kind: BPF_MAP_TYPE_ARRAY,
            key_size: 4,
            value_size: u32::try_from(len).map_err(|_| Errno::INVAL)?,
            max_entries: 1,
            flags: BPF_F_MMAPABLE,
            name: NAME,
            ..MapCreate::default()
        };
        let map = opened(call(BPF_MAP_CREATE, &mut attributes)?)?;
        Ok((Self::of(&map, count)?, map))
    }

    /// Maps the `count` words of a map that another process of this daemon has made. The kernel
    /// refuses to map more pages than the map has, and a map's size never changes.
    ///
    /// # Errors
    /// `EINVAL`, `EPERM`: the descriptor is no such map. Any other: the kernel cannot map it.
    pub fn of(map: &OwnedFd, count: usize) -> Result<Self, Errno> {
        let len = count * size_of::<AtomicU32>();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other memory.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, map, 0) }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, count })
    }

    /// Returns the shared words. Each of them may change at any time.
    #[must_use]
    #[inline]
    pub fn as_slice(&self) -> &[AtomicU32] {
        // SAFETY: `count` words are mapped, writable and aligned to a page, until `self` is
        // dropped; the kernel reads and writes them by single loads and stores.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.count) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        let len = self.count * size_of::<AtomicU32>();
        // SAFETY: it was mapped by `new` with this length, and nothing borrows it any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Loads a program that reads frames and returns a number (`BPF_PROG_TYPE_SOCKET_FILTER`). The
/// program keeps its maps alive.
///
/// # Errors
/// `EPERM`: the process lacks `CAP_BPF`. `EACCES`: the kernel considers the program unsafe.
pub fn load(instructions: &[Insn]) -> Result<OwnedFd, Errno> {
    load_as(BPF_PROG_TYPE_SOCKET_FILTER, instructions)
}

/// Loads a program that decides about frames that arrive at an interface (XDP). The program keeps
/// its maps alive.
///
/// # Errors
/// Those of [`load`]; `EPERM` may also mean that the process lacks `CAP_NET_ADMIN`.
pub fn load_xdp(instructions: &[Insn]) -> Result<OwnedFd, Errno> {
    load_as(BPF_PROG_TYPE_XDP, instructions)
}

fn load_as(kind: u32, instructions: &[Insn]) -> Result<OwnedFd, Errno> {
    let license = *b"Apache-2.0 OR MIT\0";
    let mut attributes = ProgLoad {
        kind,
        count: u32::try_from(instructions.len()).map_err(|_| Errno::INVAL)?,
        instructions: address(instructions),
        license: address(&license),
        name: NAME,
        ..ProgLoad::default()
    };
    // Repeat: a signal interrupts the kernel's verification (`EAGAIN`).
    for _ in 0..LOAD_TRIES {
        match call(BPF_PROG_LOAD, &mut attributes) {
            Err(Errno::AGAIN) => {}
            result => return opened(result?),
        }
    }
    Err(Errno::AGAIN)
}

/// Makes a map of `count` AF_XDP sockets (`XSKMAP`), all of its entries empty.
///
/// # Errors
/// `EPERM`: the process lacks `CAP_BPF`. Any other: the kernel has no memory or no such maps.
pub fn sockets(count: u32) -> Result<OwnedFd, Errno> {
    let mut attributes = MapCreate {
        kind: BPF_MAP_TYPE_XSKMAP,
        key_size: 4,
        value_size: 4,
        max_entries: count,
        name: NAME,
        ..MapCreate::default()
    };
    opened(call(BPF_MAP_CREATE, &mut attributes)?)
}

/// Puts `socket` into entry `index` of a map of sockets; `None` empties the entry.
///
/// # Errors
/// `E2BIG`: the map has no such entry. `ENOENT`: the entry is empty already.
pub fn set_socket(
    map: BorrowedFd<'_>,
    index: u32,
    socket: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let key = [index];
    let value = [socket.map_or(-1, |socket| socket.as_raw_fd())];
    let mut attributes = MapElement {
        map: u32::try_from(map.as_raw_fd()).map_err(|_| Errno::BADF)?,
        key: address(&key),
        // The kernel refuses to remove an entry if a value is given.
        value: if socket.is_some() { address(&value) } else { 0 },
        flags: 0,
    };
    let command = if socket.is_some() { BPF_MAP_UPDATE_ELEM } else { BPF_MAP_DELETE_ELEM };
    call(command, &mut attributes).map(drop)
}

/// Attaches a program to interface number `interface`, for the frames that arrive there, until the
/// returned link is closed or the interface deleted. With `generic` the kernel runs it behind the
/// driver.
///
/// # Errors
/// `EBUSY`, `EEXIST`: the interface has a program. `EOPNOTSUPP`, `EINVAL`: the driver supports
/// none. `EPERM`: the process lacks `CAP_NET_ADMIN`.
pub fn attach_xdp(
    program: BorrowedFd<'_>,
    interface: u32,
    generic: bool,
) -> Result<OwnedFd, Errno> {
    let mut attributes = LinkCreate {
        program: u32::try_from(program.as_raw_fd()).map_err(|_| Errno::BADF)?,
        target: interface,
        attach: BPF_ATTACH_XDP,
        flags: if generic { XDP_FLAGS_SKB_MODE } else { 0 },
        ..LinkCreate::default()
    };
    opened(call(BPF_LINK_CREATE, &mut attributes)?)
}

/// Returns the number by which the kernel lists a program; no other program has it while this one
/// is open or attached.
///
/// # Errors
/// The error of `BPF_OBJ_GET_INFO_BY_FD`.
pub fn program_id(program: BorrowedFd<'_>) -> Result<u32, Errno> {
    /// The first fields of `struct bpf_prog_info`. The kernel writes no field beyond this size.
    #[repr(C, align(8))]
    struct Info {
        _kind: u32,
        id: u32,
    }
    let mut info = [Info { _kind: 0, id: 0 }];
    let mut attributes = InfoByFd {
        object: u32::try_from(program.as_raw_fd()).map_err(|_| Errno::BADF)?,
        len: u32::try_from(size_of_val(&info)).map_err(|_| Errno::INVAL)?,
        info: info.as_mut_ptr().expose_provenance() as u64,
    };
    call(BPF_OBJ_GET_INFO_BY_FD, &mut attributes)?;
    Ok(info[0].id)
}

/// For tests: returns the number that a program returns for `frame`.
///
/// # Errors
/// The error of `BPF_PROG_TEST_RUN`.
#[cfg(test)]
pub(crate) fn run(program: BorrowedFd<'_>, frame: &[u8]) -> Result<u32, Errno> {
    // The test run strips an Ethernet header: put one in front of the frame.
    let data = [&[0; 14][..], frame].concat();
    let mut attributes = TestRun {
        program: u32::try_from(program.as_raw_fd()).map_err(|_| Errno::BADF)?,
        size_in: u32::try_from(data.len()).map_err(|_| Errno::INVAL)?,
        data_in: address(&data),
        repeat: 1,
        ..TestRun::default()
    };
    call(BPF_PROG_TEST_RUN, &mut attributes)?;
    Ok(attributes.result)
}

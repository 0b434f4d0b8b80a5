//! The XDP program that passes the frames of an interface's queue to the socket of that queue.

use crate::sys::bpf::{self, BPF_FUNC_REDIRECT_MAP, Insn};
use crate::sys::link::Links;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;

/// Opcode: load a word, `to = *(from + offset)`.
const LDX_WORD: u8 = 0x61;
const LD_IMM64: u8 = 0x18;
const MOV_NUMBER: u8 = 0xb7;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// As the source register of [`LD_IMM64`]: the constant is the address of a map.
const PSEUDO_MAP: u8 = 1;
/// Offset in `struct xdp_md` of the number of the queue on which the frame arrived.
const QUEUE_AT: i16 = 16;
/// Verdict: the host's network stack gets the frame.
const XDP_PASS: i32 = 2;

/// A program that is attached to an interface, and the map of sockets that it redirects to.
#[derive(Debug)]
pub(super) struct Program {
    map: OwnedFd,
    /// The link that attaches the program. Closing it detaches the program.
    _link: OwnedFd,
    /// The kernel's number of the program.
    id: u32,
    /// True if the kernel runs the program behind the driver, which does not support XDP
    /// (`XDP_FLAGS_SKB_MODE`).
    pub(super) is_generic: bool,
}

impl Program {
    /// Attaches a program to interface `index`, with a map of `count` sockets that is empty.
    ///
    /// # Errors
    /// `EBUSY`: the interface has another program. `EPERM`: the process needs CAP_NET_ADMIN and
    /// CAP_BPF. Any other: the kernel cannot make or attach the program.
    pub(super) fn attach(index: u32, count: u32) -> Result<Self, Errno> {
        let map = bpf::sockets(count)?;
        let program = bpf::load_xdp(&instructions(map.as_raw_fd()))?;
        let id = bpf::program_id(program.as_fd())?;
        let (link, is_generic) = match bpf::attach_xdp(program.as_fd(), index, false) {
            Err(Errno::BUSY | Errno::EXIST) => return Err(Errno::BUSY),
            // Run the program behind the driver: the driver does not support it at this MTU, or
            // with the interface's present features.
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::RANGE) => {
                (bpf::attach_xdp(program.as_fd(), index, true)?, true)
            }
            link => (link?, false),
        };
        Ok(Self { map, _link: link, id, is_generic })
    }

    /// True if the program is attached to the interface that has number `index` in this namespace.
    /// False: the program's interface was deleted or moved away, and another one may have the
    /// number. True also if the kernel does not answer.
    pub(super) fn is_on(&self, links: &Links, index: u32) -> bool {
        match links.at(index) {
            Ok(link) => link.is_some_and(|link| link.xdp_programs.contains(&self.id)),
            Err(_) => true,
        }
    }

    /// Passes the frames of queue `index` to `socket`; `None`: to the host's network stack.
    ///
    /// # Errors
    /// `E2BIG`: the map has no such entry. Any other: the kernel refuses the socket.
    pub(super) fn set(&self, index: u32, socket: Option<&OwnedFd>) -> Result<(), Errno> {
        match bpf::set_socket(self.map.as_fd(), index, socket.map(AsFd::as_fd)) {
            Err(Errno::NOENT) if socket.is_none() => Ok(()),
            result => result,
        }
    }
}

/// Returns the program:
/// ```text
/// return bpf_redirect_map(sockets, frame->rx_queue_index, XDP_PASS)
/// ```
fn instructions(map: i32) -> [Insn; 6] {
    [
        Insn::new(LDX_WORD, (2, 1), QUEUE_AT, 0),
        Insn::new(LD_IMM64, (1, PSEUDO_MAP), 0, map),
        Insn::new(0, (0, 0), 0, 0),
        Insn::new(MOV_NUMBER, (3, 0), 0, XDP_PASS),
        Insn::new(CALL, (0, 0), 0, BPF_FUNC_REDIRECT_MAP),
        Insn::new(EXIT, (0, 0), 0, 0),
    ]
}

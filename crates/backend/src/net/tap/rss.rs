//! Receive-side scaling on a tap: the BPF program by which the host finds the queue that the
//! guest's hash chooses (virtio 1.3 §5.1.6.5.6.4).
//!
//! The program chooses the same pair as [`Rss::pair_of`]. Each configuration of the guest gets a
//! program with the guest's hash types in its instructions, and words of its own:
//! ```text
//! 0 .. 128      for each masked hash its pair
//! 128 ..        the table of the Toeplitz hash: 16 words for each half of a byte of the input
//! ```
//! The place of the pair among the queues that the host uses comes from the words of the steering
//! table ([`super::flows`]), which the port keeps right as pairs come and go. A frame for a pair
//! that the host does not use goes to the first queue in use.

use super::flows::Flows;
use super::program::{
    ADD, AND, AT, BYTE, Code, EXIT, HALF, IF_EQUAL, IF_SET, IPV4_AT, IPV6_AT, Label, Labels, MOV,
    PORTS_AT, R0, R1, R2, R3, SHL, SHR, SOURCE, STACK, SUB, XOR, in_order, look_at_ethernet,
    look_behind_extensions, size,
};
use super::{State, TapPort};
use crate::net::steer::PAIR_MASK;
use crate::sys::bpf::{self, Insn, Words};
use crate::sys::tuntap;
use manyring_wire::net::flow;
use manyring_wire::net::rss::{
    PROTOCOLS, Rss, RssConfig, TABLE_LEN_MAX, TOEPLITZ_WORDS, hash_type,
};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// The register in which the hash is added up: calls leave it unchanged.
const HASH: u8 = SOURCE;

/// The program of one configuration, and the words that it reads.
#[derive(Debug)]
pub(super) struct Hashed {
    program: OwnedFd,
}

impl Hashed {
    /// # Errors
    /// `EPERM`: the process lacks `CAP_BPF`. Any other: the kernel refuses the program.
    fn new(rss: &Rss, flows: &Flows) -> Result<Self, Errno> {
        let (words, map) = Words::new(TABLE_LEN_MAX + TOEPLITZ_WORDS)?;
        let (table, toeplitz) = words.as_slice().split_at(TABLE_LEN_MAX);
        for (word, pair) in table.iter().zip(&rss.config().table) {
            word.store((*pair).into(), Ordering::Relaxed);
        }
        for (word, value) in toeplitz.iter().zip(rss.hasher().toeplitz().words()) {
            word.store(*value, Ordering::Relaxed);
        }
        // The program keeps the words alive.
        let maps = Maps { own: map.as_raw_fd(), flows: flows.map().as_raw_fd() };
        Ok(Self { program: bpf::load(&program(&maps, rss.config()))? })
    }

    fn attach(&self, tap: BorrowedFd<'_>) -> Result<(), Errno> {
        tuntap::set_steering(tap, Some(self.program.as_fd()))
    }
}

impl TapPort {
    /// Lets the kernel choose queues as `rss` says; `None`: by the steering table.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the host does not allow programs, or other processes have queues of this tap.
    /// Any other: the kernel refuses the program.
    pub(super) fn steer_by(&self, rss: Option<&Rss>) -> Result<(), Errno> {
        let mut state = self.state();
        let Some(flows) = self.flows.as_ref().filter(|_| !state.is_left_alone) else {
            return if rss.is_some() { Err(Errno::OPNOTSUPP) } else { Ok(()) };
        };
        let next = rss.map(|rss| Hashed::new(rss, flows)).transpose()?;
        next.iter().for_each(|_| flows.deliver(&state.order, None));
        let before = std::mem::replace(&mut state.hashed, next);
        if state.is_gone || (before.is_none() && rss.is_none()) {
            return Ok(());
        }
        let attached = self.attach_program(&state, flows);
        if attached.is_err() {
            state.hashed = before;
        }
        attached
    }

    /// Attaches the program that applies now: the guest's RSS program, or that of the table.
    pub(super) fn attach_program(&self, state: &State, flows: &Flows) -> Result<(), Errno> {
        let tap = self.queues[0].as_fd();
        match &state.hashed {
            Some(hashed) => hashed.attach(tap),
            None => flows.attach(tap),
        }
    }
}

/// The file descriptors of the program's own map, and of the map of the steering table.
struct Maps {
    own: i32,
    flows: i32,
}

/// The steps that follow the hash of a frame.
struct Steps {
    /// The hash is known: look up its pair.
    look_up: Label,
    /// No hash type fits the frame.
    unclassified: Label,
}

/// The hash types of one version of IP.
struct Types {
    addresses: u32,
    /// TCP, UDP.
    with_ports: [u32; 2],
}

fn program(maps: &Maps, config: &RssConfig) -> Vec<Insn> {
    let mut code = Code::default();
    let [v4, v6, look_up, unclassified] = std::array::from_fn(|_| code.label());
    let labels =
        Labels { v4, v6, ports: unclassified, number: unclassified, too_short: unclassified };
    let steps = Steps { look_up, unclassified };
    look_at_ethernet(&mut code, &labels);
    code.mark(v4);
    hash_ipv4(&mut code, maps, config, &steps);
    code.mark(v6);
    hash_ipv6(&mut code, maps, config, &steps);
    let found = code.label();
    // The kernel refuses a program with unreachable instructions.
    if config.hash.types != 0 {
        code.mark(steps.look_up);
        code.words(R1, maps.own);
        code.with_number(AND, HASH, size(config.table.len().min(TABLE_LEN_MAX) - 1));
        code.with_number(SHL, HASH, 2);
        code.with(ADD, R1, HASH);
        code.read(R2, R1, 0, 0);
        code.jump(found);
    }
    code.mark(steps.unclassified);
    code.with_number(MOV, R2, config.unclassified.into());
    code.mark(found);
    // The place of the pair among the queues in use, plus one.
    code.words(R1, maps.flows);
    code.with_number(AND, R2, PAIR_MASK);
    code.with_number(SHL, R2, 2);
    code.with(ADD, R1, R2);
    code.read(R0, R1, 0, 0);
    let is_unused = code.label();
    code.jump_if(IF_EQUAL, R0, 0, is_unused);
    code.with_number(SUB, R0, 1);
    code.mark(is_unused);
    code.add(EXIT, 0, 0, 0, 0);
    code.finish()
}

fn hash_ipv4(code: &mut Code, maps: &Maps, config: &RssConfig, steps: &Steps) {
    let plain = code.label();
    code.read(R2, STACK, IPV4_AT + 6, HALF);
    code.jump_if(IF_SET, R2, in_order(flow::FRAGMENT), plain);
    code.read(R3, STACK, IPV4_AT, BYTE);
    code.with_number(AND, R3, 0xf);
    code.with_number(SHL, R3, 2);
    code.with(ADD, AT, R3);
    code.with_number(ADD, AT, size(flow::ETHERNET));
    code.read(R2, STACK, IPV4_AT + 9, BYTE);
    let with_ports = [hash_type::TCPV4, hash_type::UDPV4];
    let types = Types { addresses: hash_type::IPV4, with_ports };
    let set = config.hash.types;
    let packet = Packet { set, types, at: IPV4_AT + 12, len: 8, plain };
    hash(code, maps, &packet, steps);
}

fn hash_ipv6(code: &mut Code, maps: &Maps, config: &RssConfig, steps: &Steps) {
    let plain = code.label();
    code.fetch(flow::ETHERNET, IPV6_AT, flow::IPV6, steps.unclassified);
    code.with_number(ADD, AT, size(flow::ETHERNET + flow::IPV6));
    code.read(R2, STACK, IPV6_AT + 6, BYTE);
    look_behind_extensions(code, plain);
    let with_ports = [hash_type::TCPV6, hash_type::UDPV6];
    let types = Types { addresses: hash_type::IPV6, with_ports };
    let set = config.hash.types;
    let packet = Packet { set, types, at: IPV6_AT + 8, len: 32, plain };
    hash(code, maps, &packet, steps);
}

/// An IP header that lies on the stack, and the hash types that apply to it.
struct Packet {
    /// The hash types that the guest has enabled, and those of this version of IP.
    set: u32,
    types: Types,
    /// The stack offset of both addresses, and their bytes.
    at: i16,
    len: usize,
    /// The step that follows for a packet that is hashed without ports.
    plain: Label,
}

/// Hashes a packet whose protocol is in R2 and whose ports, if it has any, AT points to.
fn hash(code: &mut Code, maps: &Maps, packet: &Packet, steps: &Steps) {
    let has_ports = code.label();
    let is_set = |types: u32| packet.set & types != 0;
    for (protocol, types) in PROTOCOLS.into_iter().zip(packet.types.with_ports) {
        if is_set(types) {
            code.jump_if(IF_EQUAL, R2, protocol.into(), has_ports);
        }
    }
    code.jump(packet.plain);
    if packet.types.with_ports.into_iter().any(is_set) {
        code.mark(has_ports);
        code.fetch(0, PORTS_AT, 4, packet.plain);
        begin(code, maps);
        add_bytes(code, packet.at, packet.len, 0);
        add_bytes(code, PORTS_AT, 4, packet.len);
        code.jump(steps.look_up);
    }
    code.mark(packet.plain);
    if is_set(packet.types.addresses) {
        begin(code, maps);
        add_bytes(code, packet.at, packet.len, 0);
        code.jump(steps.look_up);
    } else {
        code.jump(steps.unclassified);
    }
}

/// Sets the hash to 0 and R1 to the address of the words.
fn begin(code: &mut Code, maps: &Maps) {
    code.with_number(MOV, HASH, 0);
    code.words(R1, maps.own);
}

/// Adds `len` bytes of the stack to the hash; they are the hash's input from byte `first` on.
fn add_bytes(code: &mut Code, stack_at: i16, len: usize, first: usize) {
    let bytes = (stack_at..).zip(first..first + len);
    for (at, byte) in bytes {
        for half in [0, 1] {
            code.read(R2, STACK, at, BYTE);
            if half == 0 {
                code.with_number(SHR, R2, 4);
            } else {
                code.with_number(AND, R2, 0xf);
            }
            code.with_number(SHL, R2, 2);
            code.with(ADD, R2, R1);
            let words = TABLE_LEN_MAX + (byte * 2 + half) * 16;
            code.read(R3, R2, i16::try_from(words * 4).unwrap_or(i16::MAX), 0);
            code.with(XOR, HASH, R3);
        }
    }
}

#[cfg(test)]
mod tests;

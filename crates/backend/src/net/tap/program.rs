//! The BPF program by which the host finds the queue for a frame to the guest.
//!
//! The program computes the same number as [`manyring_wire::net::flow::flow_of`], and looks the
//! flow up in the memory that [`super::flows`] describes. It returns:
//! ```text
//! no flow                                queue 0
//! one of the flow's slots has its tag    the place of the slot's pair among the queues in use
//! no such slot, or a pair out of use     the place that the table has for eight bits of the flow's
//!                                        number; without such a place, the flow's number, which
//!                                        the kernel takes modulo the number of queues
//! ```
//! The kernel runs the program under RCU, for every frame that it sends to the tap.

use super::TAP_QUEUE_PAIRS_MAX as PAIRS;
use crate::net::steer::{PAIR_MASK, SLOT_SHIFT, SLOTS, TAG_IN_SLOT, TAG_SHIFT};
use crate::sys::bpf::{BPF_FUNC_SKB_LOAD_BYTES, Insn};
use manyring_wire::net::flow;

/// The index of the first of 256 places for flows without a slot.
pub(super) const SPREAD_AT: usize = PAIRS + SLOTS;

// Classes, sizes and operations of instructions (RFC 9669).
const LD_IMM64: u8 = 0x18;
const LDX: u8 = 0x61;
pub(super) const HALF: u8 = 0x08;
pub(super) const BYTE: u8 = 0x10;
const LONG: u8 = 0x18;
const ALU64: u8 = 0x07;
const FROM_REGISTER: u8 = 0x08;
pub(super) const ADD: u8 = 0x00;
pub(super) const SUB: u8 = 0x10;
const MUL: u8 = 0x20;
const OR: u8 = 0x40;
pub(super) const AND: u8 = 0x50;
pub(super) const SHL: u8 = 0x60;
pub(super) const SHR: u8 = 0x70;
pub(super) const XOR: u8 = 0xa0;
pub(super) const MOV: u8 = 0xb0;
const JUMP: u8 = 0x05;
pub(super) const IF_EQUAL: u8 = 0x15;
const IF_UNEQUAL: u8 = 0x55;
const IF_GREATER: u8 = 0x25;
pub(super) const IF_SET: u8 = 0x45;
const CALL: u8 = 0x85;
pub(super) const EXIT: u8 = 0x95;
/// As the source register of `LD_IMM64`: the constant is the address of the first entry of a map.
const PSEUDO_MAP_VALUE: u8 = 2;

// Registers. A call returns its result in R0, takes arguments in R1 to R5, and changes all of them.
pub(super) const R0: u8 = 0;
pub(super) const R1: u8 = 1;
pub(super) const R2: u8 = 2;
pub(super) const R3: u8 = 3;
const R4: u8 = 4;
const R5: u8 = 5;
// Calls leave these unchanged. FRAME: the frame (`skb`). AT: where in the frame the program reads.
// SOURCE, TARGET: the two ends of the flow. STACK: the end of the stack.
const FRAME: u8 = 6;
pub(super) const AT: u8 = 7;
pub(super) const SOURCE: u8 = 8;
const TARGET: u8 = 9;
pub(super) const STACK: u8 = 10;

/// Where on the stack the headers of the frame are copied to: the fields of each are aligned there.
const ETHERNET_AT: i16 = -62;
pub(super) const IPV4_AT: i16 = ETHERNET_AT + 14;
pub(super) const IPV6_AT: i16 = -64;
pub(super) const PORTS_AT: i16 = -8;

/// The target of jumps: an index into [`Code::marks`].
#[derive(Clone, Copy)]
pub(super) struct Label(usize);

/// The targets that several steps jump to.
pub(super) struct Labels {
    pub(super) v4: Label,
    pub(super) v6: Label,
    /// Both ends of the flow are known, except for their ports.
    pub(super) ports: Label,
    /// Both ends of the flow are known: compute its number.
    pub(super) number: Label,
    pub(super) too_short: Label,
}

/// Instructions, and jumps whose targets come later.
#[derive(Default)]
pub(super) struct Code {
    list: Vec<Insn>,
    /// The jump instructions, each with its target.
    jumps: Vec<(usize, Label)>,
    /// For each label the instruction that it marks, once that is known.
    marks: Vec<Option<usize>>,
}

impl Code {
    pub(super) fn add(&mut self, code: u8, to: u8, from: u8, offset: i16, immediate: i32) {
        self.list.push(Insn::new(code, (to, from), offset, immediate));
    }

    /// `to = to operation from`
    pub(super) fn with(&mut self, operation: u8, to: u8, from: u8) {
        self.add(ALU64 | FROM_REGISTER | operation, to, from, 0, 0);
    }

    /// `to = to operation number`
    pub(super) fn with_number(&mut self, operation: u8, to: u8, number: i32) {
        self.add(ALU64 | operation, to, 0, 0, number);
    }

    /// `to = number`, of 64 bits
    fn constant(&mut self, to: u8, number: u64) {
        let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
        self.add(LD_IMM64, to, 0, 0, i32::from_le_bytes([a, b, c, d]));
        self.add(0, 0, 0, 0, i32::from_le_bytes([e, f, g, h]));
    }

    /// `to = the address of the words`
    pub(super) fn words(&mut self, to: u8, map: i32) {
        self.add(LD_IMM64, to, PSEUDO_MAP_VALUE, 0, map);
        self.add(0, 0, 0, 0, 0);
    }

    /// `to = *(from + offset)`, of this size; 0 is a word of 32 bits
    pub(super) fn read(&mut self, to: u8, from: u8, offset: i16, size: u8) {
        self.add(LDX | size, to, from, offset, 0);
    }

    pub(super) fn jump(&mut self, label: Label) {
        self.jumps.push((self.list.len(), label));
        self.add(JUMP, 0, 0, 0, 0);
    }

    /// Jumps to `label` if `comparison` holds between the register and `number`.
    pub(super) fn jump_if(&mut self, comparison: u8, register: u8, number: i32, label: Label) {
        self.jumps.push((self.list.len(), label));
        self.add(comparison, register, 0, 0, number);
    }

    /// Copies `len` bytes of the frame, from `AT + offset` on, to the stack; jumps to `otherwise`
    /// if the frame is shorter.
    pub(super) fn fetch(&mut self, offset: usize, to: i16, len: usize, otherwise: Label) {
        self.with(MOV, R1, FRAME);
        self.with(MOV, R2, AT);
        self.with_number(ADD, R2, size(offset));
        self.with(MOV, R3, STACK);
        self.with_number(ADD, R3, to.into());
        self.with_number(MOV, R4, size(len));
        self.add(CALL, 0, 0, 0, BPF_FUNC_SKB_LOAD_BYTES);
        self.jump_if(IF_UNEQUAL, R0, 0, otherwise);
    }

    pub(super) fn label(&mut self) -> Label {
        self.marks.push(None);
        Label(self.marks.len() - 1)
    }

    pub(super) fn mark(&mut self, label: Label) {
        self.marks[label.0] = Some(self.list.len());
    }

    pub(super) fn finish(mut self) -> Vec<Insn> {
        for (at, label) in self.jumps {
            let distance = self.marks[label.0].and_then(|to| to.checked_sub(at + 1));
            let distance = distance.and_then(|distance| i16::try_from(distance).ok());
            // A jump without a target becomes a loop, so that the kernel refuses the program.
            self.list[at] = self.list[at].with_offset(distance.unwrap_or(-1));
        }
        self.list
    }
}

/// A number of bytes as the immediate value of an instruction.
pub(super) fn size(bytes: usize) -> i32 {
    i32::try_from(bytes).unwrap_or(i32::MAX)
}

/// The number that an instruction reads from a field of the frame in network byte order.
pub(super) fn in_order(field: u16) -> i32 {
    field.to_be().into()
}

/// The program that looks flows up in the words of `map`, and hashes with `key`.
pub(super) fn program(map: i32, key: u64) -> Vec<Insn> {
    let mut code = Code::default();
    let [v4, v6, ports, number, too_short] = std::array::from_fn(|_| code.label());
    let labels = Labels { v4, v6, ports, number, too_short };
    look_at_ethernet(&mut code, &labels);
    look_at_ipv4(&mut code, &labels);
    look_at_ipv6(&mut code, &labels);
    look_at_ports(&mut code, &labels);
    code.mark(labels.number);
    choose(&mut code, map, key);
    code.mark(labels.too_short);
    code.with_number(MOV, R0, 0);
    code.add(EXIT, 0, 0, 0, 0);
    code.finish()
}

/// Finds the IP packet behind VLAN tags and PPPoE headers, and advances AT by their length. The
/// ends of a frame that is not IP are its Ethernet addresses.
pub(super) fn look_at_ethernet(code: &mut Code, labels: &Labels) {
    code.with(MOV, FRAME, R1);
    code.with_number(MOV, AT, 0);
    code.fetch(0, ETHERNET_AT, flow::FLOW_BYTES_MIN, labels.too_short);
    for (end, at) in [(SOURCE, ETHERNET_AT), (TARGET, ETHERNET_AT + 6)] {
        code.read(end, STACK, at, HALF);
        for (shift, at) in [(16, at + 2), (32, at + 4)] {
            code.read(R2, STACK, at, HALF);
            code.with_number(SHL, R2, shift);
            code.with(OR, end, R2);
        }
    }
    for _ in 0..flow::LOOKS_BEHIND {
        look_at_kind(code, labels);
        let (tagged, session, again) = (code.label(), code.label(), code.label());
        for kind in flow::TYPES_VLAN {
            code.jump_if(IF_EQUAL, R2, in_order(kind), tagged);
        }
        code.jump_if(IF_EQUAL, R2, in_order(flow::TYPE_PPPOE), session);
        code.jump(labels.number);
        code.mark(session);
        code.with_number(ADD, AT, size(flow::PPPOE));
        code.jump(again);
        code.mark(tagged);
        code.with_number(ADD, AT, size(flow::VLAN_TAG));
        code.mark(again);
        code.fetch(0, ETHERNET_AT, flow::FLOW_BYTES_MIN, labels.too_short);
    }
    look_at_kind(code, labels);
    code.jump(labels.number);
}

/// Jumps to the step of IPv4 or IPv6, if the EtherType is one of these.
fn look_at_kind(code: &mut Code, labels: &Labels) {
    code.read(R2, STACK, IPV4_AT - 2, HALF);
    for (kinds, label) in [(flow::TYPES_IPV6, labels.v6), (flow::TYPES_IPV4, labels.v4)] {
        for kind in kinds {
            code.jump_if(IF_EQUAL, R2, in_order(kind), label);
        }
    }
}

/// Reads both addresses, the protocol to R2, and advances AT to the ports.
fn look_at_ipv4(code: &mut Code, labels: &Labels) {
    code.mark(labels.v4);
    code.read(SOURCE, STACK, IPV4_AT + 12, 0);
    code.read(TARGET, STACK, IPV4_AT + 16, 0);
    code.read(R2, STACK, IPV4_AT + 6, HALF);
    code.jump_if(IF_SET, R2, in_order(flow::FRAGMENT), labels.number);
    code.read(R3, STACK, IPV4_AT, BYTE);
    code.with_number(AND, R3, 0xf);
    code.with_number(SHL, R3, 2);
    code.with(ADD, AT, R3);
    code.with_number(ADD, AT, 14);
    code.read(R2, STACK, IPV4_AT + 9, BYTE);
    code.jump(labels.ports);
}

fn look_at_ipv6(code: &mut Code, labels: &Labels) {
    code.mark(labels.v6);
    code.fetch(flow::ETHERNET, IPV6_AT, flow::IPV6, labels.too_short);
    code.constant(R3, flow::MIX[1]);
    for (end, at) in [(SOURCE, IPV6_AT + 8), (TARGET, IPV6_AT + 24)] {
        code.read(end, STACK, at, LONG);
        code.with(MUL, end, R3);
        code.read(R4, STACK, at + 8, LONG);
        code.with(XOR, end, R4);
    }
    code.with_number(ADD, AT, 14 + 40);
    code.read(R2, STACK, IPV6_AT + 6, BYTE);
    look_behind_extensions(code, labels.number);
}

/// Reads the protocol behind the extension headers of IPv6 to R2, where the protocol of the first
/// one is, and advances AT. Jumps to `otherwise` where an extension header is cut off or too long.
pub(super) fn look_behind_extensions(code: &mut Code, otherwise: Label) {
    let behind = code.label();
    for _ in 0..flow::EXTENSIONS_MAX {
        let is_extension = code.label();
        for protocol in flow::EXTENSIONS {
            code.jump_if(IF_EQUAL, R2, protocol.into(), is_extension);
        }
        code.jump(behind);
        code.mark(is_extension);
        code.fetch(0, PORTS_AT, 2, otherwise);
        code.read(R3, STACK, PORTS_AT + 1, BYTE);
        code.jump_if(IF_GREATER, R3, flow::EXTENSION_UNITS_MAX.into(), otherwise);
        code.with_number(SHL, R3, 3);
        code.with(ADD, AT, R3);
        code.with_number(ADD, AT, 8);
        code.read(R2, STACK, PORTS_AT, BYTE);
    }
    code.mark(behind);
}

/// Adds the ports to both ends, if the protocol has ports.
fn look_at_ports(code: &mut Code, labels: &Labels) {
    code.mark(labels.ports);
    let has_ports = code.label();
    for protocol in flow::PROTOCOLS_WITH_PORTS {
        code.jump_if(IF_EQUAL, R2, protocol.into(), has_ports);
    }
    code.jump(labels.number);
    code.mark(has_ports);
    code.fetch(0, PORTS_AT, 4, labels.number);
    for (end, at) in [(SOURCE, PORTS_AT), (TARGET, PORTS_AT + 2)] {
        code.read(R2, STACK, at, HALF);
        code.with_number(SHL, R2, 48);
        code.with(XOR, end, R2);
    }
}

/// Hashes both ends to the flow's number, finds the flow's slot, and returns the queue.
fn choose(code: &mut Code, map: i32, key: u64) {
    let (known, unknown) = (code.label(), code.label());
    code.constant(R2, key);
    code.with(XOR, SOURCE, R2);
    code.with(XOR, TARGET, R2);
    code.constant(R3, flow::MIX[0]);
    code.constant(R4, flow::MIX[1]);
    for end in [SOURCE, TARGET] {
        code.with(MUL, end, R3);
        code.with(MOV, R2, end);
        code.with_number(SHR, R2, 32);
        code.with(XOR, end, R2);
        code.with(MUL, end, R4);
        code.with(MOV, R2, end);
        code.with_number(SHR, R2, 29);
        code.with(XOR, end, R2);
    }
    code.with(ADD, SOURCE, TARGET);
    code.with(MUL, SOURCE, R3);
    // The flow's tag.
    code.with(MOV, R5, SOURCE);
    code.with_number(SHR, R5, TAG_SHIFT);
    code.with_number(AND, R5, 0xffff);
    code.with_number(OR, R5, 1);
    // The byte offset of the slot that the number names; the second pass takes the one beside it.
    code.words(R1, map);
    code.with(MOV, R2, SOURCE);
    code.with_number(SHR, R2, SLOT_SHIFT);
    code.with_number(SHL, R2, 2);
    for is_last in [false, true] {
        code.with(MOV, R3, R1);
        code.with(ADD, R3, R2);
        code.read(R3, R3, i16::try_from(PAIRS * 4).unwrap_or(0), 0);
        code.with(MOV, R4, R3);
        code.with_number(SHR, R4, TAG_IN_SLOT);
        code.with(XOR, R4, R5);
        if is_last {
            code.jump_if(IF_UNEQUAL, R4, 0, unknown);
        } else {
            code.jump_if(IF_EQUAL, R4, 0, known);
            code.with_number(XOR, R2, 4);
        }
    }
    code.mark(known);
    // The place of the pair among the queues in use, plus one.
    code.with_number(AND, R3, PAIR_MASK);
    code.with_number(SHL, R3, 2);
    code.with(ADD, R1, R3);
    code.read(R0, R1, 0, 0);
    code.jump_if(IF_EQUAL, R0, 0, unknown);
    code.with_number(SUB, R0, 1);
    code.add(EXIT, 0, 0, 0, 0);
    code.mark(unknown);
    let by_number = code.label();
    code.words(R1, map);
    code.with(MOV, R2, SOURCE);
    code.with_number(SHR, R2, 48 - 2);
    code.with_number(AND, R2, PAIR_MASK << 2);
    code.with(ADD, R1, R2);
    code.read(R0, R1, i16::try_from(SPREAD_AT * 4).unwrap_or(0), 0);
    code.jump_if(IF_EQUAL, R0, 0, by_number);
    code.with_number(SUB, R0, 1);
    code.add(EXIT, 0, 0, 0, 0);
    code.mark(by_number);
    code.with(MOV, R0, SOURCE);
    code.with_number(SHR, R0, 48);
    code.add(EXIT, 0, 0, 0, 0);
}

//! `ControlDriverQueue`: the driver's commands to a device that serves its own control queue.

use crate::{Arena, DriverError, Virtqueue};
use manyring_queue::RingFeatures;
use manyring_wire::net::{
    Coalescing, CtrlStatus, FilterTable, MacAddress, QueueCoalescing, RxMode, class,
};
use std::sync::Arc;
use std::time::Duration;

/// Number of entries of the control queue.
const SIZE: u16 = 64;
/// Most bytes of a command, and of its answer.
const AREA: u32 = 16 << 10;
/// Longest time a command may take: longer than the device allows itself.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The status byte before the device writes it.
const NO_STATUS: u8 = 255;

/// The device's answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CtrlAnswer {
    /// The status byte; 255 if the device wrote none.
    pub status: u8,
    /// The bytes behind the status byte.
    pub data: Vec<u8>,
    /// Bytes that the device reports as written, including the status byte.
    pub written: u32,
}

/// The control queue (virtio 1.3 §5.1.6.5). One command at a time.
#[derive(Debug)]
pub struct ControlDriverQueue {
    arena: Arc<Arena>,
    vring: Virtqueue,
    command: u64,
    answer: u64,
    timeout: Duration,
}

impl ControlDriverQueue {
    /// Makes the control queue in `arena`, as virtqueue `index`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(
        arena: &Arc<Arena>,
        index: u32,
        features: RingFeatures,
    ) -> Result<Self, DriverError> {
        Ok(Self {
            arena: arena.clone(),
            vring: Virtqueue::new(arena, index, SIZE, features, 0)?,
            command: arena.alloc(AREA.into(), 8)?,
            answer: arena.alloc(AREA.into(), 8)?,
            timeout: TIMEOUT,
        })
    }

    /// Most bytes of arena that a control queue takes.
    #[must_use]
    pub const fn arena_size() -> u64 {
        Virtqueue::arena_size(SIZE) + 2 * (AREA as u64 + 8)
    }

    /// The virtqueue of the control queue.
    #[must_use]
    pub fn vring(&mut self) -> &mut Virtqueue {
        &mut self.vring
    }

    /// Sets the longest wait for an answer.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Sends a command. Class and command number are in one descriptor, the data in one for each of
    /// `parts`. The device can write the status byte and `answer_size` bytes behind it.
    ///
    /// # Errors
    /// [`DriverError::TooLong`], [`DriverError::Timeout`], [`DriverError::LostCall`].
    pub fn command(
        &mut self,
        class: u8,
        command: u8,
        parts: &[&[u8]],
        answer_size: u32,
    ) -> Result<CtrlAnswer, DriverError> {
        let header = [class, command];
        let readable: Vec<&[u8]> =
            std::iter::once(&header[..]).chain(parts.iter().copied()).collect();
        let writable: &[u32] = if answer_size == 0 { &[1] } else { &[1, answer_size] };
        self.raw(&readable, writable)
    }

    /// Sends a chain of any shape: a device-readable descriptor for each of `readable`, and a
    /// device-writable one of each size in `writable`, even if these are empty.
    ///
    /// # Errors
    /// See [`Self::command`]; [`DriverError::RingFull`] for a chain without descriptors.
    pub fn raw(&mut self, readable: &[&[u8]], writable: &[u32]) -> Result<CtrlAnswer, DriverError> {
        let total: usize = readable.iter().map(|part| part.len()).sum();
        let room: u64 = writable.iter().map(|len| u64::from(*len)).sum();
        let max = AREA as usize;
        if total > max || room > u64::from(AREA) {
            return Err(DriverError::TooLong { len: total.max(writable.len()), max });
        }
        let mut at = self.command;
        let mut sources = Vec::with_capacity(readable.len());
        for part in readable {
            self.arena.write(at, part)?;
            let len = u32::try_from(part.len()).unwrap_or(0);
            sources.push((at, len));
            at += u64::from(len);
        }
        let mut at = self.answer;
        let mut targets = Vec::with_capacity(writable.len());
        for len in writable {
            targets.push((at, *len));
            at += u64::from(*len);
        }
        self.arena.write(self.answer, &[NO_STATUS])?;
        self.vring.queue().add(&sources, &targets).ok_or(DriverError::RingFull)?;
        self.vring.publish()?;
        let (_, written) = self.vring.wait_used(self.timeout)?;
        let mut bytes = vec![NO_STATUS; usize::try_from(room).unwrap_or(0).max(1)];
        if room > 0 {
            self.arena.read(self.answer, &mut bytes)?;
        }
        let data = bytes.split_off(1);
        Ok(CtrlAnswer { status: bytes[0], data, written })
    }

    fn run(&mut self, class: u8, command: u8, parts: &[&[u8]]) -> Result<CtrlStatus, DriverError> {
        status(self.command(class, command, parts, 0)?.status)
    }

    /// `RX_*`: switches a receive mode.
    ///
    /// # Errors
    /// See [`Self::command`]; [`DriverError::Status`] for an unknown status. The same holds for all
    /// commands below.
    pub fn set_rx_mode(&mut self, mode: RxMode, on: bool) -> Result<CtrlStatus, DriverError> {
        let command = match mode {
            RxMode::Promisc => class::RX_PROMISC,
            RxMode::AllMulti => class::RX_ALLMULTI,
            RxMode::AllUni => class::RX_ALLUNI,
            RxMode::NoMulti => class::RX_NOMULTI,
            RxMode::NoUni => class::RX_NOUNI,
            RxMode::NoBcast => class::RX_NOBCAST,
        };
        self.run(class::RX, command, &[&[u8::from(on)]])
    }

    /// `MAC_TABLE_SET`: sets the addresses that are received in addition to the device's own.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn set_mac_table(&mut self, table: &FilterTable) -> Result<CtrlStatus, DriverError> {
        let (unicast, multicast) = (mac_list(&table.unicast), mac_list(&table.multicast));
        self.run(class::MAC, class::MAC_TABLE_SET, &[&unicast, &multicast])
    }

    /// `MAC_ADDR_SET`
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn set_mac(&mut self, mac: MacAddress) -> Result<CtrlStatus, DriverError> {
        self.run(class::MAC, class::MAC_ADDR_SET, &[&mac])
    }

    /// `VLAN_ADD`: receives a VLAN.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn add_vlan(&mut self, id: u16) -> Result<CtrlStatus, DriverError> {
        self.run(class::VLAN, class::VLAN_ADD, &[&id.to_le_bytes()])
    }

    /// `VLAN_DEL`: stops receiving a VLAN.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn remove_vlan(&mut self, id: u16) -> Result<CtrlStatus, DriverError> {
        self.run(class::VLAN, class::VLAN_DEL, &[&id.to_le_bytes()])
    }

    /// `ANNOUNCE_ACK`: the driver has announced itself.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn acknowledge_announce(&mut self) -> Result<CtrlStatus, DriverError> {
        self.run(class::ANNOUNCE, class::ANNOUNCE_ACK, &[])
    }

    /// `MQ_VQ_PAIRS_SET`: uses this many queue pairs.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn set_queue_pairs(&mut self, count: u16) -> Result<CtrlStatus, DriverError> {
        self.run(class::MQ, class::MQ_VQ_PAIRS_SET, &[&count.to_le_bytes()])
    }

    /// `GUEST_OFFLOADS_SET`: accepts only the unfinished packets of these `GUEST_*` feature bits.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn set_guest_offloads(&mut self, bits: u64) -> Result<CtrlStatus, DriverError> {
        self.run(class::GUEST_OFFLOADS, class::GUEST_OFFLOADS_SET, &[&bits.to_le_bytes()])
    }

    /// `NOTF_COAL_TX_SET`: coalesces the notifications of all transmitqs.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn coalesce_tx(&mut self, coalescing: Coalescing) -> Result<CtrlStatus, DriverError> {
        self.run(class::NOTF_COAL, class::NOTF_COAL_TX_SET, &[&coalescing.emit()])
    }

    /// `NOTF_COAL_RX_SET`: coalesces the notifications of all receiveqs.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn coalesce_rx(&mut self, coalescing: Coalescing) -> Result<CtrlStatus, DriverError> {
        self.run(class::NOTF_COAL, class::NOTF_COAL_RX_SET, &[&coalescing.emit()])
    }

    /// `NOTF_COAL_VQ_SET`: coalesces the notifications of one virtqueue.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn coalesce_queue(&mut self, queue: QueueCoalescing) -> Result<CtrlStatus, DriverError> {
        self.run(class::NOTF_COAL, class::NOTF_COAL_VQ_SET, &[&queue.emit()])
    }

    /// `NOTF_COAL_VQ_GET`: reads the coalescing of virtqueue `index`; `None` if the device refuses.
    ///
    /// # Errors
    /// See [`Self::set_rx_mode`].
    pub fn coalescing_of(&mut self, index: u16) -> Result<Option<QueueCoalescing>, DriverError> {
        let (kind, get) = (class::NOTF_COAL, class::NOTF_COAL_VQ_GET);
        // The index, and the reserved field behind it.
        let answer = self.command(kind, get, &[&index.to_le_bytes(), &[0; 2]], 8)?;
        if status(answer.status)? == CtrlStatus::Err {
            return Ok(None);
        }
        let number = |at: usize| {
            let bytes = answer.data.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_le_bytes(bytes))
        };
        let parse = || {
            let coalescing = Coalescing { packets_max: number(0)?, delay_us_max: number(4)? };
            Some(QueueCoalescing { index, coalescing })
        };
        Ok(parse())
    }
}

fn status(byte: u8) -> Result<CtrlStatus, DriverError> {
    match byte {
        0 => Ok(CtrlStatus::Ok),
        1 => Ok(CtrlStatus::Err),
        other => Err(DriverError::Status(other)),
    }
}

/// The bytes of a MAC table: the number of addresses, then the addresses.
fn mac_list(macs: &[MacAddress]) -> Vec<u8> {
    let count = u32::try_from(macs.len()).unwrap_or(u32::MAX);
    [&count.to_le_bytes()[..], macs.as_flattened()].concat()
}

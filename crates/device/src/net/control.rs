//! What the commands of the control queue do (virtio 1.3 §5.1.6.5).

use super::{Inner, State};
use manyring_wire::net::{
    Coalescing, Command, CtrlStatus, Offloads, QueueCoalescing, RxMode,
    VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_RX,
    VIRTIO_NET_F_CTRL_RX_EXTRA, VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_GUEST_ANNOUNCE,
    VIRTIO_NET_F_MQ, VIRTIO_NET_F_NOTF_COAL, VIRTIO_NET_F_VQ_NOTF_COAL,
};

/// Why a command is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("its feature was not negotiated")]
    Feature,
    #[error("{pairs} queue pairs of a device with {max}")]
    Pairs { pairs: u16, max: usize },
    #[error("offloads that were not negotiated")]
    Offloads,
    #[error("the host's interface does not follow")]
    Port,
    #[error("virtqueue {index} is no transmitq or receiveq that runs")]
    Index { index: u16 },
    #[error("the host or the workers do not answer in time")]
    Time,
}

/// What a command answers: its status, and the bytes behind it.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: CtrlStatus,
    pub(super) result: Vec<u8>,
}

impl Reply {
    pub(super) fn status(status: CtrlStatus) -> Self {
        Self { status, result: Vec::new() }
    }
}

/// The feature a command needs.
fn needs(command: &Command) -> u64 {
    match command {
        Command::Rx(RxMode::Promisc | RxMode::AllMulti, _) | Command::MacTable(_) => {
            VIRTIO_NET_F_CTRL_RX
        }
        Command::Rx(..) => VIRTIO_NET_F_CTRL_RX_EXTRA,
        Command::MacAddr(_) => VIRTIO_NET_F_CTRL_MAC_ADDR,
        Command::VlanAdd(_) | Command::VlanDel(_) => VIRTIO_NET_F_CTRL_VLAN,
        Command::AnnounceAck => VIRTIO_NET_F_GUEST_ANNOUNCE,
        Command::QueuePairs(_) => VIRTIO_NET_F_MQ,
        Command::GuestOffloads(_) => VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
        Command::CoalesceTx(_) | Command::CoalesceRx(_) => VIRTIO_NET_F_NOTF_COAL,
        Command::CoalesceQueue(_) | Command::CoalesceQuery(_) => VIRTIO_NET_F_VQ_NOTF_COAL,
    }
}

impl Inner {
    /// Does what the driver wants; returns when every worker goes by it.
    pub(super) async fn obey(&self, command: Command) -> Result<Reply, Refusal> {
        if self.state().features & needs(&command) == 0 {
            return Err(Refusal::Feature);
        }
        match command {
            Command::Rx(mode, on) => self.set_filter(|f| f.set_mode(mode, on)).await,
            Command::MacTable(table) => self.set_filter(|f| f.set_table(table)).await,
            Command::VlanAdd(id) => self.set_filter(|f| f.set_vlan(id, true)).await,
            Command::VlanDel(id) => self.set_filter(|f| f.set_vlan(id, false)).await,
            Command::MacAddr(mac) => {
                self.state().mac = mac;
                self.set_filter(|f| f.set_mac(mac)).await;
            }
            Command::AnnounceAck => self.state().announces = false,
            Command::QueuePairs(pairs) => self.use_pairs(pairs).await?,
            Command::GuestOffloads(bits) => self.set_guest_offloads(bits).await?,
            Command::CoalesceTx(coalescing) => self.coalesce(1, coalescing).await,
            Command::CoalesceRx(coalescing) => self.coalesce(0, coalescing).await,
            Command::CoalesceQueue(QueueCoalescing { index, coalescing }) => {
                let at = self.data_queue(index)?;
                self.state().vqs[at].coalescing = coalescing;
                self.push_coalescing(at).await;
            }
            Command::CoalesceQuery(index) => {
                let at = self.data_queue(index)?;
                let coalescing = self.state().vqs[at].coalescing;
                let result = QueueCoalescing { index, coalescing }.emit().to_vec();
                return Ok(Reply { status: CtrlStatus::Ok, result });
            }
        }
        Ok(Reply::status(CtrlStatus::Ok))
    }

    async fn set_filter(&self, change: impl FnOnce(&mut super::rules::Filter)) {
        if let State { filter: Some(filter), .. } = &mut *self.state() {
            change(filter);
        }
        self.push_rules().await;
    }

    async fn use_pairs(&self, pairs: u16) -> Result<(), Refusal> {
        let max = self.options.queue_pairs;
        if !(1..=max).contains(&usize::from(pairs)) {
            return Err(Refusal::Pairs { pairs, max });
        }
        let before = std::mem::replace(&mut self.state().pairs_in_use, usize::from(pairs));
        if self.apply_pairs().await {
            return Ok(());
        }
        self.state().pairs_in_use = before;
        self.apply_pairs().await;
        Err(Refusal::Port)
    }

    async fn set_guest_offloads(&self, bits: u64) -> Result<(), Refusal> {
        let wanted = Offloads::of_guest(bits);
        let given = {
            let mut state = self.state();
            if bits & !state.features != 0 {
                return Err(Refusal::Offloads);
            }
            std::mem::replace(&mut state.given, wanted)
        };
        if !self.apply_offloads().await {
            let mut state = self.state();
            if state.given == wanted {
                state.given = given;
            }
            return Err(Refusal::Port);
        }
        self.push_rules().await;
        Ok(())
    }

    /// What a driver before has set counts no more: tells whoever goes by it.
    pub(super) async fn forget_commands(&self) {
        self.begin_control();
        self.apply_offloads().await;
        self.push_rules().await;
        for index in 0..self.options.queue_pairs * 2 {
            self.push_coalescing(index).await;
        }
        self.apply_pairs().await;
    }

    /// Sets the parameters of all transmitqs (1) or receiveqs (0).
    async fn coalesce(&self, odd: usize, coalescing: Coalescing) {
        let count = self.options.queue_pairs * 2;
        {
            let mut state = self.state();
            if odd == 1 {
                state.coalescing_tx = coalescing;
            } else {
                state.coalescing_rx = coalescing;
            }
            for vq in state.vqs[..count].iter_mut().skip(odd).step_by(2) {
                vq.coalescing = coalescing;
            }
        }
        for index in (odd..count).step_by(2) {
            self.push_coalescing(index).await;
        }
    }

    fn data_queue(&self, index: u16) -> Result<usize, Refusal> {
        let at = usize::from(index);
        let is_data = at < self.options.queue_pairs * 2;
        let runs = is_data && self.state().vqs[at].is_started;
        if runs { Ok(at) } else { Err(Refusal::Index { index }) }
    }
}

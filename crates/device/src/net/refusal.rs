//! `CtrlRefusal`: why a command of the control queue is refused.

/// Why a command is answered with `VIRTIO_NET_ERR`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CtrlRefusal {
    #[error("its feature was not negotiated")]
    Feature,
    #[error("{pairs} queue pairs of a device with {max}")]
    Pairs { pairs: usize, max: usize },
    #[error("offloads that were not negotiated")]
    Offloads,
    #[error("changing the host's interface failed")]
    Port,
    #[error("the host's interface passes only frames to its own address")]
    OnlyTo,
    #[error("the guest may only send as its own address")]
    OnlyFrom,
    #[error("the host's interface passes only frames to groups that the host has joined")]
    Groups,
    #[error("its port of the switch is not in this VLAN")]
    Vlan,
    #[error("virtqueue {index} is no transmitq or receiveq that runs")]
    Index { index: u16 },
    #[error("the host or the workers do not answer in time")]
    Time,
}

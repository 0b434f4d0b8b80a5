//! The house's part of a network device in a room: it tells the room what the host and the operator
//! change, and does what the guest may choose.
//!
//! One thing is done after another, at the pace that the device allows its own guests (`net/pace`):
//! a room that asks for more before it was answered is ended.

use super::house::Room;
use super::message::{PortFacts, Told, Wish};
use manyring_backend::net::tap::lent::{Lent, LentTable};
use manyring_device::Device;
use manyring_device::net::Offloads;
use manyring_device::net::{NetDevice, Outside};
use manyring_engine::aside;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::Arc;
use tokio::sync::mpsc;

/// A question of a room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) number: u64,
    pub(super) wish: Wish,
}

/// The queues of the device's interface as a message carries them. Neither, if its port is none.
pub(super) async fn lent(net: &NetDevice) -> Result<(Option<PortFacts>, Vec<OwnedFd>), String> {
    let port = net.port().clone();
    let lent = aside(move || port.lend().transpose()).await.ok_or("the daemon has failed")?;
    let Some(lent) = lent.map_err(|errno| errno.to_string())? else {
        return Ok((None, Vec::new()));
    };
    let Lent { facts, mut queues, table } = lent;
    let table_key = table.as_ref().map(|table| table.key);
    queues.extend(table.map(|LentTable { map, .. }| map));
    let facts = PortFacts {
        interface: facts.interface,
        is_macvtap: facts.is_macvtap,
        offloads: facts.offloads.guest_features(),
        mtu: facts.mtu,
        table_key,
    };
    Ok((Some(facts), queues))
}

/// Attends to a device until its room has it no more; `joins`: before its queues were lent. Then
/// the host uses none of its queues.
pub(super) async fn attend(
    net: Arc<NetDevice>,
    room: Arc<Room>,
    joins: u64,
    mut asks: mpsc::Receiver<Ask>,
) {
    let mut changes = net.config_changes();
    changes.mark_changed();
    let mut joins = joins;
    loop {
        tokio::select! {
            ask = asks.recv() => {
                let Some(Ask { number, wish }) = ask else { break };
                let error = done(&net, wish).await.map_or_else(Errno::raw_os_error, |()| 0);
                room.tell_in_turn(Told::Done { number, error }, Vec::new()).await;
            }
            Ok(()) = changes.changed() => {
                let outside = net.outside();
                if outside.joins != joins && !outside.is_gone {
                    joins = outside.joins;
                    renew(&net, &room).await;
                }
                room.tell_in_turn(told(&net), Vec::new()).await;
            }
        }
    }
    net.take_back().await;
}

async fn done(net: &NetDevice, wish: Wish) -> Result<(), Errno> {
    match wish {
        Wish::Pair { pair, attached } => net.lend_pair(pair.into(), attached).await,
        Wish::Offloads { bits } => net.lend_offloads(Offloads::of_guest(bits)).await,
    }
}

/// Lends the queues of the interface that was joined.
async fn renew(net: &NetDevice, room: &Room) {
    let device = net.name().to_owned();
    match lent(net).await {
        Ok((Some(_), mut queues)) => {
            queues.truncate(net.queue_pairs());
            room.tell_in_turn(Told::Queues { device }, queues).await;
        }
        Ok((None, _)) => {}
        Err(error) => tracing::error!(device, error, "the room does not get its queues"),
    }
}

/// What the host and the operator want of the device now.
pub(super) fn told(net: &NetDevice) -> Told {
    let Outside { link_up, is_gone, mtu, announcements, .. } = net.outside();
    Told::Outside { device: net.name().to_owned(), link_up, is_gone, mtu, announcements }
}

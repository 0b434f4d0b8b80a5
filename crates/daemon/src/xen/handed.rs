//! Hands the disks of a Xen to the next house (`rooms/takeover.rs`).
//!
//! Their tasks leave the disks, as at the end of the process: the rings stay as they are, with
//! their journals, and images and event channels are closed. The tasks of the next house take the
//! rings over. Two things go along: the locks by which no other daemon serves these disks, and the
//! bytes of disks in memory.

use super::{Bytes, Disks, Memory, XenDisks};
use crate::rooms::{Bequest, Left, OfXen, XenBytes};
use manyring_transport::xenbus::DeviceId;
use rustix::fd::OwnedFd;
use std::collections::HashMap;

impl XenDisks {
    /// Leaves disks that were told to be left; returns when they are to be served here again.
    pub(super) async fn hand_over(&self, disks: &mut Disks, mut bequest: Bequest) {
        let all = async { while disks.ended().await.is_some() {} };
        tokio::select! {
            () = all => {}
            // A request does not end, or another device was too slow.
            () = bequest.is_void() => return,
        }
        bequest.answer(self.left()).await;
        self.shared.state_dir.sign();
    }

    fn left(&self) -> Result<Vec<(Left, Vec<OwnedFd>)>, String> {
        let failed = |error: std::io::Error| error.to_string();
        let locks = self.shared.state_dir.locks().map_err(failed)?;
        let mut left = vec![(Left::Locks {}, locks)];
        for (id, Memory { params, bytes }) in self.shared.memory().iter() {
            let DeviceId { kind, domain, device } = id.clone();
            let params = params.clone();
            let file = match bytes {
                Bytes::File(file) => file.try_clone().map_err(failed)?,
                Bytes::Disk { disk, lies_apart: true } => {
                    let file = disk.hand_memory().map_err(|errno| errno.to_string())?;
                    file.ok_or("a disk in memory that lies nowhere")?
                }
                Bytes::Disk { .. } => {
                    return Err(format!("the disk {id} is in the memory of this process"));
                }
            };
            left.push((Left::XenMemory { kind, domain, device, params }, vec![file]));
        }
        Ok(left)
    }
}

/// The bytes of disks of these kinds that another house has left.
pub(super) fn taken(left: &mut OfXen, kinds: &[String]) -> HashMap<DeviceId, Memory> {
    let all = std::mem::take(&mut left.memory);
    let (own, others): (Vec<_>, _) = all.into_iter().partition(|of| kinds.contains(&of.kind));
    left.memory = others;
    let memory = |XenBytes { kind, domain, device, params, file }| {
        (DeviceId { kind, domain, device }, Memory { params, bytes: Bytes::File(file) })
    };
    own.into_iter().map(memory).collect()
}

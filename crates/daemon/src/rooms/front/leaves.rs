//! The part of a device that another house gets when it takes over.

use super::{Front, Waiting};
use crate::rooms::left::Left;
use crate::rooms::lend::left_of;
use crate::rooms::parcel::Parcel;
use crate::rooms::takeover::{Bequest, Share};
use manyring_engine::aside;
use rustix::fd::OwnedFd;

impl Front<'_> {
    /// Leaves the device to another house: its room ends first. If that house fails, all goes on.
    pub(super) async fn bequeath(&mut self, bequest: Bequest) {
        if bequest.reply.is_closed() {
            return;
        }
        let held = match &self.room {
            Some(room) => room.park("another process takes over").await,
            None => None,
        };
        let share = self.share(held).await;
        let _ = bequest.reply.send(share);
        let _ = bequest.resumes.await;
        if let Some(port) = self.net().map(|net| net.port().clone()) {
            aside(move || port.keep()).await;
        }
    }

    /// `held`: the process of the room, if it has not ended. Requests of it may be under way: the
    /// next house waits for them, as for those of a room of its own, before it gives anybody the
    /// image.
    async fn share(&mut self, held: Option<OwnedFd>) -> Result<Share, String> {
        // If the other house fails, the next room here waits for requests of former rooms.
        self.attended().await;
        let device = self.wanted.plan().name.clone();
        let mut share = Share::new();
        for process in &self.held {
            let process = process.try_clone().map_err(|error| error.to_string())?;
            share.push((Left::Held { device: device.clone() }, vec![process.into()]));
        }
        let held =
            held.map(|process| (Left::Held { device: device.clone() }, vec![process.into()]));
        share.extend(held);
        let marks = self.endings.iter().filter(|ending| ending.may_write());
        share.extend(marks.map(|ending| {
            (Left::Marked { device: device.clone(), byte: ending.mark() }, Vec::new())
        }));
        let kind = self.part.kind.clone();
        let left = aside(move || left_of(&kind)).await.ok_or("the daemon has failed")?;
        let left = left.map_err(|errno| errno.to_string())?;
        let is_disk = self.net().is_none();
        for fds in left {
            let device = device.clone();
            let of = if is_disk { Left::Disk { device } } else { Left::Queues { device } };
            share.push((of, fds.into_iter().map(Into::into).collect()));
        }
        if let Some(owner) = &self.owner {
            share.extend(self.estates.share(owner));
        }
        // Behind those whose domain has the device: the next house has it wait, too.
        if let Some(Waiting { socket, domain }) = &self.waiting {
            let (domain, answering) = (domain.clone(), None);
            let parcel = Parcel::Foreign(socket.clone());
            share.push((Left::Client { device, domain, answering }, vec![parcel]));
        }
        Ok(share)
    }
}

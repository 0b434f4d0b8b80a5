//! The part of a device that another supervisor gets when it takes over.

use super::{Front, Waiting};
use crate::processes::left::{Left, Share};
use crate::processes::lend::left_of;
use crate::processes::parcel::Parcel;
use crate::processes::takeover::Bequest;
use manyring_backend::blk::Ending;
use manyring_engine::aside;
use rustix::fd::OwnedFd;
use std::time::Duration;
use tokio::time::timeout;

/// How long the supervisor's own part of a disk may take to end, when its device process has.
const REST: Duration = Duration::from_millis(300);

impl Front<'_> {
    /// Leaves the device to another supervisor: its device process ends first. If that supervisor
    /// fails, all goes on.
    pub(super) async fn bequeath(&mut self, bequest: Bequest) {
        if bequest.reply.is_closed() {
            return;
        }
        let held = match &self.process {
            Some(process) => process.park("another process takes over").await,
            None => None,
        };
        let share = self.share(held).await;
        let _ = bequest.reply.send(share);
        let _ = bequest.resumes.await;
        if let Some(port) = self.net().map(|net| net.port().clone()) {
            aside(move || port.keep()).await;
        }
    }

    /// Waits for the attendants. They make the guest's writes durable before they let go of the
    /// lock that goes with its rings, and that takes as long as the host takes. The next supervisor
    /// does not wait for that now: it gets the mark by which it asks whether that is over, before
    /// it gives anybody the image.
    async fn rests(&mut self) -> Result<Option<Ending>, String> {
        if self.net().is_some() {
            self.attended().await;
            return Ok(None);
        }
        if timeout(REST, self.attended()).await.is_ok() {
            return Ok(None);
        }
        let Some(marks) = self.marks.upgrade() else {
            // The attendant has let go of its marks, and returns without another wait.
            self.attended().await;
            return Ok(None);
        };
        let ended = timeout(REST, aside(move || marks.end())).await;
        ended.ok().flatten().map(Some).ok_or_else(|| "a lock of an image does not come".to_owned())
    }

    /// `held`: the device process, if it has not ended. Requests of it may be under way: the next
    /// supervisor waits for them, as for those of a device process of its own, before it gives
    /// anybody the image.
    async fn share(&mut self, held: Option<OwnedFd>) -> Result<Share, String> {
        // If the other supervisor fails, the next device process here waits for requests of former
        // device processes.
        let ending = self.rests().await?;
        let device = self.wanted.plan().name.clone();
        let mut share = Share::new();
        for process in &self.held {
            let process = process.try_clone().map_err(|error| error.to_string())?;
            share.push((Left::Held { device: device.clone() }, vec![process.into()]));
        }
        let held =
            held.map(|process| (Left::Held { device: device.clone() }, vec![process.into()]));
        share.extend(held);
        let all = ending.iter().chain(self.endings.iter().map(|ending| &**ending));
        for ending in all {
            let (byte, only_reads) = (ending.mark(), !ending.may_write());
            let unmarked = ending.unmarked().map_err(|errno| errno.to_string())?;
            let unmarked = unmarked.into_iter().map(Into::into).collect();
            share.push((Left::Marked { device: device.clone(), byte, only_reads }, unmarked));
        }
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
        // Behind those whose domain has the device: the next supervisor has it wait, too.
        if let Some(Waiting { socket, domain }) = &self.waiting {
            let (domain, answering) = (domain.clone(), None);
            let parcel = Parcel::Foreign(socket.clone());
            share.push((Left::Client { device, domain, answering }, vec![parcel]));
        }
        Ok(share)
    }
}

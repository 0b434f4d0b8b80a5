//! Hands a device to the next supervisor.

use super::{Front, Waiting};
use crate::processes::handoff::HandoffRequest;
use crate::processes::handoff::{DeviceHandoff, HandoffMessage};
use crate::processes::request_server::left_of;
use manyring_backend::blk::Ending;
use manyring_device::net::NetSide;
use manyring_engine::aside;
use manyring_serve::outgoing::MessageFd;
use manyring_serve::times::HAND_OFF_DISK;
use rustix::fd::OwnedFd;
use tokio::time::timeout;

impl Front<'_> {
    /// Hands the device to another supervisor; its device process ends first. If that supervisor
    /// fails, this one serves the device again.
    pub(super) async fn hand_off(&mut self, handoff_request: HandoffRequest) {
        if handoff_request.reply.is_closed() {
            return;
        }
        let held = match &self.process {
            Some(process) => process.quiesce("a takeover by another daemon is under way").await,
            None => None,
        };
        let share = self.share(held).await;
        let _ = handoff_request.reply.send(share);
        // A takeover that succeeds ends this process, so the code behind this line runs only if the
        // takeover has failed.
        let _ = handoff_request.resumes.await;
        if let Some(port) = self.net().map(|net| net.port().clone()) {
            // The other supervisor may have changed settings of the tap: restore them.
            aside(move || port.keep()).await;
        }
    }

    /// Waits until the request servers have ended. If the image's lock goes with the rings
    /// (`lock_with_rings`), a request server flushes the guest's writes and then releases the lock,
    /// which takes as long as the host takes. After [`HAND_OFF_DISK`] this returns the handle of
    /// the lock mark instead: the next supervisor waits until the mark is released before it gives
    /// the image to a device process.
    async fn rests(&mut self) -> Result<Option<Ending>, String> {
        if self.net().is_some() {
            self.attended().await;
            return Ok(None);
        }
        if timeout(HAND_OFF_DISK, self.attended()).await.is_ok() {
            return Ok(None);
        }
        let Some(marks) = self.marks.upgrade() else {
            // The request server has released its marks, and ends at once.
            self.attended().await;
            return Ok(None);
        };
        let ended = timeout(HAND_OFF_DISK, aside(move || marks.end())).await;
        ended
            .ok()
            .flatten()
            .map(Some)
            .ok_or_else(|| "the lock of an image is not released".to_owned())
    }

    /// Returns the messages that hand the device over. `held`: a pidfd of the device process, if
    /// the kernel has not ended it. Requests of that process may be in flight, so the next
    /// supervisor waits for its end before it gives the image to a device process.
    async fn share(&mut self, held: Option<OwnedFd>) -> Result<DeviceHandoff, String> {
        // `ending` goes into the messages only. If the takeover fails, `attended` gets the same
        // handle from the request server before the next device process here gets the image.
        let ending = self.rests().await?;
        let device = self.wanted.plan().name.clone();
        let mut share = DeviceHandoff::new();
        for (process, _) in &self.held {
            let process = process.try_clone().map_err(|error| error.to_string())?;
            share.push((HandoffMessage::Held { device: device.clone() }, vec![process.into()]));
        }
        let held = held
            .map(|process| (HandoffMessage::Held { device: device.clone() }, vec![process.into()]));
        share.extend(held);
        let all = ending.iter().chain(self.endings.iter().map(|ending| &**ending));
        for ending in all {
            let (byte, only_reads) = (ending.mark(), !ending.may_write());
            let unmarked = ending.unmarked().map_err(|errno| errno.to_string())?;
            let unmarked = unmarked.into_iter().map(Into::into).collect();
            share.push((
                HandoffMessage::Marked { device: device.clone(), byte, only_reads },
                unmarked,
            ));
        }
        share.extend(self.part.remote.as_deref().map(|remote| {
            let (device, (target, told)) = (device.clone(), remote.left());
            (HandoffMessage::Export { device, target, told }, Vec::new())
        }));
        let left = left_of(&self.part.owned).await?;
        let is_disk = self.net().is_none();
        for fds in left {
            let device = device.clone();
            let of = if is_disk {
                HandoffMessage::Disk { device }
            } else {
                HandoffMessage::Queues { device }
            };
            share.push((of, fds.into_iter().map(Into::into).collect()));
        }
        if let Some(capture) = self.part.capture.clone() {
            let left = aside(move || capture.left()).await.ok_or("internal error")?;
            let left = left.map_err(|error| error.to_string())?;
            let device = device.clone();
            share.push((HandoffMessage::Capture { device }, vec![left.into()]));
        }
        if let Some(owner) = &self.owner {
            share.extend(self.journals.share(owner));
        }
        // Clients of other domains come last: they wait at the next supervisor, too.
        if let Some(Waiting { socket, domain }) = &self.waiting {
            let (domain, outgoing) = (domain.clone(), MessageFd::Foreign(socket.clone()));
            share.push((HandoffMessage::Client { device, domain }, vec![outgoing]));
        }
        Ok(share)
    }
}

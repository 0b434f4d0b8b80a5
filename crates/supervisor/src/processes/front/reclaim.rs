//! Takes a device back from its device process, because the device goes to another domain's process
//! or is removed.

use super::{Front, gone};
use crate::processes::journal_store::JournalStore;
use crate::processes::process::DeviceProcess;
use crate::processes::request_server::let_go;
use manyring_backend::blk::{Ending, Image};
use manyring_device::Owned;
use manyring_engine::aside;
use manyring_serve::times::{FRONT_RETRY, PROCESS_ANSWER, RECLAIM};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How many times `forget_journals` searches the journals for descriptors of the image.
const LOOKS_MAX: usize = 3;

/// Returns when no request of a device process for the device's image is in flight. `endings`: the
/// handles that the device's request servers returned.
pub(in crate::processes) async fn release(
    owned: &Owned,
    endings: &[Arc<Ending>],
    device: &str,
    process: &str,
) -> Result<(), String> {
    let Some(shown) = owned.as_disk() else { return Ok(()) };
    let began = Instant::now();
    let mut is_told = false;
    loop {
        let (disk, all) = (shown.disk().clone(), endings.to_vec());
        let is_let_go = aside(move || {
            let Some(image) = disk.image() else { return Ok::<_, Errno>(true) };
            let all = all.iter().map(|ending| ending.is_over(image));
            [image.is_let_go()].into_iter().chain(all).try_fold(true, |all, is| Ok(all && is?))
        });
        let is_let_go = is_let_go.await;
        let elsewhere = endings.iter().any(|ending| ending.is_elsewhere());
        match is_let_go {
            Some(Ok(true)) => return Ok(()),
            Some(Ok(false)) => {}
            Some(Err(errno)) => return Err(errno.to_string()),
            None => return Err("internal error".to_owned()),
        }
        if began.elapsed() > RECLAIM && !std::mem::replace(&mut is_told, true) {
            let problem = match elsewhere {
                true => "image is locked by another process; waiting",
                false => "requests of a former device process are still in flight; waiting",
            };
            let (disk, device) = (shown.disk().clone(), device.to_owned());
            let process = process.to_owned();
            // This reads /proc of every process, which may take seconds.
            tokio::spawn(aside(move || {
                let holder = disk.image().and_then(Image::other_holder);
                tracing::warn!(device, process, holder, "{problem}");
            }));
        }
        sleep((began.elapsed() / 8).clamp(Duration::from_millis(1), FRONT_RETRY)).await;
    }
}

impl Front<'_> {
    /// Waits until the request servers of device processes that no longer have the device have
    /// ended, and keeps the handles that they return.
    pub(super) async fn attended(&mut self) {
        while let Some(ended) = self.request_servers.join_next().await {
            self.endings.extend(ended.ok().flatten().map(Arc::new));
        }
    }

    /// Returns when no device process has the device, and none of its writes is in flight. With
    /// `reads`, none of its reads either: a read in flight would write into the memory of a guest
    /// that another device process continues to serve.
    pub(super) async fn release(&mut self, reads: bool) -> Result<(), String> {
        self.attended().await;
        while let Some((process, _)) = self.held.last() {
            gone(process).await.map_err(|error| error.to_string())?;
            self.held.pop();
        }
        let name = &self.wanted.plan().name;
        let all = self.endings.iter().filter(|ending| reads || ending.may_write());
        let all: Vec<_> = all.cloned().collect();
        release(&self.part.owned, &all, name, self.domain).await?;
        self.endings.retain(|ending| !reads && !ending.may_write());
        Ok(())
    }

    /// As [`Self::release`], for a device that is removed. If another program has locked the image,
    /// it did so while requests of a device process may have been in flight: waiting for them now
    /// protects nobody, so this does not wait. `process`, which had the device, may keep an open
    /// file of the image that no lock mark shows, so it is killed; the next device process serves
    /// its other devices.
    async fn release_at_end(
        &mut self,
        reads: bool,
        process: Option<&DeviceProcess>,
    ) -> Result<(), String> {
        self.attended().await;
        self.mark_again().await;
        if !self.endings.iter().any(|ending| ending.is_elsewhere()) {
            return self.release(reads).await;
        }
        if let Some(process) = process.filter(|process| process.serves()) {
            process.leave("one of its images is locked by another process");
            process.ended_or_stuck().await;
        }
        let (elsewhere, endings): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.endings).into_iter().partition(|e| e.is_elsewhere());
        self.endings = endings;
        let (device, process) = (&self.wanted.plan().name, self.domain);
        let problem = "image is locked by another process; requests of a former device process \
                       may still reach it";
        tracing::warn!(device, process, "{problem}");
        // Closing the last descriptor of a file may take long.
        aside(move || drop(elsewhere)).await;
        self.release(reads).await
    }

    /// Tries again to lock the marks that could not be locked before, because another program had
    /// the image locked.
    async fn mark_again(&mut self) {
        let Some(shown) = self.part.owned.as_disk() else { return };
        let all: Vec<_> = self.endings.iter().filter(|e| e.is_elsewhere()).cloned().collect();
        if all.is_empty() {
            return;
        }
        let disk = shown.disk().clone();
        let mark = move || {
            let image = disk.image();
            all.iter().for_each(|ending| {
                let _ = image.map(|image| ending.is_over(image));
            });
        };
        aside(mark).await;
    }

    /// Takes the device from its device process for another domain. A compromised process may
    /// report that it stopped the device, and keep the descriptors, so the process is killed. The
    /// next process of its domain serves its other devices.
    pub(super) async fn leave(&mut self) {
        let process = self.process.clone();
        let journals = process.as_ref().map(|process| process.all_journals()).unwrap_or_default();
        if let Some(process) = &process {
            process.remove(&self.wanted.plan().name).await;
            process.end_yielding("one of its devices moves to another domain").await;
        }
        self.reclaim().await;
        if let Some(process) = process
            && timeout(RECLAIM, self.release(true)).await.is_err()
        {
            self.forget_journals(&process, &journals).await;
        }
    }

    /// Releases the front-ends in whose journals a device process put a descriptor of the image.
    /// The supervisor stores the descriptors of a journal without checking them, and would hand
    /// this one to the next device process.
    async fn forget_journals(&self, process: &DeviceProcess, journals: &[Arc<JournalStore>]) {
        let Some(shown) = self.part.owned.as_disk() else { return };
        let (device, domain) = (&self.wanted.plan().name, process.name());
        // A compromised process may store another descriptor before it ends.
        for _ in 0..LOOKS_MAX {
            let (disk, mut all) = (shown.disk().clone(), journals.to_vec());
            all.extend(self.processes.journals_of(domain));
            let are_kept = aside(move || {
                let Some(image) = disk.image() else { return false };
                let journals =
                    all.iter().filter(|journals| journals.forget_journals(image.holder()));
                journals.count() > 0
            });
            if are_kept.await != Some(true) {
                return;
            }
            let problem =
                "session closed: its device process stored a descriptor of the image in it";
            tracing::warn!(device, process = domain, "{problem}");
            let _ = self.processes.end_one(domain, "it kept an image open by a session").await;
        }
    }

    /// Returns when all sockets of the interface of a removed device are closed, or when `process`,
    /// which had the device, was killed for keeping them. If yet another process has such a socket,
    /// the queue stays in use, and the next device with this interface waits.
    async fn let_go_at_end(&mut self, process: Option<&DeviceProcess>) {
        let Some(net) = self.net().cloned() else { return };
        // A front that was stopped while queues were lent: the call ends soon, unless the host
        // holds it up.
        let _ = timeout(RECLAIM, net.lends_nothing()).await;
        let Some(process) = process else { return };
        self.attended().await;
        let domain = process.name();
        if timeout(RECLAIM, let_go(&net, Some(domain))).await.is_err() && process.serves() {
            process.evict("it does not release an interface").await;
        }
    }

    /// Takes the device from its device process, which stops it first. If the future is dropped,
    /// this must be called again.
    pub(super) async fn reclaim(&mut self) {
        let Some(process) = self.process.clone() else { return };
        process.remove(&self.wanted.plan().name).await;
        self.process = None;
        let counts = self.counts.clone();
        aside(move || counts.end()).await;
    }

    /// Takes the device from its device process. The caller then releases the image's lock, so this
    /// returns only when no request of the device is in flight.
    pub(super) async fn close(&mut self) {
        // Refuse requests from now on: a front that ends is not handed to another supervisor.
        self.asks.close();
        while self.asks.try_recv().is_ok() {}
        let device = &self.wanted.plan().name;
        let process = self.process.clone();
        let journals = process.as_ref().map(|process| process.all_journals()).unwrap_or_default();
        self.reclaim().await;
        if let Some(process) = process.as_ref().filter(|process| process.devices().is_empty()) {
            process.end_yielding("its last device was removed").await;
        }
        self.journals.forget_all();
        let last = process.as_deref();
        self.let_go_at_end(last).await;
        if let Some(process) = last
            && timeout(RECLAIM, self.release_at_end(true, last)).await.is_err()
        {
            self.forget_journals(process, &journals).await;
            let lets_go = timeout(PROCESS_ANSWER, self.release_at_end(true, last));
            if process.serves() && lets_go.await.is_err() {
                // The device process reported that it stopped the disk, but still has the image
                // open.
                process.evict("it does not release an image").await;
                self.forget_journals(process, &journals).await;
            }
        }
        if let Err(error) = self.release_at_end(false, last).await {
            tracing::warn!(
                device,
                error,
                "waiting for the requests in flight failed; image released"
            );
        }
        if let Some(capture) = self.part.capture.clone() {
            aside(move || capture.finish()).await;
        }
    }
}

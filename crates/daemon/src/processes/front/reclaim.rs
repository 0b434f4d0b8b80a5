//! How the supervisor takes a device back from its device process: for another domain's device
//! process, or at its end.

use super::{Front, RETRY, gone};
use crate::assemble::Kind;
use crate::processes::journal_store::JournalStore;
use crate::processes::process::DeviceProcess;
use crate::processes::question;
use manyring_backend::blk::{Ending, Image};
use manyring_engine::aside;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How long requests may outlast their device process before the log says so.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How often the supervisor looks for front-ends for which it keeps an image that is to be let go
/// of.
const LOOKS_MAX: usize = 3;

/// Returns when no request that a device process has made of the device's image is under way.
/// `endings` are those that its request servers have returned.
pub(in crate::processes) async fn release(
    kind: &Kind,
    endings: &[Arc<Ending>],
    device: &str,
    process: &str,
) -> Result<(), String> {
    let Kind::Blk(shown) = kind else { return Ok(()) };
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
            None => return Err("the daemon has failed".to_owned()),
        }
        if began.elapsed() > TIMEOUT && !std::mem::replace(&mut is_told, true) {
            let problem = match elsewhere {
                true => "another process has locked the image: waiting until it lets go of it",
                false => "requests of a device process that has ended are still waited for",
            };
            let disk = shown.disk().clone();
            let holder = aside(move || disk.image().and_then(Image::other_holder)).await.flatten();
            tracing::warn!(device, process, holder, "{problem}");
        }
        sleep((began.elapsed() / 8).clamp(Duration::from_millis(1), RETRY)).await;
    }
}

impl Front<'_> {
    /// Waits for the request servers, whose device processes have the device no more.
    pub(super) async fn attended(&mut self) {
        while let Some(ended) = self.request_servers.join_next().await {
            self.endings.extend(ended.ok().flatten().map(Arc::new));
        }
    }

    /// Returns when no device process has the device any more, and no request of one is under way
    /// that writes. `reads`: and none that reads, because its device process goes on and would have
    /// the bytes, or its guest does, to whose memory they go.
    pub(super) async fn release(&mut self, reads: bool) -> Result<(), String> {
        self.attended().await;
        while let Some(process) = self.held.last() {
            gone(process).await.map_err(|error| error.to_string())?;
            self.held.pop();
        }
        let name = &self.wanted.plan().name;
        let all = self.endings.iter().filter(|ending| reads || ending.may_write());
        let all: Vec<_> = all.cloned().collect();
        release(&self.part.kind, &all, name, self.domain).await?;
        self.endings.retain(|ending| !reads && !ending.may_write());
        Ok(())
    }

    /// As [`Self::release`], for a device that goes. Another process that has the image got it
    /// although requests of a device process may have been under way: they are nothing new to that
    /// process, and are not waited for. `process`, which had the device, may keep a description of
    /// the image, and no mark tells of that: its other devices go on in the next one.
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
            process.leave("another process has locked an image of it");
            process.ended_or_stuck().await;
        }
        let (elsewhere, endings): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.endings).into_iter().partition(|e| e.is_elsewhere());
        self.endings = endings;
        let (device, process) = (&self.wanted.plan().name, self.domain);
        let problem = "another process has locked the image: requests of a former device process \
                       may still reach it";
        tracing::warn!(device, process, "{problem}");
        // The last descriptor of a file may take long to close.
        aside(move || drop(elsewhere)).await;
        self.release(reads).await
    }

    /// Marks the descriptions that could not be marked yet, if the process that had the image
    /// locked has released it.
    async fn mark_again(&mut self) {
        let Kind::Blk(shown) = &self.part.kind else { return };
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

    /// Takes the device from its device process for another domain. A device process that a guest
    /// has taken over may say that it has stopped, and keep the descriptors that it was given: only
    /// its end takes them away. The device process's other devices go on in the next device process
    /// of its domain.
    pub(super) async fn leave(&mut self) {
        let process = self.process.clone();
        let journals = process.as_ref().map(|process| process.all_journals()).unwrap_or_default();
        if let Some(process) = &process {
            process.remove(&self.wanted.plan().name).await;
            process.end_yielding("another domain gets a device of it").await;
        }
        self.reclaim().await;
        if let Some(process) = process
            && timeout(TIMEOUT, self.release(true)).await.is_err()
        {
            self.forget_journals(&process, &journals).await;
        }
    }

    /// Releases the front-ends for which a device process has had the supervisor keep the image.
    /// The supervisor keeps the descriptors that a device process notes of its sessions without a
    /// look at them, and hands them to the next device process, which ends then.
    async fn forget_journals(&self, process: &DeviceProcess, journals: &[Arc<JournalStore>]) {
        let Kind::Blk(shown) = &self.part.kind else { return };
        let (device, domain) = (&self.wanted.plan().name, process.name());
        // One that a guest has taken may do it again before its end.
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
            let problem = "a device process has had its image kept for a session, which ends";
            tracing::warn!(device, process = domain, "{problem}");
            let _ = self.processes.end_one(domain, "it has had an image kept").await;
        }
    }

    /// Takes the device from its device process, which has stopped it then. If this is given up, it
    /// is to be done again.
    pub(super) async fn reclaim(&mut self) {
        let Some(process) = self.process.clone() else { return };
        process.remove(&self.wanted.plan().name).await;
        self.process = None;
        let counts = self.counts.clone();
        aside(move || counts.end()).await;
    }

    /// Takes the device from its device process. The image's lock is released when this returns,
    /// so the device process's requests must have ended.
    pub(super) async fn close(&mut self) {
        // A front that ends leaves nothing to another supervisor.
        self.asks.close();
        while self.asks.try_recv().is_ok() {}
        let device = &self.wanted.plan().name;
        let process = self.process.clone();
        let journals = process.as_ref().map(|process| process.all_journals()).unwrap_or_default();
        self.reclaim().await;
        if let Some(process) = process.as_ref().filter(|process| process.devices().is_empty()) {
            process.end_yielding("its last device is gone").await;
        }
        self.journals.forget_all();
        let last = process.as_deref();
        if let Some(process) = last
            && timeout(TIMEOUT, self.release_at_end(true, last)).await.is_err()
        {
            self.forget_journals(process, &journals).await;
            let lets_go = timeout(question::TIMEOUT, self.release_at_end(true, last));
            if process.serves() && lets_go.await.is_err() {
                // The device process says that it has stopped the disk, and keeps the image.
                process.evict("it does not let go of an image").await;
                self.forget_journals(process, &journals).await;
            }
        }
        if let Err(error) = self.release_at_end(false, last).await {
            tracing::warn!(device, error, "the image is let go of");
        }
    }
}

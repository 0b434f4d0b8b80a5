//! Starts vrings. Those for which the host lacks something are tried again while their session
//! lives.

use super::{Effect, ServedFrontEnd};
use manyring_device::StartError;
use manyring_engine::Activation;
use manyring_memory::Words;
use manyring_queue::{DeviceQueue, QueueConfig, QueueError, Ring, RingAddresses, RingFeatures};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::Instant;

/// The first pause before the vrings that wait are tried again, and the longest.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Vrings whose start failed for want of something that the host may have again: an image that
/// another process serves, a file descriptor, a thread.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    vrings: BTreeSet<usize>,
    /// When they are tried again; `None`: none waits.
    due: Option<Instant>,
    pause: Duration,
    is_told: bool,
}

impl Waiting {
    /// A vring did not start. True if the operator must be told, which is once in a session.
    fn add(&mut self, index: usize, now: Instant) -> bool {
        self.vrings.insert(index);
        if self.due.is_none() {
            self.pause = (self.pause * 2).clamp(RETRY_DELAYS.0, RETRY_DELAYS.1);
            self.due = Some(now + self.pause);
        }
        !std::mem::replace(&mut self.is_told, true)
    }

    /// A vring has started, or never will. True if it was the last that waited.
    fn remove(&mut self, index: usize) -> bool {
        let was_last = self.vrings.remove(&index) && self.vrings.is_empty();
        if self.vrings.is_empty() {
            (self.due, self.pause) = (None, Duration::ZERO);
        }
        was_last
    }

    /// The vrings that are tried now.
    fn take(&mut self) -> Vec<usize> {
        self.due = None;
        std::mem::take(&mut self.vrings).into_iter().collect()
    }
}

impl ServedFrontEnd {
    /// When [`Self::start_waiting`] is to be called; `None`: no vring waits.
    pub(in crate::vhost_user) fn start_due(&self) -> Option<Instant> {
        self.waiting.due
    }

    /// Tries the vrings again that wait for the host, if their front-end still wants them to run.
    pub(in crate::vhost_user) async fn start_waiting(&mut self) {
        let indexes = self.waiting.take();
        for effect in self.session.retry::<()>(&indexes) {
            if let Effect::Start(index) = effect {
                self.start(index).await;
            }
        }
    }

    /// Starts a vring. False: it will not start. True also if it waits for the host: its guest's
    /// requests stay in the ring.
    pub(super) async fn start(&mut self, index: usize) -> bool {
        let device = self.device.clone();
        let device = device.name();
        match self.try_start(index).await {
            Ok(()) => {
                tracing::debug!(device, queue = index, "queue started");
                if self.waiting.remove(index) {
                    tracing::info!(device, "waiting queues started");
                }
                true
            }
            Err(StartError::Queue(error)) => {
                self.session.refuse(index);
                self.waiting.remove(index);
                self.tell_queue_error(index, error);
                false
            }
            Err(error) if error.is_shortage() => {
                self.session.refuse(index);
                let is_first = self.waiting.add(index, Instant::now());
                // Of an image the device has told more.
                if is_first && error != StartError::Image {
                    tracing::warn!(
                        device,
                        queue = index,
                        %error,
                        "starting the queue failed; retrying"
                    );
                }
                true
            }
            Err(error) => {
                // Only a new kick starts the vring again.
                let base = self.session.vring(index).map(|v| v.base()).unwrap_or_default();
                self.session.stopped(index, base);
                self.find_base(index).await;
                self.waiting.remove(index);
                self.vrings[index].kick = None;
                tracing::error!(device, queue = index, %error, "starting the queue failed");
                false
            }
        }
    }

    async fn try_start(&mut self, index: usize) -> Result<(), StartError> {
        let features = self.session.features();
        let enabled = self.session.is_enabled(index);
        let (queue, addresses) = self.ring_of(index)?;
        self.tell_unfit(index);
        let host = &self.vrings[index];
        let activation = Activation {
            index,
            queue,
            addresses,
            kick: host.kick.clone(),
            call: host.call.clone(),
            err: host.err.clone(),
            enabled,
            features,
            events: self.events.clone(),
        };
        let running = self.device.start(activation).await?;
        let host = &mut self.vrings[index];
        (host.running, host.kick) = (Some(running), None);
        Ok(())
    }

    /// The ring of a vring, of which nothing is read yet: the queue's worker does that. The
    /// front-end decides how long a page fault there lasts, and all sessions wait for this thread.
    fn ring_of(&self, index: usize) -> Result<(DeviceQueue, RingAddresses), QueueError> {
        let vring = self.session.vring(index).copied().unwrap_or_default();
        let addresses = vring.addresses().ok_or(QueueError::Size { size: vring.size() })?;
        let config = QueueConfig {
            size: vring.size(),
            addresses,
            base: vring.base(),
            features: RingFeatures::from_bits(self.session.features()),
        };
        let queue = DeviceQueue::unread(config, self.memory.clone())?;
        let (record, former) = self.record(index, vring.size());
        let queue = queue.recorded(record, former);
        let queue = if self.device.trails_rings() { queue.trailed() } else { queue };
        Ok((queue, addresses))
    }

    /// Finds where the ring stands of a vring that does not run here, if its in-flight region or
    /// the ring itself tells that: a process before this one may have run it, and then the
    /// front-end's base is from before that. On the janitor, as whatever touches guest memory.
    pub(super) async fn find_base(&mut self, index: usize) {
        let Ok((mut queue, _)) = self.ring_of(index) else { return };
        let find = move || {
            // A new record would begin at a ring that nobody has served.
            if queue.is_new() {
                return None;
            }
            queue.begin();
            queue.put_back_owed();
            queue.fault().is_none().then(|| (queue.base(), queue.owed()))
        };
        let Some(Some((base, owed))) = self.janitor.run(find).await else { return };
        if owed > 0 {
            let device = self.device.name();
            let told = "the queue is stopped; its base is reported without the requests in flight";
            tracing::warn!(device, queue = index, owed, "{told}");
        }
        self.session.found(index, base);
    }

    /// The ring's place in the front-end's in-flight region, or in the one of the session; and a
    /// place that is too small for the ring. A ring that fits neither is served without a record:
    /// the region is an aid, and its device goes on.
    fn record(&self, index: usize, size: u16) -> (Option<Words>, Option<Words>) {
        let is_packed = self.is_packed();
        let mut former = None;
        if let Some(theirs) = &self.inflight {
            if let Some(place) = theirs.fitting(index, size, is_packed) {
                return (Some(place), None);
            }
            // A ring of former days may have fitted, and left a record there. A later one that fits
            // again must not go on from it: it says nothing of the chains that this ring takes.
            former = theirs.place(index, is_packed);
        }
        let own = self.own_inflight.as_ref();
        (own.and_then(|own| own.region.fitting(index, size, is_packed)), former)
    }

    /// True if the ring has a place in one of the regions.
    pub(super) fn has_record(&self, index: usize) -> bool {
        let size = self.session.vring(index).map_or(0, |vring| vring.size());
        self.record(index, size).0.is_some()
    }

    /// Tells the operator, once for each region, what the VMM must be told.
    fn tell_unfit(&mut self, index: usize) {
        let size = self.session.vring(index).map_or(0, |vring| vring.size());
        let Some(theirs) = &self.inflight else { return };
        let entries = theirs.queue_size();
        let fits = theirs.fitting(index, size, self.is_packed()).is_some();
        if fits || std::mem::replace(&mut self.is_unfit_told, true) {
            return;
        }
        let device = self.device.name();
        let costs = "a crash loses track of requests in flight";
        if size > entries {
            tracing::warn!(
                device,
                queue = index,
                ring_size = size,
                region_entries = entries,
                "the ring is larger than the VMM's in-flight region: {costs}. Set \
                 queue-size={size} for this device in the VMM"
            );
        } else {
            tracing::warn!(
                device,
                queue = index,
                "the VMM's in-flight region has no entry for this ring: {costs}"
            );
        }
    }
}

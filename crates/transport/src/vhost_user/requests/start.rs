//! Starts vrings. A start that fails for a shortage of the host is retried while the session lives.

use super::{Effect, ServedFrontEnd};
use manyring_device::StartError;
use manyring_engine::Activation;
use manyring_memory::Words;
use manyring_queue::{DeviceQueue, QueueConfig, QueueError, Ring, RingAddresses, RingFeatures};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::Instant;

/// The first and the longest pause before the start of waiting vrings is retried.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Vrings whose start failed for a shortage that may end: an image that another process serves, a
/// file descriptor, a thread.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    vrings: BTreeSet<usize>,
    /// The time at which the start of all waiting vrings is retried; `None`: no vring waits.
    due: Option<Instant>,
    pause: Duration,
    is_told: bool,
}

impl Waiting {
    /// Adds a vring that did not start. Returns true if this must be logged, which is once in a
    /// session.
    fn add(&mut self, index: usize, now: Instant) -> bool {
        self.vrings.insert(index);
        if self.due.is_none() {
            self.pause = (self.pause * 2).clamp(RETRY_DELAYS.0, RETRY_DELAYS.1);
            self.due = Some(now + self.pause);
        }
        !std::mem::replace(&mut self.is_told, true)
    }

    /// Removes a vring that has started, or never will. Returns true if it was the last one that
    /// waited.
    fn remove(&mut self, index: usize) -> bool {
        let was_last = self.vrings.remove(&index) && self.vrings.is_empty();
        if self.vrings.is_empty() {
            (self.due, self.pause) = (None, Duration::ZERO);
        }
        was_last
    }

    /// Takes the vrings whose start is retried now.
    fn take(&mut self) -> Vec<usize> {
        self.due = None;
        std::mem::take(&mut self.vrings).into_iter().collect()
    }
}

/// The region in which a ring records its chains in flight, and the ring's place there.
enum RecordPlace {
    /// A place in the front-end's region.
    FrontEnd(Words),
    /// A place in the session's own region.
    Own(Words),
}

impl ServedFrontEnd {
    /// Returns when [`Self::start_waiting`] must be called; `None`: no vring waits.
    pub(in crate::vhost_user) fn start_due(&self) -> Option<Instant> {
        self.waiting.due
    }

    /// Retries the start of the waiting vrings, if their front-end still wants them to run.
    pub(in crate::vhost_user) async fn start_waiting(&mut self) {
        let indexes = self.waiting.take();
        for effect in self.session.retry::<()>(&indexes) {
            if let Effect::Start(index) = effect {
                self.start(index).await;
            }
        }
    }

    /// Starts a vring. Returns false if it will not start. Returns true also if its start is
    /// retried later: until then, the guest's requests stay in the ring.
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
                // The device has already logged the details of an image that cannot be opened.
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

    /// Makes the queue of a vring without reading its ring: the queue's worker reads it. A page
    /// fault in guest memory can take as long as the front-end likes (userfaultfd), and would block
    /// all sessions on this thread.
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
        let queue = match record {
            Some(RecordPlace::Own(place)) => queue.recorded(Some(place), former).in_own_region(),
            Some(RecordPlace::FrontEnd(place)) => queue.recorded(Some(place), former),
            None => queue.recorded(None, former),
        };
        let queue = if self.device.trails_rings() { queue.trailed() } else { queue };
        Ok((queue, addresses))
    }

    /// Finds the base of a vring that does not run here, from its in-flight region or from the ring
    /// itself. A former process may have served the ring, and then the base that the front-end has
    /// set is too old. Runs on the janitor, like all access to guest memory.
    pub(super) async fn find_base(&mut self, index: usize) {
        let Ok((mut queue, _)) = self.ring_of(index) else { return };
        let find = move || {
            // An empty record says nothing about the ring: nobody has served it with this record.
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

    /// Returns the ring's place in the front-end's in-flight region, or in the session's own
    /// region; and a place in the front-end's region that is too small for the ring. A ring that
    /// fits neither region is served without a record: it then cannot be resumed after a crash.
    fn record(&self, index: usize, size: u16) -> (Option<RecordPlace>, Option<Words>) {
        let is_packed = self.is_packed();
        let mut former = None;
        if let Some(theirs) = &self.inflight {
            if let Some(place) = theirs.fitting(index, size, is_packed) {
                return (Some(RecordPlace::FrontEnd(place)), None);
            }
            // An earlier, smaller ring may have left a record in this place. A later ring that fits
            // again must not resume from it, because it lacks the chains that this ring takes.
            former = theirs.place(index, is_packed);
        }
        let own = self.own_inflight.as_ref();
        let place = own.and_then(|own| own.region.fitting(index, size, is_packed));
        (place.map(RecordPlace::Own), former)
    }

    /// True if the ring has a place in one of the regions.
    pub(super) fn has_record(&self, index: usize) -> bool {
        let size = self.session.vring(index).map_or(0, |vring| vring.size());
        self.record(index, size).0.is_some()
    }

    /// Logs, once for each region, that the ring does not fit, and the option that the VMM needs.
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

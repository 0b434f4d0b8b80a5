//! `Commands`: carries out the commands of the control queue (virtio 1.3 §5.1.6.5).

use super::command_effect::lacking;
use super::pace::{REST, REST_MAX};
use super::port::HasPort;
use super::refusal::CtrlRefusal;
use super::rules::Filter;
use super::{Inner, State};
use manyring_wire::net::rss::{Hasher, Rss};
use manyring_wire::net::{
    Coalescing, Command, CtrlStatus, MacAddress, Offloads, QueueCoalescing, RxMode,
    VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_RX,
    VIRTIO_NET_F_CTRL_RX_EXTRA, VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_GUEST_ANNOUNCE,
    VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_MQ, VIRTIO_NET_F_NOTF_COAL, VIRTIO_NET_F_RSS,
    VIRTIO_NET_F_VQ_NOTF_COAL,
};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Longest wait of a command for the workers and the host.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The answer to a command: its status, and the bytes that follow it.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: CtrlStatus,
    pub(super) result: Vec<u8>,
}

impl Reply {
    pub(super) fn status(status: CtrlStatus) -> Self {
        Self { status, result: Vec::new() }
    }
}

/// Returns the feature that the driver must have negotiated for a command.
pub(super) fn needs(command: &Command) -> u64 {
    match command {
        Command::Rx(RxMode::Promisc | RxMode::AllMulti, _) | Command::MacTable(_) => {
            VIRTIO_NET_F_CTRL_RX
        }
        Command::Rx(..) => VIRTIO_NET_F_CTRL_RX_EXTRA,
        Command::MacAddr(_) => VIRTIO_NET_F_CTRL_MAC_ADDR,
        Command::VlanAdd(_) | Command::VlanDel(_) => VIRTIO_NET_F_CTRL_VLAN,
        Command::AnnounceAck => VIRTIO_NET_F_GUEST_ANNOUNCE,
        Command::QueuePairs(_) => VIRTIO_NET_F_MQ,
        Command::Rss(_) => VIRTIO_NET_F_RSS,
        Command::Hash(_) => VIRTIO_NET_F_HASH_REPORT,
        Command::GuestOffloads(_) => VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
        Command::CoalesceTx(_) | Command::CoalesceRx(_) => VIRTIO_NET_F_NOTF_COAL,
        Command::CoalesceQueue(_) | Command::CoalesceQuery(_) => VIRTIO_NET_F_VQ_NOTF_COAL,
    }
}

/// The workers, or calls of the host, to which a command's change must be passed.
#[derive(Clone, Debug)]
enum Reach {
    /// The receive filter, to all queues.
    Rules,
    /// Coalescing parameters, to these queues.
    Coalescing(Vec<usize>),
    /// The pairs in use: to the queues of all pairs, to the host, and to the receiveqs that report
    /// hashes.
    Pairs,
    /// The offloads: to the host first, then to all queues.
    Offloads,
}

/// The former value of a setting that a command has changed.
#[derive(Debug)]
pub(super) enum Before {
    Filter(MacAddress, Option<Filter>),
    Coalescing {
        tx: Option<Coalescing>,
        rx: Option<Coalescing>,
        queues: Vec<(usize, Option<Coalescing>)>,
    },
    Steering(Steering),
    Offloads(Offloads),
}

/// The pairs that the driver uses, and the hash by which frames are spread over them.
#[derive(Debug)]
pub(super) struct Steering {
    pairs: usize,
    rss: Option<Arc<Rss>>,
    hash: Option<Arc<Hasher>>,
}

/// The two kinds of changes. A slow change of one kind delays only commands of the same kind.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// The change is passed to workers only.
    Workers,
    /// The change needs a call of the host, which may take long.
    Host,
}

impl Reach {
    fn kind(&self) -> Kind {
        match self {
            Self::Rules | Self::Coalescing(_) => Kind::Workers,
            Self::Pairs | Self::Offloads => Kind::Host,
        }
    }
}

/// Carries out the commands of one driver, one after another.
///
/// A command first changes the state of the device; then the change is passed to workers or the
/// host. If the host refuses, or if this takes longer than a second, the state is restored, and
/// passed on again. A call of the host cannot be cancelled: it may return after the driver was
/// answered; another call then undoes it.
#[derive(Debug)]
pub(super) struct Commands {
    inner: Arc<Inner>,
    /// Changes that are still being passed on after the answer: at most one task of each [`Kind`].
    late: [Option<JoinHandle<bool>>; 2],
    /// When the host was called last.
    called_at: Instant,
    /// The next command that calls the host waits until this time (`pace.rs`).
    rests_until: Instant,
}

impl Commands {
    /// Makes the commands of a driver that has set nothing yet.
    pub(super) fn new(inner: Arc<Inner>) -> Self {
        let now = Instant::now();
        Self { inner, late: [None, None], called_at: now, rests_until: now }
    }

    /// Begins to serve a driver. Unless the driver `goes_on` from a former start of the ring,
    /// resets all settings and passes them to workers and host. Waits for that a second at most, so
    /// that commands without a call of the host are served even if the host hangs.
    pub(super) async fn begin(inner: Arc<Inner>, goes_on: bool) -> Self {
        inner.begin_control(goes_on);
        let mut commands = Self::new(inner);
        let deadline = Instant::now() + TIMEOUT;
        let queues = (0..commands.inner.options.queue_pairs * 2).collect();
        commands.leave(Kind::Workers, vec![Reach::Rules, Reach::Coalescing(queues)]);
        commands.leave(Kind::Host, vec![Reach::Offloads, Reach::Pairs]);
        for kind in [Kind::Workers, Kind::Host] {
            let _ = commands.settle(kind, deadline).await;
        }
        commands
    }

    /// Writes the driver's settings to the journal, for the process that serves this guest next.
    pub(super) async fn keep_state(&self) {
        let journal = self.inner.journal.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(journal) = journal {
            journal.keep_state(self.inner.save().emit()).await;
        }
    }

    /// Carries out a command; returns when every worker and the host have applied it. A refused
    /// command has no effect, or its effect is undone. There is one exception. If the host filters
    /// out some of the frames that a receive mode or a MAC table asks for, the command is refused,
    /// but the device's own filter changes as the driver asked. Drivers keep their receive modes
    /// and MAC table whatever the answer is; so the guest gets at least the frames that the host
    /// delivers.
    pub(super) async fn obey(&mut self, command: Command) -> Result<Reply, CtrlRefusal> {
        let deadline = Instant::now() + TIMEOUT;
        let inner = &self.inner;
        if inner.state().features & needs(&command) == 0 {
            return Err(CtrlRefusal::Feature);
        }
        if let Command::CoalesceQuery(index) = command {
            let result = inner.coalescing_of(index)?.emit().to_vec();
            return Ok(Reply { status: CtrlStatus::Ok, result });
        }
        let mac = inner.state().mac;
        let lacks = lacking(&*inner.host.port, mac, &command);
        if let (Some(refusal), Command::MacAddr(_) | Command::VlanAdd(_)) = (lacks, &command) {
            return Err(refusal);
        }
        let Some(reach) = inner.reach(&command)? else {
            inner.state().announces = false;
            return Ok(Reply::status(CtrlStatus::Ok));
        };
        let kind = reach.kind();
        self.settle(kind, deadline).await?;
        if matches!(kind, Kind::Host) {
            sleep_until(self.rests_until).await;
        }
        let (driver, before) = self.inner.set(command);
        self.leave(kind, vec![reach.clone()]);
        let refusal = match self.settle(kind, deadline).await {
            Ok(true) => return lacks.map_or(Ok(Reply::status(CtrlStatus::Ok)), Err),
            Ok(false) => CtrlRefusal::Port,
            Err(refusal) => refusal,
        };
        self.inner.put_back(driver, before);
        // An unfinished change holds the locks, so it ends before this task can begin.
        self.leave(kind, vec![reach]);
        let _ = self.settle(kind, deadline).await;
        Err(refusal)
    }

    /// Starts a task that passes the changes `reaches` on, and that may outlive the answer to the
    /// driver.
    fn leave(&mut self, kind: Kind, reaches: Vec<Reach>) {
        let inner = self.inner.clone();
        let work = tokio::spawn(async move {
            let mut follows = true;
            for reach in &reaches {
                follows &= inner.spread(reach).await;
            }
            follows
        });
        self.late[kind as usize] = Some(work);
        if matches!(kind, Kind::Host) {
            self.called_at = Instant::now();
        }
    }

    /// Waits until changes of this kind are passed on. Returns false if the host refused one.
    async fn settle(&mut self, kind: Kind, deadline: Instant) -> Result<bool, CtrlRefusal> {
        let slot = &mut self.late[kind as usize];
        let Some(late) = slot else { return Ok(true) };
        let done = timeout_at(deadline, late).await.map_err(|_| CtrlRefusal::Time)?;
        *slot = None;
        if matches!(kind, Kind::Host) {
            let now = Instant::now();
            self.rests_until = now + ((now - self.called_at) * REST).min(REST_MAX);
        }
        Ok(done.unwrap_or(false))
    }
}

impl State {
    fn change_filter(&mut self, change: impl FnOnce(&mut Filter)) -> Before {
        let before = Before::Filter(self.mac, self.filter.clone());
        if let Some(filter) = &mut self.filter {
            change(filter);
        }
        before
    }

    /// Sets the pairs in use, and the hash `rss` that spreads frames over them. Returns the former
    /// settings.
    fn steer(&mut self, pairs: usize, rss: Option<Arc<Rss>>) -> Before {
        let hash = self.hash.clone();
        if let Some(rss) = &rss {
            self.hash = Some(Arc::new(rss.hasher().clone()));
        }
        let pairs = std::mem::replace(&mut self.pairs_in_use, pairs);
        Before::Steering(Steering { pairs, rss: std::mem::replace(&mut self.port.rss, rss), hash })
    }

    /// Sets the coalescing parameters of these virtqueues. Returns the former ones.
    fn coalesce(&mut self, indices: impl Iterator<Item = usize>, coalescing: Coalescing) -> Before {
        let (tx, rx) = (self.coalescing_tx, self.coalescing_rx);
        let set = |index: usize| {
            let own = &mut self.vqs[index].coalescing;
            (index, own.replace(coalescing))
        };
        Before::Coalescing { tx, rx, queues: indices.map(set).collect() }
    }
}

impl Inner {
    /// Returns where the change of `command` must be passed to; `None` if it only reads, or changes
    /// only the config space.
    ///
    /// # Errors
    /// [`CtrlRefusal`]: the command names a queue or value that the device does not have.
    fn reach(&self, command: &Command) -> Result<Option<Reach>, CtrlRefusal> {
        Ok(Some(match command {
            Command::Rx(..)
            | Command::MacTable(_)
            | Command::VlanAdd(_)
            | Command::VlanDel(_)
            | Command::MacAddr(_) => Reach::Rules,
            Command::CoalesceTx(_) => Reach::Coalescing(self.data_queues(1).collect()),
            Command::CoalesceRx(_) => Reach::Coalescing(self.data_queues(0).collect()),
            Command::CoalesceQueue(queue) => Reach::Coalescing(vec![self.data_queue(queue.index)?]),
            Command::QueuePairs(pairs) => {
                let (pairs, max) = (usize::from(*pairs), self.options.queue_pairs);
                if !(1..=max).contains(&pairs) {
                    return Err(CtrlRefusal::Pairs { pairs, max });
                }
                Reach::Pairs
            }
            Command::Rss(config) => {
                let (pairs, max) = (config.pairs(), self.options.queue_pairs);
                if pairs > max {
                    return Err(CtrlRefusal::Pairs { pairs, max });
                }
                Reach::Pairs
            }
            Command::Hash(_) => Reach::Rules,
            Command::GuestOffloads(bits) => {
                if bits & !self.state().features != 0 {
                    return Err(CtrlRefusal::Offloads);
                }
                Reach::Offloads
            }
            Command::AnnounceAck | Command::CoalesceQuery(_) => return Ok(None),
        }))
    }

    /// Changes the state as `command` says. Returns the number of the present driver, and the
    /// former value.
    pub(super) fn set(&self, command: Command) -> (u64, Option<Before>) {
        let state = &mut *self.state();
        let before = match command {
            Command::Rx(mode, on) => state.change_filter(|f| f.set_mode(mode, on)),
            Command::MacTable(table) => state.change_filter(|f| f.set_table(table)),
            Command::VlanAdd(id) => state.change_filter(|f| f.set_vlan(id, true)),
            Command::VlanDel(id) => state.change_filter(|f| f.set_vlan(id, false)),
            Command::MacAddr(mac) => {
                let before = state.change_filter(|f| f.set_mac(mac));
                state.mac = mac;
                before
            }
            Command::CoalesceTx(coalescing) => {
                let before = state.coalesce(self.data_queues(1), coalescing);
                state.coalescing_tx = Some(coalescing);
                before
            }
            Command::CoalesceRx(coalescing) => {
                let before = state.coalesce(self.data_queues(0), coalescing);
                state.coalescing_rx = Some(coalescing);
                before
            }
            Command::CoalesceQueue(QueueCoalescing { index, coalescing }) => {
                state.coalesce(std::iter::once(usize::from(index)), coalescing)
            }
            Command::QueuePairs(pairs) => state.steer(pairs.into(), None),
            Command::Rss(config) => {
                // Do not reduce the pairs in use: Linux 6.1 keeps using the pairs that it set
                // before, despite this command.
                let pairs = state.pairs_in_use.max(config.pairs());
                state.steer(pairs, Some(Arc::new(Rss::new(config))))
            }
            Command::Hash(config) => {
                let before = Before::Steering(Steering {
                    pairs: state.pairs_in_use,
                    rss: state.port.rss.clone(),
                    hash: state.hash.clone(),
                });
                state.hash = Some(Arc::new(Hasher::new(config)));
                before
            }
            Command::GuestOffloads(bits) => {
                // Check the bits again: another driver, with other features, may have begun
                // meanwhile.
                let wanted = Offloads::of_guest(bits & state.features);
                Before::Offloads(std::mem::replace(&mut state.port.given, wanted))
            }
            Command::AnnounceAck | Command::CoalesceQuery(_) => return (state.drivers, None),
        };
        (state.drivers, Some(before))
    }

    /// Restores the former value, unless another driver than `driver` has begun meanwhile.
    fn put_back(&self, driver: u64, before: Option<Before>) {
        let state = &mut *self.state();
        if state.drivers != driver {
            return;
        }
        match before {
            Some(Before::Filter(mac, filter)) => (state.mac, state.filter) = (mac, filter),
            Some(Before::Coalescing { tx, rx, queues }) => {
                (state.coalescing_tx, state.coalescing_rx) = (tx, rx);
                for (index, coalescing) in queues {
                    state.vqs[index].coalescing = coalescing;
                }
            }
            Some(Before::Steering(Steering { pairs, rss, hash })) => {
                (state.pairs_in_use, state.port.rss, state.hash) = (pairs, rss, hash);
            }
            Some(Before::Offloads(given)) => state.port.given = given,
            None => {}
        }
    }

    /// Passes the present settings to the workers or the host; returns when they have applied them.
    /// Returns false if the host refuses.
    async fn spread(&self, reach: &Reach) -> bool {
        match reach {
            Reach::Rules => self.push_rules().await,
            Reach::Coalescing(queues) => self.push_coalescing(queues).await,
            Reach::Pairs => {
                let follows = self.apply_steering().await;
                self.push_rules().await;
                return follows;
            }
            Reach::Offloads => {
                let follows = self.apply_offloads().await;
                self.push_rules().await;
                return follows;
            }
        }
        true
    }

    /// Returns the indexes of all transmitqs (`odd` is 1) or receiveqs (0).
    fn data_queues(&self, odd: usize) -> impl Iterator<Item = usize> + use<> {
        (odd..self.options.queue_pairs * 2).step_by(2)
    }

    fn data_queue(&self, index: u16) -> Result<usize, CtrlRefusal> {
        let at = usize::from(index);
        let is_data = at < self.options.queue_pairs * 2;
        let runs = is_data && self.state().vqs[at].is_started;
        if runs { Ok(at) } else { Err(CtrlRefusal::Index { index }) }
    }

    /// Returns the coalescing parameters that the driver has set; zeroes if it has set none
    /// (§5.1.6.5.9.1). The operator's moderation is not reported.
    fn coalescing_of(&self, index: u16) -> Result<Coalescing, CtrlRefusal> {
        let at = self.data_queue(index)?;
        Ok(self.state().vqs[at].coalescing.unwrap_or_default())
    }
}

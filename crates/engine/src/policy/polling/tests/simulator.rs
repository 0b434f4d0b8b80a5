//! A machine in a script: CPUs that threads share, a disk, one worker or two that go by the policy,
//! and their clients. Time is a number; nothing in it is random.
//!
//! A thread runs step by step; each step takes CPU time and ends with what the thread does next. A
//! thread that is woken on an idle CPU runs after [`IDLE_WAKE_NS`], and whoever wakes it pays for
//! that too; on a busy CPU it waits for its turn.

mod balance;

use self::balance::{Balance, Place};
use super::super::{Policy, Polling};
use std::collections::VecDeque;

/// The cost of a wake that the workers are told: the waker's part and the sleeper's.
pub(super) const WAKE_NS: u64 = 25_000;
/// From the write that wakes to the sleeper running, on an idle CPU.
const IDLE_WAKE_NS: u64 = 15_000;
/// The time of the write that wakes an idle CPU.
const WAKING_NS: u64 = 10_000;
/// The time of the write if the sleeper's CPU is busy, or nobody sleeps.
const WRITE_NS: u64 = 1_000;
/// A time slice.
const SLICE_NS: u64 = 3_000_000;
/// A look of the worker, and one of a client that polls.
const LOOK_NS: u64 = 1_000;
/// The way out of a system call that slept, where that costs more than a switch of threads.
const AWAKING_NS: u64 = 60_000;
/// Asking for notifications, looking once more, and the system call that sleeps.
const SETTLE_NS: u64 = 1_500;
/// A turn with work, and each of its requests.
const TURN_NS: u64 = 500;
const SERVE_NS: u64 = 200;

/// The next step of a thread.
#[derive(Clone, Copy, Debug)]
enum Step {
    Run(u64),
    Sleep,
    SleepUntil(u64),
}

/// The behaviour of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client {
    /// Requests that it has with the worker at a time.
    pub(super) depth: u32,
    /// The client thinks about each answer by itself and then sends another request, so that
    /// `depth` of them are always under way. False: it waits for the answers to all of its `depth`
    /// requests before it goes on.
    pub(super) streams: bool,
    /// Looks for answers instead of sleeping.
    pub(super) polls: bool,
    /// Time between an answer and the next request: on the CPU, or asleep if it is long.
    pub(super) think_ns: u64,
    /// After this many requests it sleeps for this long.
    pub(super) pause: Option<(u64, u64)>,
    /// How many workers it has requests with; it waits for all of them.
    pub(super) workers: usize,
    pub(super) cpu: usize,
    /// When it moves to another CPU, and to which.
    pub(super) moves: Option<(u64, usize)>,
}

/// One request at a time, sleeping, on a CPU of its own.
pub(super) const CLIENT: Client = Client {
    depth: 1,
    streams: false,
    polls: false,
    think_ns: 0,
    pause: None,
    workers: 1,
    cpu: 0,
    moves: None,
};

/// The rest of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Machine {
    /// A disk that takes this long for each request.
    pub(super) disk_ns: Option<u64>,
    /// The worker passes each request to a server on its own CPU, and the answer back.
    pub(super) server: bool,
    /// A thread that never sleeps, on the first worker's CPU.
    pub(super) hog: bool,
    /// A thread that is woken on a busy CPU runs at once.
    pub(super) preempts: bool,
    /// The kernel moves the client: to the worker's CPU while that one sleeps between requests, to
    /// the other one when it does not, each after a while. And to be awake again is dear.
    pub(super) balances: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Worker(usize),
    Client,
    Server,
    Hog,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    Asleep(Option<u64>),
    /// Woken; runs from then on.
    Waking(u64),
}

#[derive(Debug)]
struct Thread {
    role: Role,
    cpu: usize,
    state: State,
    /// CPU time left of its step.
    left_ns: u64,
    ran_ns: u64,
    /// CPU time, as the scheduler compares it.
    weight_ns: u64,
    slept_at_ns: u64,
}

#[derive(Debug)]
struct Worker {
    policy: Policy,
    ring: u32,
    answers: u32,
    serving: u32,
    disk: VecDeque<u64>,
    /// It has asked for a kick and sleeps.
    asleep: bool,
    settling: bool,
    woken: bool,
}

/// The result of a run.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) answers: u64,
    /// CPU time of the workers.
    pub(super) worker_ns: u64,
    pub(super) policies: Vec<Policy>,
}

struct Sim {
    now_ns: u64,
    machine: Machine,
    client: Client,
    threads: Vec<Thread>,
    /// Who runs on each CPU, and since when its slice lasts.
    cpus: Vec<Option<(usize, u64)>>,
    workers: Vec<Worker>,
    /// Per worker: answers that the client has not taken.
    used: Vec<u32>,
    client_waits: bool,
    client_sent: bool,
    client_thought: bool,
    client_paused_at: u64,
    server_inbox: u32,
    server_serves: u32,
    answered: u64,
    balance: Balance,
}

/// Runs the machine, with workers that poll as `polling` says, for `span_ns`.
pub(super) fn run(client: Client, machine: Machine, polling: Polling, span_ns: u64) -> Outcome {
    let thread = |role, cpu| Thread {
        role,
        cpu,
        state: State::Ready,
        left_ns: 0,
        ran_ns: 0,
        weight_ns: 0,
        slept_at_ns: 0,
    };
    let mut threads = vec![thread(Role::Client, client.cpu)];
    threads.extend((0..client.workers).map(|at| thread(Role::Worker(at), at + 1)));
    threads.extend(machine.server.then(|| thread(Role::Server, 1)));
    threads.extend(machine.hog.then(|| thread(Role::Hog, 1)));
    let workers = (0..client.workers).map(|at| Worker {
        policy: Policy::new(polling, WAKE_NS, at as u64),
        ring: 0,
        answers: 0,
        serving: 0,
        disk: VecDeque::new(),
        asleep: false,
        settling: false,
        woken: false,
    });
    let mut sim = Sim {
        now_ns: 1,
        machine,
        client,
        cpus: vec![None; client.workers + 1],
        used: vec![0; client.workers],
        workers: workers.collect(),
        threads,
        client_waits: false,
        client_sent: false,
        client_thought: false,
        client_paused_at: 0,
        server_inbox: 0,
        server_serves: 0,
        answered: 0,
        balance: Balance::default(),
    };
    while sim.now_ns < span_ns {
        sim.advance();
    }
    let is_worker = |t: &&Thread| matches!(t.role, Role::Worker(_));
    Outcome {
        answers: sim.answered,
        worker_ns: sim.threads.iter().filter(is_worker).map(|t| t.ran_ns).sum(),
        policies: sim.workers.into_iter().map(|w| w.policy).collect(),
    }
}

impl Sim {
    /// Goes to the next event, and lets everybody whose step is over take the next one.
    fn advance(&mut self) {
        self.schedule();
        let ends = self.cpus.iter().flatten().map(|&(id, since)| {
            let slice_end = (since + SLICE_NS).max(self.now_ns + 1);
            (self.now_ns + self.threads[id].left_ns).min(slice_end)
        });
        let timers = self.threads.iter().filter_map(|t| match t.state {
            State::Asleep(at) => at,
            State::Waking(at) => Some(at),
            State::Ready => None,
        });
        let disks =
            self.workers.iter().filter(|w| w.asleep).filter_map(|w| w.disk.front()).copied();
        let next = ends.chain(timers).chain(disks).min().expect("somebody runs");
        let passed = next.saturating_sub(self.now_ns);
        self.now_ns = self.now_ns.max(next);
        for &(id, _) in self.cpus.iter().flatten() {
            let thread = &mut self.threads[id];
            let ran = passed.min(thread.left_ns);
            thread.left_ns -= ran;
            thread.ran_ns += ran;
            thread.weight_ns += ran;
        }
        if self.machine.balances {
            self.balance(passed);
        }
        self.expire();
        for cpu in 0..self.cpus.len() {
            if let Some((id, _)) = self.cpus[cpu]
                && self.threads[id].left_ns == 0
            {
                self.step(id);
            }
        }
    }

    /// Moves the client after `passed` more nanoseconds, if the kernel would.
    fn balance(&mut self, passed: u64) {
        let worker = &self.threads[self.thread_of(Role::Worker(0))];
        let (wants, its_cpu) = (worker.state == State::Ready, worker.cpu);
        let client = self.thread_of(Role::Client);
        match self.balance.place(passed, wants) {
            Some(Place::Apart) => self.threads[client].cpu = 0,
            Some(Place::Together) => self.threads[client].cpu = its_cpu,
            None => {}
        }
    }

    /// Timers, wakes and the disk.
    fn expire(&mut self) {
        for id in 0..self.threads.len() {
            match self.threads[id].state {
                State::Asleep(Some(at)) if at <= self.now_ns => _ = self.wake(id),
                State::Waking(at) if at <= self.now_ns => self.threads[id].state = State::Ready,
                _ => {}
            }
        }
        for at in 0..self.workers.len() {
            let is_done = self.workers[at].disk.front().is_some_and(|done| *done <= self.now_ns);
            if self.workers[at].asleep && is_done {
                self.wake_worker(at);
            }
        }
    }

    /// Puts the thread that has had least on each CPU whose slice is over, or that is idle.
    fn schedule(&mut self) {
        for cpu in 0..self.cpus.len() {
            let ready = |id: &usize| {
                let thread = &self.threads[*id];
                thread.cpu == cpu && thread.state == State::Ready
            };
            let weight = |id: &usize| self.threads[*id].weight_ns;
            let running = self.cpus[cpu].filter(|(id, _)| ready(id));
            let others = (0..self.threads.len())
                .filter(ready)
                .filter(|id| running.is_none_or(|(running, _)| running != *id));
            let Some(best) = others.min_by_key(weight) else {
                // Alone: its slice begins anew.
                self.cpus[cpu] = running.map(|(id, _)| (id, self.now_ns));
                continue;
            };
            let keeps = running.is_some_and(|(id, since)| {
                let is_fresh = self.now_ns - since < SLICE_NS;
                let is_ahead = weight(&best) + SLICE_NS / 3 < weight(&id);
                is_fresh && !is_ahead && !(self.machine.preempts && weight(&best) < weight(&id))
            });
            self.cpus[cpu] = if keeps { running } else { Some((best, self.now_ns)) };
        }
    }

    /// Wakes a thread. Returns what the waker pays.
    fn wake(&mut self, id: usize) -> u64 {
        if !matches!(self.threads[id].state, State::Asleep(_)) {
            return WRITE_NS;
        }
        let cpu = self.threads[id].cpu;
        // Who sleeps gathers no claim on the CPU beyond a slice.
        let here = self.threads.iter().filter(|t| t.cpu == cpu && t.state == State::Ready);
        let least = here.map(|t| t.weight_ns).min();
        let thread = &mut self.threads[id];
        thread.weight_ns = thread.weight_ns.max(least.unwrap_or(0).saturating_sub(SLICE_NS / 6));
        if least.is_none() {
            thread.state = State::Waking(self.now_ns + IDLE_WAKE_NS);
            return WAKING_NS;
        }
        thread.state = State::Ready;
        WRITE_NS
    }

    fn wake_worker(&mut self, at: usize) -> u64 {
        let worker = &mut self.workers[at];
        if !worker.asleep {
            return 0;
        }
        worker.asleep = false;
        worker.woken = true;
        let id = self.thread_of(Role::Worker(at));
        self.wake(id)
    }

    fn thread_of(&self, role: Role) -> usize {
        self.threads.iter().position(|t| t.role == role).expect("it is there")
    }

    fn step(&mut self, id: usize) {
        let step = match self.threads[id].role {
            Role::Worker(at) => self.worker_step(at, id),
            Role::Client => self.client_step(),
            Role::Server => self.server_step(),
            Role::Hog => Step::Run(SLICE_NS),
        };
        let thread = &mut self.threads[id];
        match step {
            Step::Run(ns) => thread.left_ns = ns.max(1),
            Step::Sleep => thread.state = State::Asleep(None),
            Step::SleepUntil(at) => thread.state = State::Asleep(Some(at)),
        }
        if !matches!(step, Step::Run(_)) {
            thread.slept_at_ns = self.now_ns;
            thread.left_ns = 1;
        }
    }

    fn worker_step(&mut self, at: usize, id: usize) -> Step {
        let now_ns = self.now_ns;
        let worker = &mut self.workers[at];
        let mut paid = 0;
        if std::mem::take(&mut worker.woken) {
            worker.policy.on_slept(now_ns, now_ns - self.threads[id].slept_at_ns);
            paid = if self.machine.balances { AWAKING_NS } else { 0 };
        }
        // The requests that were served in the step that is over reach the client.
        let served = std::mem::take(&mut worker.serving);
        if served > 0 {
            self.used[at] += served;
            if self.client_waits {
                self.client_waits = false;
                let client = self.thread_of(Role::Client);
                paid += self.wake(client);
            }
        }
        let worker = &mut self.workers[at];
        let taken = std::mem::take(&mut worker.ring);
        let mut done = std::mem::take(&mut worker.answers);
        while worker.disk.front().is_some_and(|at| *at <= now_ns) {
            worker.disk.pop_front();
            done += 1;
        }
        let direct = self.machine.disk_ns.is_none() && !self.machine.server;
        let settled = std::mem::take(&mut worker.settling);
        if taken > 0 || done > 0 {
            if worker.policy.on_burst(now_ns, u64::from(taken)) {
                worker.policy.end_epoch(now_ns, self.threads[id].ran_ns);
            }
            if let Some(disk_ns) = self.machine.disk_ns {
                worker.disk.extend((0..taken).map(|_| now_ns + disk_ns));
            }
            worker.serving = if direct { taken } else { done };
            if self.machine.server && taken > 0 {
                self.server_inbox += taken;
                let server = self.thread_of(Role::Server);
                paid += self.wake(server);
            }
            return Step::Run(paid + TURN_NS + SERVE_NS * u64::from(taken + done));
        }
        if paid > 0 {
            return Step::Run(paid);
        }
        if settled {
            worker.asleep = true;
            return Step::Sleep;
        }
        if worker.policy.on_idle(now_ns, !worker.disk.is_empty()).looks(now_ns, now_ns) {
            return Step::Run(LOOK_NS);
        }
        worker.settling = true;
        Step::Run(SETTLE_NS)
    }

    fn server_step(&mut self) -> Step {
        let served = std::mem::replace(&mut self.server_serves, 0);
        let mut paid = 0;
        if served > 0 {
            self.workers[0].answers += served;
            paid = self.wake_worker(0);
        }
        self.server_serves = std::mem::take(&mut self.server_inbox);
        match (self.server_serves, paid) {
            (0, 0) => Step::Sleep,
            (served, paid) => Step::Run(paid + 2_000 * u64::from(served)),
        }
    }

    fn client_step(&mut self) -> Step {
        if !self.client_sent {
            self.client_sent = true;
            if let Some((_, cpu)) = self.client.moves.take_if(|(at, _)| *at <= self.now_ns) {
                let client = self.thread_of(Role::Client);
                self.threads[client].cpu = cpu;
            }
            let mut paid = 0;
            for at in 0..self.workers.len() {
                self.workers[at].ring += self.client.depth;
                paid += self.wake_worker(at);
            }
            return Step::Run(paid + 300 * u64::from(self.client.depth));
        }
        if self.client.streams {
            return self.client_streams();
        }
        let is_answered = self.used.iter().all(|used| *used >= self.client.depth);
        if !is_answered {
            if self.client.polls {
                return Step::Run(LOOK_NS);
            }
            self.client_waits = true;
            return Step::Sleep;
        }
        if !std::mem::replace(&mut self.client_thought, true) {
            self.answered += self.used.iter().map(|used| u64::from(*used)).sum::<u64>();
            if let Some((every, pause_ns)) = self.client.pause
                && self.answered - self.client_paused_at >= every
            {
                self.client_paused_at = self.answered;
                return Step::SleepUntil(self.now_ns + pause_ns);
            }
            match self.client.think_ns {
                0 => {}
                ns if ns >= 1_000_000 => return Step::SleepUntil(self.now_ns + ns),
                ns => return Step::Run(ns),
            }
        }
        self.used.fill(0);
        self.client_thought = false;
        self.client_sent = false;
        Step::Run(300)
    }

    /// One of many answers: it is thought about, and then another request goes to the worker.
    fn client_streams(&mut self) -> Step {
        if std::mem::take(&mut self.client_thought) {
            self.workers[0].ring += 1;
            return Step::Run(300 + self.wake_worker(0));
        }
        if self.used[0] == 0 {
            self.client_waits = !self.client.polls;
            return if self.client.polls { Step::Run(LOOK_NS) } else { Step::Sleep };
        }
        self.used[0] -= 1;
        self.answered += 1;
        self.client_thought = true;
        Step::Run(self.client.think_ns)
    }
}

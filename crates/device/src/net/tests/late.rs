//! A port by its script that finishes what it takes later, and in any order.

use super::*;
use manyring_backend::net::late::{Grip, LateOptions, LatePort};
use manyring_backend::net::{Readiness, Returned};

/// Calls of `reap` for which a frame is kept at most.
const CALLS_MAX: u32 = 3;

/// A port that finishes frames late, and the port behind it that gets them.
#[derive(Clone, Debug)]
pub(super) struct Delay {
    port: Arc<LatePort>,
    pub(super) grip: Grip,
    pub(super) behind: Scripted,
}

impl Delay {
    /// `tells`: by a timer; if not, the port must be asked.
    pub(super) fn new(tells: bool) -> Self {
        let behind = Scripted::default();
        let options = LateOptions { seed: 1, calls_max: CALLS_MAX, tells };
        let port = Arc::new(LatePort::new(Arc::new(behind.clone()), options));
        Self { grip: port.grip(), port, behind }
    }
}

/// The sending half: frames stop, are refused and lost by the script, and those that are taken pass
/// through the delay.
#[derive(Debug)]
pub(super) struct Delayed {
    port: Scripted,
    half: Box<dyn PortTx>,
    pass: Frames,
}

impl Delayed {
    pub(super) fn new(port: Scripted, delay: &Delay) -> Self {
        let half = delay.port.open_tx(0).unwrap();
        Self { port, half, pass: Frames::new().unwrap() }
    }

    /// Gives one frame to the delay, or to the script if that has something else to do with it.
    fn send_one(&mut self) -> Sent {
        {
            let mut script = self.port.script();
            let next = script.sends.front().copied().or(script.then).unwrap_or(Next::Take);
            if next != Next::Take {
                drop(script);
                return PortTx::send(&mut self.port, &self.pass, 0);
            }
            script.sends.pop_front();
        }
        self.half.send(&self.pass, 0)
    }
}

impl PortTx for Delayed {
    fn checks_place(&self) -> bool {
        PortTx::checks_place(&self.port)
    }

    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        let mut sent = Sent::default();
        let group = self.port.script().group;
        let group = if group == 0 { usize::MAX } else { group };
        for index in (first..frames.count()).take(group) {
            self.pass.clear();
            let (token, header) = (frames.token(index), frames.header(index));
            let payload = frames.payload(index).unwrap();
            self.pass.push_as(token, &header, payload, 0, frames.len(index));
            let one = self.send_one();
            self.pass.release();
            if !sent.add_one(index, &one) {
                break;
            }
            sent.taken += 1;
        }
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        PortTx::readiness(&self.port)
    }

    fn reap(&mut self, done: &mut Vec<Returned>) {
        self.half.reap(done);
    }

    fn recall(&mut self, done: &mut Vec<Returned>) -> usize {
        self.half.recall(done)
    }

    fn done(&self) -> Readiness<'_> {
        self.half.done()
    }
}

//! The part of the scripted kernel that moves a client between CPUs, by how busy its worker is.

/// The kernel looks this often how busy the first worker is.
const LOOK_NS: u64 = 10_000_000;
/// After this many looks in a row that found the worker busy, its client has the other CPU.
const LOOKS_APART: u32 = 19;
/// After this many that found it asleep, both have one CPU: who is woken runs beside its waker.
const LOOKS_TOGETHER: u32 = 5;

/// The CPU that a client gets.
pub(super) enum Place {
    Apart,
    Together,
}

/// How busy the first worker was, as the kernel has seen it so far.
#[derive(Default)]
pub(super) struct Balance {
    /// Time that has passed since the last look, and how much of it the worker wanted a CPU.
    passed_ns: u64,
    wanted_ns: u64,
    is_busy: bool,
    /// Looks in a row with that result.
    times: u32,
}

impl Balance {
    /// `passed_ns` more have passed, in which the worker `wants` a CPU or sleeps. Returns the
    /// place of its client, if that changes or is confirmed.
    pub(super) fn place(&mut self, passed_ns: u64, wants: bool) -> Option<Place> {
        self.passed_ns += passed_ns;
        self.wanted_ns += if wants { passed_ns } else { 0 };
        if self.passed_ns < LOOK_NS {
            return None;
        }
        let is_busy = self.wanted_ns * 10 > self.passed_ns * 9;
        self.times = if is_busy == self.is_busy { self.times + 1 } else { 1 };
        (self.is_busy, self.passed_ns, self.wanted_ns) = (is_busy, 0, 0);
        match (is_busy, self.times) {
            (true, LOOKS_APART..) => Some(Place::Apart),
            (false, LOOKS_TOGETHER..) => Some(Place::Together),
            _ => None,
        }
    }
}

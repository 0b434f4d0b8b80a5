//! The results of an idle daemon: CPU time, memory and threads by its number of devices.

use super::Party;
use serde::Serialize;

/// One daemon with this many devices, over some seconds in which nobody does anything.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct IdleSample {
    /// Seconds from the start of the program to the last socket.
    pub(crate) ready_seconds: f64,
    /// Seconds that the guests took to connect, one after the other.
    pub(crate) connect_seconds: f64,
    /// Clock ticks of CPU time.
    pub(crate) ticks: f64,
    /// Times that a thread was woken and went to sleep again.
    pub(crate) wakes: f64,
    /// Threads.
    pub(crate) threads: f64,
    /// Resident memory of all its processes in KiB.
    pub(crate) resident_kib: f64,
    /// Resident memory in KiB of each further device: what one device takes is left out.
    pub(crate) kib_per_device: f64,
    /// Memory that the kernel charges to the memory cgroup of all its processes, in KiB, with the
    /// kernel's own memory for these processes. 0 where no such group can be made.
    pub(crate) group_kib: f64,
    /// Charged memory in KiB of each further device: the charge of one device is left out.
    pub(crate) group_kib_per_device: f64,
}

/// One daemon for each number of devices.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct IdleCell {
    pub(crate) name: String,
    pub(crate) parties: Vec<Party<IdleSample>>,
}

impl IdleCell {
    /// Puts the samples of each round, in the order of `counts`, into a party for each count.
    pub(crate) fn new(name: String, counts: &[usize], rounds: &[Vec<IdleSample>]) -> Self {
        let party = |(index, count): (usize, &usize)| Party {
            name: format!("{count} device{}", if *count == 1 { "" } else { "s" }),
            samples: rounds.iter().filter_map(|round| round.get(index).copied()).collect(),
        };
        Self { name, parties: counts.iter().enumerate().map(party).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_of_devices_is_a_party_with_a_sample_of_each_round() {
        let sample = |ticks| IdleSample { ticks, ..IdleSample::default() };
        let rounds = [vec![sample(1.0), sample(2.0)], vec![sample(3.0), sample(4.0)]];
        let cell = IdleCell::new(String::new(), &[1, 10], &rounds);
        let ticks = |party: &Party<IdleSample>| party.samples.iter().map(|s| s.ticks).collect();
        let found: Vec<(&str, Vec<f64>)> =
            cell.parties.iter().map(|party| (party.name.as_str(), ticks(party))).collect();
        assert_eq!(found, [("1 device", vec![1.0, 3.0]), ("10 devices", vec![2.0, 4.0])]);
    }
}

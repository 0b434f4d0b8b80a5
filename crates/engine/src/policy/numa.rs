//! To which NUMA node the workers of a process are bound: to the one that holds the memory of its
//! guests, if one does.
//!
//! A device process serves the guests of one domain, and the memory of a guest mostly lies on one
//! node. A worker on another node reads each ring and copies each frame across the link between
//! the nodes. The scheduler does not know that: it moves the worker to any idle CPU.
//!
//! ```text
//! each region has [`BIND_PERCENT`] of its pages on the same node   bind to that node
//! each region has [`KEEP_PERCENT`] on the present one              as before
//! fewer than [`PAGES_MIN`] pages are known                         as before
//! otherwise                                                       bind to none
//! ```
//! 1. Two looks in succession must agree, since a guest that starts has touched few pages.
//! 2. The two bounds lie apart, so a guest whose memory moves slowly makes one change, and not one
//!    at each look.
//! 3. A guest with memory on several nodes is left to the scheduler: wherever a worker runs, a part
//!    of the pages is remote.
//! 4. Each region has a voice, and all must agree. So a large guest does not choose for the small
//!    one beside it in the same process: it can only leave both to the scheduler.

/// A node with this percentage of the known pages, or more, binds the workers.
const BIND_PERCENT: u64 = 75;
/// The workers stay bound to a node that has at least this percentage of the known pages.
const KEEP_PERCENT: u64 = 50;
/// Fewer pages in all say nothing, and fewer of a region say nothing of that region.
pub const PAGES_MIN: u64 = 16;
const REGION_PAGES_MIN: u64 = 4;

/// The node to which the workers are bound, and the change that the last look has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeChoice {
    node: Option<usize>,
    /// The node that the last look found, if it differs from `node`: `Some(None)` is no node.
    wanted: Option<Option<usize>>,
}

impl NodeChoice {
    /// Returns the node to which the workers are bound; `None`: they may run on all nodes.
    #[must_use]
    pub fn node(&self) -> Option<usize> {
        self.node
    }

    /// True if the last look found another node than [`Self::node`]: look again soon.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        self.wanted.is_some()
    }

    /// Looks at how many pages of each region lie on each node. Returns true if [`Self::node`] has
    /// changed.
    pub fn look(&mut self, regions: &[Vec<u64>]) -> bool {
        let wanted = self.wanted(regions);
        if wanted == self.node {
            self.wanted = None;
            return false;
        }
        let agrees = self.wanted == Some(wanted);
        if agrees {
            (self.node, self.wanted) = (wanted, None);
        } else {
            self.wanted = Some(wanted);
        }
        agrees
    }

    fn wanted(&self, regions: &[Vec<u64>]) -> Option<usize> {
        let sum = |region: &Vec<u64>| region.iter().sum::<u64>();
        let known = regions.iter().filter(|region| sum(region) >= REGION_PAGES_MIN);
        let known: Vec<_> = known.collect();
        if known.iter().map(|region| sum(region)).sum::<u64>() < PAGES_MIN {
            return self.node;
        }
        let have = |node: usize, percent: u64| {
            let has = |region: &&Vec<u64>| {
                region.get(node).is_some_and(|pages| pages * 100 >= sum(region) * percent)
            };
            known.iter().all(has).then_some(node)
        };
        let nodes = known.iter().map(|region| region.len()).max().unwrap_or(0);
        let bound = (0..nodes).find_map(|node| have(node, BIND_PERCENT));
        bound.or(self.node.and_then(|node| have(node, KEEP_PERCENT)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(looks: usize, choice: &mut NodeChoice, pages: &[u64]) -> Option<usize> {
        for _ in 0..looks {
            choice.look(&[pages.to_vec()]);
        }
        choice.node()
    }

    #[test]
    fn memory_on_one_node_binds_after_two_looks() {
        let mut choice = NodeChoice::default();
        assert!(!choice.look(&[vec![0, 200]]) && choice.node().is_none());
        assert!(choice.look(&[vec![10, 190]]) && choice.node() == Some(1));
        assert!(!choice.look(&[vec![0, 200]]), "nothing new");
    }

    #[test]
    fn few_pages_and_memory_on_several_nodes_bind_to_none() {
        let mut choice = NodeChoice::default();
        assert_eq!(after(9, &mut choice, &[0, PAGES_MIN - 1]), None);
        assert_eq!(after(9, &mut choice, &[100, 100, 100, 100]), None);
        assert_eq!(after(9, &mut choice, &[]), None);
    }

    #[test]
    fn guests_of_a_process_bind_it_only_where_they_agree() {
        let mut choice = NodeChoice::default();
        let (large, small, unknown) = (vec![9000], vec![0, 20], vec![0, 3]);
        for _ in 0..9 {
            assert!(!choice.look(&[large.clone(), small.clone()]));
        }
        assert!(!choice.look(&[large.clone(), unknown.clone()]));
        assert!(choice.look(&[large.clone(), unknown.clone()]) && choice.node() == Some(0));
        assert!(!choice.look(&[large.clone(), small.clone()]));
        assert!(choice.look(&[large, small]) && choice.node().is_none());
    }

    #[test]
    fn memory_that_moves_makes_one_change_and_not_many() {
        let mut choice = NodeChoice::default();
        let mut changes = Vec::new();
        for moved in 0..=100 {
            if choice.look(&[vec![1000 - 10 * moved, 10 * moved]]) {
                changes.push((moved, choice.node()));
            }
        }
        assert_eq!(changes, [(1, Some(0)), (52, None), (76, Some(1))]);
    }

    #[test]
    fn a_guest_at_the_border_makes_no_change_at_each_look() {
        let mut choice = NodeChoice::default();
        let mut changes = 0;
        for look in 0..1000_u64 {
            // Samples between 70 and 80 percent.
            let pages = 700 + look * 7919 % 100;
            changes += u32::from(choice.look(&[vec![pages, 1000 - pages]]));
        }
        assert_eq!(changes, 1);
    }
}

//! To which NUMA node the workers of a process are bound: to the one that holds the memory of its
//! guests, if one does.
//!
//! A device process serves the guests of one domain, and the memory of a guest mostly lies on one
//! node. A worker on another node reads each ring and copies each frame across the link between
//! the nodes. The scheduler does not know that: it moves the worker to any idle CPU.
//!
//! ```text
//! [`BIND_PERCENT`] of the pages or more lie on one node          bind to that node
//! the node has less than [`KEEP_PERCENT`], and no other has more  bind to none
//! fewer than [`PAGES_MIN`] pages are known                        as before
//! ```
//! 1. Two looks in succession must agree, since a guest that starts has touched few pages.
//! 2. The two bounds lie apart, so a guest whose memory moves slowly makes one change, and not one
//!    at each look.
//! 3. A guest with memory on several nodes is left to the scheduler: wherever a worker runs, a part
//!    of the pages is remote.

/// A node with this percentage of the known pages, or more, binds the workers.
const BIND_PERCENT: u64 = 75;
/// The workers stay bound to a node that has at least this percentage of the known pages.
const KEEP_PERCENT: u64 = 50;
/// Below this number of known pages, a look changes nothing.
pub const PAGES_MIN: u64 = 16;

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

    /// Takes the number of sampled pages on each node. Changes [`Self::node`] and returns true if
    /// the last two looks agree on another node.
    pub fn look(&mut self, pages: &[u64]) -> bool {
        let wanted = self.wanted(pages);
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

    fn wanted(&self, pages: &[u64]) -> Option<usize> {
        let all: u64 = pages.iter().sum();
        if all < PAGES_MIN {
            return self.node;
        }
        let has = |node: usize, percent: u64| {
            pages.get(node).is_some_and(|pages| pages * 100 >= all * percent)
        };
        let most = (0..pages.len()).max_by_key(|node| pages[*node]);
        let bound = most.filter(|node| has(*node, BIND_PERCENT));
        bound.or(self.node.filter(|node| has(*node, KEEP_PERCENT)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(looks: usize, choice: &mut NodeChoice, pages: &[u64]) -> Option<usize> {
        for _ in 0..looks {
            choice.look(pages);
        }
        choice.node()
    }

    #[test]
    fn memory_on_one_node_binds_after_two_looks() {
        let mut choice = NodeChoice::default();
        assert!(!choice.look(&[0, 200]) && choice.node().is_none());
        assert!(choice.look(&[10, 190]) && choice.node() == Some(1));
        assert!(!choice.look(&[0, 200]), "nothing new");
    }

    #[test]
    fn few_pages_and_memory_on_several_nodes_bind_to_none() {
        let mut choice = NodeChoice::default();
        assert_eq!(after(9, &mut choice, &[0, PAGES_MIN - 1]), None);
        assert_eq!(after(9, &mut choice, &[100, 100, 100, 100]), None);
        assert_eq!(after(9, &mut choice, &[]), None);
    }

    #[test]
    fn memory_that_moves_makes_one_change_and_not_many() {
        let mut choice = NodeChoice::default();
        let mut changes = Vec::new();
        for moved in 0..=100 {
            if choice.look(&[1000 - 10 * moved, 10 * moved]) {
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
            changes += u32::from(choice.look(&[pages, 1000 - pages]));
        }
        assert_eq!(changes, 1);
    }
}

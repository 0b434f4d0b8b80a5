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

/// So much of the memory on one node binds the workers to it.
const BIND_PERCENT: u64 = 75;
/// Workers stay bound to a node that has so much of the memory.
const KEEP_PERCENT: u64 = 50;
/// Fewer pages say nothing.
pub const PAGES_MIN: u64 = 16;

/// The node that the workers are bound to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeChoice {
    node: Option<usize>,
    /// What the last look wanted, if it was something else.
    wanted: Option<Option<usize>>,
}

impl NodeChoice {
    /// The node; `None`: the workers may run on all.
    #[must_use]
    pub fn node(&self) -> Option<usize> {
        self.node
    }

    /// True if the last look wanted a change: the next one should come soon.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        self.wanted.is_some()
    }

    /// Looks at how many pages of a sample lie on each node. Returns true if [`Self::node`] has
    /// changed.
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

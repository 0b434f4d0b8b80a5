//! `Transaction`: a client's own copy of the tree, and the nodes that must be unchanged at its
//! commit.
//!
//! ```text
//! begin          the whole tree is copied (one reference)
//! read, apply    on the copy; each node that is seen or changed is noted, and each change
//! commit         every noted node has the generation that it had: make the changes on the tree
//!                any has another one, or has come or gone: EAGAIN, and nothing is changed
//! ```
//! A node that is created notes the nearest one above it, since that has a new child: two
//! transactions that add children to one node collide, as with xenstored.

use super::tree::{Change, ChangedNode, Node, Tree};
use manyring_wire::xen::path::Path;
use manyring_wire::xen::store::ErrorName;
use std::collections::BTreeSet;

/// Nodes that a transaction may see or change, as xenstored's own default.
const NODES_MAX: usize = 1024;
/// Bytes of the changes of a transaction.
const CHANGES_SIZE_MAX: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Transaction {
    domain: u16,
    /// The tree when the transaction began.
    base: Tree,
    copy: Tree,
    noted: BTreeSet<String>,
    changes: Vec<(String, Change)>,
    size: usize,
}

impl Transaction {
    pub(super) fn new(domain: u16, tree: &Tree) -> Self {
        let (base, copy) = (tree.clone(), tree.clone());
        Self { domain, base, copy, noted: BTreeSet::new(), changes: Vec::new(), size: 0 }
    }

    fn note(&mut self, path: Path<'_>) -> Result<(), ErrorName> {
        if self.noted.len() >= NODES_MAX {
            return Err(ErrorName::Enospc);
        }
        self.noted.insert(path.as_str().to_owned());
        Ok(())
    }

    /// The node at `path`, in the copy.
    pub(super) fn read(&mut self, path: Path<'_>) -> Result<&Node, ErrorName> {
        self.note(path)?;
        // The error for a missing node depends on the nearest node above it.
        let (nearest, _) = self.copy.nearest(path);
        self.note(nearest)?;
        self.copy.read(self.domain, path)
    }

    /// Makes a change in the copy.
    pub(super) fn apply(&mut self, path: Path<'_>, change: Change) -> Result<(), ErrorName> {
        let size = path.as_str().len() + if let Change::Write(v) = &change { v.len() } else { 64 };
        if self.size + size > CHANGES_SIZE_MAX {
            return Err(ErrorName::Enospc);
        }
        self.note(path)?;
        let (nearest, _) = self.copy.nearest(path);
        self.note(nearest)?;
        if let (Change::Rm, Some(parent)) = (&change, path.parent()) {
            self.note(parent)?;
        }
        if self.copy.apply(self.domain, path, &change)?.is_some() {
            self.size += size;
            self.changes.push((path.as_str().to_owned(), change));
        }
        Ok(())
    }

    /// Makes all changes on `tree`, unless somebody changed a node that this transaction has seen.
    pub(super) fn commit(self, tree: &mut Tree) -> Result<Vec<ChangedNode>, ErrorName> {
        let generation = |tree: &Tree, noted: &String| {
            Path::parse(noted.as_bytes()).ok().and_then(|path| tree.generation(path))
        };
        let is_changed = |noted| generation(tree, noted) != generation(&self.base, noted);
        if self.noted.iter().any(is_changed) {
            return Err(ErrorName::Eagain);
        }
        let (mut next, mut changed) = (tree.clone(), Vec::new());
        for (path, change) in &self.changes {
            let path = Path::parse(path.as_bytes()).map_err(|_| ErrorName::Einval)?;
            changed.extend(next.apply(self.domain, path, change)?);
        }
        *tree = next;
        Ok(changed)
    }
}

//! `Tree`: the nodes of the simulated xenstore, with their permissions and quotas.
//!
//! A node is shared by all snapshots of the tree in which it is the same: a copy of the whole tree,
//! with which a transaction begins, is one reference, and a change copies the nodes from the root
//! down to it. Each node has a *generation*, which changes with its value, its permissions and the
//! list of its children; so a transaction knows whether the nodes that it saw are unchanged.

use manyring_wire::xen::path::Path;
use manyring_wire::xen::store::{Access, ErrorName, Permission};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The domain that may do everything.
pub(super) const DOM0: u16 = 0;
/// Nodes that a domain may own, as xenstored's own default.
const NODES_MAX: usize = 1000;
/// Nodes that domain 0 may own: all back-ends of many domains.
const DOM0_NODES_MAX: usize = 100_000;
/// Bytes of the value of a node of another domain than domain 0, as xenstored's own default.
const VALUE_SIZE_MAX: usize = 2048;
/// Most entries in the permissions of a node.
const PERMISSIONS_MAX: usize = 16;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Node {
    pub(super) value: Vec<u8>,
    pub(super) permissions: Vec<Permission>,
    pub(super) children: BTreeMap<String, Arc<Node>>,
    pub(super) generation: u64,
}

impl Node {
    /// The domain that owns the node.
    fn owner(&self) -> u16 {
        self.permissions.first().map_or(DOM0, |first| first.domain)
    }

    /// The access of `domain` to the node: everything for the owner, for another domain the access
    /// of its own entry, or of the first entry if it has none.
    fn access(&self, domain: u16) -> Access {
        if domain == DOM0 || domain == self.owner() {
            return Access::Both;
        }
        let own = self.permissions.iter().skip(1).find(|entry| entry.domain == domain);
        own.or(self.permissions.first()).map_or(Access::None, |entry| entry.access)
    }

    pub(super) fn may_read(&self, domain: u16) -> bool {
        matches!(self.access(domain), Access::Read | Access::Both)
    }

    fn may_write(&self, domain: u16) -> bool {
        matches!(self.access(domain), Access::Write | Access::Both)
    }

    /// The node at `names` below this one.
    pub(super) fn below<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> Option<&Self> {
        names.try_fold(self, |node, name| node.children.get(name).map(Arc::as_ref))
    }

    /// Adds the nodes from this one down to the node counts of their owners.
    fn count(&self, owned: &mut BTreeMap<u16, usize>) {
        *owned.entry(self.owner()).or_default() += 1;
        self.children.values().for_each(|child| child.count(owned));
    }
}

/// A change of one node.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// Sets the value; creates the node and its parents.
    Write(Vec<u8>),
    /// Creates the node and its parents, without a value.
    Mkdir,
    /// Removes the node and everything below.
    Rm,
    /// Sets the permissions.
    SetPerms(Vec<Permission>),
}

/// A change that was made, for the watches that see it.
#[derive(Clone, Debug)]
pub(super) struct ChangedNode {
    pub(super) path: String,
    /// The node that was removed.
    pub(super) removed: Option<Arc<Node>>,
}

/// All nodes, at one time.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: Arc<Node>,
    /// Number of nodes by owner.
    owned: BTreeMap<u16, usize>,
    /// The newest generation of any node.
    generation: u64,
}

impl Tree {
    /// The root alone, domain 0's, which others may not read.
    pub(super) fn new() -> Self {
        let permissions = vec![Permission { access: Access::None, domain: DOM0 }];
        let (value, children) = (Vec::new(), BTreeMap::new());
        let root = Node { value, permissions, children, generation: 0 };
        Self { root: Arc::new(root), owned: BTreeMap::from([(DOM0, 1)]), generation: 0 }
    }

    pub(super) fn node(&self, path: Path<'_>) -> Option<&Node> {
        self.root.below(path.components())
    }

    /// The generation of a node; `None` if the node does not exist.
    pub(super) fn generation(&self, path: Path<'_>) -> Option<u64> {
        self.node(path).map(|node| node.generation)
    }

    /// The node at `path`, or the nearest one above it that exists, and its path.
    pub(super) fn nearest<'a>(&self, path: Path<'a>) -> (Path<'a>, &Node) {
        let mut at = path;
        loop {
            match (self.node(at), at.parent()) {
                (Some(node), _) => return (at, node),
                (None, Some(parent)) => at = parent,
                (None, None) => return (Path::ROOT, &self.root),
            }
        }
    }

    /// The node at `path`, for a domain that may read it. Whether a node exists is told to those
    /// who may read the node above.
    pub(super) fn read(&self, domain: u16, path: Path<'_>) -> Result<&Node, ErrorName> {
        let (at, node) = self.nearest(path);
        if !node.may_read(domain) {
            return Err(ErrorName::Eacces);
        }
        if at == path { Ok(node) } else { Err(ErrorName::Enoent) }
    }

    /// Makes one change for a domain. `Ok(None)`: the tree is like that already.
    ///
    /// Nothing is changed if it fails.
    pub(super) fn apply(
        &mut self,
        domain: u16,
        path: Path<'_>,
        change: &Change,
    ) -> Result<Option<ChangedNode>, ErrorName> {
        let removed = match change {
            Change::Write(value) => {
                if domain != DOM0 && value.len() > VALUE_SIZE_MAX {
                    return Err(ErrorName::Enospc);
                }
                self.create(domain, path)?;
                self.change(path, |node| node.value.clone_from(value));
                None
            }
            Change::Mkdir => {
                if self.node(path).is_some() {
                    return Ok(None);
                }
                self.create(domain, path)?;
                None
            }
            Change::Rm => match self.remove(domain, path)? {
                None => return Ok(None),
                removed => removed,
            },
            Change::SetPerms(permissions) => {
                self.set_permissions(domain, path, permissions)?;
                None
            }
        };
        Ok(Some(ChangedNode { path: path.as_str().to_owned(), removed }))
    }

    /// Sees to it that `path` exists, and that `domain` may write there. A new node has the
    /// permissions of the one above, and its creator for an owner unless that is domain 0.
    fn create(&mut self, domain: u16, path: Path<'_>) -> Result<(), ErrorName> {
        let (at, nearest) = self.nearest(path);
        if !nearest.may_write(domain) {
            return Err(ErrorName::Eacces);
        }
        let missing = path.depth_below(at).unwrap_or(0);
        if missing == 0 {
            return Ok(());
        }
        let mut permissions = nearest.permissions.clone();
        if let (Some(first), true) = (permissions.first_mut(), domain != DOM0) {
            first.domain = domain;
        }
        let owner = permissions.first().map_or(DOM0, |first| first.domain);
        self.own(owner, missing)?;
        self.generation += 1;
        let generation = self.generation;
        let mut node = Arc::make_mut(&mut self.root);
        let existing = path.components().count() - missing;
        for (depth, name) in path.components().enumerate() {
            if depth == existing {
                node.generation = generation;
            }
            let child = node.children.entry(name.to_owned()).or_insert_with(|| {
                let (value, children) = (Vec::new(), BTreeMap::new());
                let permissions = permissions.clone();
                Arc::new(Node { value, permissions, children, generation })
            });
            node = Arc::make_mut(child);
        }
        Ok(())
    }

    /// Counts `count` more nodes as owned by `owner`, within its quota.
    fn own(&mut self, owner: u16, count: usize) -> Result<(), ErrorName> {
        let max = if owner == DOM0 { DOM0_NODES_MAX } else { NODES_MAX };
        let owned = self.owned.entry(owner).or_default();
        if *owned + count > max {
            return Err(ErrorName::Enospc);
        }
        *owned += count;
        Ok(())
    }

    fn disown(&mut self, gone: &BTreeMap<u16, usize>) {
        for (owner, count) in gone {
            if let Some(owned) = self.owned.get_mut(owner) {
                *owned -= count;
            }
        }
        self.owned.retain(|_, owned| *owned > 0);
    }

    /// Changes a node that exists.
    fn change(&mut self, path: Path<'_>, change: impl FnOnce(&mut Node)) {
        self.generation += 1;
        let mut node = Arc::make_mut(&mut self.root);
        for name in path.components() {
            let Some(child) = node.children.get_mut(name) else { return };
            node = Arc::make_mut(child);
        }
        change(node);
        node.generation = self.generation;
    }

    fn remove(&mut self, domain: u16, path: Path<'_>) -> Result<Option<Arc<Node>>, ErrorName> {
        let parent = path.parent().ok_or(ErrorName::Einval)?;
        let (at, nearest) = self.nearest(path);
        if !nearest.may_write(domain) {
            return Err(ErrorName::Eacces);
        }
        if at != path {
            return if at == parent { Ok(None) } else { Err(ErrorName::Enoent) };
        }
        let mut removed = None;
        self.change(parent, |node| removed = node.children.remove(path.name()));
        if let Some(removed) = &removed {
            let mut gone = BTreeMap::new();
            removed.count(&mut gone);
            self.disown(&gone);
        }
        Ok(removed)
    }

    /// Sets the permissions of a node; its owner may, and domain 0.
    fn set_permissions(
        &mut self,
        domain: u16,
        path: Path<'_>,
        permissions: &[Permission],
    ) -> Result<(), ErrorName> {
        let node = self.read(domain, path)?;
        let (old, new) = (node.owner(), permissions.first().ok_or(ErrorName::Einval)?.domain);
        // A domain that gave a node away would use up another domain's quota.
        if domain != DOM0 && (domain != old || new != old) {
            return Err(ErrorName::Eacces);
        }
        if permissions.len() > PERMISSIONS_MAX {
            return Err(ErrorName::Enospc);
        }
        if new != old {
            self.own(new, 1)?;
            self.disown(&BTreeMap::from([(old, 1)]));
        }
        self.change(path, |node| node.permissions = permissions.to_vec());
        Ok(())
    }

    /// Nodes by owner, counted anew, to compare with `owned`.
    #[cfg(test)]
    pub(super) fn is_counted(&self) -> bool {
        let mut counted = BTreeMap::new();
        self.root.count(&mut counted);
        counted == self.owned
    }
}

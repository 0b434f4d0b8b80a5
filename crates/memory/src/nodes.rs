//! The NUMA nodes of the host, and on which of them the guests' memory lies: a sample of the pages
//! of all mapped regions.
#![allow(unsafe_code, reason = "allow-listed: one system call")]

use crate::sigbus;
use rustix::io::Errno;
use std::path::Path;

/// The largest number of nodes that a sample counts; the kernel supports no more.
const NODES_MAX: usize = 1024;

/// The NUMA nodes of a host that has several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The CPUs of each node that this process may use, by the node's number.
    cpus: Vec<Vec<usize>>,
    /// All CPUs that this process may use.
    allowed: Vec<usize>,
}

/// A sample of the pages of all regions that this process maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSample {
    /// For each node, the number of sampled pages on it. Pages that this process has not touched
    /// are not counted: only its own page tables show a page's node.
    pub pages: Vec<u64>,
    /// The size of all regions together, in bytes.
    pub mapped: u64,
}

impl Topology {
    /// Reads the host's nodes from /sys. `allowed`: the CPUs that this process may use. Returns
    /// `None` if the host has one node, or /sys does not show its nodes.
    #[must_use]
    pub fn of_host(allowed: Vec<usize>) -> Option<Self> {
        Self::below(Path::new("/sys/devices/system/node"), allowed)
    }

    fn below(folder: &Path, allowed: Vec<usize>) -> Option<Self> {
        let mut cpus = Vec::new();
        let online = std::fs::read_to_string(folder.join("online")).ok()?;
        for node in numbers(&online) {
            let list = std::fs::read_to_string(folder.join(format!("node{node}/cpulist"))).ok()?;
            cpus.resize_with(cpus.len().max(node + 1), Vec::new);
            cpus[node] = numbers(&list).into_iter().filter(|cpu| allowed.contains(cpu)).collect();
        }
        (cpus.len() > 1).then_some(Self { cpus, allowed })
    }

    /// Makes a topology of nodes with these CPUs, by the node's number.
    #[must_use]
    pub fn new(cpus: Vec<Vec<usize>>, allowed: Vec<usize>) -> Self {
        Self { cpus, allowed }
    }

    /// Returns all CPUs that this process may use.
    #[must_use]
    pub fn allowed(&self) -> &[usize] {
        &self.allowed
    }

    /// Returns the CPUs of a node; `None`: this process may use none of them.
    #[must_use]
    pub fn cpus_of(&self, node: usize) -> Option<&Vec<usize>> {
        self.cpus.get(node).filter(|cpus| !cpus.is_empty())
    }
}

/// Returns the numbers in a list like `0-3,8`, the format of /sys; at most 4096.
fn numbers(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (last < 4096).then_some(first..=last)
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// Asks the kernel on which nodes `count` pages lie, at equal distances in all regions that this
/// process maps. Touches no page. Waits while another thread of this process maps or unmaps memory.
///
/// # Errors
/// `EPERM`, `ENOSYS`: a sandbox forbids `move_pages`, or the kernel has no NUMA.
pub fn sample_nodes(count: usize) -> Result<NodeSample, Errno> {
    let ranges = sigbus::watched();
    let mapped: usize = ranges.iter().map(|(_, len)| len).sum();
    let pages = pages_of(&ranges, mapped, count);
    if pages.is_empty() {
        return Ok(NodeSample::default());
    }
    let mut nodes = vec![-1_i32; pages.len()];
    // SAFETY: with a null pointer for the nodes the call moves nothing; it reads `pages.len()`
    // addresses, which the kernel does not access, and writes as many numbers.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            std::ptr::null::<libc::c_int>(),
            nodes.as_mut_ptr(),
            0,
        )
    };
    if result < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::NOSYS));
    }
    Ok(NodeSample { pages: counted(&nodes), mapped: mapped as u64 })
}

/// Returns the addresses of `count` pages, at equal distances over all these ranges.
fn pages_of(ranges: &[(usize, usize)], mapped: usize, count: usize) -> Vec<usize> {
    let page = rustix::param::page_size();
    let step = (mapped / count.max(1)).max(page);
    let (mut pages, mut skip) = (Vec::new(), step / 2);
    for &(base, len) in ranges {
        while skip < len && pages.len() < count {
            pages.push((base + skip) & !(page - 1));
            skip += step;
        }
        skip = skip.saturating_sub(len);
    }
    pages
}

/// Counts the pages of each node. A negative entry is an error: the page lies on no node.
fn counted(nodes: &[i32]) -> Vec<u64> {
    let mut pages = Vec::new();
    for node in nodes.iter().filter_map(|node| usize::try_from(*node).ok()) {
        if node < NODES_MAX {
            if pages.len() <= node {
                pages.resize(node + 1, 0);
            }
            pages[node] += 1;
        }
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[test]
    fn nodes_are_read_as_the_kernel_lists_them() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("online", "0\n");
        write("node0/cpulist", "0-3\n");
        let read = || Topology::below(folder.path(), vec![0, 1, 2, 5, 6]);
        assert_eq!(read(), None, "one node");
        write("online", "0,2-3\n");
        write("node2/cpulist", "4-7,9\n");
        // A node of memory alone.
        write("node3/cpulist", "\n");
        let topology = read().unwrap();
        assert_eq!(topology.cpus, [vec![0, 1, 2], vec![], vec![5, 6], vec![]]);
        assert_eq!((topology.cpus_of(2), topology.cpus_of(3)), (Some(&vec![5, 6]), None));
        assert_eq!(topology.cpus_of(4), None);
    }

    #[test]
    fn pages_are_taken_from_all_ranges_at_equal_distances() {
        let page = rustix::param::page_size();
        let ranges = [(64 * page, 6 * page), (128 * page, 2 * page)];
        let pages = pages_of(&ranges, 8 * page, 4);
        assert_eq!(pages, [65, 67, 69, 129].map(|number| number * page));
        assert_eq!(pages_of(&ranges, 8 * page, 1000).len(), 8, "no page is counted twice");
        assert_eq!(pages_of(&[], 0, 4), []);
    }

    #[test]
    fn pages_without_a_node_are_not_counted() {
        assert_eq!(counted(&[0, 2, -2, 2, i32::MAX]), [1, 0, 2]);
        assert_eq!(counted(&[-14]), []);
    }

    #[test]
    fn pages_that_were_written_lie_on_a_node() {
        let len = 64 * rustix::param::page_size();
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len as u64).unwrap();
        let mapping = Mapping::of_file(&file, 0, len as u64).unwrap();
        let before = sample_nodes(1000).unwrap();
        mapping.slice(0, len).unwrap().write_from(&vec![7; len]);
        let after = sample_nodes(1000).unwrap();
        let sum = |sample: &NodeSample| sample.pages.iter().sum::<u64>();
        assert!(sum(&after) >= sum(&before) + 32, "{before:?}, {after:?}");
        assert!(after.mapped >= len as u64);
    }
}

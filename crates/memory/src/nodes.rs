//! The NUMA nodes of the host, and on which of them the guests' memory lies: a sample of the pages
//! of all mapped regions.
#![allow(unsafe_code, reason = "allow-listed: one system call")]

use crate::sigbus;
use rustix::io::Errno;
use std::path::Path;

/// The largest number of nodes that a sample counts; the kernel supports no more.
const NODES_MAX: usize = 1024;
/// Pages of the first sample, and of the largest one, which the kernel finds in 3 ms: meanwhile no
/// thread of this process can map or unmap memory.
const SAMPLE_MIN: usize = 256;
const SAMPLE_MAX: usize = 16384;
/// Most regions of a sample, and the fewest pages of each.
const REGIONS_MAX: usize = 1024;
const PAGES_EACH_MIN: usize = 16;

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
    /// For each region, and each node, how many pages of the sample lie there. A page counts once
    /// this process has touched it: only its own page tables tell the node.
    pub regions: Vec<Vec<u64>>,
    /// Bytes of all regions.
    pub mapped: u64,
}

impl NodeSample {
    /// For each node, how many pages of the sample lie there.
    #[must_use]
    pub fn pages(&self) -> Vec<u64> {
        let nodes = self.regions.iter().map(Vec::len).max().unwrap_or(0);
        let on = |node| self.regions.iter().filter_map(|region| region.get(node)).sum();
        (0..nodes).map(on).collect()
    }
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

/// Asks the kernel on which nodes pages of the regions lie that this process maps: of each region
/// the same number, at equal distances. The sample grows from 256 to 16,384 pages until
/// this process has touched `enough` of them. Touches no page. Waits while another
/// thread of this process maps or unmaps memory.
///
/// # Errors
/// `EPERM`, `ENOSYS`: a sandbox forbids `move_pages`, or the kernel has no NUMA.
pub fn sample_nodes(enough: u64) -> Result<NodeSample, Errno> {
    let (ranges, mut count) = (sigbus::watched(), SAMPLE_MIN);
    loop {
        let sample = sample_of(&ranges, count)?;
        if count >= SAMPLE_MAX || sample.pages().iter().sum::<u64>() >= enough {
            return Ok(sample);
        }
        count *= 4;
    }
}

/// For a test of the sandbox: moves no page, with a list of nodes whose address has zeros in its
/// lower half.
///
/// # Errors
/// `EPERM`: the process may not move pages.
#[doc(hidden)]
pub fn try_to_move_pages() -> Result<(), Errno> {
    // SAFETY: the call is for no page, so the kernel reads none of the lists.
    let result = unsafe { libc::syscall(libc::SYS_move_pages, 0, 0, 0, 1_u64 << 32, 0, 0) };
    if result < 0 { Err(last_error()) } else { Ok(()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::NOSYS)
}

fn sample_of(ranges: &[(usize, usize)], count: usize) -> Result<NodeSample, Errno> {
    let mapped = ranges.iter().map(|(_, len)| *len as u64).sum();
    // Of very many regions, some.
    let every = ranges.len().div_ceil(REGIONS_MAX).max(1);
    let ranges: Vec<_> = ranges.iter().step_by(every).collect();
    let each = (count / ranges.len().max(1)).max(PAGES_EACH_MIN);
    let pages: Vec<_> = ranges.iter().map(|range| pages_of(**range, each)).collect();
    let all: Vec<usize> = pages.concat();
    if all.is_empty() {
        return Ok(NodeSample::default());
    }
    let mut nodes = vec![-1_i32; all.len()];
    // SAFETY: with a null pointer for the nodes the call moves nothing; it reads `all.len()`
    // addresses, which the kernel does not access, and writes as many numbers.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            all.len(),
            all.as_ptr(),
            std::ptr::null::<libc::c_int>(),
            nodes.as_mut_ptr(),
            0,
        )
    };
    if result < 0 {
        return Err(last_error());
    }
    let mut rest = nodes.as_slice();
    let regions = pages.iter().map(|pages| {
        let (own, others) = rest.split_at(pages.len());
        rest = others;
        counted(own)
    });
    Ok(NodeSample { regions: regions.collect(), mapped })
}

/// Addresses of `count` pages of a region, at equal distances; of all its pages if there are fewer.
fn pages_of((base, len): (usize, usize), count: usize) -> Vec<usize> {
    let page = rustix::param::page_size();
    let step = (len / count.max(1)).max(page);
    let at = |index: usize| (base + index * step + step / 2) & !(page - 1);
    (0..(len / step).min(count)).map(at).collect()
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
    fn pages_of_a_region_lie_at_equal_distances() {
        let page = rustix::param::page_size();
        let taken = |len: usize, count| pages_of((64 * page, len * page), count);
        assert_eq!(taken(8, 4), [65, 67, 69, 71].map(|number| number * page));
        assert_eq!(taken(8, 1000).len(), 8, "no page is counted twice");
        assert_eq!(taken(0, 4), []);
    }

    #[test]
    fn a_sample_has_a_count_for_each_region() {
        let regions = vec![vec![3], vec![], vec![0, 5, 1]];
        assert_eq!(NodeSample { regions, mapped: 9 }.pages(), [3, 5, 1]);
        assert_eq!(NodeSample::default().pages(), []);
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
        let ranges = [(mapping.addresses().start, len)];
        // A container's sandbox may refuse the call: there nothing follows memory.
        let Ok(before) = sample_of(&ranges, 1000) else { return };
        assert_eq!((before.pages(), before.mapped), (vec![], len as u64), "nothing is touched");
        mapping.slice(0, len).unwrap().write_from(&vec![7; len]);
        let after = sample_of(&ranges, 1000).unwrap();
        assert_eq!(after.pages().iter().sum::<u64>(), 64, "{after:?}");
    }
}

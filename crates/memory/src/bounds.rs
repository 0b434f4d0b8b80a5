//! How many mappings, and how much of its addresses, a process gives to the memory of front-ends.

use std::sync::OnceLock;

/// Bytes of a guest's regions together. Few of those that there may be at a time
/// (`Mapping::of_file`), also while a front-end replaces all of its regions; more than guests have.
pub(crate) const BYTES_MAX: u64 = 1 << 43;

/// `vm.max_map_count`, where it cannot be read: the kernel's default.
const COUNT_DEFAULT: usize = 65_530;

/// How many mappings front-ends may make us have as regions, and again as many as pieces of
/// windows: three of eight that the kernel lets a process have (`vm.max_map_count`). A process that
/// has them all can neither map nor unmap, start no thread and allocate nothing large; so a quarter
/// is left for everything else.
pub(crate) fn count_max() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(COUNT_DEFAULT) / 8 * 3
    })
}

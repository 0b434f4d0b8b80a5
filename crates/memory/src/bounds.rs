//! How many mappings a process uses for the memory of front-ends, and how many of its addresses.

use std::sync::OnceLock;

/// The most bytes of one guest's regions together. Guests have less. The bound is a small part of
/// `FILE_BYTES_MAX`, even while a front-end replaces all of its regions.
pub(crate) const BYTES_MAX: u64 = 1 << 43;

/// The kernel's default of `vm.max_map_count`, used if the present value cannot be read.
const COUNT_DEFAULT: usize = 65_530;

/// Returns the most mappings that all front-ends together may have as regions of memory: three
/// eighths of the kernel's limit (`vm.max_map_count`). The pieces of windows may take another three
/// eighths. A quarter stays for everything else: a process without a free mapping can neither map
/// nor unmap, start no thread and allocate nothing large.
pub(crate) fn count_max() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(COUNT_DEFAULT) / 8 * 3
    })
}

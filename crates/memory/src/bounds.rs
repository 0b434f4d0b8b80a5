//! How many mappings, and how much of its addresses, a process gives to the memory of front-ends.

use std::sync::OnceLock;

/// Bytes of one guest's regions together: more than guests have, and little of the addresses that
/// all mappings of files share (`FILE_BYTES_MAX`), also while a front-end replaces all of its
/// regions.
pub(crate) const BYTES_MAX: u64 = 1 << 43;

/// `vm.max_map_count`, where it cannot be read: the kernel's default.
const COUNT_DEFAULT: usize = 65_530;

/// Mappings that all front-ends together may have as regions of memory; the pieces of windows may
/// be the same number again. That is three eighths of the mappings that the kernel lets a process
/// have (`vm.max_map_count`), twice, and a quarter stays for everything else: a process without a
/// free one can neither map nor unmap, start no thread and allocate nothing large.
pub(crate) fn count_max() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(COUNT_DEFAULT) / 8 * 3
    })
}

//! `MemoryGroup`: a memory cgroup for a daemon, which counts the kernel's own memory for it too.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A memory cgroup below our own one. It is removed on drop, once its processes have ended.
#[derive(Debug)]
pub(crate) struct MemoryGroup {
    own: PathBuf,
    folder: PathBuf,
}

/// Names of the file with the memory charged to a group, in cgroup version 1 and 2.
const CHARGED: [&str; 2] = ["memory.usage_in_bytes", "memory.current"];

impl MemoryGroup {
    /// Makes a group. `None`: this program lacks the right, or its own group has no memory
    /// controller for groups below it.
    pub(crate) fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = groups.lines().find_map(of_memory).filter(|own| own.is_dir())?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = own.join(format!("manyring-bench-{}-{number}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let group = Self { own, folder };
        group.kib().map(|_| group)
    }

    /// Calls `start` with this process in the group, and returns its result. All processes that
    /// `start` starts are in the group.
    pub(crate) fn with<T>(&self, start: impl FnOnce() -> T) -> T {
        let enter = |group: &Path| {
            let _ = fs::write(group.join("cgroup.procs"), std::process::id().to_string());
        };
        enter(&self.folder);
        let started = start();
        enter(&self.own);
        started
    }

    /// Memory charged to the group, in KiB.
    #[allow(clippy::cast_precision_loss, reason = "memory of one host")]
    pub(crate) fn kib(&self) -> Option<f64> {
        let text = CHARGED.iter().find_map(|name| fs::read_to_string(self.folder.join(name)).ok());
        text?.trim().parse().ok().map(|bytes: u64| bytes as f64 / 1024.0)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // A device process ends a moment after its supervisor.
        for _ in 0..100 {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The folder of our memory cgroup, if this line of `/proc/self/cgroup` names it: the line of
/// controller `memory` in version 1, or the line of version 2.
fn of_memory(line: &str) -> Option<PathBuf> {
    let (_, group) = line.split_once(':')?;
    let (controllers, path) = group.split_once(':')?;
    let root = match controllers {
        "" => "/sys/fs/cgroup",
        of if of.split(',').any(|of| of == "memory") => "/sys/fs/cgroup/memory",
        _ => return None,
    };
    let path = Path::new(root).join(path.trim_start_matches('/'));
    CHARGED.iter().any(|name| path.join(name).exists()).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_other_controllers_name_no_memory_group() {
        for line in ["", "4:cpu:/", "0::/no/such/group", "4:memory:/no/such/group"] {
            assert_eq!(of_memory(line), None, "{line}");
        }
    }

    #[test]
    fn a_program_that_is_started_in_a_group_is_charged_to_it() {
        // Without the right to make one there is nothing to see.
        let Some(group) = MemoryGroup::new() else { return };
        let sleep = || std::process::Command::new("/bin/sleep").arg("9").spawn();
        let mut child = group.with(sleep).unwrap();
        let charged = group.kib().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(charged > 0.0 && charged < 100_000.0, "{charged}");
    }
}

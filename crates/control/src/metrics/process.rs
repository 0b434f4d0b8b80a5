//! The `process_*` metrics, named as in the client libraries of Prometheus, and the size of the
//! heap.

use super::exposition::{Sort, Text};
use super::seconds;
use manyring_backend::sys::heap;
use manyring_serve::proc_stat::{TICKS, field};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::fs;

/// Writes all metrics of the process; a value that the kernel does not give is left out.
pub(super) fn write(out: &mut Text) {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let cpu_ns = nanoseconds(cpu.tv_sec, cpu.tv_nsec);
    let help = "CPU time of the process";
    out.family("process_cpu_seconds", Sort::Counter, Some("seconds"), help);
    out.alone(seconds(cpu_ns));
    let mut gauge = |name: &str, unit, help, value: Option<u64>| {
        if let Some(value) = value {
            out.family(name, Sort::Gauge, unit, help);
            out.alone(value);
        }
    };
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let page = u64::try_from(rustix::param::page_size()).ok();
    let started = field(&stat, 22).zip(boot_time()).map(|(ticks, boot)| boot + ticks / TICKS);
    let sec = Some("seconds");
    gauge(
        "process_start_time_seconds",
        sec,
        "Start of the process, in seconds since 1970",
        started,
    );
    gauge("process_threads", None, "Threads of the process", field(&stat, 20));
    let bytes = Some("bytes");
    let virtual_help = "Address space of the process, with mapped guest memory";
    gauge("process_virtual_memory_bytes", bytes, virtual_help, field(&stat, 23));
    let resident = field(&stat, 24).zip(page).map(|(pages, page)| pages * page);
    let resident_help =
        "Resident memory of the process, with the pages of guest memory that it has used";
    gauge("process_resident_memory_bytes", bytes, resident_help, resident);
    let heap_help = "Memory that the process has allocated, without stacks and guest memory";
    gauge("manyring_heap_bytes", bytes, heap_help, heap::in_use());
    let open = fs::read_dir("/proc/self/fd").ok().map(|all| all.count() as u64);
    gauge("process_open_fds", None, "File descriptors that are open", open);
    let most = getrlimit(Resource::Nofile).current;
    gauge("process_max_fds", None, "File descriptors that may be open at a time", most);
}

/// Returns when the system started, in seconds since 1970.
fn boot_time() -> Option<u64> {
    let now = |clock| u64::try_from(clock_gettime(clock).tv_sec).ok();
    now(ClockId::Realtime)?.checked_sub(now(ClockId::Boottime)?)
}

fn nanoseconds(sec: i64, nsec: i64) -> u64 {
    let [sec, nsec] = [sec, nsec].map(|n| u64::try_from(n).unwrap_or(0));
    sec.saturating_mul(1_000_000_000).saturating_add(nsec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_all_of_them() {
        let mut out = Text::new(crate::metrics::Format::Plain);
        write(&mut out);
        let text = out.end();
        let value = |name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
            line.unwrap_or_else(|| panic!("{name}: {text}")).parse().unwrap()
        };
        assert!(value("process_cpu_seconds_total") >= 0.0);
        assert!(value("process_threads") >= 1.0);
        assert!(value("process_resident_memory_bytes") >= 4096.0);
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(value("process_open_fds") >= 3.0 && value("process_max_fds") >= 3.0);
        let heap = value("manyring_heap_bytes");
        assert!(heap >= 4096.0 && heap < value("process_resident_memory_bytes"), "{heap}");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let started = value("process_start_time_seconds");
        assert!(started > 1e9 && started <= now.as_secs_f64() + 2.0, "{started}");
    }
}

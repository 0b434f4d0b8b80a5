//! `Scanners`: threads that read /proc without a pause, as many monitors on one host do. To reap a
//! process then takes the kernel long.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Threads that scan until this is dropped.
#[derive(Debug)]
pub struct Scanners {
    stop: Arc<AtomicBool>,
    scans: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Scanners {
    /// Starts this many.
    #[must_use]
    pub fn start(count: u32) -> Self {
        let (stop, scans) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let scanner = |_| {
            let (stop, scans) = (stop.clone(), scans.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    scan();
                    scans.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let threads = (0..count).map(scanner).collect();
        Self { stop, scans, threads }
    }
}

impl Drop for Scanners {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let count = self.threads.len();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        if count > 0 {
            let scans = self.scans.load(Ordering::Relaxed);
            println!("beside {count} threads that read all of /proc {scans} times");
        }
    }
}

/// Reads what a monitor shows of each process and each of its threads.
fn scan() {
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let folder = process.path();
        if process.file_name().to_string_lossy().parse::<u32>().is_err() {
            continue;
        }
        read(&folder, &["stat", "status", "cmdline", "comm"]);
        let open = fs::read_dir(folder.join("fd")).into_iter().flatten().flatten();
        open.for_each(|file| drop(fs::read_link(file.path())));
        for thread in fs::read_dir(folder.join("task")).into_iter().flatten().flatten() {
            read(&thread.path(), &["stat", "comm"]);
        }
    }
}

fn read(folder: &Path, names: &[&str]) {
    names.iter().for_each(|name| drop(fs::read(folder.join(name))));
}

//! Who touches or unmaps guest memory without being allowed to ends the process: each case runs in
//! a process of its own.
#![cfg(debug_assertions)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

use manyring_memory::{Duty, Mapping, Words, guard_memory, in_own_memory, take_duty};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;

/// Set in the process of a case: its name.
const CASE: &str = "MANYRING_TEST_TOUCH";
const SIGABRT: i32 = 6;
const LARGE: u64 = 4 << 20;
const SMALL: u64 = 4096;

type Case = (&'static str, Option<Duty>, fn(Mapping), u64, bool);

fn copies(mapping: Mapping) {
    mapping.slice(0, 4).unwrap().write_from(b"seen");
    std::mem::forget(mapping);
}

fn reads_a_word(mapping: Mapping) {
    let words = Words::new(Arc::new(mapping), 0, 64, 16).unwrap();
    assert_eq!(words.load_u16(0), 0);
    std::mem::forget(words);
}

fn copies_as_of_ours(mapping: Mapping) {
    in_own_memory(|| copies(mapping));
}

/// Name, duty, what the thread does with how many bytes, and whether it may.
const CASES: [Case; 10] = [
    ("a thread that has said nothing copies", None, copies, LARGE, false),
    ("the control thread reads a word", Some(Duty::Control), reads_a_word, LARGE, false),
    ("a janitor reads a word", Some(Duty::Map), reads_a_word, LARGE, false),
    ("a worker copies", Some(Duty::Touch), copies, LARGE, true),
    ("a worker reads a word", Some(Duty::Touch), reads_a_word, LARGE, true),
    ("the control thread copies in memory of ours", None, copies_as_of_ours, LARGE, true),
    ("the control thread unmaps", Some(Duty::Control), drop, LARGE, false),
    ("a worker unmaps much", Some(Duty::Touch), drop, LARGE, false),
    ("a worker unmaps a page", Some(Duty::Touch), drop, SMALL, true),
    ("a janitor unmaps", Some(Duty::Map), drop, LARGE, true),
];

#[test]
fn whoever_may_not_touch_or_unmap_guest_memory_ends_the_process() {
    if let Ok(name) = std::env::var(CASE) {
        let (_, duty, act, size, _) = CASES.into_iter().find(|case| case.0 == name).unwrap();
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, size).unwrap();
        let mapping = Mapping::of_file(&file, 0, size).unwrap();
        guard_memory();
        duty.into_iter().for_each(take_duty);
        act(mapping);
        return;
    }
    for (name, .., may) in CASES {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let test = "whoever_may_not_touch_or_unmap_guest_memory_ends_the_process";
        let output = child.args(["--exact", test, "--nocapture"]).env(CASE, name).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let signal = output.status.signal();
        assert_eq!(output.status.success(), may, "{name}: {signal:?}: {said}");
        if !may {
            assert_eq!(signal, Some(SIGABRT), "{name}");
            assert!(said.contains("guest memory, and others wait for it"), "{name}: {said}");
        }
    }
}

#[test]
fn a_process_that_does_not_guard_its_memory_lets_every_thread_touch_it() {
    let mapping = Mapping::anonymous(SMALL).unwrap();
    copies(mapping);
}

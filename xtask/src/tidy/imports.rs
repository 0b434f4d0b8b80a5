//! Who may import whom: the table of ARCHITECTURE.md, and the purity of policy.

use super::files::File;
use super::{Offence, source};

/// A crate, what it may depend on, and what its tests may in addition.
pub(super) type Row = (&'static str, &'static [&'static str], &'static [&'static str]);

pub(super) const TABLE: &[Row] = &[
    ("wire", &[], &[]),
    ("memory", &[], &[]),
    ("queue", &["wire", "memory"], &[]),
    ("backend", &["wire", "memory"], &[]),
    ("nbd", &["wire", "memory", "backend"], &[]),
    ("engine", &["memory", "queue", "backend"], &[]),
    ("device", &["wire", "memory", "queue", "backend", "engine"], &["driver"]),
    ("transport", &["wire", "memory", "queue", "engine", "device"], &[]),
    ("protocol", &["device"], &[]),
    ("config", &["transport", "device", "engine", "backend", "nbd", "protocol"], &[]),
    (
        "serve",
        &["config", "protocol", "transport", "device", "engine", "backend", "nbd", "memory"],
        &["driver", "wire"],
    ),
    ("xen", &["serve", "config", "protocol", "transport", "engine", "memory"], &[]),
    (
        "supervisor",
        &[
            "xen",
            "serve",
            "config",
            "protocol",
            "transport",
            "device",
            "engine",
            "backend",
            "nbd",
            "memory",
        ],
        &["driver"],
    ),
    (
        "control",
        &["supervisor", "serve", "config", "protocol", "transport", "device", "engine", "backend"],
        &[],
    ),
    (
        "manyring",
        &[
            "control",
            "supervisor",
            "serve",
            "config",
            "transport",
            "device",
            "engine",
            "backend",
            "memory",
        ],
        &["driver", "queue", "wire"],
    ),
    ("driver", &["wire", "memory", "queue"], &[]),
    ("bench", &["driver", "queue", "memory", "wire", "backend", "system"], &[]),
];

/// Our crates' manifests follow the table.
pub(super) fn crates(file: &File) -> Vec<Offence> {
    let path = file.path.strip_prefix("crates/").and_then(|p| p.strip_suffix("/Cargo.toml"));
    let Some(name) = path else { return Vec::new() };
    let Some((_, edges, in_tests)) = TABLE.iter().find(|(row, ..)| *row == name) else {
        return vec![Offence::new(file, 0, "this crate is not in the table of ARCHITECTURE.md")];
    };
    let mut section = String::new();
    let mut offences = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        if line.starts_with('[') {
            section = line.trim_matches(['[', ']']).to_owned();
        }
        let Some((_, other)) = line.split_once("manyring-").filter(|_| !line.starts_with('#'))
        else {
            continue;
        };
        let other: String = other.chars().take_while(char::is_ascii_alphanumeric).collect();
        let is_edge = section.contains("dependencies") && line.contains(['=', '.', ']']);
        let is_allowed = edges.contains(&other.as_str())
            || (section.contains("dev-dependencies") && in_tests.contains(&other.as_str()));
        if is_edge && !is_allowed {
            let sentence = format!("{name} must not import {other} ({section})");
            offences.push(Offence::new(file, index + 1, sentence));
        }
    }
    offences
}

/// The parts of `std` that policy may use: they allocate, and do nothing else.
const PURE: [&str; 2] = ["cmp::", "collections::"];

/// Policy decides from its arguments: core and collections alone, no I/O, no clock, no thread.
pub(super) fn policy(file: &File) -> Vec<Offence> {
    if !file.path.contains("/src/policy/") {
        return Vec::new();
    }
    let code = file.code_before_tests();
    let mut offences = Vec::new();
    for (at, _) in code.match_indices("::") {
        let head = code[..at].trim_end();
        let start = head.rfind(|c: char| !(c.is_alphanumeric() || "_:".contains(c)));
        let path = &head[start.map_or(0, |at| at + 1)..];
        let is_path_start = !path.is_empty() && !path.contains(':');
        let is_module = path.starts_with(|c: char| c.is_lowercase());
        let rest = &code[at + "::".len()..];
        // `.sum::<u64>()` is a call.
        let is_generic = rest.starts_with('<');
        let is_pure = ["core", "super", "self"].contains(&path)
            || (path == "std" && PURE.iter().any(|part| rest.starts_with(part)));
        if is_path_start && is_module && !is_primitive(path) && !is_generic && !is_pure {
            let sentence = format!("policy imports nothing but core and collections, not {path}");
            offences.push(Offence::new(file, source::line_of(code, at), sentence));
        }
    }
    offences
}

fn is_primitive(word: &str) -> bool {
    let types = ["u8", "u16", "u32", "u64", "u128", "usize", "i32", "i64", "f32", "f64", "bool"];
    types.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::offences;

    fn manifest(name: &str, text: &str) -> Vec<(usize, String)> {
        let head = format!("[package]\nname = \"manyring-{name}\"\n");
        offences(crates, &format!("crates/{name}/Cargo.toml"), &format!("{head}{text}"))
    }

    #[test]
    fn an_edge_of_the_table_passes_and_its_reverse_does_not() {
        let queue = "[dependencies]\nmanyring-queue.workspace = true\n";
        assert!(manifest("device", queue).is_empty());
        let device = "[dependencies]\nmanyring-device.workspace = true\n";
        let found = manifest("queue", device);
        assert!(found[0].0 == 4 && found[0].1.contains("queue must not import device"));
        let table = "[dependencies.manyring-device]\npath = \"../device\"\n";
        assert_eq!(manifest("queue", table).len(), 1);
    }

    #[test]
    fn the_driver_is_the_daemons_in_tests_only() {
        let dev = "[dev-dependencies]\nmanyring-driver.workspace = true\n";
        assert!(manifest("serve", dev).is_empty());
        let real = "[dependencies]\nmanyring-driver.workspace = true\n";
        assert_eq!(manifest("serve", real).len(), 1);
        let on_target = "[target.\"cfg(unix)\".dependencies]\nmanyring-driver = \"1\"\n";
        assert_eq!(manifest("serve", on_target).len(), 1);
    }

    #[test]
    fn a_crate_that_is_not_in_the_table_is_one_too_many() {
        assert_eq!(manifest("utils", "").len(), 1);
    }

    #[test]
    fn policy_takes_time_as_an_argument() {
        let path = "crates/engine/src/policy/polling.rs";
        let pure = "use core::time::Duration;\nuse super::Law;\nlet a = u32::MAX;\nSelf::b();\n\
            use std::collections::BTreeMap;\nlet b = a.iter().sum::<u64>();\n\
            /// std::time is not here\n#[cfg(test)]\nmod tests { use std::time::Instant; }\n";
        assert!(offences(policy, path, pure).is_empty());
        for bad in ["use std::time::Instant;", "std::thread::sleep(d);", "use rustix::fs;"] {
            assert_eq!(offences(policy, path, bad).len(), 1, "{bad}");
            assert_eq!(offences(policy, "crates/device/src/policy/reclaim.rs", bad).len(), 1);
            assert!(offences(policy, "crates/engine/src/wait.rs", bad).is_empty());
            let below = format!("#[cfg(test)]\nmod tests;\n{bad}\n");
            assert_eq!(offences(policy, path, &below).len(), 1, "behind the tests' name: {bad}");
        }
    }
}

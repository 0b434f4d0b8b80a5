//! Words that have their places, and words that have none.

use super::files::File;
use super::{Offence, source, tree};

/// The files that may hold unsafe code; a path that ends in `/` stands for its files.
pub(super) const UNSAFE: &[&str] = &[
    "crates/backend/src/blk/uring.rs",
    "crates/backend/src/blk/uring/tests.rs",
    "crates/backend/src/sys/",
    "crates/serve/src/fds.rs",
    "crates/memory/src/evtchn.rs",
    "crates/memory/src/gntdev.rs",
    "crates/memory/src/iov.rs",
    "crates/memory/src/list.rs",
    "crates/memory/src/mapping.rs",
    "crates/memory/src/nodes.rs",
    "crates/memory/src/region.rs",
    "crates/memory/src/shared.rs",
    "crates/memory/src/sigbus.rs",
    "crates/memory/src/window.rs",
    "crates/driver/src/hostile/hold.rs",
    // The foreign client's own interface takes raw pointers.
    "crates/bench/src/load/blkio.rs",
    "crates/manyring/tests/support/foreign.rs",
];

/// The files of the daemon that may read /proc, or reap a process. On a busy host both take
/// seconds: docs/design/0030 says which thread does so, and who waits for it.
pub(super) const PROC: &[&str] = &[
    "crates/backend/src/blk/holder.rs",
    "crates/backend/src/blk/image.rs",
    "crates/backend/src/blk/image/handover.rs",
    "crates/backend/src/sys/",
    // A helper may read /proc: that is a rule, and no read.
    "crates/serve/src/assemble/helper_walls.rs",
    "crates/serve/src/assemble/qemu_helper.rs",
    "crates/config/src/plan/allowed_path.rs",
    "crates/control/src/socket.rs",
    "crates/serve/src/fds.rs",
    "crates/control/src/metrics/process.rs",
    "crates/supervisor/src/processes/spawner.rs",
    "crates/serve/src/device_process/denied.rs",
    "crates/serve/src/device_process.rs",
    "crates/supervisor/src/processes/journal_store.rs",
    "crates/serve/src/lease_file.rs",
    "crates/serve/src/device_process/sandbox.rs",
    "crates/serve/src/reaper.rs",
    "crates/xen/src/state_dir.rs",
    "crates/engine/src/accounts.rs",
    "crates/engine/src/fds/doorbell.rs",
    "crates/engine/src/watch.rs",
    "crates/memory/src/bounds.rs",
    "crates/transport/src/vhost_user/listener.rs",
];

/// The file with the times of the daemon.
pub(super) const TIMES: &str = "crates/serve/src/times.rs";
/// The crates that have them.
pub(super) const OF_DAEMON: [&str; 5] = ["serve", "xen", "supervisor", "control", "manyring"];

const LEFT_OVER: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
const HOMES: [&str; 3] = [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Use", "rs/")];
const MIRRORS: [&str; 3] = [
    concat!("deb.", "debian.org"),
    concat!("ftp.", "debian.org"),
    concat!("security.", "debian.org"),
];
/// Names that something had before it got the field's name, which is the second one.
const FORMER: [(&str, &str); 16] = [
    (concat!("ho", "use"), "supervisor, or DeviceManager"),
    (concat!("--ho", "use"), "--isolate"),
    (concat!("/v1/ro", "oms"), "/v1/processes"),
    (concat!("manyring ro", "om"), "manyring device-process"),
    (concat!("manyring-ro", "om"), "manyring-device"),
    (concat!("manyring_ro", "om_"), "manyring_device_process_"),
    (concat!("cour", "ier"), "copy path"),
    (concat!("heir", "loom"), "adopted session"),
    (concat!("beq", "uest"), "handoff request"),
    (concat!("beq", "ueath"), "hand off"),
    (concat!("PAT", "IENCE"), "TIMEOUT"),
    (concat!("Queue", "Room"), "QueueLength"),
    (concat!("Room", "Info"), "QueueLengthInfo"),
    (concat!("Room", "Source"), "QueueLengthSource"),
    (concat!("waiting_for_", "room"), "waiting_for_space"),
    (concat!("dropped_no_", "room"), "dropped_small_buffers"),
];
const NAMELESS: [&str; 6] = ["common", "helper", "helpers", "manager", "misc", "utils"];

/// Unsafe code lives in the allow-list.
pub(super) fn unsafe_code(file: &File) -> Vec<Offence> {
    if is_listed(UNSAFE, file) {
        return Vec::new();
    }
    let places = source::words(&file.code, "unsafe");
    let sentence = "unsafe code outside the allow-list";
    places.map(|at| Offence::new(file, source::line_of(&file.code, at), sentence)).collect()
}

pub(super) fn is_listed(list: &[&str], file: &File) -> bool {
    list.iter().any(|&p| file.path == p || (p.ends_with('/') && file.path.starts_with(p)))
}

/// Reads of /proc and the reaping of processes have their files, and a row in docs/design/0030.
pub(super) fn proc(file: &File) -> Vec<Offence> {
    /// Their programs may.
    const OTHERS: [&str; 2] = ["bench", "driver"];
    let is_in = |name: &&&str| file.path.starts_with(&format!("crates/{name}/src/"));
    let is_ours = tree::CRATES.iter().find(is_in).is_some_and(|name| !OTHERS.contains(name));
    let is_test = file.path.ends_with("/tests.rs") || file.path.contains("/tests/");
    if !is_ours || is_listed(PROC, file) || is_test {
        return Vec::new();
    }
    let sentence = "a read of /proc or a wait for a process outside the list (docs/design/0030)";
    reads_of_proc(file).map(|line| Offence::new(file, line, sentence)).collect()
}

/// The lines that read /proc or wait for a process.
pub(super) fn reads_of_proc(file: &File) -> impl Iterator<Item = usize> {
    let reads = |line: &str| {
        let is_comment = line.trim_start().starts_with("//");
        let words = ["\"/proc", "waitpid(", "waitid(", "try_wait(", "child.wait("];
        !is_comment && words.iter().any(|word| line.contains(word))
    };
    let lines = file.code_before_tests().lines().count();
    let lines = file.text.lines().take(lines).enumerate();
    lines.filter(move |(_, line)| reads(line)).map(|(at, _)| at + 1)
}

/// Work that is left is an issue, or done: notes about it are refused.
pub(super) fn left_over(file: &File) -> Vec<Offence> {
    if file.path.ends_with(".md") {
        return Vec::new();
    }
    let places = LEFT_OVER.iter().flat_map(|word| source::words(&file.text, word));
    let line = |at| source::line_of(&file.text, at);
    places.map(|at| Offence::new(file, line(at), "an issue, or the work, but no note")).collect()
}

/// What has got another name has it everywhere, but in the list of changes.
pub(super) fn former_name(file: &File) -> Vec<Offence> {
    if file.path == "CHANGELOG.md" {
        return Vec::new();
    }
    let all = FORMER.iter().flat_map(|(former, name)| {
        let is_meant = |at: &usize| !file.text[at + former.len()..].starts_with(" rule");
        let places = file.text.match_indices(former).map(|(at, _)| at).filter(is_meant);
        let starts = |at: &usize| !file.text[..*at].ends_with(|c: char| c.is_ascii_alphanumeric());
        places.filter(starts).map(move |at| (at, format!("{former} is called {name}")))
    });
    all.map(|(at, sentence)| Offence::new(file, source::line_of(&file.text, at), sentence))
        .collect()
}

/// The daemon's constants of time are in one table, with what happens when each is over.
pub(super) fn time(file: &File) -> Vec<Offence> {
    let is_in = |name: &&str| file.path.starts_with(&format!("crates/{name}/src/"));
    if file.path == TIMES || !OF_DAEMON.iter().any(is_in) {
        return Vec::new();
    }
    let sentence = format!("a time belongs in {TIMES}");
    times(file).map(|line| Offence::new(file, line, sentence.as_str())).collect()
}

/// The lines that declare a constant of time.
pub(super) fn times(file: &File) -> impl Iterator<Item = usize> {
    let is_time = |line: &str| {
        let (before, of) = line.split_once("const ").unwrap_or_default();
        let of = Some(of).filter(|of| !of.starts_with("fn ")).and_then(|of| of.split_once(": "));
        let of = of.and_then(|(_, of)| of.split(" =").next());
        (before.trim().is_empty() || before.trim().starts_with("pub"))
            && of.is_some_and(|of| of.contains("Duration"))
    };
    let lines = file.code_before_tests().lines().enumerate();
    lines.filter(move |(_, line)| is_time(line)).map(|(at, _)| at + 1)
}

/// A function that gives something is named after what it gives.
pub(super) fn getter(file: &File) -> Vec<Offence> {
    let functions = source::functions(file.code_before_tests()).into_iter();
    functions
        .filter(|(name, _)| name.starts_with("get_"))
        .map(|(name, lines)| {
            let sentence = format!("fn {name}: leave the get_ out");
            Offence::new(file, lines.start, sentence)
        })
        .collect()
}

/// A file is named after what lives there.
pub(super) fn file_name(file: &File) -> Vec<Offence> {
    let mut parts = file.path.trim_end_matches(".rs").split('/');
    let sentence = "this name does not say what lives here";
    let is_bad = file.is_rust() && parts.any(|part| NAMELESS.contains(&part));
    is_bad.then(|| Offence::new(file, 0, sentence)).into_iter().collect()
}

/// No path of somebody's machine.
pub(super) fn home_path(file: &File) -> Vec<Offence> {
    let places = HOMES.iter().flat_map(|home| file.text.match_indices(home));
    let starts = |at: usize| !file.text[..at].ends_with(|c: char| c.is_alphanumeric());
    let line = |at| source::line_of(&file.text, at);
    places
        .filter(|(at, _)| starts(*at))
        .map(|(at, _)| Offence::new(file, line(at), "a path of somebody's machine"))
        .collect()
}

/// No mirror's host: packages come from where the machine's own apt has them from.
pub(super) fn mirror(file: &File) -> Vec<Offence> {
    let places = MIRRORS.iter().flat_map(|mirror| file.text.match_indices(mirror));
    let line = |at| source::line_of(&file.text, at);
    places.map(|(at, _)| Offence::new(file, line(at), "the host of a package mirror")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::offences;

    #[test]
    fn times_of_the_daemon_have_one_file() {
        for text in [
            "//! x\nconst A: Duration = B;\n",
            "//! x\npub(super) const A: (Duration, u8) = B;\n",
            "//! x\npub const A: Duration =\n    B;\n",
            "//! x\n    const A: Duration = B;\n",
        ] {
            for place in ["serve/src/log", "supervisor/src/xen", "control/src/socket"] {
                let found = offences(time, &format!("crates/{place}.rs"), text);
                assert_eq!(found.first().map(|(line, _)| *line), Some(2), "{place}: {text}");
            }
            assert!(offences(time, TIMES, text).is_empty());
            assert!(offences(time, "crates/engine/src/watch.rs", text).is_empty());
        }
        let others = "//! x\nconst A: u8 = f(Duration::ZERO);\nconst fn f(a: Duration) {}\n";
        assert!(offences(time, "crates/supervisor/src/xen.rs", others).is_empty());
    }

    #[test]
    fn unsafe_code_has_its_files() {
        let text = "//! x\nlet a = unsafe { b() };\n";
        assert!(offences(unsafe_code, "crates/memory/src/shared.rs", text).is_empty());
        assert!(offences(unsafe_code, "crates/backend/src/sys/uring.rs", text).is_empty());
        assert_eq!(offences(unsafe_code, "crates/memory/src/guest.rs", text)[0].0, 2);
        let spoken = "#![forbid(unsafe_code)]\n// unsafe\nlet a = \"unsafe\";\n";
        assert!(offences(unsafe_code, "crates/queue/src/lib.rs", spoken).is_empty());
    }

    #[test]
    fn reads_of_proc_and_waits_for_processes_have_their_files() {
        let control = "crates/control/src/api.rs";
        for text in [
            "//! x\nlet a = read(\"/proc/stat\");\n",
            "//! x\nlet a = format!(\"/proc/{pid}/comm\");\n",
            "//! x\nlet a = child.try_wait();\n",
        ] {
            assert_eq!(offences(proc, control, text)[0].0, 2, "{text}");
            assert!(offences(proc, "crates/serve/src/reaper.rs", text).is_empty());
            assert!(offences(proc, "crates/bench/src/peer.rs", text).is_empty());
            let test = text.replacen("let", "#[cfg(test)]\nmod tests {\nlet", 1) + "}\n";
            assert!(offences(proc, control, &test).is_empty(), "{test}");
        }
        assert!(offences(proc, control, "//! x\n// `/proc/stat`\n").is_empty());
    }

    #[test]
    fn nothing_is_left_over() {
        for word in LEFT_OVER {
            let text = format!("//! x\n// {word}: later\n");
            assert_eq!(offences(left_over, "a.rs", &text)[0].0, 2);
            assert!(offences(left_over, "CONTRIBUTING.md", &text).is_empty());
        }
        assert!(offences(left_over, "a.rs", &format!("MKS{}\n", LEFT_OVER[0])).is_empty());
    }

    #[test]
    fn what_has_another_name_has_it_everywhere() {
        for (former, _) in FORMER {
            let text = format!("//! x\n// The {former} of before.\n");
            assert_eq!(offences(former_name, "a.rs", &text)[0].0, 2, "{former}");
            assert!(offences(former_name, "CHANGELOG.md", &text).is_empty());
        }
        let text = format!("//! The {0} rules, and ware{0}s.\n", FORMER[0].0);
        assert!(offences(former_name, "a.rs", &text).is_empty());
    }

    #[test]
    fn getters_are_named_after_what_they_give() {
        assert_eq!(offences(getter, "a.rs", "fn get_size() {}\n").len(), 1);
        assert!(offences(getter, "a.rs", "fn size() { a.get_size() }\nfn get() {}\n").is_empty());
    }

    #[test]
    fn files_are_named_after_what_they_hold() {
        assert_eq!(offences(file_name, "crates/queue/src/utils.rs", "").len(), 1);
        assert_eq!(offences(file_name, "crates/queue/tests/common/mod.rs", "").len(), 1);
        assert!(offences(file_name, "crates/queue/src/config.rs", "").is_empty());
    }

    #[test]
    fn no_path_of_somebodys_machine() {
        for home in HOMES {
            assert_eq!(offences(home_path, "README.md", &format!("a\n{home}x\n"))[0].0, 2);
        }
        for elsewhere in ["/var/lib/manyring\n".to_owned(), format!("/v1{}x\n", HOMES[1])] {
            assert!(offences(home_path, "README.md", &elsewhere).is_empty());
        }
    }

    #[test]
    fn no_host_of_a_mirror() {
        for host in MIRRORS {
            let text = format!("//! x\n// http://{host}/debian\n");
            assert_eq!(offences(mirror, "a.rs", &text)[0].0, 2);
        }
        assert!(offences(mirror, "README.md", "https://www.debian.org\n").is_empty());
    }
}

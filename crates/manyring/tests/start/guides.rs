//! README and the guides are true: each fragment is taken as it stands through the entry point of
//! the program that would read it, and what they name exists.
#![allow(clippy::disallowed_methods, reason = "the embedding program serves on its own thread")]

#[path = "../../examples/embed.rs"]
#[allow(dead_code, reason = "its main is the example's")]
mod embed;

use crate::documents::{Fragment, commands, documents, fragments, program, root};
use crate::support::client::Client;
use crate::support::process::{TIMEOUT, wait_until};
use manyring::documented;
use manyring_config as config;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Accounts of the reader's host. Theirs are found by name; the tests' host need not have them.
const ACCOUNTS: [&str; 4] = ["kvm", "libvirt-qemu", "vmadmin", "monitoring"];

fn of_language(language: &str) -> Vec<Fragment> {
    let all: Vec<_> = fragments().into_iter().filter(|f| f.language == language).collect();
    assert!(!all.is_empty(), "no document has a fragment of {language}");
    all
}

#[test]
fn every_fragment_says_what_it_is_so_that_it_is_checked() {
    for fragment in fragments() {
        let known = ["sh", "toml", "xml", "ini", "yaml", "text"];
        assert!(known.contains(&fragment.language.as_str()), "{}: no language", fragment.at);
    }
}

/// Checks a configuration, with the accounts of this process in the reader's place.
fn planned(text: &str) -> Result<(), String> {
    let with_accounts = |text: String, name: &&str| text.replace(&format!("\"{name}\""), "\"0\"");
    let text = ACCOUNTS.iter().fold(text.to_owned(), with_accounts);
    match config::parse(&text) {
        // The reader has other CPUs.
        Err(error) if error.contains("is not available; this process may use") => Ok(()),
        parsed => parsed.map(drop),
    }
}

#[test]
fn every_configuration_is_one() {
    for fragment in of_language("toml") {
        planned(&fragment.text).unwrap_or_else(|error| panic!("{}: {error}", fragment.at));
    }
    for file in ["examples/blk.toml", "examples/net.toml", "contrib/deb/manyring.toml"] {
        let text = std::fs::read_to_string(root().join(file)).unwrap();
        planned(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
    }
}

/// Checks a command. False: it is not one of the commands that this test knows.
fn checked(words: &[String]) -> Result<bool, String> {
    match program(words) {
        "manyring" | "vhost-user-blk" | "vhost-user-net" => {
            let ours = |word: &String| match ACCOUNTS.contains(&word.as_str()) {
                true => "0".into(),
                false => word.into(),
            };
            documented::command_line(words.iter().map(ours).collect()).map(|()| true)
        }
        "curl" => asked(words).map(|()| true),
        "cargo" if words.get(1).is_some_and(|word| word == "xtask") => is_xtask(&words[2..]),
        _ => Ok(false),
    }
}

/// A request of the control API: its body is one.
fn asked(words: &[String]) -> Result<(), String> {
    let after = |option: &str| {
        words.iter().position(|word| word == option).and_then(|at| words.get(at + 1))
    };
    let path = words.iter().find_map(|word| word.split_once("://")?.1.split_once('/'));
    let path = path.ok_or("no URL")?.1;
    let body = || after("-d").ok_or("no body");
    match (after("-X").map_or("GET", String::as_str), path.strip_prefix("v1/devices/")) {
        ("PUT", Some(name)) => documented::device(name, body()?),
        ("PATCH", Some(_)) => documented::keys(body()?),
        ("GET" | "DELETE", _) => Ok(()),
        (method, _) => Err(format!("{method} {path}: not known here")),
    }
}

fn is_xtask(words: &[String]) -> Result<bool, String> {
    let main = std::fs::read_to_string(root().join("xtask/src/main.rs")).unwrap();
    let name = words.first().ok_or("which command?")?;
    let capital = |part: &str| part[..1].to_uppercase() + &part[1..];
    let variant: String = name.split('-').map(capital).collect();
    let is_there = ['(', ' ', ',', '{'].iter().any(|c| main.contains(&format!("    {variant}{c}")));
    if is_there { Ok(true) } else { Err(format!("cargo xtask has no {name}")) }
}

#[test]
fn every_command_line_is_understood() {
    let mut known = 0;
    for fragment in of_language("sh") {
        for words in commands(&fragment.text) {
            let is_ours = checked(&words).unwrap_or_else(|error| {
                panic!("{}: {}: {error}", fragment.at, words.join(" "));
            });
            known += usize::from(is_ours);
        }
    }
    assert!(known > 30, "{known} commands of ours");
}

#[test]
fn every_whole_command_in_a_sentence_is_understood() {
    for document in documents() {
        for code in document.text.split('`').skip(1).step_by(2) {
            if !code.starts_with("manyring ") || !code.contains("/run/manyring/") {
                continue;
            }
            for words in commands(code) {
                checked(&words)
                    .unwrap_or_else(|error| panic!("{}: {code}: {error}", document.name));
            }
        }
    }
}

#[test]
fn sockets_have_one_folder_and_one_ending_everywhere() {
    for fragment in fragments() {
        for words in commands(&fragment.text.replace(['\'', '"'], " ")) {
            for pair in words.windows(2) {
                let [option, path] = pair else { continue };
                let is_socket = ["--socket-path", "--control"].contains(&option.as_str());
                let is_right = path.starts_with("/run/manyring/") || !path.starts_with('/');
                let at = &fragment.at;
                assert!(!is_socket || is_right && path.ends_with(".sock"), "{at}: {path}");
            }
        }
    }
}

/// QEMU 10.2 and newer refuse the old form, and QEMU before 9.2 the new one.
#[test]
fn wherever_a_qemu_is_told_to_connect_again_both_forms_are_named() {
    let mut count = 0;
    for document in documents() {
        for (number, line) in document.text.lines().enumerate() {
            let forms = ["reconnect=1", "reconnect-ms=1000"].map(|form| line.contains(form));
            count += usize::from(forms[0]);
            // Where a command has no room for the other form, the text beside it names that.
            let is_command = line.contains(" -chardev ") && !line.starts_with('|');
            let at = format!("{}:{}: {line}", document.name, number + 1);
            assert!(forms[0] == forms[1] || is_command && forms[1], "{at}");
        }
    }
    assert!(count >= 8, "{count} lines");
}

#[test]
fn every_element_of_xml_is_closed() {
    for Fragment { at, text, .. } in of_language("xml") {
        let mut open = Vec::new();
        for tag in text.split('<').skip(1).map(|tag| tag.split_once('>').expect(&at).0) {
            let name = tag.trim_matches('/').split_whitespace().next().unwrap_or_default();
            match (tag.starts_with('/'), tag.ends_with('/')) {
                (true, _) => assert_eq!(open.pop(), Some(name), "{at}"),
                (false, false) => open.push(name),
                (false, true) => {}
            }
        }
        assert!(open.is_empty(), "{at}: {open:?}");
    }
}

#[test]
fn every_line_of_a_unit_or_of_yaml_has_a_key() {
    for Fragment { at, text, .. } in of_language("ini") {
        assert!(text.starts_with('['), "{at}: no section");
        let lines = text.lines().filter(|line| !line.starts_with(['[', '#']));
        lines.for_each(|line| assert!(line.contains('='), "{at}: {line}"));
    }
    for Fragment { at, text, .. } in of_language("yaml") {
        let is_plain = |line: &str| !line.contains('\t') && line.contains(':');
        text.lines().for_each(|line| assert!(is_plain(line), "{at}: {line}"));
    }
}

/// All sources below a folder.
fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        match entry.is_dir() {
            true => sources(&entry, into),
            false if entry.extension().is_some_and(|e| e == "rs") => into.push(entry),
            false => {}
        }
    }
}

/// The sources of the workspace, without line breaks in their texts.
fn source_texts() -> Vec<String> {
    let mut paths = Vec::new();
    ["crates", "system/src"].iter().for_each(|folder| sources(&root().join(folder), &mut paths));
    let text = |path: &PathBuf| std::fs::read_to_string(path).unwrap();
    let joined = |text: String| {
        let lines: Vec<_> = text.split("\\\n").collect();
        lines.iter().map(|line| line.trim_start()).collect::<String>()
    };
    paths.iter().map(text).map(joined).collect()
}

#[test]
fn every_test_that_the_matrix_of_features_names_exists() {
    let texts = source_texts();
    let names: BTreeSet<String> = documents()
        .into_iter()
        .filter(|document| document.name == "features.md")
        .flat_map(|document| {
            let tables = document.text.split("## What is offered").next().unwrap().to_owned();
            let cells = tables.lines().filter(|line| line.starts_with('|')).map(|line| {
                line.split('|').skip(2).map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
            });
            cells.flatten().collect::<Vec<_>>()
        })
        .filter_map(|cell| Some(cell.strip_prefix('`')?.strip_suffix('`')?.to_owned()))
        .collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        let (behaviour, case) = (format!("Behaviour {{ name: \"{name}\""), format!("fn {name}("));
        let case = match name.strip_prefix("cargo xtask xen --only ") {
            Some(of_xen) => format!("case(\"{of_xen}\""),
            None => case,
        };
        let is_there = |text: &String| text.contains(&behaviour) || text.contains(&case);
        assert!(texts.iter().any(is_there), "features.md names {name}, which is no test");
    }
}

/// Whether a name in code is that of a test, of a behaviour, or `manyring-bench SCENARIO`.
fn is_shown(name: &str, texts: &[String]) -> bool {
    let shown = match name.strip_prefix("manyring-bench ") {
        // Its row in the table of scenarios: the module and the name.
        Some(scenario) => vec![format!("{} \"{scenario}\",", scenario.replace('-', "_"))],
        None => vec![format!("fn {name}("), format!("Behaviour {{ name: \"{name}\"")],
    };
    texts.iter().any(|text| shown.iter().any(|shown| text.contains(shown)))
}

#[test]
fn each_of_the_113_things_that_is_there_names_a_test_or_a_scenario_that_exists() {
    let texts = source_texts();
    let documents = documents();
    let guide = documents.iter().find(|document| document.name == "features.md").unwrap();
    let section = guide.text.split("## What the reference documents name").nth(1).unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    let rows: Vec<Vec<&str>> = rows.map(|line| line.split(" | ").collect()).collect();
    let rows: Vec<_> = rows.iter().filter(|row| row[1] != "state").collect();
    assert_eq!(rows.len(), 113);
    let states = ["have", "in part", "no", "differs", "not ours"];
    let counts = states.map(|state| rows.iter().filter(|row| row[1] == state).count());
    let [have, part, no, differs, others] = counts;
    assert_eq!(counts.iter().sum::<usize>(), 113, "a state that is none of {states:?}");
    let said = format!(
        "{have} are there, {part} in part, {no} are missing, {differs} differ on purpose, and \
         {others} belong"
    );
    assert!(section.contains(&said), "the page does not say: {said}");
    for row in rows {
        let names = row[2].split('`').skip(1).step_by(2);
        let tests = names.filter(|name| name.contains('_') || name.starts_with("manyring-"));
        // What is there in part may name a key, such as `zero_copy`.
        let is_named = |name: &&str| {
            row[1] == "have" || name.matches('_').count() > 2 || name.starts_with("manyring-bench")
        };
        let tests: Vec<&str> = tests.filter(is_named).collect();
        assert!(row[1] != "have" || !tests.is_empty(), "{} names no test", row[0]);
        let unknown = tests.into_iter().find(|name| !is_shown(name, &texts));
        assert_eq!(unknown, None, "{}: neither test nor scenario", row[0]);
    }
    assert!(!is_shown("no_test_of_ours", &texts) && !is_shown("manyring-bench none", &texts));
}

#[test]
fn every_test_that_the_guide_of_domains_names_exists() {
    let texts = source_texts();
    let documents = documents();
    let guide = documents.iter().find(|document| document.name == "security.md").unwrap();
    let rows = guide.text.lines().filter(|line| line.starts_with("| ") && line.contains("_"));
    let last = rows.filter_map(|line| line.trim_end_matches('|').rsplit('|').next());
    let names: Vec<_> = last.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert!(names.len() > 12, "{names:?}");
    for name in names.iter().filter(|name| name.matches('_').count() > 2) {
        let (case, behaviour) = (format!("fn {name}("), format!("Behaviour {{ name: \"{name}\""));
        let is_there = |text: &String| text.contains(&case) || text.contains(&behaviour);
        assert!(texts.iter().any(is_there), "{name} is no test");
    }
}

#[test]
fn every_line_of_the_log_that_troubleshooting_names_is_one() {
    let texts = source_texts();
    let documents = documents();
    let guide = documents.iter().find(|document| document.name == "troubleshooting.md").unwrap();
    let rows = guide.text.lines().filter(|line| line.starts_with('|'));
    let symptoms = rows.filter_map(|line| line.split('|').nth(1));
    let mut count = 0;
    for symptom in symptoms {
        let codes = symptom.split('`').skip(1).step_by(2);
        for said in codes.filter(|code| code.contains(' ') && !code.starts_with("manyring ")) {
            count += 1;
            assert!(texts.iter().any(|text| text.contains(said)), "nothing says {said:?}");
        }
    }
    assert!(count > 10, "{count} lines of the log");
}

/// A heading as a link names it.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
    heading.trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

/// All documents: those of the root, and all below `docs`.
fn texts() -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let below = |folder: &str| std::fs::read_dir(root().join(folder)).unwrap();
    for folder in [".", "docs", "docs/design", "docs/guide", "docs/measured"] {
        paths.extend(below(folder).map(|entry| entry.unwrap().path()));
    }
    paths.retain(|path| path.extension().is_some_and(|e| e == "md"));
    paths
}

#[test]
fn every_link_leads_somewhere() {
    for document in texts() {
        let text = std::fs::read_to_string(&document).unwrap();
        let at = document.display();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            let path = match file {
                "" => document.clone(),
                file => document.parent().unwrap().join(file),
            };
            assert!(path.exists(), "{at}: {link}");
            if !place.is_empty() {
                let text = std::fs::read_to_string(path).unwrap();
                let mut headings = text.lines().filter(|line| line.starts_with('#'));
                let is_there = headings.any(|h| anchor(h.trim_start_matches('#')) == place);
                assert!(is_there, "{at}: {link}");
            }
        }
    }
}

#[test]
fn a_program_that_embeds_the_crates_serves_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("disk.sock");
    let (stop, stops) = tokio::sync::watch::channel(false);
    let server = std::thread::spawn({
        let socket = socket.clone();
        move || embed::disk(socket, stops).map_err(|error| error.to_string())
    });
    assert!(wait_until(|| socket.exists()), "no socket");
    let mut client = Client::connect(&socket, 2);
    for queue in 0..2 {
        client.submit_reads(queue, 8);
        assert_eq!(client.wait_for(queue, 8, TIMEOUT), 8);
    }
    drop(client);
    stop.send_replace(true);
    server.join().unwrap().unwrap();
    assert!(!socket.exists(), "its socket is left");
}

//! ARCHITECTURE.md's tree: crates and folders, each with the first sentence of its own page and the
//! names of its files.

use super::Offence;
use super::files::File;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

pub(super) const PLACE: &str = "ARCHITECTURE.md";
const START: &str = "<!-- From here on written by `cargo xtask tidy --write`. -->\n";
const END: &str = "<!-- Up to here written by `cargo xtask tidy --write`. -->\n";

/// The crates in the order in which a guest's request meets them; then those that face them.
pub(super) const CRATES: [&str; 16] = [
    "transport",
    "queue",
    "device",
    "engine",
    "backend",
    "nbd",
    "wire",
    "memory",
    "config",
    "protocol",
    "serve",
    "supervisor",
    "control",
    "manyring",
    "driver",
    "bench",
];
/// The files of a smaller folder are named with those of the folder around it.
const FILES_MIN: usize = 3;
/// Where the sentences begin, and the columns of a line of names.
const INDENT: usize = 24;
const COLUMNS: usize = 160;

/// The tree in ARCHITECTURE.md is what the pages of crates and folders say.
pub(super) fn tree(files: &[File]) -> Vec<Offence> {
    let Some(page) = files.iter().find(|file| file.path == PLACE) else { return Vec::new() };
    let sentence = match written(&page.text, files) {
        Some(text) if text == page.text => return Vec::new(),
        Some(_) => "the tree is not what the folders say: cargo xtask tidy --write",
        None => "the comments around the tree are gone",
    };
    vec![Offence::new(page, 0, sentence)]
}

/// The page with the tree as it should be; `None`: there is no place for it.
pub(super) fn written(page: &str, files: &[File]) -> Option<String> {
    let (before, rest) = page.split_once(START)?;
    let (_, after) = rest.split_once(END)?;
    let crates: String = CRATES.iter().map(|name| drawn(name, files)).collect();
    Some(format!("{before}{START}```\n{crates}```\n{END}{after}"))
}

/// A crate: a line for itself and for each folder, each followed by the names of its files.
fn drawn(name: &str, files: &[File]) -> String {
    let src = format!("crates/{name}/src/");
    let code = files.iter().filter(|file| !file.code_before_tests().trim().is_empty());
    let paths: Vec<&str> = code
        .filter_map(|file| file.path.strip_prefix(&src)?.strip_suffix(".rs"))
        .filter(|path| !["lib", "main"].contains(path))
        .collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (folder, _) in paths.iter().filter_map(|path| path.rsplit_once('/')) {
        *counts.entry(folder).or_default() += 1;
    }
    let folders: BTreeSet<&str> =
        counts.into_iter().filter(|(_, count)| *count >= FILES_MIN).map(|(f, _)| f).collect();
    let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for path in paths.iter().filter(|path| !folders.contains(*path)) {
        let inside = |folder: &&&str| path.strip_prefix(**folder).is_some_and(is_below);
        let owner = folders.iter().rev().find(inside).copied().unwrap_or_default();
        let own = path[owner.len()..].trim_start_matches('/');
        if own != "mod" {
            names.entry(owner).or_default().push(own);
        }
    }
    let mut tree = String::new();
    for folder in std::iter::once("").chain(folders) {
        let (head, pages) = match folder {
            "" => (format!("crates/{name}/"), ["lib.rs".to_owned(), "main.rs".to_owned()]),
            _ => (format!("  {folder}/"), [format!("{folder}/mod.rs"), format!("{folder}.rs")]),
        };
        let sentence = pages.iter().find_map(|page| first_sentence(files, &format!("{src}{page}")));
        let _ = writeln!(tree, "{head:INDENT$}{}", sentence.unwrap_or_default());
        write_names(&mut tree, names.get(folder).map_or(&[][..], |names| names));
    }
    tree
}

fn is_below(rest: &str) -> bool {
    rest.starts_with('/')
}

/// Writes names, and begins a new line where the next name does not fit.
fn write_names(tree: &mut String, names: &[&str]) {
    let mut line = String::new();
    for name in names {
        if INDENT + line.len() + 1 + name.len() > COLUMNS {
            let _ = writeln!(tree, "{:INDENT$}{}", "", line.trim_start());
            line.clear();
        }
        line.push(' ');
        line.push_str(name);
    }
    if !line.is_empty() {
        let _ = writeln!(tree, "{:INDENT$}{}", "", line.trim_start());
    }
}

/// The first sentence of a file's page.
fn first_sentence(files: &[File], path: &str) -> Option<String> {
    let file = files.iter().find(|file| file.path == path)?;
    let lines = file.text.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim);
    let page: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
    let page = page.join(" ");
    let sentence = page.split_once(". ").map_or(page.as_str(), |(first, _)| first);
    Some(sentence.trim_end_matches('.').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> Vec<File> {
        let file =
            |path: &str, page: &str| File::new(path.into(), format!("{page}\nfn a() {{}}\n"));
        let mut files = vec![
            file("crates/queue/src/lib.rs", "//! Rings. Both halves."),
            file("crates/queue/src/split.rs", "//! The split\n//! ring.\n//!\n//! More"),
            file("crates/queue/src/walk.rs", "//! Along a chain."),
        ];
        files.extend(["a", "b", "c"].map(|n| file(&format!("crates/queue/src/split/{n}.rs"), "")));
        files.extend(["d", "e"].map(|n| file(&format!("crates/queue/src/tiny/{n}.rs"), "")));
        files
    }

    #[test]
    fn the_tree_has_crates_and_folders_in_their_own_words_and_all_files_by_name() {
        let page = format!("a\n{START}old{END}b\n");
        let new = written(&page, &files()).unwrap();
        assert!(new.starts_with("a\n") && new.ends_with("b\n"));
        let lines: Vec<_> = new.lines().map(|line| line.split_whitespace()).collect();
        let words = lines.into_iter().map(|words| words.collect::<Vec<_>>().join(" "));
        let words: Vec<String> = words.collect();
        let at = words.iter().position(|line| line == "crates/queue/ Rings").unwrap();
        assert_eq!(words[at + 1..at + 4], ["walk tiny/d tiny/e", "split/ The split ring", "a b c"]);
    }

    #[test]
    fn a_tree_that_is_not_what_the_folders_say_is_an_offence() {
        let mut files = files();
        let page = format!("{START}old{END}");
        let right = written(&page, &files).unwrap();
        files.push(File::new(PLACE.into(), page));
        assert_eq!(tree(&files).len(), 1);
        files.last_mut().unwrap().text = right;
        assert_eq!(tree(&files), []);
        files.last_mut().unwrap().text = "no tree".to_owned();
        assert_eq!(tree(&files).len(), 1);
    }
}

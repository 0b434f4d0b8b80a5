//! What documents, and the first comments of files, quote of the code is there: its files, by
//! their paths, and its tests, by the beginnings of their names.

use super::Offence;
use super::files::File;
use std::collections::BTreeSet;

/// The documents that a reader goes by from a promise to the code that keeps it.
pub(super) const DOCUMENTS: [&str; 5] =
    ["ARCHITECTURE.md", "CONTRIBUTING.md", "GLOSSARY.md", "SECURITY.md", "docs/hazards.md"];
const DESIGN: &str = "docs/design/";

/// Paths and tests that documents quote are those of a file, and of a function.
pub(super) fn quoted(files: &[File]) -> Vec<Offence> {
    let paths: Vec<Vec<&str>> = files.iter().map(|file| file.path.split('/').collect()).collect();
    let functions: BTreeSet<&str> = files.iter().flat_map(|file| functions(&file.text)).collect();
    let is_page = |file: &&File| {
        let path = file.path.as_str();
        DOCUMENTS.contains(&path) || path.starts_with(DESIGN) || file.is_rust()
    };
    let mut offences = Vec::new();
    for page in files.iter().filter(is_page) {
        let is_rust = page.is_rust();
        let lines = page.text.lines().enumerate();
        for (line, text) in lines.filter(|(_, text)| !is_rust || text.starts_with("//!")) {
            for quote in text.split('`').skip(1).step_by(2) {
                let problem = match test_name(quote) {
                    Some(name) if !starts_one(&functions, name) => "no test has a name like",
                    None if !alternatives(quote).iter().all(|path| is_file(&paths, path)) => {
                        "no file has the path"
                    }
                    _ => continue,
                };
                offences.push(Offence::new(page, line + 1, format!("{problem} `{quote}`")));
            }
        }
    }
    offences
}

/// The names behind `fn` in a file.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    text.split("fn ").skip(1).filter_map(|rest| rest.split(|c: char| !is_of_name(c)).next())
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The beginning of a test's name, of a quote like `a_spin_lasts_..`.
fn test_name(quote: &str) -> Option<&str> {
    let name = quote.strip_suffix("..")?;
    (name.ends_with('_') && name.chars().all(is_of_name)).then_some(name)
}

fn starts_one(functions: &BTreeSet<&str>, beginning: &str) -> bool {
    functions.range(beginning..).next().is_some_and(|name| name.starts_with(beginning))
}

/// The paths of a quote like `config/{raw,plan}.rs`; none if it is not of a file of Rust.
fn alternatives(quote: &str) -> Vec<String> {
    let is_path = |c: char| is_of_name(c) || "/.-{},".contains(c);
    if !quote.ends_with(".rs") || !quote.chars().all(is_path) {
        return Vec::new();
    }
    let braces = quote.split_once('{').and_then(|(before, rest)| {
        rest.split_once('}').map(|(names, after)| (before, names, after))
    });
    match braces {
        Some((before, names, after)) => {
            let of = |name: &str| alternatives(&format!("{before}{name}{after}"));
            names.split(',').flat_map(of).collect()
        }
        None => vec![quote.to_owned()],
    }
}

/// Whether a file lies at this path. Documents leave out folders that say nothing, as `src`: the
/// names are those of the file and of some of its folders, in their order.
fn is_file(paths: &[Vec<&str>], quoted: &str) -> bool {
    let (folders, name) = quoted.rsplit_once('/').unwrap_or(("", quoted));
    paths.iter().any(|path| {
        let Some((last, above)) = path.split_last() else { return false };
        let mut above = above.iter();
        let mut folders = folders.split('/').filter(|folder| !folder.is_empty());
        *last == name && folders.all(|folder| above.any(|other| *other == folder))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quote_of_a_file_or_a_test_that_is_gone_is_an_offence() {
        let code = "/// A test.\nfn a_spin_lasts_ten_wakes_or_longer() {}\n";
        let files = |page: &str| {
            vec![
                File::new("SECURITY.md".to_owned(), page.to_owned()),
                File::new("crates/engine/src/policy/polling.rs".to_owned(), code.to_owned()),
                File::new("crates/config/src/raw.rs".to_owned(), String::new()),
            ]
        };
        for good in [
            "`a_spin_lasts_ten_..` and `polling.rs`",
            "`engine/policy/polling.rs`, `config/src/raw.rs`",
            "`{config/raw,policy/polling}.rs`",
            "`manyring stats`, `a_b`, `x.toml`, `/proc/self/..`",
        ] {
            assert_eq!(quoted(&files(good)), [], "{good}");
        }
        for bad in [
            "`a_spin_lasts_four_..`",
            "`daemon/raw.rs`",
            "`policy/engine/polling.rs`",
            "`{raw,b}.rs`",
        ] {
            let found = quoted(&files(&format!("\n{bad}")));
            assert_eq!(found.iter().map(|offence| offence.line).collect::<Vec<_>>(), [2], "{bad}");
        }
        let code = |text: &str| quoted(&[File::new("a/b.rs".to_owned(), text.to_owned())]).len();
        assert_eq!(code("//! As `b.rs` has it.\n//! So does `a/c.rs`.\nlet d = \"`e.rs`\";\n"), 1);
    }
}

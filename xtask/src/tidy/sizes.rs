//! A crate fits a sitting, a file a screen's patience, a function a screen, a line its width.

use super::files::File;
use super::{Offence, source};
use std::collections::BTreeMap;

const CRATE_LINES_MAX: usize = 4000;
const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;
const LINE_COLUMNS_MAX: usize = 100;

/// The page that names the crates which are larger, with a bound for each and the reason.
pub(super) const NOTE: &str = "docs/design/0027-sizes.md";
/// Every bound in [`NOTE`] is a multiple of this number.
const STEP: usize = 500;

/// A crate has at most 4,000 lines in its `src`, tests left out, or the bound that [`NOTE`] has for
/// it. Files outside of `crates` are tests and tools.
pub(super) fn src_folder(files: &[File]) -> Vec<Offence> {
    let note = files.iter().find(|file| file.path == NOTE).map_or("", |note| &note.text);
    let bounds: BTreeMap<&str, usize> = note.lines().filter_map(row).collect();
    let sizes = sizes(files);
    let of_crates = sizes.iter().filter_map(|(folder, lines)| {
        let (bound, right) = (bounds.get(folder.as_str()).copied(), bound_of(*lines));
        let sentence = match bound {
            None if *lines <= CRATE_LINES_MAX => return None,
            None => format!("{CRATE_LINES_MAX} at most, or a row in {NOTE} that says why"),
            Some(_) if *lines <= CRATE_LINES_MAX => format!("no row in {NOTE} is needed"),
            Some(bound) if bound == right || bound == right + STEP => return None,
            Some(bound) => format!("the bound in {NOTE} is {bound}: cargo xtask tidy --write"),
        };
        let sentence = format!("{lines} lines before the tests; {sentence}");
        Some(Offence { path: folder.clone(), line: 0, sentence })
    });
    let gone = bounds.keys().filter(|folder| !sizes.contains_key(**folder));
    let gone = gone.map(|folder| Offence {
        path: NOTE.to_owned(),
        line: 0,
        sentence: format!("there is no {folder}"),
    });
    of_crates.chain(gone).collect()
}

/// The page with the bounds as they should be.
pub(super) fn written(page: &str, files: &[File]) -> Option<String> {
    let sizes = sizes(files);
    let lines =
        page.lines().map(|line| match row(line).and_then(|(f, _)| Some((f, sizes.get(f)?))) {
            Some((folder, lines)) => {
                let why = line.splitn(4, '|').last().unwrap_or_default();
                format!("| `{folder}` | {} |{why}", bound_of(*lines))
            }
            None => line.to_owned(),
        });
    Some(lines.collect::<Vec<_>>().join("\n") + "\n")
}

/// The folder and the bound of a row of the page's table.
fn row(line: &str) -> Option<(&str, usize)> {
    let (folder, rest) = line.strip_prefix("| `")?.split_once("` | ")?;
    Some((folder, rest.split_once(" |")?.0.parse().ok()?))
}

fn bound_of(lines: usize) -> usize {
    lines.next_multiple_of(STEP)
}

/// Lines before the tests of each crate's `src`.
fn sizes(files: &[File]) -> BTreeMap<String, usize> {
    let mut sizes = BTreeMap::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        if let Some(at) = file.path.find("/src/").filter(|_| file.path.starts_with("crates/")) {
            let folder = file.path[..at + "/src".len()].to_owned();
            *sizes.entry(folder).or_default() += file.code_before_tests().lines().count();
        }
    }
    sizes
}

/// At most 500 lines before the tests.
pub(super) fn file(file: &File) -> Vec<Offence> {
    let lines = file.code_before_tests().lines().count();
    let sentence = format!("{lines} lines before the tests, {FILE_LINES_MAX} at most");
    (lines > FILE_LINES_MAX).then(|| Offence::new(file, 0, sentence)).into_iter().collect()
}

/// At most 70 lines from `fn` to its closing brace.
pub(super) fn function(file: &File) -> Vec<Offence> {
    let functions = source::functions(&file.code).into_iter();
    let too_long = functions.filter(|(_, lines)| lines.len() > FUNCTION_LINES_MAX);
    too_long
        .map(|(name, lines)| {
            let count = lines.len();
            let sentence = format!("fn {name} has {count} lines, {FUNCTION_LINES_MAX} at most");
            Offence::new(file, lines.start, sentence)
        })
        .collect()
}

/// At most 100 columns.
pub(super) fn line(file: &File) -> Vec<Offence> {
    let lines = file.text.lines().enumerate().filter(|_| file.is_rust());
    lines
        .map(|(index, line)| (index, line.chars().count()))
        .filter(|(_, columns)| *columns > LINE_COLUMNS_MAX)
        .map(|(index, columns)| {
            let sentence = format!("{columns} columns, {LINE_COLUMNS_MAX} at most");
            Offence::new(file, index + 1, sentence)
        })
        .collect()
}

/// Line one says what lives there.
pub(super) fn first_line(file: &File) -> Vec<Offence> {
    let says = file.text.strip_prefix("//! ").is_some_and(|rest| !rest.starts_with('\n'));
    let sentence = "the first line must say what lives here: `//! ..`";
    (file.is_rust() && !says).then(|| Offence::new(file, 1, sentence)).into_iter().collect()
}

/// Test programs of the daemon, each of which is linked with all of it after every change.
const TEST_PROGRAMS_MAX: usize = 10;
const DAEMON_TESTS: &str = "crates/manyring/tests/";

/// At most ten test programs run against the daemon: a new test is a module of one of them.
pub(super) fn test_programs(files: &[File]) -> Vec<Offence> {
    let is_program = |path: &str| path.ends_with("/main.rs") || !path.contains('/');
    let below = |file: &&File| file.path.strip_prefix(DAEMON_TESTS).is_some_and(is_program);
    let count = files.iter().filter(below).count();
    let sentence = format!("{count} test programs, {TEST_PROGRAMS_MAX} at most");
    let offence = Offence { path: DAEMON_TESTS.to_owned(), line: 0, sentence };
    (count > TEST_PROGRAMS_MAX).then_some(offence).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::offences;

    #[test]
    fn a_crate_has_4000_lines_or_a_bound_that_the_page_of_sizes_has_for_it() {
        let lines = |count| "a\n".repeat(count);
        let file = |path: &str, text: String| File::new(path.into(), text);
        let mut files = vec![
            file("crates/queue/src/lib.rs", lines(4000)),
            file("crates/queue/src/tests.rs", lines(900)),
            file("crates/queue/tests/pair.rs", lines(900)),
            file("crates/wire/src/lib.rs", lines(3000)),
            file("system/src/lib.rs", lines(4001)),
        ];
        assert_eq!(src_folder(&files), []);
        files.push(file("crates/queue/src/ring.rs", lines(1)));
        let found = src_folder(&files);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].path, "crates/queue/src");
        assert!(found[0].sentence.contains("4001 lines"), "{found:?}");
        let page = |bound| format!("# x\n| `crates/queue/src` | {bound} | it is | large |\n");
        files.push(file(NOTE, page(4000)));
        assert_eq!(src_folder(&files).len(), 1, "it has grown");
        let right = written(&page(4000), &files).unwrap();
        assert_eq!(right, page(4500));
        for (bound, offences) in [(4500, 0), (5000, 0), (5500, 1)] {
            files.last_mut().unwrap().text = page(bound);
            assert_eq!(src_folder(&files).len(), offences, "{bound}");
        }
        files.retain(|file| !file.path.ends_with("ring.rs"));
        assert_eq!(src_folder(&files).len(), 1, "no row is needed");
        files.retain(|file| !file.path.starts_with("crates/queue"));
        assert_eq!(src_folder(&files).len(), 1, "the crate is gone");
    }

    #[test]
    fn the_daemon_has_ten_test_programs_of_any_number_of_modules() {
        let file = |path: String| File::new(format!("crates/manyring/tests/{path}"), String::new());
        let mut files: Vec<_> = (0..10).map(|n| file(format!("p{n}/main.rs"))).collect();
        files.extend((0..20).map(|n| file(format!("p1/m{n}.rs"))));
        assert_eq!(test_programs(&files), []);
        files.push(file("eleventh.rs".to_owned()));
        assert!(test_programs(&files)[0].sentence.starts_with("11 test programs"));
    }

    #[test]
    fn a_file_has_500_lines_and_any_number_of_tests() {
        let fits =
            format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", "a\n".repeat(500), "b\n".repeat(9));
        assert!(offences(file, "crates/queue/src/a.rs", &fits).is_empty());
        let too_long = "a\n".repeat(501);
        assert_eq!(offences(file, "crates/queue/src/a.rs", &too_long)[0].0, 0);
        assert!(offences(file, "crates/queue/tests/a.rs", &too_long).is_empty());
    }

    #[test]
    fn a_function_has_70_lines() {
        let of =
            |lines: usize| format!("//! x\nfn long() {{\n{}}}\n", "    a();\n".repeat(lines - 2));
        assert!(offences(function, "a.rs", &of(70)).is_empty());
        let found = offences(function, "a.rs", &of(71));
        assert!(found[0].0 == 2 && found[0].1.contains("fn long has 71"), "{found:?}");
    }

    #[test]
    fn a_line_has_100_columns_not_bytes() {
        assert!(offences(line, "a.rs", &"ä".repeat(100)).is_empty());
        assert_eq!(offences(line, "a.rs", &format!("\n{}", "a".repeat(101)))[0].0, 2);
        assert!(offences(line, "README.md", &"a".repeat(101)).is_empty());
    }

    #[test]
    fn the_first_line_says_what_lives_there() {
        assert!(offences(first_line, "a.rs", "//! Rings.\n").is_empty());
        for text in ["use a;\n", "", "//! \nfn", "\n//! Rings.\n", "// Rings.\n"] {
            assert_eq!(offences(first_line, "a.rs", text).len(), 1, "{text:?}");
        }
        assert!(offences(first_line, "a.toml", "x = 1\n").is_empty());
    }
}

//! A crate fits a sitting, a file a screen's patience, a function a screen, a line its width.

use super::files::File;
use super::{Offence, source};
use std::collections::BTreeMap;

const CRATE_LINES_MAX: usize = 4000;
const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;
const LINE_COLUMNS_MAX: usize = 100;

/// A crate has at most 4,000 lines in its `src`, tests left out, unless a design note names that
/// folder, like `` `crates/engine/src` ``, and says why it is larger. What lies outside `crates` is
/// tests and tools.
pub(super) fn src_folder(files: &[File]) -> Vec<Offence> {
    let mut sizes: BTreeMap<&str, usize> = BTreeMap::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        if let Some(at) = file.path.find("/src/").filter(|_| file.path.starts_with("crates/")) {
            let folder = &file.path[..at + "/src".len()];
            *sizes.entry(folder).or_default() += file.code_before_tests().lines().count();
        }
    }
    let notes: Vec<_> = files.iter().filter(|f| f.path.starts_with("docs/design/")).collect();
    let has_note = |folder: &str| notes.iter().any(|f| f.text.contains(&format!("`{folder}`")));
    let too_large = sizes.into_iter().filter(|(_, lines)| *lines > CRATE_LINES_MAX);
    too_large
        .filter(|(folder, _)| !has_note(folder))
        .map(|(folder, lines)| {
            let bound = format!("{lines} lines before the tests, {CRATE_LINES_MAX} at most");
            let sentence = format!("{bound}, or a note in docs/design that names `{folder}`");
            Offence { path: folder.to_owned(), line: 0, sentence }
        })
        .collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::offences;

    #[test]
    fn a_crate_has_4000_lines_unless_a_design_note_names_it() {
        let lines = |count| "a\n".repeat(count);
        let file = |path: &str, text: String| File::new(path.into(), text);
        let mut files = vec![
            file("crates/queue/src/lib.rs", lines(2000)),
            file("crates/queue/src/split/device.rs", lines(2000)),
            file("crates/queue/src/split/tests.rs", lines(900)),
            file("crates/queue/tests/pair.rs", lines(900)),
            file("crates/wire/src/lib.rs", lines(3000)),
            file("system/src/lib.rs", lines(4001)),
            file("docs/design/0001-names.md", "see `crates/queue/src/lib.rs`\n".into()),
        ];
        assert_eq!(src_folder(&files), []);
        files.push(file("crates/queue/src/ring.rs", lines(1)));
        let found = src_folder(&files);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].path, "crates/queue/src");
        assert!(found[0].sentence.contains("4001 lines"), "{found:?}");
        files.push(file("docs/design/0009-large.md", "`crates/queue/src` is large\n".into()));
        assert_eq!(src_folder(&files), []);
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

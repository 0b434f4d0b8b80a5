//! The lists of these rules name what is there: an entry whose files went is taken out.

use super::files::File;
use super::{Offence, imports, parameters, quoted, source, tree, words};

/// Each entry of a list has a file that needs it.
pub(super) fn entries(files: &[File]) -> Vec<Offence> {
    let has_unsafe = |file: &File| source::words(&file.code, "unsafe").next().is_some();
    let reads_proc = |file: &File| words::reads_of_proc(file).next().is_some();
    let has_times = |file: &File| words::times(file).next().is_some();
    let mut offences = unneeded(files, "unsafe_code", words::UNSAFE, has_unsafe);
    offences.extend(unneeded(files, "proc", words::PROC, reads_proc));
    offences.extend(unneeded(files, "time", &[words::TIMES], has_times));
    offences.extend(unneeded(files, "quoted", &quoted::DOCUMENTS, |_| true));
    let of_crates: [(&str, &[&str]); 3] =
        [("tree", &tree::CRATES), ("time", &words::OF_DAEMON), ("parameters", &parameters::CRATES)];
    let of_crates =
        of_crates.iter().flat_map(|(rule, names)| names.iter().map(move |n| (*rule, *n)));
    let of_imports = imports::TABLE.iter().flat_map(|(name, edges, in_tests)| {
        let names =
            [*name].into_iter().chain(edges.iter().copied()).chain(in_tests.iter().copied());
        names.filter(|name| *name != "system").map(|name| ("imports", name))
    });
    for (rule, name) in of_crates.chain(of_imports) {
        offences.extend(unneeded(files, rule, &[&format!("crates/{name}/src/")], |_| true));
    }
    offences
}

/// The entries of a list without a file that `needs` them.
fn unneeded(
    files: &[File],
    rule: &str,
    list: &[&str],
    needs: impl Fn(&File) -> bool,
) -> Vec<Offence> {
    let is_needed =
        |entry: &str| files.iter().any(|file| words::is_listed(&[entry], file) && needs(file));
    let sentence = format!("no file here needs its place in a list of the rule `{rule}`");
    let offence =
        |entry: &&str| Offence { path: (*entry).to_owned(), line: 0, sentence: sentence.clone() };
    list.iter().filter(|entry| !is_needed(entry)).map(offence).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_without_a_file_that_needs_them_are_offences() {
        let file = |path: &str, text: &str| File::new(path.into(), text.into());
        let files = [file("a/b.rs", "unsafe {}\n"), file("c.rs", "// unsafe\n")];
        let needs = |file: &File| source::words(&file.code, "unsafe").next().is_some();
        assert_eq!(unneeded(&files, "x", &["a/b.rs", "a/"], needs), []);
        for entry in ["c.rs", "d.rs", "d/", "a"] {
            let found = unneeded(&files, "x", &["a/b.rs", entry], needs);
            assert_eq!(found.iter().map(|at| at.path.as_str()).collect::<Vec<_>>(), [entry]);
        }
    }

    #[test]
    fn every_list_is_looked_at() {
        let found = entries(&[]);
        for entry in [
            words::UNSAFE[0],
            words::PROC[0],
            words::TIMES,
            quoted::DOCUMENTS[0],
            "crates/wire/src/",
            "crates/control/src/",
        ] {
            assert!(found.iter().any(|offence| offence.path == entry), "{entry}");
        }
    }
}

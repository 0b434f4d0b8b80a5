//! `cargo xtask tidy`: the house rules that can be checked, as code. One file per family.

mod circles;
mod files;
mod imports;
mod lists;
mod parameters;
mod quoted;
mod sizes;
mod source;
mod tree;
mod words;

use crate::cargo::ROOT;
use crate::readme::{FIGURES, difference};
use files::File;
use manyring_system::{Context, Outcome, check};
use std::path::Path;

/// A place where a rule is broken.
#[derive(Debug, PartialEq, Eq)]
struct Offence {
    path: String,
    /// From 1; 0 is the whole file.
    line: usize,
    sentence: String,
}

impl Offence {
    fn new(file: &File, line: usize, sentence: impl Into<String>) -> Self {
        Self { path: file.path.clone(), line, sentence: sentence.into() }
    }
}

impl std::fmt::Display for Offence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.sentence)
    }
}

type Rule = fn(&File) -> Vec<Offence>;

/// All rules; each looks at one file and knows which files it is about.
const RULES: &[Rule] = &[
    imports::crates,
    imports::policy,
    parameters::tuples,
    sizes::file,
    sizes::function,
    sizes::line,
    sizes::first_line,
    words::unsafe_code,
    words::proc,
    words::left_over,
    words::former_name,
    words::time,
    words::getter,
    words::file_name,
    words::home_path,
    words::mirror,
];

type RuleOfAll = fn(&[File]) -> Vec<Offence>;

/// Rules that need to see all files.
const RULES_OF_ALL: &[RuleOfAll] = &[
    circles::modules,
    lists::entries,
    quoted::quoted,
    sizes::src_folder,
    sizes::test_programs,
    tree::tree,
    readme,
];

/// README shows the figures that are kept beside it.
fn readme(files: &[File]) -> Vec<Offence> {
    let of = |path: &str| files.iter().find(|file| file.path == path);
    let Some(readme) = of("README.md") else { return Vec::new() };
    let figures = of(FIGURES).map_or("", |file| &file.text);
    difference(&readme.text, figures).map(|s| Offence::new(readme, 0, s)).into_iter().collect()
}

/// Checks all rules. With `write`, what documents say of the code is written first.
pub(crate) fn run(write: bool) -> Outcome {
    if write {
        renew(&files::all(Path::new(ROOT))?)?;
    }
    let files = files::all(Path::new(ROOT))?;
    let of_each = files.iter().flat_map(|file| RULES.iter().flat_map(move |rule| rule(file)));
    let of_all = RULES_OF_ALL.iter().flat_map(|rule| rule(&files));
    let offences: Vec<_> = of_each.chain(of_all).collect();
    for offence in &offences {
        println!("{offence}");
    }
    let rules = RULES.len() + RULES_OF_ALL.len();
    println!("tidy: {} files, {rules} rules, {} offences", files.len(), offences.len());
    check(offences.is_empty(), || "the tree is not tidy".into())
}

/// Writes the tree of ARCHITECTURE.md and the sizes of crates.
fn renew(files: &[File]) -> Outcome {
    type Written = fn(&str, &[File]) -> Option<String>;
    let writers: [(&str, Written); 2] =
        [(tree::PLACE, tree::written), (sizes::NOTE, sizes::written)];
    for (place, written) in writers {
        let page = files.iter().find(|file| file.path == place).ok_or(place)?;
        let text = written(&page.text, files).ok_or_else(|| format!("{place}: no place for it"))?;
        std::fs::write(Path::new(ROOT).join(place), text).context(place)?;
    }
    Ok(())
}

/// A file for the rules' own tests, and what `rule` says of it.
#[cfg(test)]
fn offences(rule: Rule, path: &str, text: &str) -> Vec<(usize, String)> {
    let file = File::new(path.into(), text.into());
    rule(&file).into_iter().map(|offence| (offence.line, offence.sentence)).collect()
}

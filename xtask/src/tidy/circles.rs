//! No circle of modules: of the modules directly below a crate's root, none needs itself by way of
//! others. A folder is one module.

use super::files::File;
use super::{Offence, source};
use std::collections::{BTreeMap, BTreeSet};

/// The crates for which that holds.
const CRATES: [&str; 6] = ["backend", "device", "driver", "engine", "transport", "wire"];

/// Who names whom, by module.
type Edges<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

/// The modules of these crates form no circle.
pub(super) fn modules(files: &[File]) -> Vec<Offence> {
    CRATES.into_iter().filter_map(|name| circle_in(files, name)).collect()
}

fn circle_in(files: &[File], name: &str) -> Option<Offence> {
    let src = format!("crates/{name}/src/");
    let of_crate: Vec<_> =
        files.iter().filter_map(|file| Some((module_of(file, &src)?, file))).collect();
    let modules: BTreeSet<&str> = of_crate.iter().map(|(module, _)| *module).collect();
    let root = files.iter().find(|file| file.path == format!("{src}lib.rs"));
    let shown = root.map(|root| shown_by(root.code_before_tests())).unwrap_or_default();
    let mut edges = Edges::new();
    for (module, file) in &of_crate {
        for named in named_in(file, &src) {
            let named = shown.get(named).copied().unwrap_or(named);
            if let Some(other) = modules.get(named).filter(|other| *other != module) {
                edges.entry(module).or_default().insert(other);
            }
        }
    }
    let circle = modules.iter().find_map(|module| way_back(&edges, module))?;
    let sentence = format!("a circle of modules: {}", circle.join(" -> "));
    Some(Offence { path: src, line: 0, sentence })
}

/// The module directly below the root in which a file lies; none for the root and for tests.
fn module_of<'a>(file: &'a File, src: &str) -> Option<&'a str> {
    let path = file.path.strip_prefix(src)?.strip_suffix(".rs")?;
    let module = path.split('/').next()?;
    let is_code = !["lib", "main"].contains(&path) && !file.code_before_tests().is_empty();
    is_code.then_some(module)
}

/// The names that the root's `use` lines bring into it, each with the module that it comes from.
fn shown_by(root: &str) -> BTreeMap<&str, &str> {
    let mut shown = BTreeMap::new();
    for at in source::words(root, "use") {
        let Some((path, _)) = root[at + "use".len()..].split_once(';') else { continue };
        let mut words = path.split(|c: char| !is_name(c)).filter(|word| !word.is_empty());
        if let Some(module) = words.next() {
            shown.extend(words.map(|word| (word, module)));
        }
    }
    shown
}

/// The names that a file takes from the root: those behind `crate::`, and those behind `super::` in
/// a file that lies directly below the root.
fn named_in<'a>(file: &'a File, src: &str) -> Vec<&'a str> {
    let code = file.code_before_tests();
    let is_below_root = !file.path[src.len()..].contains('/');
    let heads = if is_below_root { &["crate", "super"][..] } else { &["crate"][..] };
    let mut names = Vec::new();
    for head in heads {
        for at in source::words(code, head) {
            let Some(rest) = code[at + head.len()..].strip_prefix("::") else { continue };
            names.extend(first_names(rest));
        }
    }
    names
}

/// The first names of a path, or of each path of a group in braces.
fn first_names(path: &str) -> Vec<&str> {
    let first = |path: &'_ str| path.trim_start().split(|c: char| !is_name(c)).next().map(str::len);
    let Some(group) = path.strip_prefix('{') else {
        return first(path).map(|len| &path[..len]).into_iter().collect();
    };
    let (mut depth, mut start, mut names) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(group[start..at].trim_start());
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(group[start..at].trim_start());
                start = at + 1;
            }
            _ => {}
        }
    }
    names.into_iter().filter_map(|path| first(path).map(|len| &path[..len])).collect()
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The shortest way from a module back to itself.
fn way_back<'a>(edges: &Edges<'a>, module: &&'a str) -> Option<Vec<&'a str>> {
    let mut ways: Vec<Vec<&str>> = vec![vec![module]];
    let mut seen = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let last = way.last().copied().unwrap_or(module);
            for next in edges.get(last).into_iter().flatten() {
                let further = || [&way[..], &[*next]].concat();
                if next == module {
                    return Some(further());
                }
                if seen.insert(*next) {
                    longer.push(further());
                }
            }
        }
        ways = longer;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(parts: &[(&str, &str)]) -> Vec<String> {
        let file = |(path, text): &(&str, &str)| {
            File::new(format!("crates/engine/src/{path}.rs"), (*text).to_owned())
        };
        let files: Vec<_> = parts.iter().map(file).collect();
        modules(&files).into_iter().map(|offence| offence.sentence).collect()
    }

    #[test]
    fn modules_that_need_each_other_are_a_circle_however_they_say_so() {
        let pool = ("pool", "use crate::{worker::Worker, stats::{A, B}};\n");
        assert!(
            circles(&[pool, ("worker/round", "use crate::stats::A;\n"), ("stats", "a")]).is_empty()
        );
        for back in ["use crate::pool::Pool;", "fn a(p: &crate::Pool) {}"] {
            let root = ("lib", "mod pool;\npub use pool::{Home, Pool};\n");
            let found = circles(&[root, pool, ("worker/round", back), ("stats", "a")]);
            assert_eq!(found, ["a circle of modules: pool -> worker -> pool"], "{back}");
        }
        let found = circles(&[("a", "use super::b::B;\n"), ("b", "use crate::a::A;\n")]);
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn a_folder_is_one_module_and_tests_are_none() {
        let inside =
            [("worker", "use self::round::a;\n"), ("worker/round", "use super::Worker;\n")];
        assert!(circles(&inside).is_empty());
        let tests = "fn a() {}\n#[cfg(test)]\nmod tests { use crate::b::B; }\n";
        assert!(circles(&[("a", tests), ("b", "use crate::a::A;\n")]).is_empty());
        assert!(
            circles(&[("a", "use crate::b::B;\n"), ("b/tests", "use crate::a::A;\n")]).is_empty()
        );
    }
}

//! No circle of modules: of the modules directly below a crate's root, none needs itself by way of
//! others. A folder is one module. That holds inside of each folder too, of the modules directly
//! below it.

use super::files::File;
use super::{Offence, source, tree};
use std::collections::{BTreeMap, BTreeSet};

/// Who names whom, by module.
type Edges<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

/// The modules of these crates form no circle.
pub(super) fn modules(files: &[File]) -> Vec<Offence> {
    let mut offences = Vec::new();
    for name in tree::CRATES {
        let src = format!("crates/{name}/src/");
        let mut folders = BTreeSet::from([src.clone()]);
        folders.extend(files.iter().flat_map(|file| folders_of(&file.path, &src)));
        offences.extend(folders.iter().filter_map(|folder| circle_in(files, &src, folder)));
    }
    offences
}

/// The folders below `src` in which a file lies.
fn folders_of(path: &str, src: &str) -> Vec<String> {
    let below = path.strip_prefix(src).unwrap_or_default();
    below.match_indices('/').map(|(at, _)| path[..=src.len() + at].to_owned()).collect()
}

/// A circle of the modules directly below `folder` of the crate at `src`.
fn circle_in(files: &[File], src: &str, folder: &str) -> Option<Offence> {
    let of_folder: Vec<_> =
        files.iter().filter_map(|file| Some((module_of(file, folder)?, file))).collect();
    let modules: BTreeSet<&str> = of_folder.iter().map(|(module, _)| *module).collect();
    let heads = format!("crate::{}", folder[src.len()..].replace('/', "::"));
    let page = folder.trim_end_matches('/');
    let pages = [format!("{folder}lib.rs"), format!("{folder}mod.rs"), format!("{page}.rs")];
    let root = files.iter().find(|file| pages.contains(&file.path));
    let shown = root.map(|root| shown_by(root.code_before_tests(), &heads)).unwrap_or_default();
    let mut edges = Edges::new();
    for (module, file) in &of_folder {
        for named in named_in(file, folder, &heads) {
            let named = shown.get(named).copied().unwrap_or(named);
            if let Some(other) = modules.get(named).filter(|other| *other != module) {
                edges.entry(module).or_default().insert(other);
            }
        }
    }
    let circle = modules.iter().find_map(|module| way_back(&edges, module))?;
    let sentence = format!("a circle of modules: {}", circle.join(" -> "));
    Some(Offence { path: folder.to_owned(), line: 0, sentence })
}

/// The module directly below a folder in which a file lies; none for the folder's page and for
/// tests.
fn module_of<'a>(file: &'a File, folder: &str) -> Option<&'a str> {
    let path = file.path.strip_prefix(folder)?.strip_suffix(".rs")?;
    let module = path.split('/').next()?;
    let is_code = !["lib", "main", "mod"].contains(&path) && !file.code_before_tests().is_empty();
    is_code.then_some(module)
}

/// The names that the `use` lines of a folder's page bring into it, each with the module of the
/// folder that it comes from. `head` is the folder's path, as `crate::` or `crate::fds::`.
fn shown_by<'a>(page: &'a str, head: &str) -> BTreeMap<&'a str, &'a str> {
    let mut shown = BTreeMap::new();
    for at in source::words(page, "use") {
        let Some((path, _)) = page[at + "use".len()..].split_once(';') else { continue };
        let path = path.trim_start();
        let path = [head, "self::"].iter().find_map(|head| path.strip_prefix(head)).unwrap_or(path);
        let module = path.split(|c: char| !is_name(c)).next().unwrap_or_default();
        for part in path.split([',', '{', '}']) {
            let name = part.rsplit("::").next().unwrap_or_default().trim();
            let is_whole = !name.is_empty() && name.chars().all(is_name);
            if is_whole && name != module {
                shown.insert(name, module);
            }
        }
    }
    shown
}

/// The names that a file takes from a folder: those behind the folder's path, and those behind as
/// many `super::` as lead from the file to the folder.
fn named_in<'a>(file: &'a File, folder: &str, head: &str) -> Vec<&'a str> {
    let code = file.code_before_tests();
    let below = file.path[folder.len()..].trim_end_matches("/mod.rs");
    let up = "super::".repeat(below.matches('/').count() + 1);
    let mut names = Vec::new();
    for path in [head, &up] {
        let word = path.split("::").next().unwrap_or_default();
        for at in source::words(code, word) {
            // The last of several `super::` is not the first.
            let is_begin = !code[..at].ends_with("::");
            if let Some(rest) = code[at..].strip_prefix(path).filter(|_| is_begin) {
                names.extend(first_names(rest));
            }
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
    fn modules_inside_of_a_folder_are_no_circle_either_however_deep_they_say_so() {
        let bridge = ("fds/bridge", "use crate::fds::foreign::Janitor;\n");
        for back in ["use crate::fds::bridge::Bridge;\n", "use super::bridge::Bridge;\n"] {
            let found = circles(&[bridge, ("fds/foreign", back), ("fds/mod", "mod bridge;\n")]);
            assert_eq!(found, ["a circle of modules: bridge -> foreign -> bridge"], "{back}");
        }
        let deep = ("fds/foreign/budget", "use super::super::bridge::Bridge;\n");
        assert_eq!(circles(&[bridge, deep]).len(), 1);
        let page = ("fds", "mod foreign;\npub use foreign::{Janitor, Device process as Seat};\n");
        let shown = ("fds/bridge", "use super::Janitor;\n");
        let back = ("fds/foreign", "use super::bridge::Bridge;\n");
        assert_eq!(circles(&[page, shown, back]).len(), 1);
        assert!(circles(&[page, ("fds/bridge", "use super::Other;\n"), back]).is_empty());
    }

    #[test]
    fn a_name_that_the_root_shows_hides_no_module_on_its_way() {
        let root = ("lib", "mod record;\npub use record::packed::Size;\n");
        let (base, packed) = (("base", "use crate::packed::Place;\n"), "use crate::base::Base;\n");
        let found = circles(&[root, base, ("packed", packed), ("record", "a")]);
        assert_eq!(found, ["a circle of modules: base -> packed -> base"]);
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

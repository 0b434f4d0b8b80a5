//! No tuples as parameters of functions: each value has a name where the function is called, or a
//! type that says what belongs together.

use super::files::File;
use super::{Offence, source};

/// The crates for which that holds.
pub(super) const CRATES: [&str; 3] = ["engine", "queue", "transport"];

/// A function takes no tuple.
pub(super) fn tuples(file: &File) -> Vec<Offence> {
    let is_meant = CRATES.iter().any(|name| file.path.starts_with(&format!("crates/{name}/src/")));
    if !is_meant {
        return Vec::new();
    }
    let code = file.code_before_tests();
    let offence = |(at, name): (usize, String)| {
        let sentence = format!("fn {name} takes a tuple: give each value a name, or a type");
        Offence::new(file, source::line_of(code, at), sentence)
    };
    functions_with_tuples(code).into_iter().map(offence).collect()
}

/// Where such functions begin, and their names.
fn functions_with_tuples(code: &str) -> Vec<(usize, String)> {
    source::words(code, "fn")
        .filter_map(|at| {
            let rest = code[at + 2..].trim_start();
            let len = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
            let (name, rest) = rest.split_at(len);
            let rest = &rest[rest.find('(')?..];
            let is_tuple = |parameter: &str| {
                let parameter = parameter.trim();
                let of_type = parameter.split_once(':').map_or("", |(_, kind)| kind.trim_start());
                parameter.starts_with('(') || (of_type.starts_with('(') && of_type != "()")
            };
            let has_tuple = !name.is_empty() && parameters(rest).iter().any(|p| is_tuple(p));
            has_tuple.then(|| (at, name.to_owned()))
        })
        .collect()
}

/// The parameters of the list in round brackets that begins here. The brackets of the generics
/// before it hold no `(`, but those of a bound like `Fn(u8)`: then these are taken, and are none.
fn parameters(list: &str) -> Vec<&str> {
    let (mut depth, mut angles, mut start, mut found) = (0_i32, 0_i32, 1, Vec::new());
    let mut before = ' ';
    for (at, c) in list.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => {
                depth -= 1;
                if depth == 0 {
                    found.push(&list[start..at]);
                    break;
                }
            }
            '<' => angles += 1,
            '>' if before != '-' && before != '=' => angles -= 1,
            ',' if depth == 1 && angles == 0 => {
                found.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        before = c;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::offences;

    #[test]
    fn a_tuple_is_no_parameter_by_pattern_or_by_type() {
        let found = |text: &str| offences(tuples, "crates/engine/src/io.rs", text);
        for bad in [
            "fn keep(&mut self, (a, b): (u16, u32)) {}",
            "fn keep(&mut self, used: (u16, u32)) {}",
            "fn keep<T: Into<u8>>(t: T, (mut a, b): (u16, u32)) {}",
        ] {
            assert_eq!(found(&format!("//! x\n{bad}\n")), [(2, MESSAGE.to_owned())], "{bad}");
        }
        for good in [
            "fn keep(a: Option<(u16, u32)>, b: &[(u8, u8)], c: impl Fn((u8, u8)) -> u8) {}",
            "fn keep(reply: ()) -> (u16, u32) { let (a, b) = reply; }",
            "fn keep(a: u8) { let take = |(a, b): (u8, u8)| a; }",
            "fn keep<F: Fn(u8, u8)>(f: F) {}",
        ] {
            assert!(found(good).is_empty(), "{good}");
        }
        let elsewhere = offences(tuples, "crates/bench/src/run.rs", "fn keep(a: (u8, u8)) {}\n");
        assert!(elsewhere.is_empty());
    }

    const MESSAGE: &str = "fn keep takes a tuple: give each value a name, or a type";
}

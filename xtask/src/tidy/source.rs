//! Rust text as far as the rules need it: what is code, and where functions begin and end.

use std::ops::Range;

/// The text with comments, strings and characters blanked; every line keeps its place and length.
pub(super) fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = at + literal_len(bytes, at).max(1);
        if end > at + 1 {
            for byte in code[at..end].iter_mut().filter(|byte| **byte != b'\n') {
                *byte = b' ';
            }
        }
        at = end;
    }
    String::from_utf8_lossy(&code).into_owned()
}

/// Bytes of the comment or literal that begins at `at`; 0 if none does.
fn literal_len(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let follows_word = at > 0 && is_word(bytes[at - 1]);
    match rest {
        [b'/', b'/', ..] => rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len()),
        [b'/', b'*', ..] => block_comment_len(rest),
        [b'"', ..] => string_len(rest),
        [b'r', b'"' | b'#', ..] if !follows_word => raw_string_len(rest, 1),
        [b'b' | b'c', b'r', b'"' | b'#', ..] if !follows_word => raw_string_len(rest, 2),
        [b'\'', b'\\', ..] => 2 + quote_after(&rest[2..], 1),
        // 'a' is a character, 'a a lifetime; a character may have up to four bytes.
        [b'\'', ..] => match rest.iter().skip(2).take(4).position(|&b| b == b'\'') {
            Some(0) => 3,
            Some(more) if !rest[1].is_ascii() => more + 3,
            _ => 0,
        },
        _ => 0,
    }
}

/// Bytes to the next quote and over it, which is not the first `skipped` bytes.
fn quote_after(rest: &[u8], skipped: usize) -> usize {
    let found = rest.iter().skip(skipped).position(|&b| b == b'\'');
    found.map_or(rest.len(), |at| skipped + at + 1)
}

fn block_comment_len(rest: &[u8]) -> usize {
    let (mut at, mut depth) = (2, 1);
    while at < rest.len() && depth > 0 {
        let step = match &rest[at..] {
            [b'/', b'*', ..] => {
                depth += 1;
                2
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                2
            }
            _ => 1,
        };
        at += step;
    }
    at.min(rest.len())
}

fn string_len(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// `r#".."#`, its hashes after `prefix` bytes; 0 for a raw identifier.
fn raw_string_len(rest: &[u8], prefix: usize) -> usize {
    let hashes = rest[prefix..].iter().take_while(|&&b| b == b'#').count();
    let open = prefix + hashes;
    if rest.get(open) != Some(&b'"') {
        return 0;
    }
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let found = rest[open + 1..].windows(close.len()).position(|window| window == close);
    found.map_or(rest.len(), |at| open + 1 + at + close.len())
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Where `word` stands by itself in code.
pub(super) fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let bytes = code.as_bytes();
    code.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let end = at + word.len();
        (at == 0 || !is_word(bytes[at - 1])) && (end == bytes.len() || !is_word(bytes[end]))
    })
}

/// The line of a place, from 1.
pub(super) fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// The text before the tests at the end. A `mod tests;` does not count: its text lies elsewhere,
/// and code may follow.
pub(super) fn before_tests(code: &str) -> &str {
    let tests = code.match_indices("#[cfg(test)]").map(|(at, _)| at).find(|&at| {
        let mut rest = code[at..].trim_start();
        while let Some((_, after)) = rest.strip_prefix("#[").and_then(|rest| rest.split_once("]\n"))
        {
            rest = after.trim_start();
        }
        let after_name = rest.strip_prefix("mod ").map(|rest| rest.trim_start_matches(is_name));
        after_name.is_some_and(|rest| rest.trim_start().starts_with('{'))
    });
    &code[..tests.unwrap_or(code.len())]
}

/// Name and lines (from 1, both ends inside) of every function with a body.
pub(super) fn functions(code: &str) -> Vec<(String, Range<usize>)> {
    words(code, "fn")
        .filter_map(|at| {
            let rest = &code[at + 2..];
            let name: String = rest.trim_start().chars().take_while(|c| is_name(*c)).collect();
            let body = body(&code[at..])?;
            let lines = line_of(code, at)..line_of(code, at + body.end - 1) + 1;
            (!name.is_empty()).then_some((name, lines))
        })
        .collect()
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// From the first brace that belongs to the function to its match; none for a bare signature.
fn body(function: &str) -> Option<Range<usize>> {
    let (mut round, mut curly, mut start) = (0_i32, 0_i32, 0);
    for (at, byte) in function.bytes().enumerate() {
        match byte {
            b'(' | b'[' => round += 1,
            b')' | b']' => round -= 1,
            b';' if round == 0 && curly == 0 => return None,
            b'{' if round == 0 || curly > 0 => {
                if curly == 0 {
                    start = at;
                }
                curly += 1;
            }
            b'}' if curly > 0 => {
                curly -= 1;
                if curly == 0 {
                    return Some(start..at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_and_lines_stay() {
        let text =
            "let a = \"fn \\\" {\"; // unsafe\nlet b = '{'; /* x /* y */ \n */ let c: &'a u8;\n";
        let code = code(text);
        assert_eq!(code.len(), text.len());
        assert_eq!(code.lines().count(), text.lines().count());
        for gone in ["fn", "{", "unsafe", "x", "y"] {
            assert!(!code.contains(gone), "{gone} in {code}");
        }
        assert!(code.contains("let c: &'a u8;") && code.contains("let b ="));
    }

    #[test]
    fn raw_strings_end_at_their_hashes_and_raw_identifiers_stay() {
        assert_eq!(code("a(r#\"x\" {\"#) b"), format!("a({}) b", " ".repeat(9)));
        assert_eq!(code("r#type + br\"q\""), "r#type +      ");
        assert_eq!(code("'\\'' 'ä' '\\u{7b}' z").trim(), "z");
    }

    #[test]
    fn functions_have_names_and_lines() {
        let code = "fn a() {\n}\ntrait T {\n    fn b();\n    fn c() -> [u8; 3] { [0; 3] }\n}\n";
        let expected = vec![("a".to_owned(), 1..3), ("c".to_owned(), 5..6)];
        assert_eq!(functions(code), expected);
    }

    #[test]
    fn tests_begin_at_their_module() {
        let code = "a\n#[cfg(test)]\nfn x() {}\n#[cfg(test)]\nmod tests {}\n";
        assert_eq!(before_tests(code), "a\n#[cfg(test)]\nfn x() {}\n");
        let code = "a\n#[cfg(test)]\n#[cfg(not(loom))]\nmod tests {}\n";
        assert_eq!(before_tests(code), "a\n");
        assert_eq!(before_tests("abc"), "abc");
        let declared = "#[cfg(test)]\nmod tests;\nfn a() {}\n";
        assert_eq!(before_tests(declared), declared);
    }
}

//! Rewords errors of the TOML parser for the author of a configuration: the parser names Rust types
//! like `u16`, and does not say what to write instead.

use super::numbers;

/// The least [`likeness`] (0 to 1) of an unknown key to a known one for which an error suggests the
/// known key.
const ALIKE: f64 = 0.7;

/// The Rust types of numbers, as serde names them in errors.
const NUMERIC: [&str; 6] = ["u16", "u32", "u64", "usize", "i32", "i64"];

/// Returns the key whose value ends in the last of these lines. The key may stand in an earlier
/// line, if its value is a list over several lines.
pub(super) fn key_of<'a>(lines: impl Iterator<Item = &'a str>) -> &'a str {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let key = |line: &'a str| line.split_once('=').map(|(key, _)| key.trim());
    let keys = lines.filter_map(key).filter(|key| key.chars().all(is_plain));
    keys.last().unwrap_or_default()
}

/// Rewords the parser's message `problem`, about `key` in `line`.
pub(super) fn explained(line: &str, key: &str, problem: &str) -> String {
    let numeric = |name: &&&str| problem.ends_with(&format!("expected {name}"));
    if let Some(name) = NUMERIC.iter().find(numeric) {
        let words = numbers::words(key).unwrap_or_else(|| "a whole number".to_owned());
        let problem = problem.strip_suffix(name).unwrap_or(problem);
        let quoted = problem.contains("string");
        return format!("{problem}{words}{}", if quoted { ", without quotes" } else { "" });
    }
    let hint = hint(line, problem);
    hint.map_or_else(|| problem.to_owned(), |hint| format!("{problem}; {hint}"))
}

fn hint(line: &str, problem: &str) -> Option<String> {
    if let Some(rest) = problem.strip_prefix("unknown field `") {
        let (unknown, list) = rest.split_once("`, expected ")?;
        let known = list.split('`').skip(1).step_by(2);
        let alike = known.map(|key| (likeness(unknown, key), key));
        let (best, key) = alike.max_by(|a, b| a.0.total_cmp(&b.0))?;
        return (best >= ALIKE).then(|| format!("did you mean `{key}`?"));
    }
    if problem.ends_with("invalid type: map, expected a sequence") {
        let name = line.trim_matches(['[', ']', ' ']);
        return Some(format!("there can be several: write [[{name}]]"));
    }
    // YAML and others accept these words for booleans; TOML does not.
    let value = line.rsplit('=').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_boolean = ["yes", "no", "on", "off", "true", "false"].contains(&value.as_str());
    let is_unquoted = problem.contains("string values must be quoted");
    if problem.ends_with("expected a boolean") || (is_unquoted && is_boolean) {
        return Some("write true or false, without quotes".to_owned());
    }
    if is_unquoted {
        return Some("paths and names stand in quotes, like \"/var/lib/disk.img\"".to_owned());
    }
    if problem.starts_with("invalid type: integer") && problem.ends_with("expected a string") {
        return Some("write it in quotes".to_owned());
    }
    None
}

/// Returns how similar an unknown key is to a known one, from 0 to 1. An unknown key that is a part
/// of the known one, like `queues` of `num_queues`, counts as 1.
fn likeness(unknown: &str, known: &str) -> f64 {
    let is_part = unknown.len() >= 4 && known.contains(unknown);
    if is_part { 1.0 } else { strsim::jaro_winkler(unknown, known) }
}

#[cfg(test)]
mod tests {
    use crate::parse;

    #[test]
    fn a_mistake_in_the_text_is_told_with_its_cure() {
        for (config, cure) in [
            ("[[blk]]\nfle = '/x'\n", "did you mean `file`?"),
            ("[[blk]]\nqueues = 4\n", "did you mean `num_queues`?"),
            ("[blk]\nfile = '/x'\n", "write [[blk]]"),
            (
                "[[blk]]\nnum_queues = 'four'\n",
                "expected a whole number from 1 to 256, without quotes",
            ),
            ("[[blk]]\nnum_queues = -1\n", "expected a whole number from 1 to 256"),
            ("[[blk]]\nqueue_size = 70000\n", "expected a power of two from 4 to 1024"),
            ("[[blk]]\nqueue_workers = [\n 'a',\n]\n", "expected a whole number from 0 to 255"),
            ("[[net]]\nmtu = '1500'\n", "expected a whole number from 68 to 65535, without quotes"),
            ("[[blk]]\nmemory = 1.5\n", "expected a size like \"64G\", or a number of bytes"),
            ("[[blk]]\nread_only = 'yes'\n", "write true or false"),
            ("[[blk]]\nread_only = yes\n", "write true or false"),
            ("[[blk]]\nfile = /x\n", "stand in quotes"),
            ("[[blk]]\nserial = 7\n", "write it in quotes"),
        ] {
            let error = parse(config).unwrap_err();
            assert!(error.contains(cure) && !error.contains('\n'), "{error}");
        }
        let error = parse("[[blk]]\nzzz = 1\n").unwrap_err();
        assert!(!error.contains("did you mean"), "{error}");
    }
}

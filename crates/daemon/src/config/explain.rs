//! What is wrong with a configuration's text, in the words of whoever wrote it: a parser's error
//! names types of the program, and no cure.

/// An unknown key is taken for the known one that is at least this much like it (0 to 1).
const ALIKE: f64 = 0.7;

/// The sentence for an error of the parser, of which `line` is the line and `problem` the message.
pub(super) fn explained(line: &str, problem: &str) -> String {
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
    let largest = [
        ("expected u16", u64::from(u16::MAX)),
        ("expected u32", u64::from(u32::MAX)),
        ("expected u64", u64::MAX),
        ("expected usize", usize::MAX as u64),
    ];
    if let Some((_, largest)) = largest.iter().find(|(words, _)| problem.ends_with(words)) {
        // A larger number is no better: the key's own limit is named when the plan is made.
        let most =
            if *largest > u64::from(u32::MAX) { "up".to_owned() } else { format!("to {largest}") };
        return Some(format!("write a whole number from 0 {most}, without quotes"));
    }
    if problem.ends_with("expected a boolean") {
        return Some("write true or false, without quotes".to_owned());
    }
    if problem.contains("string values must be quoted") {
        return Some("paths and names stand in quotes, like \"/var/lib/disk.img\"".to_owned());
    }
    if problem.starts_with("invalid type: integer") && problem.ends_with("expected a string") {
        return Some("write it in quotes".to_owned());
    }
    None
}

/// How much a key is like a known one. A part of its name, like `queues` of `num_queues`, is best.
fn likeness(unknown: &str, known: &str) -> f64 {
    let is_part = unknown.len() >= 4 && known.contains(unknown);
    if is_part { 1.0 } else { strsim::jaro_winkler(unknown, known) }
}

#[cfg(test)]
mod tests {
    use crate::config::parse;

    #[test]
    fn a_mistake_in_the_text_is_told_with_its_cure() {
        for (config, cure) in [
            ("[[blk]]\nfle = '/x'\n", "did you mean `file`?"),
            ("[[blk]]\nqueues = 4\n", "did you mean `num_queues`?"),
            ("[blk]\nfile = '/x'\n", "write [[blk]]"),
            ("[[blk]]\nnum_queues = 'four'\n", "write a whole number from 0 up, without quotes"),
            ("[[blk]]\nnum_queues = -1\n", "write a whole number from 0 up"),
            ("[[blk]]\nqueue_size = 70000\n", "write a whole number from 0 to 65535"),
            ("[[blk]]\nread_only = 'yes'\n", "write true or false"),
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

//! The documents for users: their fragments of code, and the commands in them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

use std::path::{Path, PathBuf};

/// A document, with its name for messages.
pub(crate) struct Document {
    pub(crate) name: String,
    pub(crate) text: String,
}

/// A fenced fragment of a document.
pub(crate) struct Fragment {
    /// Document and line, for messages.
    pub(crate) at: String,
    pub(crate) language: String,
    pub(crate) text: String,
}

/// The folder of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// README and all guides.
pub(crate) fn documents() -> Vec<Document> {
    let guides = std::fs::read_dir(root().join("docs/guide")).unwrap();
    let mut paths: Vec<_> = guides.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.insert(0, root().join("README.md"));
    let read = |path: &PathBuf| Document {
        name: path.file_name().unwrap().to_string_lossy().into_owned(),
        text: std::fs::read_to_string(path).unwrap(),
    };
    paths.iter().map(read).collect()
}

/// The fenced fragments of all documents, without the indentation of their fences.
pub(crate) fn fragments() -> Vec<Fragment> {
    documents().iter().flat_map(fragments_of).collect()
}

fn fragments_of(document: &Document) -> Vec<Fragment> {
    let mut fragments = Vec::new();
    let mut open: Option<(usize, Fragment)> = None;
    for (number, line) in document.text.lines().enumerate() {
        let indentation = line.len() - line.trim_start().len();
        let fence = line.trim_start().strip_prefix("```");
        match (fence, open.take()) {
            (Some(language), None) => {
                let at = format!("{}:{}", document.name, number + 1);
                let language = language.trim().to_owned();
                open = Some((indentation, Fragment { at, language, text: String::new() }));
            }
            (Some(behind), Some((_, fragment))) => {
                assert!(behind.is_empty(), "{}:{}: ends with {line}", document.name, number + 1);
                fragments.push(fragment);
            }
            (None, Some((indentation, mut fragment))) => {
                fragment.text += line.get(indentation..).unwrap_or_default();
                fragment.text.push('\n');
                open = Some((indentation, fragment));
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{}: a fragment has no end", document.name);
    fragments
}

/// The simple commands of a script of the shell, each as its words. Values of variables are not
/// known: `1` stands for each.
pub(crate) fn commands(script: &str) -> Vec<Vec<String>> {
    let mut commands = Vec::new();
    for line in script.replace("\\\n", " ").lines() {
        let mut words = Vec::new();
        for word in words_of(line) {
            match word.as_str() {
                "&&" | "||" | "|" | ";" | "&" | ";;" => commands.push(std::mem::take(&mut words)),
                _ => words.push(word),
            }
        }
        commands.push(words);
    }
    let is_assignment = |word: &String| {
        word.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        })
    };
    for words in &mut commands {
        let begin = words.iter().take_while(|word| is_assignment(word)).count();
        words.drain(..begin);
    }
    commands.retain(|words| !words.is_empty());
    commands
}

/// The words of a line of the shell, without its comment.
fn words_of(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quote) = (None::<String>, None);
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        match (c, quote) {
            (c, Some(q)) if c == q => quote = None,
            ('\'' | '"', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            ('$', None | Some('"')) => {
                while rest.next_if(|c| c.is_ascii_alphanumeric() || "_!?{}".contains(*c)).is_some()
                {
                }
                word.get_or_insert_default().push('1');
            }
            ('#', None) if word.is_none() => break,
            (';' | '&' | '|', None) => {
                words.extend(word.take());
                let twice = rest.next_if_eq(&c).is_some();
                words.push(if twice { format!("{c}{c}") } else { c.to_string() });
            }
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    assert!(quote.is_none(), "a quote has no end: {line}");
    words.extend(word);
    words
}

/// The name of the program that a command starts.
pub(crate) fn program(words: &[String]) -> &str {
    words[0].rsplit('/').next().unwrap_or_default()
}

//! The files the rules look at: every text file of the project that people write.

use super::source;
use manyring_system::{Context, Outcome};
use std::path::Path;

/// Folders that hold what is built or found, not written.
const SKIPPED: [&str; 4] = [".git", "artifacts", "corpus", "target"];
/// Files of other kinds that a rule reads.
const OTHERS: [&str; 2] = [".ci/run", crate::readme::FIGURES];
const KINDS: [&str; 7] = ["c", "md", "rs", "service", "sh", "toml", "yml"];

/// A file of the project.
#[derive(Debug)]
pub(super) struct File {
    /// From the root, with slashes.
    pub(super) path: String,
    pub(super) text: String,
    /// Rust only: the text with comments and literals blanked, same lines.
    pub(super) code: String,
}

impl File {
    pub(super) fn new(path: String, text: String) -> Self {
        let code = if path.ends_with(".rs") { source::code(&text) } else { String::new() };
        Self { path, text, code }
    }

    pub(super) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// The code without its tests at the end; none in a file that is all tests.
    pub(super) fn code_before_tests(&self) -> &str {
        let is_test = ["/tests/", "/tests.rs", "/benches/"].iter().any(|p| self.path.contains(p));
        if is_test { "" } else { source::before_tests(&self.code) }
    }
}

/// All files below `root`, in order.
pub(super) fn all(root: &Path) -> Outcome<Vec<File>> {
    let mut files = Vec::new();
    walk(root, "", &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn walk(folder: &Path, prefix: &str, files: &mut Vec<File>) -> Outcome {
    for entry in std::fs::read_dir(folder).context(folder.display())? {
        let entry = entry.context(folder.display())?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let (path, here) = (entry.path(), format!("{prefix}{name}"));
        let kind = entry.file_type().context(path.display())?;
        if kind.is_dir() && !SKIPPED.contains(&name.as_str()) {
            walk(&path, &format!("{here}/"), files)?;
        }
        let is_ours = name.rsplit_once('.').is_some_and(|(_, kind)| KINDS.contains(&kind));
        if kind.is_file() && (is_ours || OTHERS.contains(&here.as_str())) {
            files.push(File::new(here, std::fs::read_to_string(&path).context(path.display())?));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_files_have_no_code_before_their_tests() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n}\n";
        let code = |path: &str| File::new(path.into(), text.into()).code_before_tests().to_owned();
        assert_eq!(code("crates/queue/src/lib.rs"), "fn a() {}\n");
        assert_eq!(code("crates/queue/tests/pair.rs"), "");
        assert_eq!(code("crates/wire/src/blk/tests.rs"), "");
    }
}

//! The archive format of an initramfs: cpio "newc". Archives may be concatenated.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

const FILE: u32 = 0o100_000;
const FOLDER: u32 = 0o040_000;
const LINK: u32 = 0o120_000;

/// Writes an archive; folders are made as files need them.
#[derive(Debug)]
pub(crate) struct Archive<W> {
    out: W,
    inode: u32,
    folders: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, inode: 0, folders: BTreeSet::new() }
    }

    /// Adds a folder, and the ones it lies in. Paths have no leading slash.
    pub(crate) fn folder(&mut self, path: &str) -> io::Result<()> {
        let ends = path.match_indices('/').map(|(end, _)| end).chain([path.len()]);
        for part in ends.map(|end| &path[..end]).filter(|part| !part.is_empty()) {
            if self.folders.insert(part.to_owned()) {
                self.entry(part, FOLDER | 0o755, &[])?;
            }
        }
        Ok(())
    }

    /// Adds a file with its permissions.
    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder)?;
        }
        self.entry(path, FILE | mode, content)
    }

    /// Adds a host's program or library.
    pub(crate) fn copy(&mut self, path: &str, from: &Path) -> io::Result<()> {
        self.file(path, 0o755, &std::fs::read(from)?)
    }

    /// Adds a symbolic link to `target`.
    pub(crate) fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder)?;
        }
        self.entry(path, LINK | 0o777, target.as_bytes())
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.entry("TRAILER!!!", 0, &[])?;
        self.out.flush()
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let too_long = |_| io::Error::from(io::ErrorKind::FileTooLarge);
        let content_size = u32::try_from(content.len()).map_err(too_long)?;
        let name_size = u32::try_from(path.len() + 1).map_err(too_long)?;
        // inode, mode, uid, gid, links, mtime, size, device x2, special device x2, name, check
        let fields =
            [self.inode, mode, 0, 0, 1, 0, content_size, 0, 0, 0, 0, name_size, 0].map(hex);
        write!(self.out, "070701{}{path}\0", fields.concat())?;
        self.pad(110 + path.len() + 1)?;
        self.out.write_all(content)?;
        self.pad(content.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..written.next_multiple_of(4) - written])
    }
}

fn hex(field: u32) -> String {
    format!("{field:08x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_holds_its_folders_before_its_files_aligned() {
        let mut bytes = Vec::new();
        let mut archive = Archive::new(&mut bytes);
        archive.file("a/b/file", 0o644, b"hello").unwrap();
        archive.link("c/link", "/a").unwrap();
        archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let mut names = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |index: usize| {
                let from = at + 6 + 8 * index;
                let text = std::str::from_utf8(&bytes[from..from + 8]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            let name_end = at + 110 + field(11);
            let content = at + (110 + field(11)).next_multiple_of(4);
            names.push(String::from_utf8(bytes[at + 110..name_end - 1].to_vec()).unwrap());
            if names.last().unwrap() == "a/b/file" {
                assert_eq!(&bytes[content..content + 5], b"hello");
            }
            at = content + field(6).next_multiple_of(4);
        }
        assert_eq!(names, ["a", "a/b", "a/b/file", "c", "c/link", "TRAILER!!!"]);
    }
}

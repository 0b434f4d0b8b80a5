//! `Pinned`: a file or folder that another user has named. It is found once, below a folder that
//! the operator allows, and held; whatever happens to its name then, nothing else is opened.

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// What was found. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Pinned(Arc<OwnedFd>);

impl Pinned {
    /// Finds `path` below one of the folders `allowed`. Neither a link nor `..` leads out of it.
    /// May block.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) fn find(path: &Path, allowed: &[PathBuf]) -> Result<Self, String> {
        let below = |folder: &PathBuf| Some((folder.clone(), path.strip_prefix(folder).ok()?));
        let climbs = path.components().any(|part| part == Component::ParentDir);
        let Some((folder, rest)) = allowed.iter().find_map(below).filter(|_| !climbs) else {
            return Err(format!("{} is below no folder of allow_paths", path.display()));
        };
        let rest = if rest.as_os_str().is_empty() { Path::new(".") } else { rest };
        let failed = |errno: Errno| format!("{}: {errno}", path.display());
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = rustix::fs::open(&folder, flags | OFlags::DIRECTORY, Mode::empty());
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let found = openat2(root.map_err(failed)?, rest, flags, Mode::empty(), how);
        Ok(Self(Arc::new(found.map_err(failed)?)))
    }

    /// A path to what was found, as long as this is held.
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_was_found_is_opened_whatever_its_name_means_later() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("allowed")).unwrap();
        std::fs::write(at("secret"), "secret").unwrap();
        std::fs::write(at("allowed/a"), "mine").unwrap();
        let allowed = [at("allowed")];
        let pinned = Pinned::find(&at("allowed/a"), &allowed).unwrap();
        std::fs::remove_file(at("allowed/a")).unwrap();
        symlink(at("secret"), at("allowed/a")).unwrap();
        assert_eq!(std::fs::read(pinned.path()).unwrap(), b"mine");
        symlink("../secret", at("allowed/b")).unwrap();
        symlink("/", at("allowed/c")).unwrap();
        for path in
            ["allowed/a", "allowed/b", "allowed/c/etc/passwd", "allowed/../secret", "secret"]
        {
            assert!(Pinned::find(&at(path), &allowed).is_err(), "{path}");
        }
        assert!(Pinned::find(Path::new("allowed/a"), &allowed).is_err(), "a relative path");
    }
}

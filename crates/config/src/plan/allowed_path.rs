//! `Pinned`: a file or folder that an unprivileged user of the control API has named. Its path is
//! resolved once, below a folder that the operator allows, into an `O_PATH` descriptor. All later
//! opens go through the descriptor, so replacing the file or a link in the path has no effect.

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A path, and the file or folder that it was resolved to. Clones share both.
#[derive(Clone, Debug)]
pub struct Pinned(Arc<Named>);

#[derive(Debug)]
struct Named {
    path: PathBuf,
    allowed: Vec<PathBuf>,
    found: OnceLock<OwnedFd>,
}

impl Pinned {
    /// Makes a path that must lie below one of the folders `allowed`. It is not resolved yet.
    pub fn new(path: &Path, allowed: &[PathBuf]) -> Self {
        let (path, allowed) = (path.to_path_buf(), allowed.to_vec());
        Self(Arc::new(Named { path, allowed, found: OnceLock::new() }))
    }

    /// Resolves the path, unless an earlier call did. Neither a link nor `..` may lead out of the
    /// allowed folder. May block. Returns a path in `/proc/self/fd` to the file or folder, which is
    /// valid as long as a clone of this `Pinned` exists.
    ///
    /// # Errors
    /// One sentence: the path is not allowed, or cannot be opened. A later call tries again.
    pub fn find(&self) -> Result<PathBuf, String> {
        if let Some(path) = self.found() {
            return Ok(path);
        }
        let found = self.0.look()?;
        let found = self.0.found.get_or_init(|| found);
        Ok(path_to(found))
    }

    /// Returns the path that [`Self::find`] has returned; `None` before it has succeeded.
    pub fn found(&self) -> Option<PathBuf> {
        self.0.found.get().map(path_to)
    }
}

impl Named {
    fn look(&self) -> Result<OwnedFd, String> {
        let Self { path, allowed, .. } = self;
        let below = |folder: &PathBuf| Some((folder.clone(), path.strip_prefix(folder).ok()?));
        let climbs = path.components().any(|part| part == Component::ParentDir);
        let Some((folder, rest)) = allowed.iter().find_map(below).filter(|_| !climbs) else {
            return Err(format!("{} is not below a folder of allow_paths", path.display()));
        };
        let rest = if rest.as_os_str().is_empty() { Path::new(".") } else { rest };
        let failed = |errno: Errno| format!("{}: {errno}", path.display());
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = rustix::fs::open(&folder, flags | OFlags::DIRECTORY, Mode::empty());
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        openat2(root.map_err(failed)?, rest, flags, Mode::empty(), how).map_err(failed)
    }
}

fn path_to(found: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()))
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
        let pinned = Pinned::new(&at("allowed/a"), &[at("allowed")]);
        assert!(pinned.find().is_err() && pinned.found().is_none(), "it is not there yet");
        std::fs::write(at("allowed/a"), "mine").unwrap();
        pinned.clone().find().unwrap();
        std::fs::remove_file(at("allowed/a")).unwrap();
        symlink(at("secret"), at("allowed/a")).unwrap();
        assert_eq!(std::fs::read(pinned.find().unwrap()).unwrap(), b"mine");
        symlink("../secret", at("allowed/b")).unwrap();
        symlink("/", at("allowed/c")).unwrap();
        let find = |path: &Path| Pinned::new(path, &[at("allowed")]).find();
        for path in
            ["allowed/a", "allowed/b", "allowed/c/etc/passwd", "allowed/../secret", "secret"]
        {
            assert!(find(&at(path)).is_err(), "{path}");
        }
        assert!(find(Path::new("allowed/a")).is_err(), "a relative path");
    }
}

//! File systems and block devices of the host that a behaviour makes for itself, in loop devices.

use crate::command::{command, output, text};
use crate::{Context, Outcome};
use std::fs::File;
use std::path::{Path, PathBuf};

/// A file system in a file, mounted; unmounted when dropped.
#[derive(Debug)]
pub struct HostFs {
    folder: PathBuf,
}

impl HostFs {
    /// Makes a file system of `mib` MiB by `mkfs`, a program with its arguments, in a sparse file
    /// `name` of `parent`, and mounts it beside that file.
    ///
    /// # Errors
    /// It cannot be made or mounted.
    pub fn new(parent: &Path, name: &str, mib: u64, mkfs: &[&str]) -> Outcome<Self> {
        let (backing, folder) = (parent.join(name), parent.join(format!("{name}.mounted")));
        let file = File::create(&backing).context(backing.display())?;
        file.set_len(mib << 20).context(backing.display())?;
        output(command(mkfs[0]).args(&mkfs[1..]).arg(&backing))?;
        std::fs::create_dir(&folder).context(folder.display())?;
        output(command("mount").args(["-o", "loop"]).args([&backing, &folder]))?;
        Ok(Self { folder })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for HostFs {
    fn drop(&mut self) {
        // Lazily: after a failure a process may still have files open.
        let _ = output(command("umount").arg("-l").arg(&self.folder));
    }
}

/// A loop device; detached when dropped.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// A device of `mib` MiB with logical sectors of `sector` bytes, in a sparse file.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(parent: &Path, name: &str, mib: u64, sector: u32) -> Outcome<Self> {
        let backing = parent.join(name);
        let file = File::create(&backing).context(backing.display())?;
        file.set_len(mib << 20).context(backing.display())?;
        let sector = sector.to_string();
        let arguments = ["--show", "-f", "-b", sector.as_str()];
        let path = text(command("losetup").args(arguments).arg(&backing))?;
        Ok(Self { path: path.trim().into() })
    }

    /// Its name below `/dev`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = output(command("losetup").arg("-d").arg(&self.path));
    }
}

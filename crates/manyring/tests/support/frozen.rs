//! A file system whose writers wait, in the kernel. Needs root, for loop devices.

use std::path::PathBuf;
use std::process::Command;

/// Runs a program of the system, and gives what it says.
pub(crate) fn run(command: &str) -> String {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A file system that can be frozen: whoever writes to it waits, and no signal helps.
pub(crate) struct Freezer {
    _file: tempfile::NamedTempFile,
    folder: tempfile::TempDir,
}

impl Freezer {
    pub(crate) fn new() -> Self {
        let (file, folder) =
            (tempfile::NamedTempFile::new().unwrap(), tempfile::tempdir().unwrap());
        file.as_file().set_len(64 << 20).unwrap();
        run(&format!("mkfs.ext4 -q {}", file.path().display()));
        run(&format!("mount -o loop {} {}", file.path().display(), folder.path().display()));
        Self { _file: file, folder }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn freeze(&self) {
        run(&format!("fsfreeze -f {}", self.folder.path().display()));
    }

    pub(crate) fn thaw(&self) {
        run(&format!("fsfreeze -u {}", self.folder.path().display()));
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(self.folder.path()).output();
        let _ = Command::new("umount").arg("-l").arg(self.folder.path()).output();
    }
}

//! `Credentials`: the certificates and the key of a TLS client, as the texts of their files.

use std::fmt::{self, Debug};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The names of a client's files, the same as QEMU's.
const NAMES: [&str; 4] = ["ca-cert.pem", "ca-crl.pem", "client-cert.pem", "client-key.pem"];
/// The largest file, in bytes. For comparison: all authorities that a distribution trusts have 220
/// KB together.
const FILE_MAX: u64 = 1 << 20;

/// The content of the files with which a client begins TLS: `ca-cert.pem`, the authorities whose
/// servers are trusted; if they exist, `ca-crl.pem`, the certificates that they have revoked, and
/// `client-cert.pem` and `client-key.pem`, the client's own certificate and its key.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The folder, for errors; empty in a process that got the texts from another process.
    pub folder: PathBuf,
    /// The texts of the files, in the order above.
    pub files: [Option<String>; 4],
}

impl Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is not for a log.
        f.debug_struct("Credentials").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Reads the files of a folder.
    ///
    /// # Errors
    /// The path of the file that cannot be read, and why.
    pub fn read(folder: &Path) -> Result<Self, (PathBuf, String)> {
        let mut files = [const { None }; 4];
        for (text, name) in files.iter_mut().zip(NAMES) {
            let path = folder.join(name);
            *text = match text_of(&path) {
                Ok(text) => Some(text),
                // Only the authorities must be there.
                Err(error) if error.kind() == ErrorKind::NotFound && name != NAMES[0] => None,
                Err(error) => return Err((path, error.to_string())),
            };
        }
        Ok(Self { folder: folder.to_owned(), files })
    }

    /// The path and the text of each file, in the order of [`Self::files`].
    pub(super) fn named(&self) -> [(PathBuf, Option<&str>); 4] {
        std::array::from_fn(|at| (self.folder.join(NAMES[at]), self.files[at].as_deref()))
    }
}

fn text_of(path: &Path) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_MAX {
        return Err(std::io::Error::other(format!("it has more than {FILE_MAX} bytes")));
    }
    // A file that is not UTF-8 is no PEM file: the parser will report that.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

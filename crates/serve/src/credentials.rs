//! Passes TLS certificates and a key to a device process, in a memfd: the texts of the four files
//! of `manyring_nbd::Credentials` as JSON. They go through a file since a list of certificate
//! authorities alone can be longer than a message. The paths of the files are not sent.

use manyring_nbd::{Connected, Credentials};
use rustix::fd::OwnedFd;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use std::path::PathBuf;

/// Most bytes of the memfd: four files of one mebibyte, in which JSON may escape each character.
const BYTES_MAX: usize = 24 << 20;
/// Bytes of one read.
const PIECE: usize = 64 << 10;

/// Returns the descriptors that a device process gets for a connection: the socket and, if the
/// connection has TLS, the memfd with its certificates.
pub fn given(connected: Connected) -> Result<Vec<OwnedFd>, Errno> {
    let Connected { socket, credentials } = connected;
    let file = credentials.as_ref().map(written).transpose()?;
    Ok([socket].into_iter().chain(file).collect())
}

fn written(credentials: &Credentials) -> Result<OwnedFd, Errno> {
    let text = serde_json::to_vec(&credentials.files).map_err(|_| Errno::INVAL)?;
    let file = rustix::fs::memfd_create("credentials", MemfdFlags::CLOEXEC)?;
    let mut rest = text.as_slice();
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    Ok(file)
}

/// Makes a connection of the descriptors that the supervisor sent ([`given`]).
///
/// # Errors
/// `EINVAL`: there is no socket among them, or the memfd holds no credentials.
pub(super) fn taken(mut fds: Vec<OwnedFd>) -> Result<Connected, Errno> {
    if fds.is_empty() {
        return Err(Errno::INVAL);
    }
    let socket = fds.remove(0);
    let credentials = fds.pop().map(|file| read(&file)).transpose()?;
    Ok(Connected { socket, credentials })
}

fn read(file: &OwnedFd) -> Result<Credentials, Errno> {
    let mut text = Vec::new();
    while text.len() < BYTES_MAX {
        let at = text.len();
        text.resize(at + PIECE, 0);
        let count = rustix::io::pread(file, &mut text[at..], at as u64)?;
        text.truncate(at + count);
        if count == 0 {
            break;
        }
    }
    let files = serde_json::from_slice(&text).map_err(|_| Errno::INVAL)?;
    Ok(Credentials { folder: PathBuf::new(), files })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_arrive_as_they_were_read_and_without_their_folder() {
        let socket = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let files = [Some("a".repeat(3 * PIECE)), None, Some("\u{1}\"".to_owned()), None];
        let credentials = Credentials { folder: "/etc/pki".into(), files: files.clone() };
        let credentials = Some(credentials);
        let fds = given(Connected { socket: socket(), credentials }).unwrap();
        assert_eq!(fds.len(), 2);
        let credentials = taken(fds).unwrap().credentials.unwrap();
        assert_eq!(credentials, Credentials { folder: PathBuf::new(), files });
        let fds = given(Connected { socket: socket(), credentials: None }).unwrap();
        assert!(taken(fds).unwrap().credentials.is_none());
        assert_eq!(taken(vec![]).unwrap_err(), Errno::INVAL);
        assert_eq!(taken(vec![socket(), socket()]).unwrap_err(), Errno::INVAL);
    }
}

//! Refuses images of other formats, unless a guest may have written the header that looks like one.
//!
//! A guest may write anything to its own disk, also a header of a qcow2 or LUKS image. So once a
//! guest has used an image, its bytes do not tell its format. An attribute of the file records that
//! a guest has used it (docs/design/0013).

use super::ImageError;
use crate::blk::container;
use rustix::fd::OwnedFd;
use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};
use rustix::io::Errno;
use std::path::Path;

/// The attribute of an image that a guest may have written to.
const NOTE: &str = "user.manyring.guest";

/// Refuses an image of another format that no guest has used.
///
/// If the attribute cannot be stored (block devices, file systems without user attributes), a guest
/// may have written these bytes: then the image is served, and the log names the format that it
/// looks like.
///
/// # Errors
/// [`ImageError::Container`]: the image has another format, and no guest has used it.
/// [`ImageError::Read`]: its beginning or its end cannot be read.
pub(super) fn check(
    file: &OwnedFd,
    path: &Path,
    (block_device, size): (bool, u64),
) -> Result<(), ImageError> {
    let noted = fgetxattr(file, NOTE, &mut [0; 0][..]);
    if noted.is_ok() {
        return Ok(());
    }
    let format = container_format(file, size)
        .map_err(|errno| ImageError::Read { path: path.to_path_buf(), errno })?;
    let Some(format) = format else { return Ok(()) };
    // Refuse only a file on which the attribute could have been set. A block device also reports
    // `ENODATA`, but cannot store such an attribute.
    if !block_device && noted == Err(Errno::NODATA) {
        return Err(ImageError::Container { path: path.to_path_buf(), format });
    }
    tracing::warn!(
        image = %path.display(),
        "the image looks like {format}; serving its bytes as they are, because its guest may have \
         written that"
    );
    Ok(())
}

/// Sets the attribute which says that a guest can write to the image from now on.
pub(super) fn note(file: &OwnedFd, path: &Path, block_device: bool) {
    if block_device || fgetxattr(file, NOTE, &mut [0; 0][..]).is_ok() {
        return;
    }
    match fsetxattr(file, NOTE, b"1", XattrFlags::empty()) {
        // A file system without user attributes stores none.
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(errno) => tracing::warn!(
            image = %path.display(),
            %errno,
            "marking the image as served failed; set format = \"raw\", or it is refused once its \
             guest writes the header of another format"
        ),
    }
}

/// Detects a container format, such as qcow2, by the first and last bytes of the file.
fn container_format(file: &OwnedFd, size: u64) -> Result<Option<&'static str>, Errno> {
    let (mut head, mut tail) = ([0; container::HEAD_LEN], [0; container::TAIL_LEN]);
    let head_len = rustix::io::pread(file, &mut head, 0)?;
    let tail_len = rustix::io::pread(file, &mut tail, size - container::TAIL_LEN as u64)?;
    Ok(container::format_of(&head[..head_len], &tail[..tail_len]))
}

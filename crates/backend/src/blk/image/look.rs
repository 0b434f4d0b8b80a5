//! `Image::look`: checks whether a path can name an image, without opening it.

use super::{Image, ImageError};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::path::Path;

impl Image {
    /// Checks the file that `path` names, without opening it.
    ///
    /// # Errors
    /// `Open`: there is no such file. `Kind`, `Empty`, `Sectors`: it cannot be an image. A path
    /// that the caller may not look up is no error.
    pub fn look(path: &Path) -> Result<(), ImageError> {
        let at = || path.to_path_buf();
        let stat = match rustix::fs::stat(path) {
            Err(Errno::ACCESS) => return Ok(()),
            found => found.map_err(|errno| ImageError::Open { path: at(), errno })?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => return Ok(()),
            FileType::RegularFile => {}
            _ => return Err(ImageError::Kind { path: at() }),
        }
        match u64::try_from(stat.st_size).unwrap_or(0) {
            ..512 => Err(ImageError::Empty { path: at() }),
            size if !size.is_multiple_of(512) => Err(ImageError::Sectors { path: at(), size }),
            _ => Ok(()),
        }
    }
}

//! The backend of a disk, opened.

use super::qemu_helper::{HelperDisk, HelperError, HelperOptions};
use super::remote::{Remote, Remotely};
use crate::times::NBD_REQUEST;
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, Image, ImageError, ImageOptions};
use manyring_config::plan::{DiskPlan, Format, HelperPlan, NbdPlan, Pinned};
use manyring_memory::MemoryError;
use manyring_nbd::{Address, JoinError, NbdDisk, NbdOptions, Target, Uri};
use manyring_protocol::spec::DiskFaultSpec;
use rustix::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Why a disk cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Its file.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A user has named it, and it is not to be had below `allow_paths`.
    #[error("{0}")]
    Unfound(String),
    /// The memory that it lies in, or that it needs.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The server that has it.
    #[error(transparent)]
    Nbd(#[from] JoinError),
    /// The program that reads the image.
    #[error(transparent)]
    Helper(#[from] HelperError),
}

/// The means with which the daemon opens a disk.
#[derive(Debug)]
pub struct Means<'a> {
    /// The host's files are served by io_uring.
    pub io_uring: bool,
    /// The description of another process that has served the disk.
    pub held: Option<OwnedFd>,
    /// The folder of the sockets of helpers.
    pub helpers: Option<&'a Path>,
    /// A device process talks to the disk's server; `None`: this process does.
    pub remotely: Option<Remotely>,
}

/// A disk that was opened, with the server that a device process talks to.
pub(crate) type Open = (Arc<dyn Disk>, Option<Arc<Remote>>);

/// Opens a disk for the device `name`, whose guest is told `block_size`, if it is given. May block.
///
/// # Errors
/// [`DiskError`].
pub fn open(
    (name, plan): (&str, &DiskPlan),
    (read_only, block_size): (bool, Option<u32>),
    Means { io_uring, held, helpers, remotely }: Means<'_>,
) -> Result<Open, DiskError> {
    let disk: Arc<dyn Disk> = match plan {
        DiskPlan::Null { size } => Arc::new(NullDisk::new(*size)),
        DiskPlan::Memory { size } => Arc::new(match held {
            Some(file) => MemoryDisk::handed(file, *size)?,
            None => MemoryDisk::new(*size)?,
        }),
        DiskPlan::Nbd(NbdPlan { uri, reconnect, .. }) => {
            return Ok(of_server((name, uri), (read_only, *reconnect), remotely)?);
        }
        DiskPlan::Helper(HelperPlan { format, path, direct, reconnect }) => {
            let options = HelperOptions {
                name: name.to_owned(),
                // A plan with a helper has a `state_dir`.
                folder: helpers.map(Path::to_owned).unwrap_or_default(),
                format,
                image: path.clone(),
                direct: *direct,
                read_only,
            };
            let serve = |uri: &Uri| of_server((name, uri), (read_only, *reconnect), remotely);
            let (disk, remote) = HelperDisk::open(options, serve)?;
            return Ok((Arc::new(disk), remote));
        }
        DiskPlan::File { path, pinned, direct, lock_with_rings, format } => {
            let any_content = *format == Some(Format::Raw);
            let options = ImageOptions {
                read_only,
                direct: *direct,
                block_size,
                any_content,
                lock_with_rings: *lock_with_rings,
            };
            let found = pinned.as_ref().map(Pinned::find).transpose();
            let found = found.map_err(DiskError::Unfound)?;
            let found = found.as_deref().unwrap_or(path);
            let image = Image::open_held((found, path), options, held)?;
            if io_uring { Arc::new(UringDisk::new(image)?) } else { Arc::new(FileDisk::new(image)) }
        }
    };
    Ok((disk, None))
}

/// The disk of a server: of this process, or measured for a device process. May block.
fn of_server(
    (name, uri): (&str, &Uri),
    (read_only, reconnect): (bool, Option<u64>),
    remotely: Option<Remotely>,
) -> Result<Open, JoinError> {
    if let Some(remotely) = remotely {
        let remote = Remote::open(name, uri, read_only, remotely)?;
        return Ok((remote.clone(), Some(remote)));
    }
    let disk = NbdDisk::open(NbdOptions {
        name: name.to_owned(),
        server: Arc::new(Address::of(uri)),
        target: Target::of(uri),
        read_only,
        reconnect: reconnect.map(Duration::from_secs),
        request_timeout: NBD_REQUEST,
    })?;
    Ok((Arc::new(disk), None))
}

/// The disk with what is to go wrong.
pub fn decorated(disk: Arc<dyn Disk>, fault: Option<DiskFaultSpec>) -> Arc<dyn Disk> {
    let Some(fault) = fault else { return disk };
    let DiskFaultSpec {
        read_error_every,
        write_error_every,
        flush_errors,
        hold_every,
        secure_erase,
    } = fault;
    let plan = FaultPlan {
        read_error_every,
        write_error_every,
        flush_errors,
        hold_every,
        secure_erase,
        ..FaultPlan::default()
    };
    Arc::new(FaultDisk::new(disk, plan))
}

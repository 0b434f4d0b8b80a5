//! Opens the backend of a disk: by plan (in the process that opens the host's files), and by spec
//! (in a device process, on descriptors that the supervisor sent).

use super::nbd_host::{Remote, Remotely};
use super::qemu_helper::{HelperDisk, HelperError, HelperOptions};
use crate::times::NBD_REQUEST;
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, Image, ImageDescriptors, ImageError, ImageOptions};
use manyring_config::plan::{DiskPlan, Format, HelperPlan, NbdPlan, Pinned};
use manyring_memory::MemoryError;
use manyring_nbd::{Address, JoinError, NbdDisk, NbdOptions, Target, Uri};
use manyring_protocol::nbd::NbdSpec;
use manyring_protocol::spec::{DiskFaultSpec, DiskSpec};
use rustix::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Stands in log lines for the path of an image whose descriptor the supervisor sent: the device
/// process is not told the path.
const HANDED: &str = "handed";

/// Why a disk cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The image file cannot be opened, locked or served.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A user named this file, and it is not found below `allow_paths`.
    #[error("{0}")]
    Unfound(String),
    /// Memory for the disk (`memory`), or for its requests, cannot be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The NBD server cannot be reached, or its export cannot be used.
    #[error(transparent)]
    Nbd(#[from] JoinError),
    /// The helper that reads the image cannot be started.
    #[error(transparent)]
    Helper(#[from] HelperError),
}

/// Resources for opening a disk, beside its plan.
#[derive(Debug)]
pub struct Means<'a> {
    /// True if the host's files are read and written through io_uring.
    pub io_uring: bool,
    /// The open file of the disk that another process handed over.
    pub held: Option<OwnedFd>,
    /// The folder of the sockets of helpers.
    pub helpers: Option<&'a Path>,
    /// How the supervisor measures the disk of an NBD server to which a device process connects;
    /// `None`: this process connects to the server.
    pub remotely: Option<Remotely>,
}

/// An opened disk, and its NBD server if a device process connects to that server.
pub(crate) type Open = (Arc<dyn Disk>, Option<Arc<Remote>>);

/// Opens a disk for the device `name`. `block_size` is the logical block size that the guest reads;
/// `None`: the disk's own. May block.
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
            of_image(image, io_uring)?
        }
    };
    Ok((disk, None))
}

/// Opens the disk of an NBD server: connects in this process, or has a device process measure the
/// disk (`remotely`). May block.
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

/// Wraps a device process's disk so that the disk can send requests to the supervisor.
pub(crate) trait Supervised {
    /// Returns the disk of an NBD server. The supervisor makes its connections.
    ///
    /// # Errors
    /// A text of one line: the disk cannot be made.
    fn nbd(self, spec: NbdSpec, read_only: bool) -> Result<Arc<dyn Disk>, String>;

    /// Returns `inner` as a disk that has the supervisor lock the image while rings run.
    fn ring_locked(self, inner: Arc<dyn Disk>) -> Arc<dyn Disk>;
}

/// Opens the disk of a device process on descriptors that the supervisor sent. May block.
///
/// # Errors
/// A text of one line: the descriptors do not fit the spec.
pub(crate) fn granted(
    (disk, read_only): (DiskSpec, bool),
    mut fds: Vec<OwnedFd>,
    uring: bool,
    supervisor: impl Supervised,
) -> Result<Arc<dyn Disk>, String> {
    match disk {
        DiskSpec::Null { size } => Ok(Arc::new(NullDisk::new(size))),
        DiskSpec::Memory { size } => {
            let file = fds.pop().ok_or("supervisor: a disk in memory without its memory")?;
            let disk = MemoryDisk::handed(file, size);
            Ok(Arc::new(disk.map_err(|error| error.to_string())?))
        }
        DiskSpec::Nbd(spec) => supervisor.nbd(spec, read_only),
        DiskSpec::File { direct, lock_with_rings } => {
            if fds.len() < 2 {
                return Err("supervisor: a disk without the descriptors of its file".to_owned());
            }
            let handed = ImageDescriptors { file: fds.remove(0), flushes: fds };
            let options = ImageOptions { read_only, direct, ..ImageOptions::default() };
            let image = Image::handed(handed, Path::new(HANDED), options);
            let image = image.map_err(|error| error.to_string())?;
            let inner = of_image(image, uring).map_err(|error| error.to_string())?;
            Ok(if lock_with_rings { supervisor.ring_locked(inner) } else { inner })
        }
    }
}

fn of_image(image: Image, io_uring: bool) -> Result<Arc<dyn Disk>, MemoryError> {
    Ok(if io_uring { Arc::new(UringDisk::new(image)?) } else { Arc::new(FileDisk::new(image)) })
}

/// Wraps the disk so that requests fail as the test option `fault` says.
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

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_protocol::nbd::{ExportSpec, NbdTarget};
    use std::sync::Mutex;

    /// A supervisor that notes what it is asked for.
    struct Noting<'a>(&'a Mutex<Vec<&'static str>>);

    impl Supervised for Noting<'_> {
        fn nbd(self, _spec: NbdSpec, _read_only: bool) -> Result<Arc<dyn Disk>, String> {
            self.0.lock().unwrap().push("nbd");
            Ok(Arc::new(NullDisk::new(512)))
        }

        fn ring_locked(self, inner: Arc<dyn Disk>) -> Arc<dyn Disk> {
            self.0.lock().unwrap().push("lock");
            inner
        }
    }

    #[test]
    fn a_disk_is_opened_on_its_descriptors_and_asks_for_what_its_spec_says() {
        let opened = |disk, fds: usize| {
            let file = || {
                let file = tempfile::tempfile().unwrap();
                file.set_len(8192).unwrap();
                file.into()
            };
            let (asked, fds) = (Mutex::default(), (0..fds).map(|_| file()).collect());
            let disk = granted((disk, true), fds, false, Noting(&asked))?;
            Ok::<_, String>((disk.kind(), disk.geometry().size, asked.into_inner().unwrap()))
        };
        let file = |lock_with_rings| DiskSpec::File { direct: false, lock_with_rings };
        let told = ExportSpec {
            size: 512,
            flags: 1,
            block_min: 1,
            block_preferred: 4096,
            block_max: 4096,
            structured: false,
        };
        let target = NbdTarget { export: String::new(), tls: None };
        let nbd = DiskSpec::Nbd(NbdSpec { target, reconnect: None, told });
        assert_eq!(opened(DiskSpec::Null { size: 1024 }, 0), Ok(("null", 1024, vec![])));
        assert_eq!(opened(nbd, 0), Ok(("null", 512, vec!["nbd"])));
        assert_eq!(opened(file(false), 2), Ok(("file", 8192, vec![])));
        assert_eq!(opened(file(true), 2), Ok(("file", 8192, vec!["lock"])));
        for (disk, fds, problem) in [
            (DiskSpec::Memory { size: 4096 }, 0, "without its memory"),
            (file(false), 1, "without the descriptors of its file"),
        ] {
            let error = opened(disk, fds).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}

//! Saves the devices of the control API for the next process: one file each, in
//! `state_dir`/devices.

use super::admit::admitted;
use crate::model::Keys;
use manyring_config as config;
use manyring_config::plan::{Found, Plan, Wanted, is_device_name};
use manyring_serve::assemble::AssembleError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A change of a saved device. `text`: the keys of the request and the user who asked; `None`:
/// remove.
#[derive(Debug)]
pub(super) struct Keep {
    pub(super) name: String,
    pub(super) text: Option<(String, u32)>,
}

/// The contents of a device's file.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// The id of the user who asked for the device.
    uid: u32,
    /// The keys of the device and their values, as in the request.
    device: Value,
}

/// The folder of saved devices. `None`: without `state_dir`, devices of the control API are lost
/// when the process ends.
#[derive(Clone, Debug)]
pub(super) struct Kept(Option<PathBuf>);

/// The contents of a device's file before a change.
#[derive(Debug)]
pub(super) struct Former {
    path: Option<PathBuf>,
    text: Option<Vec<u8>>,
}

impl Kept {
    /// Creates the folder, which only this user may read.
    ///
    /// # Errors
    /// Errors of the system. `PermissionDenied`: another user could add devices to the folder.
    pub(super) fn open(state_dir: Option<&Path>) -> io::Result<Self> {
        let Some(state_dir) = state_dir else { return Ok(Self(None)) };
        let folder = state_dir.join("devices");
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        for folder in [state_dir, &folder] {
            let found = std::fs::metadata(folder)?;
            let owners = [0, rustix::process::geteuid().as_raw()];
            if found.mode() & 0o022 != 0 || !owners.contains(&found.uid()) {
                let problem = format!("{}: writable by others", folder.display());
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
            }
        }
        Ok(Self(Some(folder)))
    }

    /// Loads the saved devices, in the order of their names. A file that cannot be loaded is
    /// logged, and stays in the folder.
    pub(super) fn devices(&self, allowed: &[PathBuf]) -> Vec<Wanted> {
        let Some(folder) = &self.0 else { return Vec::new() };
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        let is_one = |path: &&PathBuf| path.extension().is_some_and(|end| end == "json");
        let read = |path: &PathBuf| {
            let device = read(path, allowed);
            let told = |error: &String| {
                tracing::error!(path = %path.display(), error, "loading a saved device failed");
            };
            device.inspect_err(told).ok()
        };
        paths.iter().filter(is_one).filter_map(read).collect()
    }

    /// Returns the path of a device's file; `None` for a name that no device can have, such as
    /// `../other`.
    fn path(&self, name: &str) -> Option<PathBuf> {
        let folder = self.0.as_ref().filter(|_| is_device_name(name))?;
        Some(folder.join(format!("{name}.json")))
    }

    /// Returns the saved record of a device with new values of these keys; `None` if no record of
    /// the device is saved.
    pub(super) fn merged(&self, name: &str, keys: &Keys) -> Option<Keep> {
        let text = std::fs::read_to_string(self.path(name)?).ok()?;
        let mut record: Record = serde_json::from_str(&text).ok()?;
        let device = record.device.as_object_mut()?;
        for (key, value) in keys {
            match (device.get_mut(key), value) {
                // An object (`limit`) keeps the keys that the request does not name.
                (Some(Value::Object(kept)), Value::Object(with)) => kept.extend(with.clone()),
                _ => _ = device.insert(key.clone(), value.clone()),
            }
            if let Some(Value::Object(kept)) = device.get_mut(key) {
                kept.retain(|_, value| !value.is_null());
            }
        }
        // Save the user who created the device, not the user who patches it: paths are checked
        // against the rights of the user who named them.
        let text = Some((record.device.to_string(), record.uid));
        Some(Keep { name: name.to_owned(), text })
    }

    /// Writes or removes the file of a device; the change is durable (fsync) when this returns.
    /// Blocks as long as the disk takes.
    pub(super) fn change(&self, keep: &Keep) -> io::Result<Former> {
        let (Some(folder), Some(path)) = (&self.0, self.path(&keep.name)) else {
            return Ok(Former { path: None, text: None });
        };
        let former = match std::fs::read(&path) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let text = keep.text.as_ref().map(|(text, uid)| {
            let device = serde_json::from_str(text).unwrap_or_default();
            serde_json::to_vec(&Record { uid: *uid, device }).unwrap_or_default()
        });
        let differs = text != former;
        let before = Former { path: Some(path.clone()), text: former };
        if differs && let Err(error) = put(folder, &path, text.as_deref()) {
            // The rename may have succeeded although the fsync of the folder failed. Undo it: a
            // change that is refused now must not come into effect with the next start.
            before.restore();
            return Err(error);
        }
        Ok(before)
    }
}

impl Former {
    /// Restores the file of a device after a failed change. May block.
    pub(super) fn restore(&self) {
        let Some(path) = &self.path else { return };
        if std::fs::read(path).ok() == self.text {
            return;
        }
        let folder = path.parent().unwrap_or(Path::new("."));
        if let Err(error) = put(folder, path, self.text.as_deref()) {
            tracing::error!(path = %path.display(), %error, "rolling back a change failed");
        }
    }
}

/// Adds the saved devices to the plan. A saved device that conflicts with the rest of the plan is
/// logged, and not served.
pub(super) fn with_kept(plan: &Plan) -> Result<(Plan, Kept), AssembleError> {
    let state_dir = plan.daemon.state_dir.as_deref();
    let failed = |source| AssembleError::StateDir { at: plan.daemon.place.at("state_dir"), source };
    let kept = Kept::open(state_dir).map_err(failed)?;
    let mut all = plan.clone();
    for device in kept.devices(&plan.daemon.allow_paths) {
        let name = &device.plan().name;
        let more = match all.device(name).is_some() {
            true => Err("the name is already used in the configuration".to_owned()),
            false => Ok(all.clone().with(&device)),
        };
        let good = more.and_then(|more| match more.check_again(more.has_captures()) {
            Found::Good => Ok(more),
            Found::Shared(error) | Found::Wrong(error) => Err(error.to_string()),
        });
        match good {
            Ok(more) => all = more,
            Err(error) => tracing::error!(device = name, error, "loading a saved device failed"),
        }
    }
    Ok((all, kept))
}

fn read(path: &Path, allowed: &[PathBuf]) -> Result<Wanted, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let record: Record = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let device = config::device(&name, &record.device.to_string())?;
    admitted(device, record.uid, allowed).map_err(|denied| denied.to_string())
}

/// Replaces a file by one with this text, or removes it (`None`); durable when it returns.
fn put(folder: &Path, path: &Path, text: Option<&[u8]>) -> io::Result<()> {
    match text {
        None => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        },
        Some(text) => {
            let new = path.with_extension("new");
            let written = write(&new, text).and_then(|()| std::fs::rename(&new, path));
            // Remove the incomplete file: the file system may be full.
            written.inspect_err(|_| drop(std::fs::remove_file(&new)))?;
        }
    }
    File::open(folder)?.sync_all()
}

fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(text)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(name: &str, text: Option<&str>) -> Keep {
        Keep { name: name.to_owned(), text: text.map(|text| (text.to_owned(), 0)) }
    }

    #[test]
    fn what_is_kept_is_there_again_and_a_change_can_be_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let kept = Kept::open(Some(folder.path())).unwrap();
        let disk = |size| format!(r#"{{"kind": "blk", "socket_path": "/s", "null": "{size}G"}}"#);
        kept.change(&keep("b", Some(&disk(1)))).unwrap();
        kept.change(&keep("a", Some(&disk(2)))).unwrap();
        let names = || -> Vec<_> {
            kept.devices(&[]).iter().map(|device| device.plan().name.clone()).collect()
        };
        assert_eq!(names(), ["a", "b"]);
        let former = kept.change(&keep("a", None)).unwrap();
        assert_eq!(names(), ["b"]);
        former.restore();
        assert_eq!(names(), ["a", "b"]);
        std::fs::write(folder.path().join("devices/c.json"), "{").unwrap();
        assert_eq!(names(), ["a", "b"], "one that is not understood costs no other one");
    }

    #[test]
    fn a_folder_that_others_may_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(folder.path(), open).unwrap();
        let error = Kept::open(Some(folder.path())).unwrap_err();
        assert!(error.to_string().contains("writable by others"), "{error}");
    }
}

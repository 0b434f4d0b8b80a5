//! Where a socket appears, and whose files are left alone.

use super::*;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::AtomicBool;

/// Binds with owner and mode in a runtime of its own.
fn bind(path: &Path, mode: u32) -> Result<Listener, ListenError> {
    let permissions = SocketPermissions { mode: Some(mode), ..SocketPermissions::default() };
    Listener::bind(path, permissions)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_socket_appears_with_its_mode_and_leaves_nothing_else() {
    let (runtime, folder) = (runtime(), tempfile::tempdir().unwrap());
    let _inside = runtime.enter();
    let path = folder.path().join("s");
    let listener = bind(&path, 0o606).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o606);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert!(matches!(bind(&path, 0o600), Err(ListenError::Taken { .. })));
    drop(listener);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_socket_that_is_bound_is_seen_when_it_is_named_and_leaves_nothing_if_it_never_is() {
    let (runtime, folder) = (runtime(), tempfile::tempdir().unwrap());
    let _inside = runtime.enter();
    let path = folder.path().join("s");
    let unnamed = || Unnamed::bind(&path, SocketPermissions::default()).unwrap();
    drop(unnamed());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let (first, second) = (unnamed(), unnamed());
    assert!(!path.exists());
    let first = first.publish().unwrap();
    let inode = std::fs::metadata(&path).unwrap().ino();
    // Another takes its place, and its name stays when the first one goes.
    let second = second.publish().unwrap();
    drop(first);
    assert_ne!(std::fs::metadata(&path).unwrap().ino(), inode);
    drop(second);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// In a container every process has the same number, and one that was killed may have left its
/// folder behind.
#[test]
fn folders_that_a_killed_process_has_left_are_in_nobodys_way() {
    let (runtime, folder) = (runtime(), tempfile::tempdir().unwrap());
    let _inside = runtime.enter();
    let next = COUNTER.load(Ordering::Relaxed);
    for number in next..next + 20 {
        let left = folder.path().join(format!(".mr-{}-{number}", std::process::id()));
        std::fs::create_dir(&left).unwrap();
        std::fs::write(left.join("s"), "").unwrap();
    }
    let path = folder.path().join("s");
    let listener = bind(&path, 0o600).unwrap();
    assert!(path.exists());
    drop(listener);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 20);
}

#[test]
fn a_folder_in_which_everybody_may_replace_names_is_refused() {
    let (runtime, folder) = (runtime(), tempfile::tempdir().unwrap());
    let _inside = runtime.enter();
    let path = folder.path().join("s");
    chmod(folder.path(), 0o777);
    let error = bind(&path, 0o600).unwrap_err().to_string();
    assert!(error.contains("any user can replace files") && error.contains("0777"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    chmod(folder.path(), 0o1777);
    bind(&path, 0o600).unwrap();
}

/// Puts a symlink to `victim` in the place of every name that the listener makes for a while.
fn race(folder: &Path, victim: &Path, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(b".mr-") {
                let aside = folder.join("aside");
                let _ = std::fs::rename(entry.path(), &aside);
                let _ = symlink(victim, entry.path());
                let _ = std::fs::remove_file(&aside);
                let _ = std::fs::remove_dir_all(&aside);
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

#[test]
fn a_name_that_becomes_a_symlink_changes_no_other_file() {
    let (runtime, folder) = (runtime(), tempfile::tempdir().unwrap());
    let _inside = runtime.enter();
    let victim = folder.path().join("victim");
    std::fs::write(&victim, b"secret").unwrap();
    chmod(&victim, 0o600);
    let shared = folder.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    let (is_over, path) = (AtomicBool::new(false), shared.join("s"));
    std::thread::scope(|scope| {
        scope.spawn(|| race(&shared, &victim, &is_over));
        // The other thread ends also where this one panics.
        let binds = || {
            for _ in 0..3000 {
                // It may fail while its names vanish: what counts is the other file.
                drop(bind(&path, 0o666));
            }
        };
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(binds));
        is_over.store(true, Ordering::Relaxed);
        done.unwrap();
    });
    assert_eq!(std::fs::metadata(&victim).unwrap().mode() & 0o7777, 0o600);
}

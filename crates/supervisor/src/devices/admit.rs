//! Checks which files a user may name over the control API. Root and the daemon's own user may name
//! every file, since they can open it themselves. The daemon opens files with rights that any other
//! user lacks, so the paths of such a user must lie in folders that the operator allows.

use manyring_config::plan::{Pinned, PortKind, SocketPlan, Wanted};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a user may not add a device, in one sentence that begins with the key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct Denied {
    key: &'static str,
    problem: String,
}

/// `queue_workers` of an unprivileged user's device may name workers below this number: every
/// device process has an io_uring for each of them from its start.
const WORKERS_MAX: usize = 16;

/// True for an unprivileged user, neither root nor the daemon's own user: such a user may name only
/// paths that the operator allows.
pub fn is_bound(uid: u32) -> bool {
    uid != 0 && uid != rustix::process::geteuid().as_raw()
}

/// Checks that this user may add the device with these values, and returns the device. `allowed`:
/// the folders of `allow_paths`. This opens no file: [`Wanted::find`] later looks for the device's
/// files below these folders only, and pins them.
pub fn admitted(device: Wanted, uid: u32, allowed: &[PathBuf]) -> Result<Wanted, Denied> {
    if !is_bound(uid) {
        return Ok(device);
    }
    let folder_of = |path: &Path| path.parent().unwrap_or(Path::new("/")).to_path_buf();
    let only_owner =
        |key| Denied { key, problem: "permitted to root and the daemon's user only".to_owned() };
    let mut device = device;
    let plan = match &mut device {
        Wanted::Blk(blk) => {
            let blk = Arc::make_mut(blk);
            blk.disk.bind(allowed).map_err(only_owner)?;
            &mut blk.device
        }
        Wanted::Net(net) => {
            let net = Arc::make_mut(net);
            let PortKind { key, is_for_all, .. } = net.port.kind();
            if !is_for_all {
                return Err(only_owner(key));
            }
            if net.pcap.is_some() {
                return Err(only_owner("pcap"));
            }
            &mut net.device
        }
    };
    if plan.front_end.memory_on_disk {
        return Err(only_owner("memory_on_disk"));
    }
    // The user's front-end would be served in the process of that domain, beside guests of other
    // users.
    if plan.domain.is_some() {
        return Err(only_owner("domain"));
    }
    // A process with more workers needs more io_urings, whose memory cannot be swapped.
    if plan.queue_workers.iter().any(|worker| *worker >= WORKERS_MAX) {
        return Err(only_owner("queue_workers"));
    }
    match &mut plan.socket {
        SocketPlan::Listen { path, folder, access } => {
            if !access.is_default() {
                return Err(only_owner("socket_owner"));
            }
            *folder = Some(Pinned::new(&folder_of(path), allowed));
        }
        SocketPlan::Connect { .. } => return Err(only_owner("client")),
        SocketPlan::Fd(_) => return Err(only_owner("fd")),
    }
    plan.owner = Some(uid);
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_config as config;

    const OTHER: u32 = 4711;

    #[test]
    fn another_user_has_only_what_the_operator_allows() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("vms")).unwrap();
        std::fs::write(at("vms/a.img"), [0; 4096]).unwrap();
        std::fs::write(at("secret"), [0; 4096]).unwrap();
        let may = |uid: u32, keys: &str| {
            let text = keys.replace('@', folder.path().to_str().unwrap());
            let device = config::device("a", &format!("{{{text}}}")).unwrap();
            let admitted = admitted(device, uid, &[at("vms")]).map_err(|denied| denied.key)?;
            admitted.find().map_err(|unfound| unfound.key)
        };
        let disk = r#""kind": "blk", "file": "@/vms/a.img", "socket_path": "@/vms/s""#;
        assert_eq!(may(OTHER, disk), Ok(()));
        let pinned = disk.replace("@/vms/s\"", "@/vms/s\", \"queue_workers\": [15]");
        assert_eq!(may(OTHER, &pinned), Ok(()));
        for (from, to, key) in [
            ("@/vms/a.img", "@/secret", "file"),
            ("@/vms/s", "@/s", "socket_path"),
            ("@/vms/s\"", "@/vms/s\", \"client\": true", "client"),
            ("@/vms/s\"", "@/vms/s\", \"socket_owner\": 0", "socket_owner"),
            ("@/vms/s\"", "@/vms/s\", \"memory_on_disk\": true", "memory_on_disk"),
            ("@/vms/s\"", "@/vms/s\", \"domain\": \"b\"", "domain"),
            ("@/vms/s\"", "@/vms/s\", \"queue_workers\": [16]", "queue_workers"),
            ("\"file\": \"@/vms/a.img\"", "\"memory\": \"1T\"", "memory"),
            ("\"file\": \"@/vms/a.img\"", "\"nbd\": \"nbd://h\"", "nbd"),
            ("/a.img\"", "/a.img\", \"format\": \"qcow2\"", "format"),
        ] {
            let other = disk.replace(from, to);
            assert_eq!(may(OTHER, &other), Err(key), "{other}");
            assert_eq!(may(0, &other), Ok(()));
        }
        let net = r#""kind": "net", "tap": "t0", "socket_path": "@/vms/s""#;
        assert_eq!(may(OTHER, net), Err("tap"));
    }
}

//! Refuses paths with a `~` or `$` that a shell would have expanded. In a configuration file, or in
//! quotes, no shell expands them, and the path would name a folder that is called `~` or `$HOME`.

use super::{Place, Plan, PlanError, SocketPlan, XenPlan};
use std::path::{Path, PathBuf};

/// Checks every path of a plan. A path with `~` or `$` is accepted only if a folder of this very
/// name exists.
pub(super) fn check(plan: &Plan) -> Result<(), PlanError> {
    let daemon = &plan.daemon;
    for (path, key) in daemon.controls() {
        check_one(Some(path), &daemon.place, key)?;
    }
    check_one(daemon.state_dir.as_deref(), &daemon.place, "state_dir")?;
    for device in plan.devices() {
        if let SocketPlan::Listen { path, .. } | SocketPlan::Connect { path } = &device.socket {
            check_one(Some(path), &device.place, "socket_path")?;
        }
    }
    for blk in &plan.blk {
        if let Some(path) = blk.disk.kind("").path {
            check_one(Some(path), &blk.device.place, "file")?;
        }
    }
    for net in &plan.net {
        check_one(net.pcap.as_deref(), &net.device.place, "pcap")?;
    }
    for xen in &plan.xen_blk {
        check_one(Some(&xen.state_dir), &xen.place, "state_dir")?;
        match &xen.xen {
            XenPlan::Real { xenstore } => check_one(xenstore.as_deref(), &xen.place, "xenstore")?,
            XenPlan::Simulated { socket } => check_one(Some(socket), &xen.place, "simulated")?,
        }
    }
    Ok(())
}

fn check_one(path: Option<&Path>, place: &Place, key: &str) -> Result<(), PlanError> {
    match path.and_then(unexpanded) {
        Some(problem) => place.error(key, problem),
        None => Ok(()),
    }
}

/// Returns the error for a path with a `~` or `$` that a shell would have expanded, if no file of
/// this very name exists.
pub fn unexpanded(path: &Path) -> Option<String> {
    let mut so_far = PathBuf::new();
    for (index, part) in path.components().enumerate() {
        so_far.push(part);
        let text = part.as_os_str().to_string_lossy();
        let sign = if index == 0 && text.starts_with('~') {
            '~'
        } else if text.split('$').skip(1).any(is_variable) {
            '$'
        } else {
            continue;
        };
        if so_far.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
            let path = path.display();
            return Some(format!(
                "{path}: there is no {text:?}, and Manyring does not expand {sign}: write the \
                 whole path"
            ));
        }
    }
    None
}

/// True if the text behind a `$` begins like the name of a variable.
fn is_variable(behind: &str) -> bool {
    behind.starts_with(|c: char| c == '{' || c == '_' || c.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_shell_would_replace_and_nobody_has_made_is_meant() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("$made"), []).unwrap();
        for (path, sign) in [
            (PathBuf::from("~/x.img"), Some('~')),
            (PathBuf::from("~user/x.img"), Some('~')),
            (at("$HOME/x.img"), Some('$')),
            (at("${vm}.img"), Some('$')),
            (at("a-$vm.img"), Some('$')),
            (at("$made"), None),
            (at("~"), None),
            (at("x~"), None),
            (at("a$1"), None),
            (at("a$"), None),
        ] {
            let found = unexpanded(&path);
            let words = sign.map(|sign| format!("does not expand {sign}: "));
            let agrees = match (&found, &words) {
                (Some(found), Some(words)) => found.contains(words),
                (found, words) => found.is_none() && words.is_none(),
            };
            assert!(agrees, "{}: {found:?}", path.display());
        }
    }
}

//! The sandbox of a helper: its children may write only the image, read only the files that the
//! image names, and run installed programs. They have no network, and can signal only each other.
//!
//! ```text
//! names      qemu-img says which files the image names, on a thread that can only read files: an
//!            image is hostile input
//! enter      the thread that is the parent of the children drops its rights, so that each child
//!            begins without them
//! ```
//! qemu-storage-daemon opens the image, and each file that the image names, by its path. So a
//! child gets no descriptors, and keeps the daemon's user, to whom these files belong. The rules
//! of landlock hold for the files themselves: a file that replaces the image at its path cannot be
//! opened.

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use nix::sched::{CloneFlags, unshare};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const ABI_MAX: ABI = ABI::V6;
/// The program that reports which other files an image names.
const LOOKS: &str = "qemu-img";
/// Folders of programs and libraries, and the files in which the kernel reports its state.
const SHOWN: [&str; 13] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/gnu/store",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/proc",
    "/sys",
];
/// Devices that every program may use.
const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];
/// Most file names that are read from an image.
const NAMES_MAX: usize = 256;

/// The files that a helper may open for an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ImageFiles {
    /// The file that the plan names.
    image: PathBuf,
    /// Files that the image names: backing files, data files, extents. No list of the operator
    /// confirms these names: a compromised child could write any name into the image.
    named: Vec<PathBuf>,
}

impl ImageFiles {
    /// Returns the image and the files that it names; only the image if `qemu-img` cannot read it.
    /// May block as long as the host's storage does.
    pub(super) fn of(image: &Path, format: &str) -> Self {
        let (path, format) = (image.to_owned(), format.to_owned());
        let look = move || {
            // On a kernel without landlock this fails, and `qemu-img` runs with the daemon's
            // rights.
            let _ = only_reads();
            let mut command = Command::new(LOOKS);
            command.args(["info", "--backing-chain", "-U", "--output=json", "-f"]).arg(format);
            let output = command.arg(path).stdin(Stdio::null()).stderr(Stdio::null()).output();
            output.ok().and_then(|output| serde_json::from_slice(&output.stdout).ok())
        };
        let thread = std::thread::Builder::new().name("disk-helper".to_owned()).spawn(look);
        let said: Option<Value> = thread.ok().and_then(|thread| thread.join().ok()).flatten();
        Self::from_info(image, &said.unwrap_or_default())
    }

    /// Parses the answer of `qemu-img info --backing-chain`.
    fn from_info(image: &Path, said: &Value) -> Self {
        let mut files = Self { image: image.to_owned(), named: Vec::new() };
        for (at, layer) in said.as_array().into_iter().flatten().take(NAMES_MAX).enumerate() {
            let Some(name) = layer["filename"].as_str() else { continue };
            let name = image.parent().unwrap_or(image).join(name);
            let data = &layer["format-specific"]["data"];
            let extents = data["extents"].as_array().into_iter().flatten().take(NAMES_MAX);
            let others = extents.map(|extent| &extent["filename"]).chain([&data["data-file"]]);
            let folder = name.parent().unwrap_or(&name).to_owned();
            let others = others.filter_map(Value::as_str).map(|other| folder.join(other));
            files.named.extend(others);
            if at > 0 {
                files.named.push(name);
            }
        }
        files
    }
}

/// Restricts the calling thread, and all children that it starts, to the rights that a helper of
/// this image needs. The error names the parts of the sandbox that the kernel lacks.
pub(super) fn enter(files: &ImageFiles, is_read_only: bool) -> Result<(), String> {
    // Without the right to make a network namespace, only landlock restricts the network, and
    // landlock restricts only TCP.
    let _ = unshare(CloneFlags::CLONE_NEWNET);
    let reads = AccessFs::ReadFile | AccessFs::ReadDir;
    let image = AccessFs::ReadFile | AccessFs::IoctlDev;
    let written = match is_read_only {
        true => image,
        false => image | AccessFs::WriteFile | AccessFs::Truncate,
    };
    restrict(|rules| {
        let rules = allow(rules, SHOWN.map(Path::new), reads | AccessFs::Execute)?;
        let devices = AccessFs::ReadFile | AccessFs::WriteFile;
        let rules = allow(rules, DEVICES.map(Path::new), devices)?;
        let rules = allow(rules, files.named.iter().map(PathBuf::as_path), image)?;
        allow(rules, [files.image.as_path()], written)
    })
}

/// Restricts the calling thread, and all children that it starts, to reading files.
fn only_reads() -> Result<(), String> {
    let _ = unshare(CloneFlags::CLONE_NEWNET);
    let reads = AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::Execute;
    restrict(|rules| {
        let rules = allow(rules, [Path::new("/")], reads)?;
        allow(rules, DEVICES.map(Path::new), AccessFs::ReadFile | AccessFs::WriteFile)
    })
}

fn restrict(
    allowed: impl FnOnce(RulesetCreated) -> Result<RulesetCreated, RulesetError>,
) -> Result<(), String> {
    let enter = || {
        let rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(ABI_MAX))?
            .handle_access(AccessNet::from_all(ABI_MAX))?
            .scope(Scope::from_all(ABI_MAX))?
            .create()?;
        allowed(rules)?.restrict_self()
    };
    match enter() {
        Ok(status) if status.ruleset == RulesetStatus::NotEnforced => {
            Err("landlock: not supported by this kernel".to_owned())
        }
        Ok(_) => Ok(()),
        Err(error) => Err(format!("landlock: {error}")),
    }
}

/// Adds a rule that allows `access` to these files, and below those that are folders. A path
/// without a file is skipped, and so stays forbidden.
fn allow<'a>(
    mut rules: RulesetCreated,
    paths: impl IntoIterator<Item = &'a Path>,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    for path in paths {
        let Ok(fd) = PathFd::new(path) else { continue };
        let of_files = AccessFs::from_file(ABI_MAX);
        let access = if path.is_dir() { access } else { access & of_files };
        rules = rules.add_rule(PathBeneath::new(fd, access))?;
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{getppid, test_kill_process};
    use serde_json::json;
    use std::fs::{File, OpenOptions};
    use std::io::{self, ErrorKind, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_files_that_an_image_names_are_those_of_all_its_layers() {
        let said = json!([
            {"filename": "/i/top.qcow2", "format-specific": {"data": {"data-file": "top.raw"}}},
            {"filename": "/b/middle.vmdk", "format-specific": {"data": {"extents": [
                {"filename": "/b/middle-flat.vmdk"}, {"filename": 7}]}}},
            {"filename": "json:{\"driver\": \"nbd\"}"}, {"no": "name"}, 5,
        ]);
        let files = ImageFiles::from_info(Path::new("/i/top.qcow2"), &said);
        assert_eq!(files.image, Path::new("/i/top.qcow2"));
        let flat = ["/i/top.raw", "/b/middle-flat.vmdk", "/b/middle.vmdk"];
        let named = flat.into_iter().chain(["/i/json:{\"driver\": \"nbd\"}"]);
        assert_eq!(files.named, named.map(PathBuf::from).collect::<Vec<_>>());
        let alone = ImageFiles::from_info(Path::new("/i/a"), &Value::Null);
        assert_eq!(alone, ImageFiles { image: "/i/a".into(), named: Vec::new() });
    }

    fn refused(what: &str, result: io::Result<()>) {
        let kind = result.expect_err(what).kind();
        assert_eq!(kind, ErrorKind::PermissionDenied, "{what}");
    }

    #[test]
    fn behind_its_walls_a_helper_has_its_image_and_nothing_else_of_the_daemon() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        for name in ["image", "base", "other", "state.json"] {
            std::fs::write(path(name), name).unwrap();
        }
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let parent = getppid().unwrap();
        test_kill_process(parent).unwrap();
        let files = ImageFiles { image: path("image"), named: vec![path("base")] };
        let tries = |is_read_only: bool| {
            if let Err(lacks) = enter(&files, is_read_only) {
                println!("not tested: {lacks}");
                return;
            }
            let write = |name: &str| OpenOptions::new().write(true).open(path(name));
            let read = |name: &str| File::open(path(name)).map(drop);
            read("image").unwrap();
            read("base").unwrap();
            match is_read_only {
                true => refused("write an image that is only read", write("image").map(drop)),
                false => {
                    let mut image = write("image").unwrap();
                    image.write_all(b"more").unwrap();
                    image.set_len(1 << 20).unwrap();
                }
            }
            refused("write what the image names", write("base").map(drop));
            refused("read another image", read("other"));
            refused("write another image", write("other").map(drop));
            refused("write the state", write("state.json").map(drop));
            refused("make a file", File::create(path("new")).map(drop));
            refused("remove a file", std::fs::remove_file(path("state.json")));
            refused("rename a file", std::fs::rename(path("other"), path("base")));
            assert!(TcpStream::connect(address).is_err(), "there is a network");
            test_kill_process(parent).expect_err("it signals the daemon");
            // Its own programs run.
            let run = Command::new("sh").args(["-c", "kill -0 $$ && echo > /dev/null"]).status();
            assert!(run.unwrap().success());
            let script = format!("cat {}", path("other").display());
            let run = Command::new("sh").args(["-c", &script]).stderr(Stdio::null()).status();
            assert!(!run.unwrap().success(), "a child has more");
        };
        std::thread::scope(|scope| {
            // Each on a thread of its own, which cannot be used for anything else afterwards.
            for is_read_only in [false, true] {
                scope.spawn(move || tries(is_read_only)).join().unwrap();
            }
        });
        assert_eq!(std::fs::read_to_string(path("state.json")).unwrap(), "state.json");
    }

    #[test]
    fn the_files_of_a_true_image_are_found() {
        let place = tempfile::tempdir().unwrap();
        let [base, top] = ["base.qcow2", "top.qcow2"].map(|name| place.path().join(name));
        let create = |more: &[&str], path: &Path| {
            let mut command = Command::new(LOOKS);
            command.current_dir(place.path()).args(["create", "-q", "-f", "qcow2"]).args(more);
            command
                .arg(path)
                .arg("4M")
                .stdout(Stdio::null())
                .status()
                .map(|status| status.success())
        };
        if create(&[], &base).is_err() {
            println!("not tested: there is no {LOOKS} here");
            return;
        }
        assert!(create(&["-b", "base.qcow2", "-F", "qcow2"], &top).unwrap());
        let files = ImageFiles::of(&top, "qcow2");
        assert_eq!(files, ImageFiles { image: top, named: vec![base] });
    }
}

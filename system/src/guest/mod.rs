//! A real Linux guest: booted, talked to over its console, ended.

mod backports;
mod cable;
pub(crate) mod cpio;
mod emulator;
pub(crate) mod fio;
pub(crate) mod initramfs;
pub(crate) mod kernel;
mod kvm;
pub mod libvirt;
mod machine;
mod monitor;
pub(crate) mod newest;

pub use cable::boot_on_cable;
pub use emulator::Emulator;
pub use kernel::{Kernel, Kind, cache};
pub(crate) use machine::{environment, is_memory_on_disk, memory_folder};
pub(crate) use monitor::Monitor;

use crate::cleanup::{self, Folder};
use crate::command::wait_for;
use crate::daemon::ticks;
use crate::{Context, Outcome, check};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A network interface of a guest, `eth0`.
#[derive(Clone, Copy, Debug)]
pub struct Net<'a> {
    /// Its vhost-user socket.
    pub socket: &'a Path,
    /// Queue pairs (QEMU; User Mode Linux asks the device).
    pub pairs: u32,
}

/// The devices and the programs of a guest.
#[derive(Clone, Copy, Debug)]
pub struct GuestOptions<'a> {
    /// The vhost-user socket of its disk.
    pub socket: Option<&'a Path>,
    /// The sockets of further disks, in the order of their names: `vdb`, `vdc`, ..
    pub more_disks: &'a [&'a Path],
    /// Request queues of each disk (QEMU).
    pub queues: u32,
    /// QEMU offers the guest packed rings for it, if the back-end does.
    pub is_packed: bool,
    /// Its network interface.
    pub net: Option<Net<'a>>,
    /// Further properties of that device, each after a comma (QEMU).
    pub net_properties: &'a str,
    /// A second one, `eth1` (User Mode Linux).
    pub second_net: Option<Net<'a>>,
    /// The QEMU that runs it; the system's unless said.
    pub emulator: Option<&'a Emulator>,
    /// CPUs (QEMU).
    pub cpus: u32,
    /// The CPU of the host that the whole guest runs on; any unless said.
    pub host_cpu: Option<usize>,
    /// Programs beside busybox, mke2fs, e2fsck, blkdiscard, blockdev and fallocate: names, or
    /// paths whose last part is the name in the guest.
    pub programs: &'a [&'a str],
    /// Libraries in this tree are taken before the system's.
    pub root: Option<&'a Path>,
    /// The script that it runs: busybox sh, with the words of `init.sh`.
    pub script: &'a str,
    /// Show the console while it runs.
    pub is_shown: bool,
    /// A reboot starts it again (QEMU); else it ends it.
    pub can_reboot: bool,
    /// Devices can be plugged into `port0` and `port1`: where QEMU takes commands (QMP).
    pub monitor: Option<&'a Path>,
    /// The console also has a line for each message to a back-end (QEMU).
    pub is_traced: bool,
    /// It boots nothing: a guest that migrates comes in here (QEMU).
    pub incoming: Option<&'a Path>,
}

impl Default for GuestOptions<'_> {
    fn default() -> Self {
        Self {
            socket: None,
            more_disks: &[],
            queues: 1,
            is_packed: false,
            net: None,
            net_properties: "",
            second_net: None,
            emulator: None,
            cpus: 1,
            host_cpu: None,
            programs: &[],
            root: None,
            script: "",
            is_shown: false,
            can_reboot: false,
            monitor: None,
            is_traced: false,
            incoming: None,
        }
    }
}

/// Writes what a container with this host's programs needs to boot a guest in QEMU: a folder with
/// the kernel, the initramfs, and `run`, a script of a shell. The container has the folder at
/// `inside`; standard input and output of the script are the guest's console.
///
/// # Errors
/// The folder cannot be written.
pub(crate) fn for_container(
    kernel: &Kernel,
    options: &GuestOptions<'_>,
    folder: &Path,
    inside: &Path,
) -> Outcome {
    std::fs::create_dir_all(folder).context(folder.display())?;
    let GuestOptions { programs, root, script, .. } = options;
    initramfs::write(&folder.join("initramfs"), kernel.modules(), programs, *root, script)?;
    std::fs::copy(kernel.image(), folder.join("vmlinuz")).context(kernel.image().display())?;
    let kernel = kernel.inside(&inside.join("vmlinuz"));
    let command = machine::qemu(&kernel, options, &inside.join("initramfs"))?;
    let program = Emulator::of_system()?.words()[0].as_str();
    let words = command.get_args().skip_while(|word| *word != program);
    let quoted: Vec<_> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
    let run = folder.join("run");
    std::fs::write(&run, format!("exec {}\n", quoted.join(" "))).context(run.display())
}

/// Lines of the console that are told of a guest that has ended too early.
const LAST_LINES: usize = 20;
/// A boot of an emulated machine on a busy host takes this long at most.
const BOOT: Duration = Duration::from_secs(240);
/// A guest whose script has ended stops its devices; beside a loaded host that can take long, too.
const POWER_OFF: Duration = Duration::from_secs(300);
/// The last line of a kernel of User Mode Linux. Its process has been seen to stay after that, with
/// all its sockets closed.
const HALTED: &str = "reboot: System halted";
/// How long such a process may stay before the machine counts as off; it is killed with its guest.
const PROCESS_ENDS: Duration = Duration::from_secs(20);

/// A guest that was started; dropped, it is gone with everything it ran in.
#[derive(Debug)]
pub struct Guest {
    child: Child,
    console: PathBuf,
    shown: Option<usize>,
    /// Bytes of the console's file that count no more.
    forgotten: u64,
    /// Holds the initramfs and the files of UML or libvirt while the guest runs.
    folder: Folder,
    /// Where the console is copied to in the end, if it lies in the folder.
    kept: Option<PathBuf>,
}

impl Guest {
    /// Boots a guest and waits until it is up. Its console goes to the file `console`.
    ///
    /// # Errors
    /// It does not come up.
    pub fn boot(kernel: &Kernel, options: &GuestOptions<'_>, console: &Path) -> Outcome<Self> {
        let mut guest = Self::launch(kernel, options, console)?;
        let Err(error) = guest.until_up(BOOT) else { return Ok(guest) };
        // An emulated interrupt controller on a busy host: the guest's own, known failure.
        check(guest.said()?.contains("IO-APIC"), || error)?;
        eprintln!("xtask: the guest's timer did not work on this busy host, booting once more");
        drop(guest);
        let mut guest = Self::launch(kernel, options, console)?;
        guest.until_up(BOOT)?;
        Ok(guest)
    }

    /// Starts a machine that waits for a guest to come in by migration. Its console goes to the
    /// file `console`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn await_migration(
        kernel: &Kernel,
        options: &GuestOptions<'_>,
        console: &Path,
    ) -> Outcome<Self> {
        Self::launch(kernel, options, console)
    }

    fn launch(kernel: &Kernel, options: &GuestOptions<'_>, console: &Path) -> Outcome<Self> {
        let folder = Folder::new()?;
        let initramfs = folder.path().join("initramfs");
        initramfs::write(
            &initramfs,
            kernel.modules(),
            options.programs,
            options.root,
            options.script,
        )?;
        let command = match kernel.kind() {
            Kind::Uml => machine::uml(kernel, options, &initramfs),
            Kind::Qemu => machine::qemu(kernel, options, &initramfs)?,
        };
        Self::spawn(command, folder, options.is_shown.then_some(0), console)
    }

    fn spawn(
        mut command: Command,
        folder: Folder,
        shown: Option<usize>,
        console: &Path,
    ) -> Outcome<Self> {
        let log = File::create(console).context(console.display())?;
        let errors = log.try_clone().context(console.display())?;
        command.stdin(Stdio::piped()).stdout(log).stderr(errors);
        let child = command.spawn().context("starting the guest")?;
        cleanup::adopt(child.id());
        Ok(Self { child, console: console.to_owned(), shown, forgotten: 0, folder, kept: None })
    }

    /// Runs a machine whose firmware finds what to boot by itself: `program` with `arguments`. Its
    /// console, standard output, goes to the file `console`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn by_firmware(program: &str, arguments: &[String], console: &Path) -> Outcome<Self> {
        let mut command = machine::namespace(&GuestOptions::default());
        command.arg(program).args(arguments);
        Self::spawn(command, Folder::new()?, None, console)
    }

    /// Boots a guest that libvirt starts, with these elements of a domain's `<devices>`, and waits
    /// until it is up. Nothing can be typed at its console, which is copied to `kept` in the end.
    ///
    /// # Errors
    /// libvirt does not start it, or it does not come up.
    pub fn boot_by_libvirt(
        kernel: &Kernel,
        options: &GuestOptions<'_>,
        devices: &str,
        kept: &Path,
    ) -> Outcome<Self> {
        let folder = Folder::new()?;
        let initramfs = folder.path().join("initramfs");
        initramfs::write(
            &initramfs,
            kernel.modules(),
            options.programs,
            options.root,
            options.script,
        )?;
        let child = libvirt::start(kernel, options, devices, folder.path())?;
        cleanup::adopt(child.id());
        let (console, kept) = (folder.path().join("console"), Some(kept.to_owned()));
        let mut guest = Self { child, console, shown: None, forgotten: 0, folder, kept };
        libvirt::create(guest.folder.path())?;
        guest.until_up(BOOT)?;
        Ok(guest)
    }

    /// Plugs a device into a guest of libvirt, or unplugs it: `verb` is virsh's `attach-device` or
    /// `detach-device`.
    ///
    /// # Errors
    /// libvirt refuses.
    pub fn change_by_libvirt(&self, verb: &str, device: &str) -> Outcome {
        libvirt::change(self.folder.path(), verb, device)
    }

    /// Waits until the first program of its Linux runs.
    ///
    /// # Errors
    /// It does not, within `limit`.
    pub fn until_up(&mut self, limit: Duration) -> Outcome {
        self.until("the guest's boot", "GUEST_UP", limit)
    }

    /// True if it has ended.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn has_ended(&mut self) -> Outcome<bool> {
        Ok(self.child.try_wait().context("the guest")?.is_some())
    }

    /// Waits until the script has said `mark NAME` or `await NAME`.
    ///
    /// # Errors
    /// It failed, ended, or took longer than `limit`.
    pub fn reach(&mut self, name: &str, limit: Duration) -> Outcome {
        self.until(&format!("the guest's mark {name:?}"), &format!("GUEST_MARK {name}"), limit)
    }

    /// Lets a script go on that said `await NAME`.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn proceed(&mut self) -> Outcome {
        self.answer("")
    }

    /// Gives a script that reads a line this one.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn answer(&mut self, line: &str) -> Outcome {
        let console = self.child.stdin.as_mut().ok_or("the guest has no console")?;
        writeln!(console, "{line}").and_then(|()| console.flush()).context("the guest's console")
    }

    /// From now on only what it says later counts: the marks of another boot, say.
    ///
    /// # Errors
    /// The console cannot be read.
    pub fn forget(&mut self) -> Outcome {
        self.forgotten = std::fs::metadata(&self.console).context(self.console.display())?.len();
        Ok(())
    }

    /// Waits until the script has ended and the machine is off; gives the whole console.
    ///
    /// # Errors
    /// The script failed or took longer than `limit`.
    pub fn finish(mut self, limit: Duration) -> Outcome<String> {
        self.until("the end of the guest's script", "GUEST_DONE", limit)?;
        let mut halted = None;
        wait_for("the guest's power-off", POWER_OFF, || {
            let ended = self.child.try_wait().context("the guest")?;
            if ended.is_none() && self.said_since(self.forgotten)?.contains(HALTED) {
                let since = *halted.get_or_insert_with(Instant::now);
                // The kernel is off, and has closed its devices: only its process stays.
                if since.elapsed() > PROCESS_ENDS {
                    return Ok(Some(()));
                }
            }
            Ok(ended.map(drop))
        })?;
        self.said()
    }

    fn until(&mut self, what: &str, line_start: &str, limit: Duration) -> Outcome {
        let reached = wait_for(what, limit, || {
            let has_ended = self.child.try_wait().context("the guest")?.is_some();
            if self.shown.is_some() {
                let said = self.said()?;
                self.show(&said);
            }
            let said = self.said_since(self.forgotten)?;
            if let Some(failure) = said.lines().find_map(|l| l.strip_prefix("GUEST_FAIL ")) {
                return Err(format!("the guest says: {}", failure.trim()));
            }
            let is_there = said.lines().any(|line| is_line(line, line_start));
            check(is_there || !has_ended, || {
                let status = self.child.try_wait().ok().flatten();
                let status = status.map_or_else(String::new, |status| status.to_string());
                let lines: Vec<_> = said.lines().collect();
                let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
                format!("{what}: the guest ended before ({status}); it said last:\n{last}")
            })?;
            Ok(is_there.then_some(()))
        });
        reached.map_err(|error| format!("{error}; {}", self.at_work()))
    }

    /// The CPU time of a guest that was waited for in vain: a guest that waits for a device's
    /// answer to a command runs in a loop, and one whose wake-up was lost sleeps.
    fn at_work(&self) -> String {
        // Our child has made the machine's namespace; the machine is the child of that one.
        let pid = self.child.id();
        let machine = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let machine = machine.ok().and_then(|pids| pids.split(' ').next()?.parse().ok());
        let ticks = || ticks(machine.unwrap_or(pid));
        let before = ticks();
        std::thread::sleep(Duration::from_secs(1));
        let (Ok(before), Ok(after)) = (before, ticks()) else { return "it has ended".to_owned() };
        format!("it takes {} of 100 ticks of CPU time", after.saturating_sub(before))
    }

    /// Everything the console has shown so far, in whole lines.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn said(&self) -> Outcome<String> {
        self.said_since(0)
    }

    /// The whole lines that the console has shown since [`Self::forget`].
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn said_lately(&self) -> Outcome<String> {
        self.said_since(self.forgotten)
    }

    /// The console's whole lines from this byte of its file on.
    fn said_since(&self, from: u64) -> Outcome<String> {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = File::open(&self.console)?;
            file.seek(SeekFrom::Start(from))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().context(self.console.display())?;
        let mut text = String::from_utf8_lossy(&bytes).replace('\r', "");
        text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
        Ok(text)
    }

    fn show(&mut self, said: &str) {
        if let Some(shown) = &mut self.shown {
            // Messages of the kernel from before its boot ended are not shown.
            let from = (*shown).max(said.find("GUEST_UP").unwrap_or(said.len()));
            let lines = said.get(from..).unwrap_or_default().lines();
            for line in lines.filter(|line| !line.starts_with("GUEST_MARK")) {
                println!("  guest | {}", line.strip_prefix("GUEST_").unwrap_or(line));
            }
            *shown = said.len();
        }
    }
}

fn is_line(line: &str, start: &str) -> bool {
    line.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
}

impl Drop for Guest {
    fn drop(&mut self) {
        // `unshare --kill-child`: the whole pid namespace goes with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        cleanup::forget(self.child.id());
        if let Some(kept) = &self.kept {
            let _ = std::fs::copy(&self.console, kept);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_a_whole_word() {
        assert!(is_line("GUEST_MARK filled", "GUEST_MARK filled"));
        assert!(is_line("GUEST_UP Linux 6.1", "GUEST_UP"));
        assert!(!is_line("GUEST_MARK filled2", "GUEST_MARK filled"));
        assert!(!is_line("x GUEST_UP", "GUEST_UP"));
    }
}

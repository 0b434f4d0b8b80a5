//! The emulated machine that runs Xen, and the scripts that its dom0 runs for us.

use super::images;
use super::parts::{Parts, stripped};
use super::stages::Stages;
use crate::cleanup::{self, Folder};
use crate::command::{child, wait_for};
use crate::daemon::ticks;
use crate::{Context, Outcome, check};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

/// Emulation on a busy host: boots and scripts take this long at most.
pub(super) const LIMIT: Duration = Duration::from_secs(600);

/// How to start the machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct MachineOptions<'a> {
    /// The `manyring` that dom0 has as `/host/manyring`.
    pub(super) manyring: &'a Path,
    /// The hotplug script that does nothing.
    pub(super) script: &'a Path,
    /// Where the logs go.
    pub(super) logs: &'a Path,
    /// dom0 has the QEMU that serves disks as qdisk.
    pub(super) has_qdisk: bool,
    /// CPUs of dom0.
    pub(super) dom0_cpus: u32,
    /// Time is the count of instructions that were run, one nanosecond each.
    pub(super) counts_instructions: bool,
}

/// Xen and its dom0 in QEMU; dropped, they are gone.
#[derive(Debug)]
pub(super) struct Machine {
    child: Child,
    log: PathBuf,
    /// `/host` of dom0. It holds what guests and the daemon say as well.
    share: PathBuf,
    /// Scripts that dom0 was given.
    runs: u32,
    /// The initramfs of dom0.
    _folder: Folder,
}

impl Machine {
    /// Boots Xen and waits until its tool stack is up.
    pub(super) fn boot(
        parts: &Parts,
        options: &MachineOptions<'_>,
        stages: &mut Stages,
    ) -> Outcome<Self> {
        let folder = Folder::new()?;
        let share = options.logs.join("dom0");
        if share.exists() {
            std::fs::remove_dir_all(&share).context(share.display())?;
        }
        std::fs::create_dir_all(&share).context(share.display())?;
        let initramfs = folder.path().join("dom0.cpio");
        stripped(options.manyring, &share.join("manyring"))?;
        if options.has_qdisk {
            Parts::need_qdisk()?;
        }
        let guest = folder.path().join("guest.cpio");
        // Each module that a guest of four CPUs loads has them interrupt each other, and all share
        // one emulated CPU: seconds, and minutes where instructions are counted.
        let mounts = !options.counts_instructions;
        images::guest(parts, mounts, folder.path(), &guest)?;
        images::dom0(parts, options, &guest, &initramfs)?;
        stages.end("initramfs of dom0 and of guests");
        let log = options.logs.join("xen.log");
        let console = File::create(&log).context(log.display())?;
        let mut command = child("qemu-system-x86_64");
        if options.counts_instructions {
            let clock = ["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"];
            command.args(clock);
        } else {
            command.args(["-accel", "tcg,thread=multi"]);
        }
        // A dom0 dies on CPUs with SMAP, which `max` has; svm and npt are for PVH guests. A second
        // emulated CPU only adds spinning where the host has few.
        command.args(["-cpu", "qemu64,+svm,+npt", "-m", "3G", "-smp", "1"]);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-nographic"]);
        command.args(["-serial", "stdio", "-kernel"]).arg(parts.xen());
        let xen = format!(
            "console=com1 com1=115200,8n1 dom0_mem=1280M,max:1280M dom0_max_vcpus={} noreboot",
            options.dom0_cpus
        );
        command.args(["-append", &xen, "-initrd"]);
        let dom0 = "console=hvc0 quiet loglevel=4 mitigations=off";
        // Commas separate the modules.
        let plain = |path: &Path| path.display().to_string().replace(',', ",,");
        command.arg(format!("{} {dom0},{}", plain(&parts.image()), plain(&initramfs)));
        command.arg("-virtfs").arg(format!(
            "local,path={},mount_tag=host,security_model=none,multidevs=remap",
            plain(&share)
        ));
        let errors = console.try_clone().context(log.display())?;
        command.stdin(Stdio::null()).stdout(console).stderr(errors);
        let child = command.spawn().context("starting QEMU")?;
        cleanup::adopt(child.id());
        let mut machine = Self { child, log, share, runs: 0, _folder: folder };
        for (said, stage) in [
            ("(XEN) Xen version", "QEMU's start to Xen's first words"),
            ("about to get started", "Xen's start to dom0's kernel"),
            ("DOM0_UP", "dom0's kernel to its tool stack"),
        ] {
            machine.says(stage, said)?;
            stages.end(stage);
        }
        Ok(machine)
    }

    /// Waits until its console has shown `said`.
    fn says(&mut self, what: &str, said: &str) -> Outcome {
        wait_for(what, LIMIT, || {
            self.lives()?;
            let bytes = std::fs::read(&self.log).context(self.log.display())?;
            Ok(String::from_utf8_lossy(&bytes).contains(said).then_some(()))
        })
    }

    /// The machine has not ended.
    pub(super) fn lives(&mut self) -> Outcome {
        let ended = self.child.try_wait().context("QEMU")?;
        check(ended.is_none(), || format!("QEMU has ended; see {}", self.log.display()))
    }

    /// Seconds of CPU time that the emulation has taken: what a quiet host would need.
    pub(super) fn cpu_seconds(&self) -> f64 {
        let ticks = u32::try_from(ticks(self.child.id()).unwrap_or(0)).unwrap_or(u32::MAX);
        let per_second = rustix::param::clock_ticks_per_second();
        f64::from(ticks) / f64::from(u32::try_from(per_second).unwrap_or(100))
    }

    /// A file that dom0 has as `/host/NAME`.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.share.join(name)
    }

    /// Writes a file that dom0 has as `/host/NAME`, all or nothing.
    pub(super) fn write(&self, name: &str, content: &str) -> Outcome {
        let (part, file) = (self.file("part"), self.file(name));
        std::fs::write(&part, content).context(part.display())?;
        std::fs::rename(&part, &file).context(file.display())
    }

    /// Runs a script in dom0, with the words of `words.sh`; gives what it said.
    ///
    /// # Errors
    /// It failed: the sentence holds the end of what it said.
    pub(super) fn run(&mut self, script: &str) -> Outcome<String> {
        self.runs += 1;
        let number = self.runs;
        self.write(&format!("run-{number}"), script)?;
        let (ended, said) =
            (self.file(&format!("ended-{number}")), self.file(&format!("said-{number}")));
        let status = wait_for("a script of dom0", LIMIT, || {
            self.lives()?;
            Ok(std::fs::read_to_string(&ended).ok())
        })?;
        let said = std::fs::read(&said).context(said.display())?;
        let said = String::from_utf8_lossy(&said).into_owned();
        let said = outcome(&status, said);
        said.map_err(|error| format!("dom0, script {number}: {error}"))
    }
}

/// The output of a script, or its last words if it failed.
pub(super) fn outcome(status: &str, said: String) -> Outcome<String> {
    if status.trim() == "0" {
        return Ok(said);
    }
    let reason = said.lines().find_map(|line| line.strip_prefix("FAIL "));
    let lines: Vec<_> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(12)..].join(" | ");
    Err(reason.map_or(format!("status {}: {last}", status.trim()), |r| format!("{r} ({last})")))
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        cleanup::forget(self.child.id());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_that_failed_says_why() {
        assert_eq!(outcome("0\n", "fine\n".into()), Ok("fine\n".into()));
        let error = outcome("1\n", "a\nFAIL no disk\n".into()).unwrap_err();
        assert!(error.starts_with("no disk (a | FAIL"), "{error}");
        assert!(outcome("2", "a\n\nb\n".into()).unwrap_err().contains("status 2: a | b"));
    }
}

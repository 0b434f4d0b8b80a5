//! A Xen guest, and the scripts it runs for us: they go in and out over its console.

use super::machine::{LIMIT, Machine, outcome};
use super::stages::Stages;
use crate::command::wait_for;
use crate::{Context, Outcome};

/// The configuration of a guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct DomainOptions<'a> {
    /// Its name, and that of its files.
    pub(super) name: &'static str,
    /// `pv` or `pvh`.
    pub(super) kind: &'a str,
    pub(super) cpus: u32,
    /// Its first disk, as `xl` reads it.
    pub(super) disk: &'a str,
}

/// A running guest.
#[derive(Debug)]
pub(super) struct Domain {
    name: &'static str,
    runs: u32,
}

impl Domain {
    /// Creates a guest with `xl` and waits until it is up.
    pub(super) fn create(
        machine: &mut Machine,
        options: &DomainOptions<'_>,
        stages: &mut Stages,
    ) -> Outcome<Self> {
        let name = options.name;
        let config = format!(
            "name = \"{name}\"\ntype = \"{}\"\nkernel = \"/guest/vmlinux\"\n\
             ramdisk = \"/guest/initramfs\"\nmemory = 384\nvcpus = {}\ntsc_mode = \"native\"\n\
             disk = [ \"{}\" ]\n\
             extra = \"console=hvc0 quiet loglevel=4 mitigations=off disk=no net=no\"\n\
             on_poweroff = \"destroy\"\non_crash = \"destroy\"\non_reboot = \"restart\"\n",
            options.kind, options.cpus, options.disk
        );
        machine.write(&format!("{name}.cfg"), &config)?;
        machine.run(&format!("create {name}"))?;
        stages.end(&format!("xl create {name} ({})", options.kind));
        let mut domain = Self { name, runs: 0 };
        domain.is_up(machine, 1)?;
        stages.end(&format!("{name}'s kernel to its first program"));
        Ok(domain)
    }

    /// Its name.
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Waits until it has come up `times` times.
    pub(super) fn is_up(&mut self, machine: &mut Machine, times: usize) -> Outcome {
        wait_for(&format!("the boot of {}", self.name), LIMIT, || {
            machine.lives()?;
            let said = self.said(machine)?;
            Ok((said.matches("GUEST_UP").count() >= times).then_some(()))
        })
    }

    /// The output of its console so far.
    pub(super) fn said(&self, machine: &Machine) -> Outcome<String> {
        let console = machine.file(&format!("console-{}", self.name));
        let bytes = std::fs::read(&console).context(console.display())?;
        Ok(String::from_utf8_lossy(&bytes).replace('\r', ""))
    }

    /// Runs a script in the guest, with the words of `guest.sh`; gives what it said.
    ///
    /// # Errors
    /// It failed: the sentence holds the end of what it said.
    pub(super) fn run(&mut self, machine: &mut Machine, script: &str) -> Outcome<String> {
        let number = self.begin(machine, script)?;
        self.end(machine, number)
    }

    /// Has a script run, and does not wait for its end.
    pub(super) fn begin(&mut self, machine: &mut Machine, script: &str) -> Outcome<u32> {
        self.runs += 1;
        let (name, number) = (self.name, self.runs);
        let file = format!("{name}-{number}");
        machine.write(&file, &format!("{}\nRUN {number}\n", script.trim()))?;
        machine.run(&format!("cat /host/{file} >/tmp/{name}.tty"))?;
        Ok(number)
    }

    /// Waits for the end of a script; gives what it said.
    ///
    /// # Errors
    /// As for [`Domain::run`].
    pub(super) fn end(&self, machine: &mut Machine, number: u32) -> Outcome<String> {
        let (status, said) = wait_for(&format!("a script of {}", self.name), LIMIT, || {
            machine.lives()?;
            Ok(parse_run(&self.said(machine)?, number))
        })?;
        let said = outcome(&status, said);
        said.map_err(|error| format!("{}, script {number}: {error}", self.name))
    }
}

/// The status of a script and what it said. Lines of the kernel may stand anywhere between.
fn parse_run(console: &str, number: u32) -> Option<(String, String)> {
    let (_, rest) = console.rsplit_once(&format!("RIG_BEGIN {number}\n"))?;
    let (said, end) = rest.split_once(&format!("RIG_END {number} "))?;
    let (status, _) = end.split_once('\n')?;
    Some((status.to_owned(), said.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_lies_between_its_begin_and_its_end() {
        let console = "GUEST_UP\nRIG_BEGIN 1\nfine\n\nRIG_END 1 0\nRIG_BEGIN 2\n[ 1.2] xen: x\nRIG";
        assert_eq!(parse_run(console, 1), Some(("0".into(), "fine\n\n".into())));
        assert_eq!(parse_run(console, 2), None);
        assert_eq!(parse_run("RIG_BEGIN 12\nRIG_END 12 1", 12), None);
        assert_eq!(parse_run("RIG_BEGIN 12\nRIG_END 12 1\n", 1), None);
    }
}

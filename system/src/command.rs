//! Other programs: found, run, waited for, and ended with us.

use crate::processes::mark;
use crate::{Context, Outcome, check};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where a program is: the search path, and the folders that a user's path may lack.
#[must_use]
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|candidate| candidate.is_file())
}

/// A command for `program`, wherever it is.
#[must_use]
pub fn command(program: &str) -> Command {
    let mut command = Command::new(find(program).unwrap_or_else(|| program.into()));
    mark(&mut command);
    command
}

/// A command whose process dies with us and gets no signal of our terminal.
///
/// The caller must be the main thread: the kernel watches the thread, not the process.
#[must_use]
pub(crate) fn child(program: impl AsRef<OsStr>) -> Command {
    use std::os::unix::process::CommandExt;
    let mut wrapped = command("setpriv");
    wrapped.args(["--pdeathsig", "KILL", "--"]).arg(program).process_group(0);
    wrapped
}

/// The command, with its arguments, that runs a program on one CPU; empty for any CPU.
#[must_use]
pub(crate) fn on_cpu(cpu: Option<usize>) -> Vec<String> {
    cpu.map(|cpu| vec!["taskset".into(), "--cpu-list".into(), cpu.to_string()]).unwrap_or_default()
}

/// Runs a command to its end and gives what it wrote to its output.
///
/// # Errors
/// It cannot be run or fails; the sentence holds what it said.
pub fn output(command: &mut Command) -> Outcome<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().context(&name)?;
    check(output.status.success(), || {
        format!("{name}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())
    })?;
    Ok(output.stdout)
}

/// As [`output`], as text.
///
/// # Errors
/// As [`output`].
pub fn text(command: &mut Command) -> Outcome<String> {
    Ok(String::from_utf8_lossy(&output(command)?).into_owned())
}

/// Asks `ready` again and again until it gives something.
///
/// # Errors
/// `what` did not happen within `limit`, or `ready` failed.
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut ready: impl FnMut() -> Outcome<Option<T>>,
) -> Outcome<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        check(Instant::now() < end, || format!("{what}: not within {} s", limit.as_secs()))?;
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_says_what_it_said() {
        let error = output(command("sh").args(["-c", "echo no >&2; exit 3"])).unwrap_err();
        assert!(error.contains("no") && error.contains('3'), "{error}");
        assert_eq!(text(command("sh").args(["-c", "echo yes"])), Ok("yes\n".into()));
    }

    #[test]
    fn waiting_ends_at_its_limit() {
        let limit = Duration::from_millis(30);
        assert!(wait_for("never", limit, || Ok(None::<()>)).unwrap_err().contains("never"));
        assert_eq!(wait_for("now", limit, || Ok(Some(7))), Ok(7));
    }
}

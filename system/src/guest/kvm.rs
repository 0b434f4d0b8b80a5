//! Does KVM boot a guest here? Asked by booting one, once; the answer is remembered.

use super::kernel::{Kernel, cache};
use super::{Guest, GuestOptions};
use crate::cleanup::Folder;
use crate::command::text;
use crate::{Context, Outcome};
use std::fs::OpenOptions;
use std::process::Command;
use std::time::Duration;

/// Nested virtualisation may offer the device and then never run an instruction.
const LIMIT: Duration = Duration::from_secs(20);

pub(super) fn boots(kernel: &Kernel) -> Outcome<bool> {
    if OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        return Ok(false);
    }
    let answer = cache()?.join("kvm");
    let host = text(Command::new("uname").arg("-rv"))?;
    let remembered = std::fs::read_to_string(&answer).unwrap_or_default();
    if let Some(boots) = remembered.strip_suffix(&host) {
        return Ok(boots == "yes ");
    }
    let boots = try_once(&kernel.with_kvm())?;
    let word = if boots { "yes" } else { "no" };
    eprintln!("xtask: does KVM boot a guest here? {word} (remembered in {})", answer.display());
    std::fs::write(&answer, format!("{word} {host}")).context(answer.display())?;
    Ok(boots)
}

fn try_once(kernel: &Kernel) -> Outcome<bool> {
    let folder = Folder::new()?;
    let options = GuestOptions::default();
    let guest = Guest::launch(kernel, &options, &folder.path().join("console"));
    Ok(guest.and_then(|mut guest| guest.until_up(LIMIT)).is_ok())
}

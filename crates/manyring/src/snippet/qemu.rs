//! The beginning of QEMU's command line, in the syntax of the wanted version of QEMU.

use super::Wanted;
use crate::cli::SnippetArgs;

/// A version of QEMU, as its first two numbers.
pub(super) type Version = (u32, u32);

/// The first QEMU whose machine takes `memory-backend`.
const OLDEST: Version = (5, 0);
/// The first QEMU whose socket takes `reconnect-ms`. QEMU 10.2 removed the older `reconnect`.
const MILLISECONDS: Version = (9, 2);

/// Returns the version in `--qemu-version`; without the option, the first version with
/// `reconnect-ms`.
pub(super) fn version(args: &SnippetArgs) -> Result<Version, String> {
    let Some(text) = &args.qemu_version else { return Ok(MILLISECONDS) };
    let version = parse(text).ok_or_else(|| {
        format!("--qemu-version: {text:?} is not a version of QEMU, such as 7.2 or 11.1")
    })?;
    if version < OLDEST {
        let (major, minor) = OLDEST;
        return Err(format!("--qemu-version: {text} is too old: the line needs {major}.{minor}"));
    }
    Ok(version)
}

/// Returns the beginning of QEMU's command line: shared memory, and a socket with the id `id`; the
/// option of the device follows. `server` is the socket's option to listen, for a device with
/// `client`.
pub(super) fn machine(wanted: &Wanted, id: &str, server: &str) -> String {
    let (socket, queues) = (wanted.socket.display(), wanted.queues);
    let (versions, how) = match (wanted.client, wanted.qemu >= MILLISECONDS) {
        (true, _) => ("5.0 and newer", server),
        (false, true) => {
            ("9.2 and newer; for an older one: --qemu-version 7.2", "reconnect-ms=1000")
        }
        (false, false) => ("5.0 to 10.1", "reconnect=1"),
    };
    format!(
        "# QEMU {versions}\n\
         qemu-system-x86_64 -accel kvm -cpu host -machine q35,memory-backend=mem0 \\\n  \
         -m 1G -object memory-backend-memfd,id=mem0,size=1G,share=on \\\n  \
         -smp {queues} \\\n  \
         -chardev socket,id={id},path={socket},{how} \\\n"
    )
}

/// Parses one to four numbers with points between, like 11, 7.2, 7.2.22 or 9.1.50.
fn parse(text: &str) -> Option<Version> {
    let number = |part: &str| {
        // `u32::parse` alone would accept a sign.
        let is_plain = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if is_plain { part.parse::<u32>().ok() } else { None }
    };
    let numbers = text.split('.').map(number).collect::<Option<Vec<_>>>()?;
    match numbers[..] {
        [major] => Some((major, 0)),
        [major, minor] | [major, minor, _] | [major, minor, _, _] => Some((major, minor)),
        _ => None,
    }
}

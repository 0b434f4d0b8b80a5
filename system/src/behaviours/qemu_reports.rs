//! What the start of a guest of QEMU costs the supervisor: its disk of eight queues sends less than
//! one report for two messages of QEMU. Its device process is killed then, and the guest goes on.

use super::{Behaviour, Scene};
use crate::cleanup;
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind};
use crate::{Context, Outcome, check};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "qemu_reports", run };

const SCRIPT: &str = r#"
must dd if=/dev/urandom of=/tmp/data bs=64k count=64 2>/dev/null
must dd if=/tmp/data of=$DISK bs=64k conv=fsync,notrunc oflag=direct 2>/dev/null
await written
must dd if=$DISK of=/tmp/again bs=64k count=64 iflag=direct 2>/dev/null
must cmp /tmp/data /tmp/again
"#;

const LIMIT: Duration = Duration::from_secs(240);
const QUEUES: u32 = 8;

fn run(scene: &Scene<'_>) -> Outcome {
    let (image, control) = (scene.image(64)?, scene.file("control"));
    let socket = scene.file("disk.sock");
    let config = format!(
        "[daemon]\ncontrol = '{}'\n[[blk]]\nname = 'disk'\nsocket_path = '{}'\nfile = '{}'\n\
         num_queues = {QUEUES}\n",
        control.display(),
        socket.display(),
        image.display(),
    );
    let path = scene.file("manyring.toml");
    std::fs::write(&path, config).context(path.display())?;
    let options = DaemonOptions {
        arguments: vec!["run".into(), "--config".into(), path.display().to_string()],
        is_controlled: false,
        ..scene.options(&image, &[])
    };
    let daemon = Daemon::start(options, &socket)?;
    let options = GuestOptions {
        socket: Some(&socket),
        queues: QUEUES,
        cpus: 2,
        is_traced: true,
        script: SCRIPT,
        ..Default::default()
    };
    let mut guest = Guest::boot(scene.kernel(Kind::Qemu)?, &options, &scene.log("guest.log"))?;
    guest.reach("written", LIMIT)?;
    let messages = guest.said()?.matches("vhost_user_write").count() as u64;
    let (pid, reports) = process(&control)?;
    println!("qemu_reports: {reports} reports for {messages} messages of QEMU");
    check(messages > 60, || format!("QEMU has sent {messages} messages"))?;
    check(2 * reports < messages, || format!("{reports} reports for {messages} messages"))?;
    let pid = cleanup::pid(pid).ok_or("no device process runs")?;
    kill_process(pid, Signal::KILL).context("the device process")?;
    guest.proceed()?;
    guest.finish(LIMIT)?;
    // The next process has all of the session from the memory of the one before.
    let log = daemon.log()?;
    check(log.contains("session resumed"), || log.clone())?;
    check(!log.contains(" ERROR ") && !log.contains(" WARN "), || log.clone())?;
    daemon.stop()
}

/// The only device process: its number, and how many reports the supervisor has read of it.
fn process(control: &Path) -> Outcome<(u32, u64)> {
    let asks = b"GET /v1/processes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let mut stream = UnixStream::connect(control).context(control.display())?;
    let mut answer = String::new();
    stream.write_all(asks).context("GET /v1/processes")?;
    stream.read_to_string(&mut answer).context("GET /v1/processes")?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let shown: Value = serde_json::from_str(body).context(body)?;
    let of = |key: &str| shown["processes"][0][key].as_u64();
    let pid = of("pid").and_then(|pid| u32::try_from(pid).ok());
    pid.zip(of("reports")).ok_or_else(|| format!("no device process in {shown}"))
}

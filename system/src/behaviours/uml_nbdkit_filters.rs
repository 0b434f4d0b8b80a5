//! Servers that are slow, fail, stop for a while, or hide errors of their own, as nbdkit's filters
//! make them: a guest has a disk of each kind. It sees errors only of the requests that failed.

use super::{Behaviour, Scene};
use crate::command::{child, wait_for};
use crate::daemon::{Daemon, DaemonOptions};
use crate::guest::{Guest, GuestOptions, Kind, is_memory_on_disk};
use crate::net::Service;
use crate::{Context, Outcome, check, packages};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_nbdkit_filters", run };

const LIMIT: Duration = Duration::from_secs(300);
const MIB: u64 = 16;
/// The delay that the filter `delay` adds to each request, in nanoseconds.
const DELAY_NS: u64 = 20_000_000;
/// The pause of the filter `retry-request` before it tries a request again: it takes whole seconds.
const RETRY_NS: u64 = 1_000_000_000;

/// The filters of each disk, in the order of the guest's disks. `FAIL` is a file: while it is
/// there, the filter `error` fails requests.
const DISKS: [(&str, &str); 4] = [
    ("delay", "--filter=delay file IMAGE rdelay=20ms wdelay=20ms"),
    ("error", "--filter=error file IMAGE error=EIO error-pread-rate=50% error-file=FAIL"),
    ("pause", "--filter=pause file IMAGE pause-control=CONTROL"),
    (
        "retry",
        "--filter=retry-request --filter=error file IMAGE error=EIO error-pread-rate=100% \
         error-file=FAIL retry-request-retries=1000 retry-request-delay=1",
    ),
];

/// `fill` writes a disk and compares what it reads. `look` reads 40 blocks one by one past the page
/// cache, and compares those that could be read; it leaves the number of the others in `$failed`.
const SCRIPT: &str = r#"
head -c 163840 /dev/urandom > /tmp/data
look() {
    failed=0
    n=0
    while [ $n -lt 40 ]; do
        if dd if=/dev/$1 of=/tmp/block bs=4k count=1 skip=$n iflag=direct 2>/dev/null; then
            dd if=/tmp/data bs=4k count=1 skip=$n 2>/dev/null | cmp -s - /tmp/block ||
                fail "$1: wrong bytes in block $n"
        else
            failed=$((failed + 1))
        fi
        n=$((n + 1))
    done
}
fill() {
    must dd if=/tmp/data of=/dev/$1 bs=4k oflag=direct 2>/dev/null
    look $1
    [ $failed = 0 ] || fail "$1: $failed reads failed"
}
fill vda
fill vdb
fill vdc
fill vdd
await filled
look vdb
must dd if=/tmp/data of=/dev/vdb bs=4k oflag=direct 2>/dev/null
await failed $failed
look vdb
[ $failed = 0 ] || fail "$failed reads failed after the errors"
await paused
look vdc
[ $failed = 0 ] || fail "$failed reads failed in the pause"
await retry
look vdd
[ $failed = 0 ] || fail "$failed reads failed that were tried again"
"#;

/// A disk of the guest, and its server.
struct Disk {
    name: &'static str,
    folder: PathBuf,
    /// Where the daemon serves it.
    socket: PathBuf,
    _server: Service,
}

impl Disk {
    /// The disk number `index` of the guest: the first one's socket is that of every daemon here.
    fn start(scene: &Scene<'_>, index: usize) -> Outcome<Self> {
        let (name, words) = DISKS[index];
        let (folder, socket) = (scene.file(name), scene.file(&format!("blk{index}.sock")));
        std::fs::create_dir_all(&folder).context(folder.display())?;
        let image = folder.join("image");
        let file = File::create(&image).context(image.display())?;
        file.set_len(MIB << 20).context(image.display())?;
        let mut command = child("nbdkit");
        command.args(["-f", "-t", "4", "-U"]).arg(folder.join("nbd.sock"));
        for word in words.split_whitespace() {
            let here = |name: &str| folder.join(name).display().to_string();
            let word = word.replace("IMAGE", &here("image")).replace("FAIL", &here("fail"));
            command.arg(word.replace("CONTROL", &here("pause.sock")));
        }
        let server = Service::silent(command, &scene.log(&format!("{name}.log")))?;
        wait_for("nbdkit's socket", LIMIT, || {
            Ok(UnixStream::connect(folder.join("nbd.sock")).is_ok().then_some(()))
        })?;
        Ok(Self { name, folder, socket, _server: server })
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}/nbd.sock", self.folder.display())
    }

    /// From now on the filter `error` fails requests, or not.
    fn fail(&self, fails: bool) -> Outcome {
        let file = self.folder.join("fail");
        let done = if fails { File::create(&file).map(drop) } else { std::fs::remove_file(&file) };
        done.context(file.display())
    }

    /// Tells the filter `pause` to pause, `p`, or to resume, `r`; it answers in capitals.
    fn tell(&self, word: u8) -> Outcome {
        let path = self.folder.join("pause.sock");
        let mut stream = UnixStream::connect(&path).context(path.display())?;
        stream.set_read_timeout(Some(LIMIT)).context("a timeout")?;
        stream.write_all(&[word]).context(path.display())?;
        let mut answer = [0];
        stream.read_exact(&mut answer).context(path.display())?;
        check(answer[0] == word.to_ascii_uppercase(), || format!("the filter said {answer:?}"))
    }

    /// The value at `place`, like `counters/errors`, in `manyring stats` of the disk's only queue.
    fn value(&self, daemon: &Daemon, place: &str) -> Outcome<u64> {
        let json = daemon.stats()?;
        let devices = json.get("devices").and_then(Value::as_array);
        let is_mine = |device: &&Value| device["name"] == self.name;
        let device = devices.and_then(|devices| devices.iter().find(is_mine));
        let value = device.and_then(|device| device.pointer(&format!("/queues/0/{place}")));
        let value = value.and_then(Value::as_u64);
        value.ok_or_else(|| format!("{}: no {place} in {json}", self.name))
    }

    fn waits(&self, daemon: &Daemon) -> Outcome {
        wait_for("a request that waits", LIMIT, || {
            Ok((self.value(daemon, "counters/in_flight")? > 0).then_some(()))
        })
    }
}

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("the test of nbdkit's filters", &["nbdkit"])?;
    let disks = (0..DISKS.len()).map(|index| Disk::start(scene, index));
    let disks = disks.collect::<Outcome<Vec<_>>>()?;
    let daemon = serve(scene, &disks)?;
    let more: Vec<_> = disks[1..].iter().map(|disk| disk.socket.as_path()).collect();
    let options = GuestOptions {
        socket: Some(&disks[0].socket),
        more_disks: &more,
        script: SCRIPT,
        ..GuestOptions::default()
    };
    let guest = Guest::boot(scene.kernel(Kind::Uml)?, &options, &scene.log("guest.log"))?;
    try_all(guest, &daemon, &disks)?;
    for disk in disks.iter().filter(|disk| disk.name != "error") {
        let errors = disk.value(&daemon, "counters/errors")?;
        check(errors == 0, || format!("{}: {errors} errors", disk.name))?;
    }
    daemon.stop()
}

/// A daemon that serves them all, the first one at its usual socket.
fn serve(scene: &Scene<'_>, disks: &[Disk]) -> Outcome<Daemon> {
    let [first, others @ ..] = disks else { return Err("there are no disks".into()) };
    let more = ["--name", first.name, "--nbd", &first.uri(), "--num-queues", "1"];
    let (folder, log) = (scene.folder.path(), scene.log("manyring.log"));
    let options = DaemonOptions::blk_of(&scene.stage.binary, folder, &log, &more);
    let daemon = Daemon::start(options, &first.socket)?;
    for disk in others {
        let (socket, uri) = (disk.socket.display().to_string(), disk.uri());
        let mut more = vec!["--socket-path", &socket, "--nbd", &uri, "--num-queues", "1"];
        if is_memory_on_disk() {
            more.push("--memory-on-disk");
        }
        daemon.add("blk", disk.name, &more)?;
    }
    Ok(daemon)
}

fn try_all(mut guest: Guest, daemon: &Daemon, disks: &[Disk]) -> Outcome {
    let [delay, error, pause, retry] = disks else { return Err("there are four disks".into()) };
    guest.reach("filled", LIMIT)?;
    for direction in ["read_ns", "write_ns"] {
        let of = |what| delay.value(daemon, &format!("histograms/{direction}/{what}"));
        let (count, sum) = (of("count")?, of("sum")?);
        let waited = sum >= count * DELAY_NS && count >= 40;
        check(waited, || format!("{count} requests took {sum} ns: {direction}"))?;
    }
    error.fail(true)?;
    guest.proceed()?;
    guest.reach("failed", LIMIT)?;
    error.fail(false)?;
    let counted = error.value(daemon, "counters/errors")?;
    guest.proceed()?;
    guest.reach("paused", LIMIT)?;
    pause.tell(b'p')?;
    let before = pause.value(daemon, "counters/requests")?;
    guest.proceed()?;
    pause.waits(daemon)?;
    let after = pause.value(daemon, "counters/requests")?;
    check(after == before, || format!("{} requests were answered", after - before))?;
    pause.tell(b'r')?;
    guest.reach("retry", LIMIT)?;
    retry.fail(true)?;
    guest.proceed()?;
    retry.waits(daemon)?;
    retry.fail(false)?;
    let said = guest.finish(LIMIT)?;
    let longest = retry.value(daemon, "histograms/read_ns/max")?;
    check(longest >= RETRY_NS, || format!("no read was tried again: {longest} ns at most"))?;
    let failed = said.lines().find_map(|line| line.strip_prefix("GUEST_MARK failed "));
    let failed = failed.and_then(|count| count.trim().parse::<u64>().ok());
    let failed = failed.ok_or("the guest has not said how many reads failed")?;
    check(failed > 0 && failed < 40, || format!("{failed} of 40 reads failed"))?;
    check(failed == counted, || format!("{failed} reads failed, {counted} errors are counted"))
}

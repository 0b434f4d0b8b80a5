//! Frames that a guest has cut itself leave merged, and every byte of small writes, of datagrams
//! and of a long stream arrives, both ways.

use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::command::{command, text, wait_for};
use crate::daemon::Daemon;
use crate::guest::{GuestOptions, Kind};
use crate::net::{Far, Flow, Namespace};
use crate::{Context, Outcome, check, cleanup, packages};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::path::Path;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_merge_transfers", run };

/// The long streams are what a cipher makes of zeroes: no two parts of one are alike, and the host
/// knows both without having seen them. The programs that `nc` runs have the socket itself, without
/// copies.
const SCRIPT: &str = r#"
step() {
    flow "$@"
    await $1
}
network
must ethtool -K eth0 tso off gso off > /dev/null
await quiet
step tcp $HOST -t 1
step tcp-small $HOST -t 1 -l 200 -N
step tcp6-small $HOST6 -t 1 -l 700 -N
step udp-small $HOST -u -l 64 -b 10M -t 1
step udp6-small $HOST6 -u -l 200 -b 10M -t 1
flow udp-to-guest $HOST -u -l 200 -b 2M -t 1 -R
flow tcp-to-guest $HOST -t 1 -l 200 -N -R
truncate -s $KIB_OUT"K" /tmp/zeroes
cat > /tmp/cipher << END
#!/bin/sh
exec openssl enc -aes-128-ctr -K $KEY_OUT -iv $KEY_OUT -in /tmp/zeroes
END
cat > /tmp/sum << END
#!/bin/sh
exec sha256sum > /tmp/received
END
chmod +x /tmp/cipher /tmp/sum
await streams
nc $HOST 7004 -e /tmp/cipher
await sent
nc $HOST 7005 -e /tmp/sum
echo "RECEIVED $(cat /tmp/received)"
"#;

/// Each of these flows of the guest's can be merged.
const TO_HOST: [&str; 5] = ["tcp", "tcp-small", "tcp6-small", "udp-small", "udp6-small"];
/// 1 GiB from the guest, 128 MiB to it.
const KIB_OUT: u64 = 1 << 20;
const KIB_IN: u64 = 1 << 17;
const KEY_OUT: &str = "6d616e7972696e672d2d746f2d686f73";
const KEY_IN: &str = "67656e6972796e612d2d746f2d677565";
const LIMIT: Duration = Duration::from_secs(180);
/// The guest's cipher makes 15 to 40 MiB of the long stream in a second.
const STREAM_LIMIT: Duration = Duration::from_secs(360);
/// How long the daemon runs, and then halts, where frames are to gather.
const RUN: Duration = Duration::from_millis(30);
const HALT: Duration = Duration::from_millis(10);

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("streams that are not alike", &["openssl"])?;
    let namespace = Namespace::new()?;
    let daemon = scene.serve_net(&namespace, &["--tap", "tap0"])?;
    namespace.address("tap0")?;
    let mut far = Far::start(&namespace, scene.folder.path())?;
    let (sum, zeroes) = (scene.file("sum"), scene.file("zeroes"));
    let file = File::create(&zeroes).context(zeroes.display())?;
    file.set_len(KIB_IN << 10).context(zeroes.display())?;
    let keep = format!("sha256sum > {}.new && mv {0}.new {0}", sum.display());
    far.offer(&namespace, scene.folder.path(), "7004", &["sh", "-c", &keep])?;
    let to_guest = cipher(KEY_IN, &zeroes);
    let words: Vec<_> = to_guest.split_whitespace().collect();
    far.offer(&namespace, scene.folder.path(), "7005", &words)?;
    let script = format!("KIB_OUT={KIB_OUT}\nKEY_OUT={KEY_OUT}\n{SCRIPT}");
    let programs = ["ethtool", "iperf3", "openssl"].as_slice();
    let options = GuestOptions { programs, script: &script, ..Default::default() };
    let mut guest = scene.boot_net(Kind::Uml, &daemon, options)?;
    guest.reach("quiet", LIMIT)?;
    for name in TO_HOST {
        merging(&daemon, name, || guest.proceed().and_then(|()| guest.reach(name, LIMIT)))?;
    }
    guest.proceed()?;
    guest.reach("streams", LIMIT)?;
    merging(&daemon, "sent", || guest.proceed().and_then(|()| guest.reach("sent", STREAM_LIMIT)))?;
    let arrived = wait_for("the sum of the stream", LIMIT, || Ok(std::fs::read(&sum).ok()))?;
    guest.proceed()?;
    let said = guest.finish(LIMIT)?;
    for name in TO_HOST.into_iter().chain(["udp-to-guest", "tcp-to-guest"]) {
        Flow::arrived(&said, name)?;
    }
    let received = said.lines().find_map(|line| line.strip_prefix("RECEIVED ")).unwrap_or_default();
    same("to the guest", received, &to_guest)?;
    File::options()
        .write(true)
        .open(&zeroes)
        .and_then(|file| file.set_len(KIB_OUT << 10))
        .context(zeroes.display())?;
    same("from the guest", &String::from_utf8_lossy(&arrived), &cipher(KEY_OUT, &zeroes))?;
    lost_nothing(&daemon.queues()?)?;
    daemon.stop()?;
    namespace.holds_only(&[])
}

/// The command whose output is the stream that `key` makes of zeroes.
fn cipher(key: &str, zeroes: &Path) -> String {
    format!("openssl enc -aes-128-ctr -K {key} -iv {key} -in {}", zeroes.display())
}

/// Runs `act`, and checks that some frames that the guest sends during it leave merged. The daemon
/// is halted again and again: on an idle machine it would send each frame by itself.
pub(super) fn merging<T>(
    daemon: &Daemon,
    what: &str,
    act: impl FnOnce() -> Outcome<T>,
) -> Outcome<T> {
    merging_by(daemon, what, &[RUN], act)
}

/// As [`merging`], with a daemon that runs for these times in turn, with a halt after each. If the
/// guest sends only what it was asked for, through this daemon, frames gather only if the daemon is
/// halted while the guest answers.
pub(super) fn merging_by<T>(
    daemon: &Daemon,
    what: &str,
    runs: &[Duration],
    act: impl FnOnce() -> Outcome<T>,
) -> Outcome<T> {
    let pid = cleanup::pid(daemon.pid()).ok_or("manyring has no pid")?;
    merged_by(daemon, what, || {
        std::thread::scope(|scope| {
            let (ended, is_ended) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || {
                for run in runs.iter().cycle() {
                    if is_ended.recv_timeout(*run) != Err(RecvTimeoutError::Timeout) {
                        break;
                    }
                    let _halt = Halt::of(pid);
                    std::thread::sleep(HALT);
                }
            });
            let value = act();
            drop(ended);
            value
        })
    })
}

/// A daemon that is halted until this is dropped.
pub(super) struct Halt(Pid);

impl Halt {
    /// Halts a daemon.
    pub(super) fn begin(daemon: &Daemon) -> Outcome<Self> {
        cleanup::pid(daemon.pid()).map(Self::of).ok_or_else(|| "manyring has no pid".into())
    }

    fn of(pid: Pid) -> Self {
        let _ = kill_process(pid, Signal::STOP);
        Self(pid)
    }
}

impl Drop for Halt {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Does `act`, by which some of what the guest sends leaves merged.
pub(super) fn merged_by<T>(
    daemon: &Daemon,
    what: &str,
    act: impl FnOnce() -> Outcome<T>,
) -> Outcome<T> {
    let count = || -> Outcome<_> {
        let queues = daemon.queues()?;
        let sent = queues.get(1).ok_or("no tx queue")?;
        let [merged, frames] = ["merged_packets", "merged_frames"].map(|name| sent.value(name));
        Ok((merged?, frames?, sent.value("packets")?))
    };
    let before = count()?;
    let value = act()?;
    let after = count()?;
    let (merged, frames) = (after.0 - before.0, after.1 - before.1);
    let sent = after.2 - before.2;
    check(frames > 0 && merged >= 2 * frames, || {
        format!("{what}: {merged} of {sent} frames left merged, as {frames}")
    })?;
    Ok(value)
}

/// Checks that the arrived bytes have the checksum of the output of `cipher`.
fn same(what: &str, arrived: &str, cipher: &str) -> Outcome {
    let made = text(command("sh").args(["-c", &format!("{cipher} | sha256sum")]))?;
    let sums = [arrived, &made].map(|text| text.split_whitespace().next().unwrap_or_default());
    check(sums[0] == sums[1] && sums[0].len() == 64, || format!("the stream {what}: {sums:?}"))
}

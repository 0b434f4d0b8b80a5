//! A Ceph cluster of one monitor and one OSD in a network namespace, and qemu-storage-daemon, which
//! offers an image of it over NBD. The OSD is killed and started again under a guest.

use crate::command::wait_for;
use crate::daemon::{Daemon, DaemonOptions};
use crate::nbd::{IMAGE_MIB, Store, Trial};
use crate::net::{Namespace, Service};
use crate::{Context, Outcome, check, packages};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PACKAGES: [&str; 5] =
    ["ceph-mon", "ceph-osd", "ceph-common", "qemu-block-extra", "qemu-system-common"];
/// How long a part of the cluster may take to answer.
const LIMIT: Duration = Duration::from_secs(60);
/// How many clients ask a cluster that starts, one after the other.
const TRIES: u32 = 6;
/// The identity of the OSD, and of its folder.
const OSD: &str = "5f3f1c9e-6a4e-4c8e-9d51-8a3b7c20d1aa";
/// More requests than the guest can have in flight: one of this number of answers is to a request
/// that the guest made when the OSD was there again.
const ENOUGH: u64 = 40;

/// The cluster, and the server of its image.
#[derive(Debug)]
pub(crate) struct Cluster {
    // Fields are dropped in this order: each part before the parts that it uses.
    _helper: Service,
    osd: Option<Service>,
    _monitor: Service,
    namespace: Namespace,
    folder: PathBuf,
    logs: PathBuf,
}

/// The settings of the cluster in `folder`. In its namespace it needs no keys. A client asks every
/// half second for the map of a cluster that does not answer, instead of every five seconds, and
/// the monitor tells a change at once: so a killed OSD is missed for two seconds. Without a cache
/// of the client, the OSD has answered what the guest was answered.
fn settings(folder: &Path, logs: &Path) -> String {
    let (folder, logs) = (folder.display(), logs.display());
    format!(
        "[global]\n\
         fsid = 0b1e7c0a-9f43-4f0e-8f0b-3d5c1c6b7e11\n\
         mon initial members = a\n\
         mon host = [v2:127.0.0.1:3300,v1:127.0.0.1:6789]\n\
         ms bind ipv6 = false\n\
         auth cluster required = none\n\
         auth service required = none\n\
         auth client required = none\n\
         osd pool default size = 1\n\
         osd pool default min size = 1\n\
         mon allow pool size one = true\n\
         osd crush chooseleaf type = 0\n\
         crush location = root=default host=h\n\
         run dir = {folder}\n\
         admin socket =\n\
         pid file =\n\
         log file = {logs}/ceph-$name.log\n\
         mon cluster log file = {logs}/ceph.log\n\
         mon data = {folder}/mon\n\
         osd data = {folder}/osd\n\
         osd objectstore = bluestore\n\
         bluestore block size = 1073741824\n\
         osd memory target = 939524096\n\
         paxos propose interval = 0.05\n\
         paxos min wait = 0.02\n\
         objecter tick interval = 0.5\n\
         objecter timeout = 1\n\
         rbd cache = false\n"
    )
}

impl Cluster {
    /// Starts a cluster in `folder` with an image, and the helper that `manyring` (the program)
    /// prints for it. The logs go to the folder `logs`.
    ///
    /// # Errors
    /// A part of it cannot be started.
    pub(crate) fn start(manyring: &Path, folder: &Path, logs: &Path) -> Outcome<Self> {
        packages::need("the test with Ceph", &PACKAGES)?;
        let (namespace, place) = (Namespace::new()?, folder.join("ceph"));
        for path in [&place, &place.join("mon"), &place.join("osd")] {
            std::fs::create_dir_all(path).context(path.display())?;
        }
        let file = place.join("ceph.conf");
        std::fs::write(&file, settings(&place, logs)).context(file.display())?;
        let run = |program: &str, words: &str| {
            namespace.run(&format!("{program} -c {} {words}", file.display()))
        };
        run("ceph-mon", "--mkfs -i a")?;
        let mut command = namespace.child("ceph-mon");
        command.arg("-c").arg(&file).args(["-f", "-i", "a"]);
        let monitor = Service::silent(command, &logs.join("ceph-mon.out"))?;
        ask(&namespace, &file, "ceph", &format!("osd new {OSD}"))?;
        run("ceph-osd", &format!("--mkfs -i 0 --osd-uuid {OSD}"))?;
        let osd = start_osd(&namespace, &place, logs)?;
        ask(&namespace, &file, "ceph", "osd pool create rbd 8 8")?;
        let image = format!("create --size {IMAGE_MIB} --image-feature layering rbd/vm1");
        ask(&namespace, &file, "rbd", &image)?;
        let helper = open_helper(manyring, &namespace, &place, logs)?;
        let (folder, logs) = (place, logs.to_owned());
        Ok(Self { _helper: helper, osd: Some(osd), _monitor: monitor, namespace, folder, logs })
    }
}

/// Has a client of Ceph carry out `words`. A client that has met a monitor or an OSD that was not
/// ready yet may wait for ever, so one without an answer is ended, and another one asks. The second
/// client finds that an image exists if the first one had made it.
fn ask(namespace: &Namespace, settings: &Path, client: &str, words: &str) -> Outcome {
    let settings = settings.display();
    let mut last = String::new();
    for _ in 0..TRIES {
        match namespace.run(&format!("timeout 30 {client} -c {settings} {words}")) {
            Ok(_) => return Ok(()),
            Err(error) if error.contains("File exists") => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(format!("{client} {words}: {last}"))
}

fn start_osd(namespace: &Namespace, folder: &Path, logs: &Path) -> Outcome<Service> {
    let mut command = namespace.child("ceph-osd");
    command.arg("-c").arg(folder.join("ceph.conf")).args(["-f", "-i", "0"]);
    Service::silent(command, &logs.join("ceph-osd.out"))
}

/// Runs the server that `manyring snippet helper ceph` prints, with the paths of this cluster.
fn open_helper(
    manyring: &Path,
    namespace: &Namespace,
    folder: &Path,
    logs: &Path,
) -> Outcome<Service> {
    let unit = crate::command::text(
        crate::command::command(&manyring.display().to_string())
            .args(["snippet", "helper", "ceph"]),
    )?;
    let unit = unit.replace("\\\n", " ");
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/env "));
    let place = folder.display().to_string();
    let line = line
        .ok_or("the unit of the helper has no ExecStart")?
        .replace("/etc/ceph", &place)
        .replace("/run/manyring-helper/%i", &place)
        .replace("%i", "vm1");
    let mut words = line.split_whitespace();
    let mut command = namespace.child(words.next().unwrap_or_default());
    command.args(words);
    let helper = Service::silent(command, &logs.join("helper.log"))?;
    wait_for("the helper to Ceph", LIMIT, || {
        Ok(UnixStream::connect(folder.join("nbd.sock")).is_ok().then_some(()))
    })?;
    Ok(helper)
}

impl Store for Cluster {
    fn options(&self, trial: &Trial<'_>) -> DaemonOptions {
        trial.over_nbd(&format!("nbd+unix:///vm1?socket={}/nbd.sock", self.folder.display()))
    }

    /// SIGKILL for the OSD, which is started again when a request of the guest waits for it.
    fn kill(&mut self, _kill: u32, daemon: &Daemon) -> Outcome {
        let osd = self.osd.take().ok_or("the OSD was not started again")?;
        osd.kill()?;
        // Answers that the OSD sent before its end are on their way for a moment.
        let mut last = None;
        wait_for("a request of the guest that waits for the OSD", LIMIT, || {
            let now = (counted(daemon, "requests")?, waiting(daemon)?);
            let is_still = now.1 > 0 && last.replace(now) == Some(now);
            Ok(is_still.then_some(()))
        })?;
        let before = counted(daemon, "requests")?;
        self.osd = Some(start_osd(&self.namespace, &self.folder, &self.logs)?);
        wait_for("the guest's next requests", LIMIT, || {
            Ok((counted(daemon, "requests")? >= before + ENOUGH).then_some(()))
        })
    }

    /// The helper has stayed: no connection was lost, and no request was sent twice.
    fn check(&self, kills: u32, losses: u64) -> Outcome {
        check(losses == 0, || format!("{kills} kills of the OSD cost {losses} connections"))
    }
}

/// A counter of all queues of the daemon's first device.
fn counted(daemon: &Daemon, name: &str) -> Outcome<u64> {
    daemon.queues()?.iter().map(|queue| queue.value(name)).sum()
}

/// Requests of the guest that are not answered.
fn waiting(daemon: &Daemon) -> Outcome<u64> {
    counted(daemon, "in_flight")
}

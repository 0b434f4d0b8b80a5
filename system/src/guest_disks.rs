//! A guest with the disks of several back-ends, whose fio reads from one of them as it is asked.
//!
//! All of them are disks of the same guest, so that nothing but the back-end differs between two
//! loads that follow each other.

use crate::cleanup::Folder;
use crate::command::find;
use crate::guest::{Guest, GuestOptions, Kernel, Kind, fio};
use crate::{Context, Outcome, check, packages};
use std::path::Path;
use std::time::Duration;

/// Reads lines with a disk's letter, a depth, and milliseconds; an empty line is the end. fio's
/// report is one line of JSON, since each byte costs an emulated console time.
const SCRIPT: &str = r#"
for letter in $letters; do
    tries=0
    while [ ! -b /dev/vd$letter ]; do
        sleep 0.1
        tries=$((tries + 1))
        [ $tries -lt 100 ] || fail "there is no disk vd$letter"
    done
done
await ready
while read -r letter depth milliseconds && [ -n "$letter" ]; do
    fio --name=load --filename=/dev/vd$letter --direct=1 --ioengine=libaio --iodepth=$depth \
        --rw=randread --bs=4k --norandommap --time_based --runtime=${milliseconds}ms \
        --lat_percentiles=1 --clat_percentiles=0 --output-format=json > /tmp/load 2>&1 ||
        fail "$(cat /tmp/load)"
    echo "LOAD $(tr -d ' \t\n' < /tmp/load)"
    mark loaded
done
"#;

/// Names of disks: `vda`, `vdb`, ..
const LETTERS: [char; 8] = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'];
/// Bytes of the console that explain a problem.
const EXPLAINED: usize = 1000;
/// A step takes no longer than this beside what was asked for.
const LIMIT: Duration = Duration::from_secs(60);

/// Where the guest runs.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Whether User Mode Linux or QEMU runs the guest.
    pub kind: Kind,
    /// The CPU of the host that the whole guest runs on; any unless said.
    pub cpu: Option<usize>,
    /// Where its console is kept; the folder is there.
    pub folder: &'a Path,
}

/// The guest; dropped, it is gone.
#[derive(Debug)]
pub struct GuestDisks {
    guest: Guest,
    disks: usize,
}

impl GuestDisks {
    /// Boots a guest whose disks are served at these sockets: between one and eight.
    ///
    /// # Errors
    /// It does not come up, or has no such disk.
    pub fn boot(place: Place<'_>, sockets: &[&Path]) -> Outcome<Self> {
        packages::need("a guest with fio", &["fio", "gcc", "binutils"])?;
        let count = sockets.len();
        check((1..=LETTERS.len()).contains(&count), || format!("{count} disks for a guest"))?;
        let kernel = Kernel::prepare(place.kind)?;
        let folder = Folder::new()?;
        let root = folder.path().join("root");
        fio::stand_ins(&find("fio").ok_or("fio is not installed")?, &root)?;
        let letters = LETTERS[..count].iter().map(char::to_string).collect::<Vec<_>>().join(" ");
        let options = GuestOptions {
            socket: sockets.first().copied(),
            more_disks: &sockets[1..],
            host_cpu: place.cpu,
            programs: &["fio"],
            root: Some(&root),
            script: &format!("letters=\"{letters}\"\n{SCRIPT}"),
            ..GuestOptions::default()
        };
        let mut guest = Guest::boot(&kernel, &options, &place.folder.join("guest-console"))?;
        guest.reach("ready", LIMIT)?;
        guest.proceed()?;
        Ok(Self { guest, disks: count })
    }

    /// Has fio read blocks of 4 KiB at random from disk number `disk`, counted from 0, for `time`
    /// and with `depth` requests in flight. Returns fio's report, JSON.
    ///
    /// # Errors
    /// There is no such disk, or a request failed.
    pub fn read(&mut self, disk: usize, depth: usize, time: Duration) -> Outcome<String> {
        check(disk < self.disks, || format!("disk {disk} of a guest with {}", self.disks))?;
        self.guest.forget()?;
        self.guest.answer(&format!("{} {depth} {}", LETTERS[disk], time.as_millis()))?;
        // While fio runs, the console shows nothing new, and reading it would disturb the guest.
        std::thread::sleep(time);
        self.guest.reach("loaded", LIMIT)?;
        let said = self.guest.said_lately()?;
        let line = said.lines().rev().find_map(|line| line.strip_prefix("LOAD "));
        let report = line.and_then(|line| line.find('{').map(|at| &line[at..]));
        report.map(str::to_owned).ok_or_else(|| "the guest says nothing of its load".to_owned())
    }

    /// A problem, and what the guest has said before it.
    #[must_use]
    pub fn explain(&self, problem: &str) -> String {
        let said = self.guest.said_lately().unwrap_or_default();
        let start = said.len().saturating_sub(EXPLAINED);
        let start = (start..said.len()).find(|at| said.is_char_boundary(*at)).unwrap_or(0);
        format!("{problem}; the guest said: {}", said[start..].trim())
    }

    /// The guest powers off.
    ///
    /// # Errors
    /// It does not.
    pub fn stop(mut self) -> Outcome {
        self.guest.answer("").context("the end of the guest's loads")?;
        self.guest.finish(LIMIT).map(drop)
    }
}

//! A capture on an interface, and what foreign tools find in it.

use super::{Namespace, Service};
use crate::command::{command, text, wait_for};
use crate::{Context, Outcome, check, packages};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A capture that has not grown for this long is complete.
const QUIET: Duration = Duration::from_millis(700);
/// Mebibytes of packets that may wait for dumpcap.
const BUFFER_MIB: &str = "64";
/// Bytes before the first frame of a pcap file, and before each frame.
const FILE_HEADER: usize = 24;
const FRAME_HEADER: usize = 16;
/// Where a frame's header has the number of bytes that follow, in the order of this machine.
const CAPTURED_LEN: std::ops::Range<usize> = 8..12;
const LIMIT: Duration = Duration::from_secs(30);

/// A checksum that does not fit, of any kind tshark knows here. It also complains of 0xffff in
/// TCP, which is how Linux writes 0, and is as right (RFC 1624).
const BAD: &str = "ip.checksum.status == 0 || udp.checksum.status == 0 \
    || icmp.checksum.status == 0 || icmpv6.checksum.status == 0 \
    || (tcp.checksum.status == 0 && tcp.checksum != 0xffff)";

/// tshark trusts checksums unless told not to.
const CHECKED: [&str; 3] = ["ip.check_checksum", "tcp.check_checksum", "udp.check_checksum"];

/// tshark joins the segments of a stream where it takes random bytes for the head of a message:
/// a file of 16 MiB has taken it a minute so. All that is asked of it here is in single frames.
const JOINED: &str = "tcp.desegment_tcp_streams";

/// dumpcap at work; dropped, it is gone.
#[derive(Debug)]
pub struct Capture {
    service: Service,
    file: PathBuf,
}

impl Capture {
    /// Captures whole frames that match `filter` into `file`. `inbound` and `outbound` are
    /// words of the filter.
    ///
    /// # Errors
    /// dumpcap does not start.
    pub fn start(
        namespace: &Namespace,
        interface: &str,
        filter: &str,
        file: &Path,
    ) -> Outcome<Self> {
        let mut command = namespace.child("dumpcap");
        command.args(["-q", "-P", "-B", BUFFER_MIB, "-i", interface, "-f", filter, "-w"]).arg(file);
        let log = file.with_extension("log");
        let mut service = Service::silent(command, &log)?;
        service.until_says("File: ", &log)?;
        Ok(Self { service, file: file.to_owned() })
    }

    /// Has `send` make frames that match, until the capture has one: of those that come while
    /// dumpcap begins it misses some.
    ///
    /// # Errors
    /// `send` fails, or nothing is captured.
    pub fn until_it_sees(&self, mut send: impl FnMut() -> Outcome) -> Outcome {
        let len = || self.file.metadata().map_or(0, |metadata| metadata.len());
        let empty = len();
        wait_for("the first frame of a capture", LIMIT, || {
            send()?;
            Ok((len() > empty).then_some(()))
        })
    }

    /// Ends the capture, once the file holds `least` frames and dumpcap writes no more: on a busy
    /// host dumpcap may come late to frames that the kernel holds for it. Without `least` frames it
    /// ends after half a minute; the caller's checks say what is missing.
    ///
    /// # Errors
    /// dumpcap does not end.
    pub fn stop(self, least: usize) -> Outcome<Frames> {
        // Interrupted, dumpcap forgets the frames that the kernel still holds for it.
        let begin = Instant::now();
        let len = || self.file.metadata().map_or(0, |metadata| metadata.len());
        let (mut last, mut since) = (len(), Instant::now());
        wait_for("the end of the capture", LIMIT * 2, || {
            let now = len();
            if now != last {
                (last, since) = (now, Instant::now());
            }
            let is_quiet = since.elapsed() >= QUIET;
            let is_whole = is_quiet && (begin.elapsed() > LIMIT || self.holds(least)?);
            Ok(is_whole.then_some(()))
        })?;
        self.service.interrupt()?;
        Frames::of(&self.file)
    }

    /// Whether the file has at least so many frames.
    fn holds(&self, least: usize) -> Outcome<bool> {
        let bytes = std::fs::read(&self.file).context("the capture's file")?;
        let mut rest = bytes.get(FILE_HEADER..).unwrap_or_default();
        let mut count = 0;
        while count < least {
            let Some(len) = rest.get(CAPTURED_LEN).and_then(|len| len.try_into().ok()) else {
                return Ok(false);
            };
            let len = u32::from_ne_bytes(len) as usize;
            let Some(next) = rest.get(FRAME_HEADER + len..) else { return Ok(false) };
            (rest, count) = (next, count + 1);
        }
        Ok(true)
    }
}

/// The frames of a capture file, as tshark sees them.
#[derive(Debug)]
pub struct Frames(PathBuf);

impl Frames {
    /// Opens one; tshark must know what it is.
    ///
    /// # Errors
    /// tshark is not there.
    pub fn of(file: &Path) -> Outcome<Self> {
        packages::need("reading captures", &["tshark"])?;
        Ok(Self(file.to_owned()))
    }

    /// The given fields of the frames that match tshark's filter, one line each, tabs between.
    ///
    /// # Errors
    /// tshark refuses the file or the filter.
    pub fn fields(&self, filter: &str, fields: &[&str]) -> Outcome<Vec<String>> {
        let mut command = command("tshark");
        command.arg("-n").arg("-r").arg(&self.0);
        for option in CHECKED {
            command.args(["-o", &format!("{option}:TRUE")]);
        }
        command.args(["-o", &format!("{JOINED}:FALSE")]);
        if !filter.is_empty() {
            command.args(["-Y", filter]);
        }
        command.args(["-T", "fields"]);
        for field in fields {
            command.args(["-e", field]);
        }
        Ok(text(&mut command)?.lines().map(str::to_owned).collect())
    }

    /// How many match tshark's filter; all if it is empty.
    ///
    /// # Errors
    /// As [`Frames::fields`].
    pub fn count(&self, filter: &str) -> Outcome<usize> {
        Ok(self.fields(filter, &["frame.number"])?.len())
    }

    /// No checksum is wrong, and at least `enough` frames match `filter` to say so.
    ///
    /// # Errors
    /// It is not so; the sentence shows the first that is wrong.
    pub fn are_right(&self, what: &str, filter: &str, enough: usize) -> Outcome {
        let matching = self.count(filter)?;
        check(matching >= enough, || {
            format!("{what}: {matching} frames match {filter:?}, {enough} are due")
        })?;
        let shown = ["frame.number", "frame.len", "_ws.col.Protocol", "_ws.col.Info"];
        let bad = self.fields(BAD, &shown)?;
        let first = bad.first().map_or("", String::as_str);
        check(bad.is_empty(), || format!("{what}: {} checksums are wrong: {first}", bad.len()))
    }
}

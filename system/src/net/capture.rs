//! A capture on an interface, and what foreign tools find in it.

use super::{Namespace, Service};
use crate::command::{command, text};
use crate::{Outcome, check, packages};
use std::path::{Path, PathBuf};

/// A checksum that does not fit, of any kind tshark knows here.
const BAD: &str = "ip.checksum.status == 0 || tcp.checksum.status == 0 \
    || udp.checksum.status == 0 || icmp.checksum.status == 0 || icmpv6.checksum.status == 0";

/// tshark trusts checksums unless told not to.
const CHECKED: [&str; 3] = ["ip.check_checksum", "tcp.check_checksum", "udp.check_checksum"];

/// tcpdump at work; dropped, it is gone.
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
    /// tcpdump does not start.
    pub fn start(
        namespace: &Namespace,
        interface: &str,
        filter: &str,
        file: &Path,
    ) -> Outcome<Self> {
        let mut command = namespace.child("tcpdump");
        // As root it would become another user, who may not write here.
        if rustix::process::geteuid().is_root() {
            command.args(["-Z", "root"]);
        }
        command.args(["-n", "-U", "-B", "65536", "-i", interface, "-w"]).arg(file).arg(filter);
        let log = file.with_extension("log");
        let mut service = Service::silent(command, &log)?;
        service.until_says("listening on", &log)?;
        Ok(Self { service, file: file.to_owned() })
    }

    /// Ends it.
    ///
    /// # Errors
    /// tcpdump does not end, or missed frames.
    pub fn stop(self) -> Outcome<Frames> {
        self.service.interrupt()?;
        let log = self.file.with_extension("log");
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        let is_whole = said.lines().any(|line| line == "0 packets dropped by kernel");
        check(is_whole, || format!("tcpdump missed frames: {said}"))?;
        Frames::of(&self.file)
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

//! DPDK's testpmd as a client: a foreign front-end without a guest.

use super::Service;
use crate::command::{child, wait_for};
use crate::{Context, Outcome, check, packages};
use manyring_driver::FrontEnd;
use manyring_driver::wire::net::VIRTIO_NET_F_MRG_RXBUF;
use manyring_driver::wire::virtio::{VIRTIO_F_IN_ORDER, VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// A host that is busy with other things needs ten seconds to start it.
const LIMIT: Duration = Duration::from_secs(60);

/// The options of a testpmd.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The vhost-user socket.
    pub socket: &'a Path,
    /// The socket of a second virtio port, its port 1.
    pub second_socket: Option<&'a Path>,
    /// Queue pairs.
    pub pairs: u32,
    /// Whether it takes mergeable receive buffers.
    pub is_mergeable: bool,
    /// Whether it wants its buffers back in the order in which it made them available.
    pub in_order: bool,
    /// Its rings.
    pub rings: Rings,
    /// testpmd's word: `txonly`, `rxonly`, `icmpecho` ..
    pub mode: &'a str,
    /// Bytes of a frame of `txonly`.
    pub frame_size: u32,
    /// Further virtual devices of DPDK, its ports from 1 on.
    pub devices: &'a [&'a str],
    /// Further options of testpmd itself.
    pub more: &'a [&'a str],
}

/// The rings of testpmd's virtio port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rings {
    /// Split rings.
    Split,
    /// Packed rings.
    Packed,
    /// Packed rings whose driver uses AVX-512, which wants chains in order and no mergeable
    /// buffers. Where the CPU has none, it takes its plain driver.
    Vectorised,
}

impl Rings {
    /// The words of the device.
    fn words(self) -> &'static str {
        match self {
            Self::Split => "packed_vq=0",
            Self::Packed => "packed_vq=1",
            Self::Vectorised => "packed_vq=1,vectorized=1",
        }
    }
}

/// Checks that the back-end offers what testpmd is told to use: it goes on without a feature that
/// is not offered, and says nothing.
fn check_offers(options: &Options<'_>, socket: &Path) -> Outcome {
    let offered = FrontEnd::offered(socket, LIMIT).context(socket.display())?;
    for (bit, is_wanted) in [
        (VIRTIO_F_VERSION_1, true),
        (VIRTIO_F_RING_PACKED, options.rings != Rings::Split),
        (VIRTIO_F_IN_ORDER, options.in_order),
        (VIRTIO_NET_F_MRG_RXBUF, options.is_mergeable),
    ] {
        check(!is_wanted || offered & bit != 0, || format!("{bit:#x} is not offered"))?;
    }
    Ok(())
}

/// Frames that testpmd has seen on its virtio port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Received.
    pub rx: u64,
    /// Sent.
    pub tx: u64,
}

/// A running testpmd; dropped, it is gone.
#[derive(Debug)]
pub struct Testpmd {
    service: Service,
    log: PathBuf,
}

impl Testpmd {
    /// Connects to a back-end; its files lie in `folder`. It does not forward yet.
    ///
    /// # Errors
    /// It does not come up.
    pub fn start(options: &Options<'_>, folder: &Path, log: &Path) -> Outcome<Self> {
        packages::need("testpmd", &["dpdk-dev"])?;
        for socket in [Some(options.socket), options.second_socket].into_iter().flatten() {
            check_offers(options, socket)?;
        }
        // Its answers lie in a buffer unless its output is a terminal.
        let mut command = child("stdbuf");
        command.args(["-o0", "dpdk-testpmd"]);
        // Ours must be the only files of DPDK's that this run leaves, and they go with the folder.
        command.env("RUNTIME_DIRECTORY", folder);
        command.args(["--lcores", "0@0,1@0", "--no-pci", "--no-telemetry"]);
        command.args(["--file-prefix", "testpmd", "--no-huge", "-m", "256"]);
        for (port, socket) in [Some(options.socket), options.second_socket].iter().enumerate() {
            let Some(socket) = socket else { continue };
            command.arg("--vdev").arg(format!(
                "net_virtio_user{port},path={},queues={},queue_size=1024,{},mrg_rxbuf={},\
                 in_order={},mac=52:54:00:00:00:0{}",
                socket.display(),
                options.pairs,
                options.rings.words(),
                u8::from(options.is_mergeable),
                u8::from(options.in_order),
                port + 1
            ));
        }
        if options.rings == Rings::Vectorised {
            command.arg("--force-max-simd-bitwidth=512");
        }
        for device in options.devices {
            command.args(["--vdev", device]);
        }
        command.args(["--", "-i", "--nb-cores=1", "--total-num-mbufs=16384"]);
        command.args(["--rxd=1024", "--txd=1024"]);
        for (option, value) in [
            ("forward-mode", options.mode.to_owned()),
            ("txpkts", options.frame_size.to_string()),
            ("rxq", options.pairs.to_string()),
            ("txq", options.pairs.to_string()),
        ] {
            command.arg(format!("--{option}={value}"));
        }
        command.args(options.more).stdin(Stdio::piped());
        let mut service = Service::start(command, log)?;
        service.until_says("testpmd> ", log)?;
        Ok(Self { service, log: log.to_owned() })
    }

    /// Begins to forward.
    ///
    /// # Errors
    /// It is gone.
    pub fn forward(&mut self) -> Outcome {
        self.ask("start", "forwarding ports=").map(|_| ())
    }

    /// Begins to forward; each port first sends `bursts` bursts of frames.
    ///
    /// # Errors
    /// It is gone.
    pub fn forward_first(&mut self, bursts: u32) -> Outcome {
        self.ask(&format!("start tx_first {bursts}"), "forwarding ports=").map(|_| ())
    }

    /// Takes another mode of forwarding.
    ///
    /// # Errors
    /// It knows no such mode.
    pub fn set_mode(&mut self, mode: &str) -> Outcome {
        self.ask(&format!("set fwd {mode}"), "packet forwarding mode").map(|_| ())
    }

    /// Ends forwarding; everything it has sent is in the ring.
    ///
    /// # Errors
    /// It does not answer.
    pub fn pause(&mut self) -> Outcome {
        self.ask("stop", "Done.").map(|_| ())
    }

    /// The frames that its virtio port has received and sent.
    ///
    /// # Errors
    /// It does not answer.
    pub fn counts(&mut self) -> Outcome<Counts> {
        self.counts_of(0)
    }

    /// The frames that port `port` has received and sent.
    ///
    /// # Errors
    /// It does not answer.
    pub fn counts_of(&mut self, port: usize) -> Outcome<Counts> {
        let answer = self.ask(&format!("show port stats {port}"), "Tx-pps:")?;
        let counts = || Some(Counts { rx: count(&answer, "RX-")?, tx: count(&answer, "TX-")? });
        counts().ok_or_else(|| format!("testpmd: no counts in {answer}"))
    }

    /// Leaves.
    ///
    /// # Errors
    /// It does not.
    pub fn quit(mut self) -> Outcome {
        self.service.say("quit")?;
        self.service.finish()
    }

    fn said(&self) -> Outcome<String> {
        let bytes = std::fs::read(&self.log).context(self.log.display())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Says a command; gives what it answers, as soon as that holds `words`.
    fn ask(&mut self, command: &str, words: &str) -> Outcome<String> {
        let from = self.said()?.len();
        self.service.say(command)?;
        let answer = wait_for(&format!("testpmd's answer to {command:?}"), LIMIT, || {
            let said = self.said()?;
            let answer = said.get(from..).unwrap_or_default();
            Ok(answer.contains(words).then(|| answer.to_owned()))
        })?;
        check(!answer.contains("Bad arguments"), || format!("testpmd: {answer}"))?;
        Ok(answer)
    }
}

/// `  RX-packets: 12          RX-missed: 0 ..`
fn count(answer: &str, direction: &str) -> Option<u64> {
    let name = format!("{direction}packets:");
    let rest = answer.lines().find_map(|line| line.trim().strip_prefix(&name))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_from_the_ports_statistics() {
        let text = "  RX-packets: 7          RX-missed: 0          RX-bytes:  0\n\
            \x20 TX-packets: 32781056   TX-errors: 0          TX-bytes:  2097987584\n";
        assert_eq!((count(text, "RX-"), count(text, "TX-")), (Some(7), Some(32_781_056)));
        assert_eq!(count("", "RX-"), None);
    }
}

//! The report of iperf3 in a guest on a flow, as the receiver saw it.

use super::Namespace;
use crate::{Context, Outcome, check};
use std::process::Stdio;

/// A flow that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flow {
    /// Megabits per second that arrived.
    pub megabits: f64,
    /// Datagrams lost and sent (UDP).
    pub datagrams: Option<(u64, u64)>,
}

impl Flow {
    /// The flow `name` in what a guest said.
    ///
    /// # Errors
    /// It is not there.
    pub fn of(said: &str, name: &str) -> Outcome<Self> {
        let line = said
            .lines()
            .find_map(|line| line.strip_prefix("FLOW ")?.strip_prefix(name)?.strip_prefix(' '));
        let line = line.ok_or_else(|| format!("the guest says nothing of flow {name}"))?;
        parse(line).ok_or_else(|| format!("flow {name}: iperf3 said {line:?}"))
    }

    /// Runs iperf3 in a namespace; `words` are the server's address and further options.
    ///
    /// # Errors
    /// It fails, or datagrams came out of order.
    pub fn run(namespace: &Namespace, words: &str) -> Outcome<Self> {
        let mut said = ask(namespace, words)?;
        for _ in 0..TRIES {
            match said {
                Said::Reset => said = ask(namespace, words)?,
                Said::All(_) => break,
            }
        }
        let Said::All(said) = said else {
            return Err(format!("iperf3 -c {words}: its server refuses again and again"));
        };
        check(!said.contains("out-of-order"), || format!("iperf3 -c {words}: {said}"))?;
        let line = said.lines().rev().find(|line| line.contains("receiver"));
        line.and_then(parse).ok_or_else(|| format!("iperf3 -c {words} said {said:?}"))
    }

    /// As [`Flow::of`]; and something arrived.
    ///
    /// # Errors
    /// It is not so.
    pub fn arrived(said: &str, name: &str) -> Outcome<Self> {
        let flow = Self::of(said, name)?;
        flow.has_arrived(name).map(|()| flow)
    }

    /// Something arrived. How many datagrams are lost follows from how long the host's scheduler
    /// lets a receiver wait, so no test asserts it: what the daemon drops, its counters tell.
    ///
    /// # Errors
    /// It is not so.
    pub fn has_arrived(&self, name: &str) -> Outcome {
        check(self.megabits > 0.0, || format!("flow {name}: {} Mbit/s", self.megabits))?;
        self.datagrams.map_or(Ok(()), |(lost, sent)| {
            check(lost < sent, || format!("flow {name}: {lost} of {sent} datagrams were lost"))
        })
    }
}

/// How a run of iperf3 ended.
enum Said {
    /// Its server reset the connection that only tells what is to be sent, before any flow began:
    /// it was not done with the client before.
    Reset,
    All(String),
}

const RESET: &str = "unable to receive control message: Connection reset by peer";
/// How often iperf3 is asked again whose server was not done with the client before.
const TRIES: usize = 3;

fn ask(namespace: &Namespace, words: &str) -> Outcome<Said> {
    let mut command = namespace.command("timeout");
    command.args(["60", "iperf3", "--forceflush", "-f", "m", "-c"]).args(words.split_whitespace());
    let output = command.stdin(Stdio::null()).output().context("iperf3")?;
    let [said, error] = [&output.stdout, &output.stderr].map(|o| String::from_utf8_lossy(o));
    // A flow that has begun has said where it goes.
    if !output.status.success() && error.contains(RESET) && !said.contains("connected to") {
        return Ok(Said::Reset);
    }
    let status = output.status;
    check(status.success(), || format!("iperf3 -c {words}: {status}: {said}{error}"))?;
    Ok(Said::All(said.into_owned()))
}

/// `[  5]   0.00-2.00   sec  1.19 MBytes  5.00 Mbits/sec  0.003 ms  0/863 (0%)  receiver`
fn parse(line: &str) -> Option<Flow> {
    let words: Vec<_> = line.split_whitespace().collect();
    let unit = words.iter().position(|word| *word == "Mbits/sec")?;
    let megabits = words.get(unit.checked_sub(1)?)?.parse().ok()?;
    let datagrams = words[unit..].iter().find_map(|word| {
        let (lost, sent) = word.split_once('/')?;
        Some((lost.parse().ok()?, sent.parse().ok()?))
    });
    Some(Flow { megabits, datagrams })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "x\n\
        FLOW tcp [  5]   0.00-2.04   sec   110 MBytes   453 Mbits/sec                  receiver\n\
        FLOW udp [  5]   0.00-2.00   sec  1.19 MBytes  5.00 Mbits/sec  0.003 ms  9/863 (1%)  \
        receiver\n\
        FLOW dead [  5]  0.00-2.00   sec  0.00 Bytes  0.00 Mbits/sec                  receiver\n";

    #[test]
    fn flows_are_read_as_the_receiver_saw_them() {
        assert_eq!(Flow::of(SAID, "tcp"), Ok(Flow { megabits: 453.0, datagrams: None }));
        assert_eq!(Flow::of(SAID, "udp"), Ok(Flow { megabits: 5.0, datagrams: Some((9, 863)) }));
        assert!(Flow::of(SAID, "ud").unwrap_err().contains("nothing"));
    }

    #[test]
    fn a_dead_flow_and_one_that_was_lost_did_not_arrive() {
        assert!(Flow::arrived(SAID, "dead").unwrap_err().contains("0 Mbit/s"));
        let all_lost = SAID.replace("9/863", "863/863");
        assert!(Flow::arrived(&all_lost, "udp").unwrap_err().contains("863 of 863"));
        assert!(Flow::arrived(SAID, "udp").is_ok() && Flow::arrived(SAID, "tcp").is_ok());
    }
}

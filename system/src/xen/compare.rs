//! Manyring beside the kernel's back-end and QEMU's, on the same disk, by QEMU's clock that counts
//! instructions: the load of the host changes nothing.

use super::Options;
use super::machine::MachineOptions;
use super::parts::Parts;
use super::rig::{Rig, U};
use super::serve::Server;
use super::stages::Stages;
use crate::{Context, Outcome, check};

/// Requests in flight of each of four threads: 32 in all.
const DEPTH: u32 = 8;
/// Mebibytes that each of them reads or writes.
const MIB: u32 = 16;
/// The least ratio of Manyring's requests per second to another's, in hundredths.
const AT_LEAST: [(Server, u32); 2] = [(Server::Blkback, 105), (Server::Qdisk, 160)];
const PARTIES: [Server; 3] = [Server::Manyring, Server::Qdisk, Server::Blkback];

/// 4 KiB reads and writes per second of the machine's own time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Rates {
    reads: f64,
    writes: f64,
}

/// Measures all three in turns, prints a table, and says whether Manyring reaches what
/// it must.
///
/// # Errors
/// The parts are missing, something failed, or Manyring is slower than it must be.
pub fn compare(options: &Options, rounds: usize) -> Outcome {
    let parts = Parts::prepare()?;
    std::fs::create_dir_all(&options.logs).context(options.logs.display())?;
    let mut measured: Vec<(Server, Vec<Rates>)> = PARTIES.map(|who| (who, Vec::new())).to_vec();
    for round in 1..=rounds {
        for (server, rates) in &mut measured {
            let rate = measure(options, &parts, *server).context(server.name())?;
            let name = server.name();
            println!("round {round} {name:<12} {:>8.0} {:>8.0}", rate.reads, rate.writes);
            rates.push(rate);
        }
    }
    report(&measured)
}

/// A machine of its own, and a guest, which gets a disk that is filled, read and written.
fn measure(options: &Options, parts: &Parts, server: Server) -> Outcome<Rates> {
    let machine = MachineOptions {
        manyring: &options.manyring,
        script: &options.script,
        logs: &options.logs,
        has_qdisk: server == Server::Qdisk,
        dom0_cpus: 1,
        counts_instructions: true,
    };
    let mut rig = Rig::boot(parts, &machine, server, Stages::begin(true))?;
    // The tool stack starts its QEMU only for a guest that has such a disk from its start.
    rig.need(&U)?;
    rig.dom0("must dd if=/dev/zero of=/tmp/disk-b bs=1M count=64 2>/dev/null")?;
    rig.attach(&U, "rw")?;
    let load = |kind: &str| {
        format!(
            "fio --name=load --filename=/dev/xvdb --direct=1 --ioengine=libaio --rw={kind} --bs=4k \
             --numjobs=4 --thread --iodepth={DEPTH} --iodepth_batch={DEPTH} \
             --iodepth_batch_complete_min=1 --size=64m --io_size={MIB}m --norandommap \
             --randrepeat=1 --group_reporting --minimal"
        )
    };
    // The first requests map the grants that stay mapped.
    rig.inside(&U, &load("randwrite").replace(&format!("{MIB}m"), "1m"))?;
    let (reads, writes) = (rig.inside(&U, &load("randread"))?, rig.inside(&U, &load("randwrite"))?);
    Ok(Rates { reads: parse_rate(&reads, 7)?, writes: parse_rate(&writes, 48)? })
}

/// A field of fio's terse line.
fn parse_rate(said: &str, field: usize) -> Outcome<f64> {
    let line = said.lines().find(|line| line.starts_with("3;"));
    let rate = line.and_then(|line| line.split(';').nth(field)?.parse().ok());
    rate.ok_or_else(|| format!("fio said {said:?}"))
}

fn report(measured: &[(Server, Vec<Rates>)]) -> Outcome {
    let ours = mean(measured, Server::Manyring);
    println!("\n4 KiB at depth 32, requests per second of virtual time");
    println!("{:<12} {:>9} {:>9} {:>12} {:>12}", "", "reads", "writes", "ours / reads", "/ writes");
    let mut missed = Vec::new();
    for (server, _) in measured {
        let theirs = mean(measured, *server);
        let (reads, writes) = (ours.reads / theirs.reads, ours.writes / theirs.writes);
        let name = server.name();
        println!(
            "{name:<12} {:>9.0} {:>9.0} {reads:>12.3} {writes:>12.3}",
            theirs.reads, theirs.writes
        );
        for (at_least, ratio, what) in AT_LEAST
            .iter()
            .filter(|(other, _)| other == server)
            .flat_map(|(_, least)| [(least, reads, "reads"), (least, writes, "writes")])
        {
            let at_least = f64::from(*at_least) / 100.0;
            if ratio < at_least {
                missed.push(format!("{what} {ratio:.3} of {name}'s, {at_least:.2} promised"));
            }
        }
    }
    check(missed.is_empty(), || missed.join("; "))
}

fn mean(measured: &[(Server, Vec<Rates>)], who: Server) -> Rates {
    let rates = measured.iter().filter(|(server, _)| *server == who).flat_map(|(_, rates)| rates);
    let (mut sum, mut count) = (Rates::default(), 0.0);
    for rate in rates {
        sum.reads += rate.reads;
        sum.writes += rate.writes;
        count += 1.0;
    }
    Rates { reads: sum.reads / count, writes: sum.writes / count }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_field_of_the_terse_line() {
        let said = "note: x\n3;fio-3.33;load;0;0;16384;1000;26300;655;\n";
        assert_eq!(parse_rate(said, 7), Ok(26300.0));
        assert!(parse_rate("fio: no disk", 7).unwrap_err().contains("no disk"));
    }

    #[test]
    fn a_ratio_below_what_is_promised_is_an_error_that_says_which() {
        let rates = |reads, writes| vec![Rates { reads, writes }, Rates { reads, writes }];
        let measured = |theirs| {
            vec![
                (Server::Manyring, rates(200.0, 200.0)),
                (Server::Blkback, rates(theirs, 100.0)),
                (Server::Qdisk, rates(100.0, 100.0)),
            ]
        };
        assert_eq!(report(&measured(190.0)), Ok(()));
        let error = report(&measured(195.0)).unwrap_err();
        assert!(error.contains("reads 1.026 of xen-blkback's"), "{error}");
    }
}

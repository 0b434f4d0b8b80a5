//! `null-blk`: what the way to a disk costs when the disk costs nothing.
//!
//! 4 KiB random reads by libblkio, and by a client of our own that waits for each call: one queue
//! and one worker against qemu-storage-daemon's null-co export (with `read-zeroes=off`: like ours
//! it touches no data) and SPDK's null bdev, then four queues against one on our own daemon, and
//! four rings against one of bare threads.

use super::{
    BLOCK, Bench, CLIENTS, Client, Contender, How, ScenarioArgs, Work, driven, ours,
    ours_and_modes, per_million, qemu_storage_daemon, spdk,
};
use crate::load::LoadResult;
use crate::measure::Affinity;
use crate::peer;
use crate::peer::spdk::SpdkDisk;
use crate::report::ScenarioReport;
use crate::report::blk::{BlkCell, BlkSample};
use clap::Args;

/// Options of `null-blk`.
#[derive(Args, Clone, Debug)]
pub(crate) struct NullBlkArgs {
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
    /// Which client drives the back-ends.
    #[arg(long, value_enum, default_value_t = Client::Blkio)]
    client: Client,
}

/// Runs the scenario.
pub(crate) fn run(args: &NullBlkArgs) -> Result<ScenarioReport<BlkCell>, String> {
    let (client, args) = (args.client, &args.scenario);
    let mut bench = Bench::new(args, client)?;
    for depth in [1, 32, 64, 128] {
        for (client, poll) in CLIENTS {
            let name = format!("one queue, QD{depth}, client {client}");
            let mut contenders =
                ours_and_modes(args, &[&"--null=64G", &"--num-queues=1", &"--workers=1"])?;
            if !args.without_peers {
                let node = "driver=null-co,node-name=disk,size=68719476736,read-zeroes=off";
                contenders.push(qemu_storage_daemon(&[node.to_owned()], 1)?);
            }
            contenders.extend(spdk(args, "spdk", SpdkDisk::Null));
            let work = Work { queues: 1, depth, size: BLOCK, poll, threads: None, pinned: true };
            bench.cell(&name, &[work], &driven(contenders, client, bench.client))?;
        }
    }
    scale(&mut bench, args)?;
    Ok(bench.report("null-blk"))
}

/// Four queues against one, on all CPUs that there are.
fn scale(bench: &mut Bench<'_>, args: &ScenarioArgs) -> Result<(), String> {
    let four = ours(args, "manyring, 4 queues", &[&"--null=64G", &"--num-queues=4"])?;
    let one = ours(args, "manyring, 1 queue", &[&"--null=64G", &"--num-queues=1"])?;
    let contenders = [four, one];
    for (name, depths, poll, threads) in [
        ("4 to 1 queues, QD64 in all, a thread sleeps on each", (16, 64), false, None),
        ("4 to 1 queues, QD32 each, a thread sleeps on each", (32, 32), false, None),
        ("4 to 1 queues, QD64 in all, one thread sleeps on all", (16, 64), false, Some(1)),
        ("4 to 1 queues, QD64 in all, one thread polls all", (16, 64), true, Some(1)),
    ] {
        let work =
            |queues, depth| Work { queues, depth, size: BLOCK, poll, threads, pinned: false };
        bench.cell(name, &[work(4, depths.0), work(1, depths.1)], &contenders)?;
    }
    let work =
        Work { queues: 4, depth: 16, size: BLOCK, poll: false, threads: None, pinned: false };
    let name = "4 to 1 rings of bare threads, 64 items in all, a thread sleeps on each";
    bench.cell(name, &[work], &[bare(4, 16), bare(1, 64)])
}

/// Bare threads with this many rings: what is lost there, no back-end can win.
fn bare(rings: usize, depth: usize) -> Contender {
    let run = move |seconds: f64, affinity: &Affinity| {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut command = peer::apart(&program);
        command.args(["load", "bare"]);
        command.args([format!("--rings={rings}"), format!("--depth={depth}")]);
        command.arg(format!("--seconds={seconds}"));
        let text = peer::output(&mut command, affinity)?;
        let result: LoadResult = serde_json::from_str(&text).map_err(|e| e.to_string())?;
        Ok(BlkSample {
            iops: result.iops,
            cpu_per_million: per_million(result.client_cpu_seconds, result.requests),
            ..BlkSample::default()
        })
    };
    let rings = if rings == 1 { "1 ring".to_owned() } else { format!("{rings} rings") };
    Contender::new(&format!("bare threads, {rings}"), How::Direct(Box::new(run)))
}

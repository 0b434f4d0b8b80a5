//! `null-blk`: what the way to a disk costs when the disk costs nothing.
//!
//! 4 KiB random reads by libblkio, and by a client of our own that waits for each call: one queue
//! and one worker against qemu-storage-daemon's null-co export (with `read-zeroes=off`: like ours
//! it touches no data) and SPDK's null bdev. `blk-queues` puts several queues against one.

use super::{
    BLOCK, Bench, CLIENTS, Client, ScenarioArgs, Work, driven, ours_and_modes, qemu_storage_daemon,
    spdk,
};
use crate::peer::spdk::SpdkDisk;
use crate::report::ScenarioReport;
use crate::report::blk::BlkCell;
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
    Ok(bench.report("null-blk"))
}

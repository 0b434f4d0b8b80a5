//! `file-blk`: what the way to a file adds to what the file costs.
//!
//! 4 KiB random reads: past the page cache against fio with io_uring on the same file, against
//! qemu-storage-daemon (`cache.direct=on`, `aio=io_uring`) and against SPDK by either of its ways
//! to a file, then through the page cache.

use super::{
    BLOCK, Bench, Client, Contender, EACH_CALL, How, ScenarioArgs, Work, driven, ours_and_modes,
    per_million, qemu_storage_daemon, spdk,
};
use crate::measure::{Affinity, Random};
use crate::peer::spdk::SpdkDisk;
use crate::peer::{self, Peer};
use crate::report::ScenarioReport;
use crate::report::blk::{BlkCell, BlkSample};
use clap::Args;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of `file-blk`.
#[derive(Args, Clone, Debug)]
pub(crate) struct FileBlkArgs {
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
    /// Folder for the file [default: that of this program]; its file system must know O_DIRECT.
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Size of the file in MiB [default: 1024, or 64 with --smoke].
    #[arg(long, value_name = "MIB")]
    mebibytes: Option<usize>,
    /// Which client drives the back-ends.
    #[arg(long, value_enum, default_value_t = Client::Blkio)]
    client: Client,
}

/// Runs the scenario.
pub(crate) fn run(args: &FileBlkArgs) -> Result<ScenarioReport<BlkCell>, String> {
    let scenario = &args.scenario;
    let mut bench = Bench::new(scenario, args.client)?;
    let mebibytes = args.mebibytes.unwrap_or(if scenario.smoke { 64 } else { 1024 });
    let image = image(args.folder.as_deref(), mebibytes)?;
    for (direct, depth, client) in [
        (true, 1, "polls"),
        (true, 1, "sleeps"),
        (true, 1, EACH_CALL),
        (true, 64, "polls"),
        (true, 64, "sleeps"),
        (true, 64, EACH_CALL),
        (false, 1, "polls"),
        (false, 64, "polls"),
        (false, 64, "sleeps"),
        (false, 64, EACH_CALL),
    ] {
        if !direct {
            warm(image.path())?;
        }
        let cache = if direct { "O_DIRECT" } else { "page cache" };
        let poll = client == "polls";
        let name = format!("{cache}, QD{depth}, client {client}");
        let contenders = contenders(scenario, image.path(), direct, depth)?;
        let contenders = driven(contenders, client, args.client);
        let work = Work { queues: 1, depth, size: BLOCK, poll, threads: None, pinned: true };
        bench.cell(&name, &[work], &contenders)?;
    }
    Ok(bench.report("file-blk"))
}

fn contenders(
    args: &ScenarioArgs,
    image: &Path,
    direct: bool,
    depth: usize,
) -> Result<Vec<Contender>, String> {
    let mut arguments: Vec<&dyn AsRef<std::ffi::OsStr>> =
        vec![&"--num-queues=1", &"--workers=1", &"--blk-file", &image];
    if direct {
        arguments.push(&"--direct");
    }
    let mut contenders = ours_and_modes(args, &arguments)?;
    if !args.without_peers {
        let file = format!(
            "driver=file,node-name=file,filename={},aio=io_uring,cache.direct={}",
            image.display(),
            if direct { "on" } else { "off" }
        );
        let raw = "driver=raw,node-name=disk,file=file".to_owned();
        contenders.push(qemu_storage_daemon(&[file, raw], 1)?);
        contenders.push(fio(image, direct, depth)?);
    }
    // SPDK knows nothing of the page cache: it opens each file with O_DIRECT.
    if direct {
        contenders.extend(spdk(args, "spdk uring", SpdkDisk::Uring(image.to_path_buf())));
        contenders.extend(spdk(args, "spdk aio", SpdkDisk::Aio(image.to_path_buf())));
    }
    Ok(contenders)
}

/// A file of this many MiB in a folder, or in that of this program. Its bytes are random, so that
/// no file system stores less than all of it.
pub(super) fn image(
    folder: Option<&Path>,
    mebibytes: usize,
) -> Result<tempfile::NamedTempFile, String> {
    let folder = match folder {
        Some(folder) => folder.to_path_buf(),
        None => std::env::current_exe()
            .ok()
            .and_then(|program| program.parent().map(Path::to_path_buf))
            .unwrap_or_default(),
    };
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut file = tempfile::Builder::new()
        .prefix("manyring-bench-")
        .suffix(".img")
        .tempfile_in(&folder)
        .map_err(failed)?;
    let mut random = Random::new(1);
    for _ in 0..mebibytes {
        let chunk: Vec<u8> =
            (0..1 << 17).flat_map(|_| random.below(u64::MAX).to_le_bytes()).collect();
        file.write_all(&chunk).map_err(failed)?;
    }
    file.as_file().sync_all().map_err(failed)?;
    Ok(file)
}

/// Reads all of the file into the page cache.
pub(super) fn warm(image: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", image.display());
    let mut file = std::fs::File::open(image).map_err(failed)?;
    std::io::copy(&mut file, &mut std::io::sink()).map_err(failed)?;
    Ok(())
}

/// fio on the file itself: no ring, no guest, the most that a back-end could reach.
fn fio(image: &Path, direct: bool, depth: usize) -> Result<Contender, String> {
    let mut filename = std::ffi::OsString::from("--filename=");
    filename.push(image);
    let direct = format!("--direct={}", u8::from(direct));
    let engine = vec!["--ioengine=io_uring".into(), direct.into(), filename];
    Ok(fio_by("fio io_uring, no vhost", engine, depth))
}

/// Random reads of fio with an engine that these arguments choose.
pub(super) fn fio_by(name: &str, engine: Vec<std::ffi::OsString>, depth: usize) -> Contender {
    let program = Peer::Fio.path();
    let run = move |seconds: f64, affinity: &Affinity| {
        let mut command = peer::apart(&program);
        command
            .args(["--name=bench", "--rw=randread", "--bs=4k"])
            .args(["--time_based", "--norandommap", "--output-format=json"])
            // From submission on, as the other client counts.
            .args(["--lat_percentiles=1", "--clat_percentiles=0"])
            // By default it empties the page cache of the file, for all others as well.
            .arg("--invalidate=0")
            .arg(format!("--iodepth={depth}"))
            // fio knows whole milliseconds, and a ramp would be time that nobody else gets.
            .arg(format!("--runtime={:.0}ms", seconds * 1000.0))
            .args(&engine);
        parse_fio(&peer::output(&mut command, affinity)?).map(|(sample, _)| sample)
    };
    Contender::new(name, How::Direct(Box::new(run)))
}

/// Takes our figures out of fio's JSON, which may follow lines of notes; and how many requests it
/// has done. The CPU time is fio's own.
pub(super) fn parse_fio(output: &str) -> Result<(BlkSample, u64), String> {
    let start = output.find('{').ok_or("no report")?;
    let report: serde_json::Value =
        serde_json::from_str(&output[start..]).map_err(|error| error.to_string())?;
    let job = &report["jobs"][0];
    let number = |pointer: &str| {
        job.pointer(pointer)
            .and_then(serde_json::Value::as_f64)
            .ok_or_else(|| format!("no {pointer} in the report"))
    };
    let cpu_share = (number("/usr_cpu")? + number("/sys_cpu")?) / 100.0;
    let requests = job["read"]["total_ios"].as_u64().ok_or("no total_ios in the report")?;
    let sample = BlkSample {
        iops: number("/read/iops")?,
        p50_us: number("/read/lat_ns/percentile/50.000000")? / 1000.0,
        p99_us: number("/read/lat_ns/percentile/99.000000")? / 1000.0,
        cpu_per_million: per_million(cpu_share * number("/job_runtime")? / 1000.0, requests),
        ..BlkSample::default()
    };
    Ok((sample, requests))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_fio_is_understood_behind_its_notes() {
        let text = "note: both iodepth >= 1 and synchronous I/O\n{\"jobs\":[{\"usr_cpu\":10.0,\
            \"sys_cpu\":40.0,\"job_runtime\":1000,\"read\":{\"iops\":500.5,\"total_ios\":500,\
            \"lat_ns\":{\"percentile\":{\"50.000000\":1500,\"99.000000\":9000}}}}]}";
        let (sample, requests) = parse_fio(text).unwrap();
        assert_eq!((sample.iops, sample.p50_us, sample.p99_us), (500.5, 1.5, 9.0));
        assert_eq!((sample.cpu_per_million, requests), (1000.0, 500));
        assert!(parse_fio("{\"jobs\":[{}]}").is_err());
        assert!(parse_fio("fio: no").is_err());
    }
}

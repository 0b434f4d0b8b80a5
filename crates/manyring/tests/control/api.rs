//! The control API, and the commands that ask it, against a daemon that serves. These tests hold
//! the names of `docs/design/0001`.

use crate::support::client::Client;
use crate::support::process::{Daemon, Running, TIMEOUT, end_of, wait_until};
use crate::support::program::{fetch, http, http_json, manyring, output_of, shown};
use manyring_engine::QueueStats;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const CONFIG: &str = "[daemon]\ncontrol = '@/control'\n\
    [[blk]]\nname = 'vda'\nsocket_path = '@/vda'\nfile = '@/image'\nnum_queues = 2\n\
    [[blk]]\nname = 'ro'\nsocket_path = '@/ro'\nfile = '@/ro-image'\nread_only = true\n\
    [[blk]]\nname = 'ram'\nsocket_path = '@/ram'\nmemory = '1M'\n";

/// A daemon with three devices; its images are beside its sockets.
struct Served {
    daemon: Daemon,
    _images: tempfile::TempDir,
    image: PathBuf,
    control: PathBuf,
}

fn serve() -> Served {
    let images = tempfile::tempdir().unwrap();
    let (image, ro) = (images.path().join("image"), images.path().join("ro-image"));
    for path in [&image, &ro] {
        std::fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
    }
    let config = CONFIG
        .replace("@/image", image.to_str().unwrap())
        .replace("@/ro-image", ro.to_str().unwrap());
    let daemon = Daemon::run(&config, &["vda", "ro", "ram", "control"]);
    let control = daemon.socket_of("control");
    Served { daemon, _images: images, image, control }
}

impl Served {
    fn json(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        http_json(&self.control, method, path, body)
    }

    fn get(&self, path: &str) -> Value {
        shown(&self.control, path)
    }

    /// A command of the program that asks this daemon.
    fn command(&self, command: &str, arguments: &[&str]) -> Command {
        let mut program = manyring();
        program.arg(command).arg("--control").arg(&self.control).args(arguments);
        program
    }

    /// Connects to `vda` and has some reads served on each of its two queues.
    fn work(&self) -> Client {
        let mut client = Client::connect(&self.daemon.socket_of("vda"), 2);
        self.work_more(&mut client);
        // A device process that does not tell its counters in time has those shown that it told
        // last.
        assert!(wait_until(|| {
            let queues = self.get("/v1/devices/vda")["queues"].clone();
            [(0, 5), (1, 3)].iter().all(|(q, count)| queues[q]["counters"]["requests"] == *count)
        }));
        client
    }

    fn work_more(&self, client: &mut Client) {
        for (queue, count) in [(0, 5), (1, 3)] {
            client.submit_reads(queue, count);
            assert_eq!(client.wait_for(queue, count, TIMEOUT), count);
        }
    }
}

#[test]
fn only_the_owner_may_connect() {
    let served = serve();
    let mode = std::fs::metadata(&served.control).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn every_device_is_listed_with_what_it_is() {
    let served = serve();
    let all = served.get("/v1/devices");
    let devices = all["devices"].as_array().unwrap();
    let of = |key: &str| devices.iter().map(|d| d[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("name"), ["vda", "ro", "ram"]);
    assert_eq!(of("kind"), ["blk", "blk", "blk"]);
    assert_eq!(of("size"), [1 << 20; 3]);
    assert_eq!(of("read_only"), [false, true, false]);
    assert_eq!(of("connected"), [false; 3]);
    assert_eq!(devices[2]["disk"], "memory");
    assert_eq!(devices[0]["socket"], served.daemon.socket_of("vda").to_str().unwrap());
    let queues: Vec<_> = devices.iter().map(|d| d["queues"].as_array().unwrap().len()).collect();
    assert_eq!(queues, [2, 8, 8]);
}

#[test]
fn a_device_shows_every_counter_of_every_queue() {
    let served = serve();
    let _client = served.work();
    let device = served.get("/v1/devices/vda");
    assert_eq!(device["connected"], true);
    let stats = QueueStats::default();
    for (index, requests) in [(0, 5), (1, 3)] {
        let queue = &device["queues"][index];
        assert_eq!(queue["index"], index);
        for counter in stats.counters() {
            assert!(queue["counters"][counter.name].is_u64(), "{}: {queue}", counter.name);
        }
        for histogram in stats.histograms() {
            let histogram = &queue["histograms"][histogram.name];
            for key in ["count", "sum", "p50", "p90", "p99", "max"] {
                assert!(histogram[key].is_u64(), "{key}: {histogram}");
            }
        }
        let counters = &queue["counters"];
        assert_eq!(counters["requests"], requests);
        assert_eq!(counters["bytes_read"], requests * 4096);
        assert_eq!((&counters["errors"], &counters["running"]), (&0.into(), &1.into()));
        assert_eq!(queue["histograms"]["serve_ns"]["count"], requests);
        assert!(queue["histograms"]["serve_ns"]["max"].as_u64() > Some(0));
        assert_eq!(queue["histograms"]["read_ns"]["count"], requests);
        assert!(queue["histograms"]["flush_ns"].is_null(), "none was asked for");
    }
}

#[test]
fn workers_are_listed() {
    let served = serve();
    let _client = served.work();
    let workers = served.get("/v1/workers")["workers"].as_array().unwrap().clone();
    assert!(!workers.is_empty());
    let queues: u64 = workers.iter().map(|w| w["queues"].as_u64().unwrap()).sum();
    assert_eq!(queues, 2);
    assert!(workers.iter().all(|w| w["sleeps"].is_u64() && w["slept_ns"].is_u64()));
    assert_eq!((&workers[0]["running"], &workers[0]["cpus"]), (&true.into(), &Value::Null));
    assert!(workers[0]["ran_ns"].as_u64() > Some(0) && workers[0]["looked_ns"].is_u64());
    assert_eq!(workers[0]["pause_ns"]["count"], 0, "nothing has moved");
    for worker in &workers {
        let polling = worker["polling"].as_object().unwrap();
        let wake_ns = polling["wake_ns"].as_u64().unwrap();
        assert!((1000..=200_000).contains(&wake_ns), "{wake_ns}");
        assert!(polling["spins"].as_u64() <= Some(1) && polling["trials"].is_u64(), "{polling:?}");
    }
}

#[test]
fn what_cannot_be_is_refused_with_its_reason() {
    let served = serve();
    let (long, vda) = ("x".repeat(5000), "/v1/devices/vda/resize");
    for (method, path, body, status, word) in [
        ("GET", "/v1/nothing", "", 404, "no such path"),
        ("GET", "/", "", 404, "no such path"),
        ("GET", "/v1/devices/none", "", 404, "\"none\""),
        ("POST", "/v1/devices/none/resize", "", 404, "\"none\""),
        ("POST", "/v1/devices", "", 405, "method"),
        ("GET", vda, "", 405, "method"),
        ("POST", vda, "{", 400, "body"),
        ("POST", vda, "[1, 2]", 400, "body"),
        ("POST", vda, "{\"size\": -1}", 400, "body: invalid value"),
        ("POST", vda, "{\"siez\": 512}", 400, "siez"),
        ("POST", vda, "{\"size\": 0}", 400, "size: 0"),
        ("POST", vda, "{\"size\": 1000}", 400, "size: 1000"),
        ("POST", vda, &long, 413, "too long"),
        ("POST", "/v1/devices/ro/resize", "{\"size\": 2097152}", 409, "read-only"),
        ("POST", "/v1/devices/ram/resize", "{\"size\": 2097152}", 422, "cannot be resized"),
    ] {
        let (code, answer) = served.json(method, path, body);
        assert_eq!(code, status, "{method} {path} {body}: {answer}");
        let error = answer["error"].as_str().unwrap();
        assert!(error.contains(word), "{method} {path} {body}: {error}");
    }
    assert_eq!(std::fs::metadata(&served.image).unwrap().len(), 1 << 20);
}

#[test]
fn a_refused_request_costs_a_short_line_whatever_it_names() {
    let served = serve();
    let (method, path) = ("X".repeat(4000), format!("/{}", "y".repeat(4000)));
    let status = http(&served.control, &method, &path, "").0;
    assert!((400..500).contains(&status), "{status}");
    let log = || served.daemon.log();
    let is_told = || log().contains("control request refused");
    assert!(wait_until(is_told), "{}", log());
    let line = log().lines().find(|line| line.contains("control request refused")).map(str::len);
    assert!(line.is_some_and(|len| len < 1000), "{line:?}");
}

#[test]
fn a_resize_changes_the_file_or_takes_its_size() {
    let served = serve();
    let resize = |body: &str| served.json("POST", "/v1/devices/vda/resize", body);
    let size = || served.get("/v1/devices/vda")["size"].as_u64().unwrap();
    let (status, answer) = resize("{\"size\": 2097152}");
    assert_eq!((status, &answer["name"], &answer["size"]), (200, &"vda".into(), &2_097_152.into()));
    assert_eq!((size(), std::fs::metadata(&served.image).unwrap().len()), (2 << 20, 2 << 20));
    std::fs::File::options().write(true).open(&served.image).unwrap().set_len(3 << 20).unwrap();
    assert_eq!((resize("").0, size()), (200, 3 << 20));
    assert_eq!((resize("{}").0, size()), (200, 3 << 20));
}

#[test]
fn a_resize_is_told_through_the_back_end_channel_be_it_a_socket_or_a_pipe() {
    use manyring_driver::FrontEnd;
    use manyring_wire::vhost_user::{BACKEND_CONFIG_CHANGE_MSG, FLAG_VERSION, Header};
    let served = serve();
    let told = Header { request: BACKEND_CONFIG_CHANGE_MSG, flags: FLAG_VERSION, size: 0 }.emit();
    for (pipe, size) in [(false, 2u64 << 20), (true, 3 << 20)] {
        let mut front = FrontEnd::connect(&served.daemon.socket_of("vda"), TIMEOUT).unwrap();
        let offered = front.protocol_features().unwrap();
        front.set_protocol_features(offered).unwrap();
        let mut ours: Box<dyn std::io::Read> = if pipe {
            // UML passes a pipe on some kernels, a socket pair on others.
            let (ours, theirs) = std::io::pipe().unwrap();
            front.set(21, &[], &[std::os::fd::AsFd::as_fd(&theirs)]).unwrap();
            Box::new(ours)
        } else {
            Box::new(front.open_backend_channel().unwrap())
        };
        let body = format!("{{\"size\": {size}}}");
        assert_eq!(served.json("POST", "/v1/devices/vda/resize", &body).0, 200);
        let mut message = [0; 12];
        ours.read_exact(&mut message).unwrap();
        assert_eq!(message, told);
        let config = front.config(0, 256).unwrap();
        assert_eq!(u64::from_le_bytes(*config.first_chunk().unwrap()), size / 512);
    }
}

#[test]
fn the_command_resize_does_the_same() {
    let served = serve();
    let output = output_of(&mut served.command("resize", &["vda", "4M"]));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "vda: 4194304 bytes\n");
    assert_eq!(std::fs::metadata(&served.image).unwrap().len(), 4 << 20);
    for (arguments, word, code) in [
        (&["none"][..], "\"none\"", 1),
        (&["no/name", "1M"], "\"no/name\"", 1),
        (&["vda", "1000"], "1000", 1),
        (&["vda", "big"], "SIZE: \"big\"", 2),
        (&["ram", "2M"], "cannot be resized", 1),
    ] {
        let output = output_of(&mut served.command("resize", arguments));
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(word) && error.lines().count() == 1, "{arguments:?}: {error}");
    }
}

#[test]
fn a_disk_becomes_smaller_only_where_that_is_asked_for() {
    let served = serve();
    let size = || served.get("/v1/devices/vda")["size"].as_u64().unwrap();
    let len = || std::fs::metadata(&served.image).unwrap().len();
    let resize = |body: &str| served.json("POST", "/v1/devices/vda/resize", body);
    for body in ["{\"size\": 524288}", "{\"size\": 1048064, \"shrink\": false}"] {
        let (status, answer) = resize(body);
        let error = answer["error"].as_str().unwrap();
        assert_eq!(status, 409, "{error}");
        assert!(error.contains("1048576") && error.contains("--shrink"), "{error}");
        assert_eq!((size(), len()), (1 << 20, 1 << 20));
    }
    let output = output_of(&mut served.command("resize", &["vda", "512K"]));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.contains("would be lost") && error.contains("--shrink"), "{error}");
    assert_eq!((size(), len()), (1 << 20, 1 << 20));
    // A resize to the present size is no shrinking.
    assert_eq!(resize("{\"size\": 1048576}").0, 200);
    let output = output_of(&mut served.command("resize", &["vda", "512K", "--shrink"]));
    assert!(output.status.success(), "{output:?}");
    assert_eq!((size(), len()), (512 << 10, 512 << 10));
    assert_eq!(resize("{\"size\": 4096, \"shrink\": true}").0, 200);
    assert_eq!((size(), len()), (4096, 4096));
    // Somebody else has cut the file: without a size it is the same loss.
    let cut = |len| {
        std::fs::File::options().write(true).open(&served.image).unwrap().set_len(len).unwrap();
    };
    cut(512);
    for body in ["", "{}", "{\"shrink\": false}"] {
        let (status, answer) = resize(body);
        let error = answer["error"].as_str().unwrap();
        assert_eq!((status, size()), (409, 4096), "{error}");
        assert!(error.contains("512") && error.contains("--shrink"), "{error}");
    }
    let output = output_of(&mut served.command("resize", &["vda"]));
    assert_eq!((output.status.code(), size()), (Some(1), 4096), "{output:?}");
    let output = output_of(&mut served.command("resize", &["vda", "--shrink"]));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(size(), 512);
    cut(4096);
    assert_eq!((resize("").0, size()), (200, 4096));
    // A file that somebody else has cut to no whole number of sectors: nothing is rounded.
    std::fs::File::options().write(true).open(&served.image).unwrap().set_len(4097).unwrap();
    assert_eq!((resize("").0, size()), (422, 4096));
}

#[test]
fn the_command_stats_shows_a_line_for_each_queue_that_ran() {
    let served = serve();
    let _client = served.work();
    let output = output_of(&mut served.command("stats", &[]));
    let table = String::from_utf8(output.stdout).unwrap();
    let words: Vec<Vec<_>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(words[0][..4], ["DEVICE", "QUEUE", "WORKER", "REQUESTS"], "{table}");
    let of = |row: usize| (words[row][0], words[row][1], words[row][3]);
    assert_eq!((of(1), of(2)), (("vda", "0", "5"), ("vda", "1", "3")), "{table}");
    assert_eq!((words[3][0], words[4][0], words[5].len()), ("ro", "ram", 0), "{table}");
    let workers = "WORKER STATE CPUS QUEUES CPU s SLEEPS MOVES PAUSE p50 p99 us";
    assert_eq!(words[6].join(" "), workers, "{table}");
    // That of the device process, below those of the daemon.
    let last = words.last().unwrap();
    assert_eq!(
        (last[0].ends_with("/0"), &last[1..4]),
        (true, &["runs", "any", "2"][..]),
        "{table}"
    );
}

#[test]
fn the_command_stats_prints_json_for_scripts() {
    let served = serve();
    let _client = served.work();
    let output = output_of(&mut served.command("stats", &["--json", "vda"]));
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["devices"].as_array().unwrap().len(), 1);
    assert_eq!(value["devices"][0]["queues"][0]["counters"]["requests"], 5);
    let output = output_of(&mut served.command("stats", &["--json"]));
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["devices"].as_array().unwrap().len(), 3);
    let output = output_of(&mut served.command("stats", &["none"]));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_command_stats_watches_until_nobody_reads() {
    let served = serve();
    let mut client = served.work();
    let mut watch = served.command("stats", &["vda", "--watch"]);
    let mut child = Running::start(watch.stdout(Stdio::piped()));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first: Vec<_> = lines.by_ref().take(3).map(Result::unwrap).collect();
    assert!(!first[0].contains("/s"), "{first:?}");
    served.work_more(&mut client);
    // On a busy machine the work may fall into a later interval.
    let rate = loop {
        let block: Vec<_> = lines.by_ref().take(3).map(Result::unwrap).collect();
        assert!(block[0].contains("REQUESTS/s"), "{block:?}");
        let rate: f64 = block[1].split_whitespace().nth(3).unwrap().parse().unwrap();
        if rate > 0.0 {
            break rate;
        }
    };
    assert!(rate <= 6.0, "five in an interval, not the ten of all time: {rate}");
    drop(lines);
    let ended = wait_until(|| child.try_wait().unwrap().is_some());
    let _ = child.kill();
    assert!(ended && end_of(&mut child).success());
}

#[test]
fn a_command_without_a_daemon_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("none");
    let output = output_of(manyring().args(["stats", "--control"]).arg(&socket));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("--control") && error.contains(socket.to_str().unwrap()), "{error}");
}

/// Families by name: their type. Panics if a sample comes before its family or outside it.
fn families(text: &str) -> HashMap<String, String> {
    let mut families = HashMap::new();
    let mut current = String::new();
    for line in text.lines().filter(|l| *l != "# EOF") {
        if let Some(rest) = line.strip_prefix("# ") {
            let mut words = rest.splitn(3, ' ');
            let (what, name, value) =
                (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
            if what == "TYPE" {
                let old = families.insert(name.to_owned(), value.to_owned());
                assert_eq!(old, None, "{name} twice");
                name.clone_into(&mut current);
            }
            assert_eq!(name, current, "{line}");
            if what == "UNIT" {
                assert!(name.ends_with(&format!("_{value}")), "{line}");
            }
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').unwrap();
        value.parse::<f64>().unwrap();
        let name = sample.split('{').next().unwrap();
        let suffixes: &[&str] = match families[&current].as_str() {
            "counter" => &["_total"],
            "gauge" => &[""],
            "info" => &["_info"],
            "histogram" => &["_bucket", "_count", "_sum"],
            other => panic!("{other}"),
        };
        let fits = suffixes.iter().any(|s| name == format!("{current}{s}"));
        assert!(fits, "{line} in {current}");
    }
    families
}

#[test]
fn metrics_are_openmetrics() {
    let served = serve();
    let _client = served.work();
    let accept = "accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5";
    let stream = UnixStream::connect(&served.control).unwrap();
    let (status, head, text) = fetch(stream, "/metrics", &[accept]);
    let text = String::from_utf8(text).unwrap();
    assert_eq!(status, 200);
    let kind = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert!(head.contains(kind), "{head}");
    assert!(text.ends_with("\n# EOF\n"), "{text}");
    let families = families(&text);
    for (name, kind) in [
        ("manyring_build", "info"),
        ("manyring_device_size_bytes", "gauge"),
        ("manyring_device_connected", "gauge"),
        ("manyring_worker_queues", "gauge"),
        ("manyring_worker_slept_seconds", "counter"),
        ("manyring_worker_ran_seconds", "counter"),
        ("manyring_worker_looked_seconds", "counter"),
        ("manyring_worker_running", "gauge"),
        ("manyring_worker_move_pause_seconds", "histogram"),
        ("manyring_queue_busy_seconds", "counter"),
        ("manyring_queue_requests", "counter"),
        ("manyring_queue_read_bytes", "counter"),
        ("manyring_queue_calls_suppressed", "counter"),
        ("manyring_queue_calls_held", "counter"),
        ("manyring_queue_calls_by_count", "counter"),
        ("manyring_queue_calls_by_time", "counter"),
        ("manyring_queue_calls_by_dry", "counter"),
        ("manyring_queue_in_flight", "gauge"),
        ("manyring_queue_batch_size", "histogram"),
        ("manyring_queue_serve_seconds", "histogram"),
    ] {
        assert_eq!(families.get(name).map(String::as_str), Some(kind), "{name}");
    }
    let busy = "manyring_queue_busy_seconds_total{device=\"vda\",queue=\"0\"} ";
    let busy = text.lines().find_map(|line| line.strip_prefix(busy)).unwrap();
    assert!((0.0..60.0).contains(&busy.parse::<f64>().unwrap()) && busy.contains('.'), "{busy}");
    for line in [
        "manyring_device_connected{device=\"vda\"} 1",
        "manyring_device_connected{device=\"ram\"} 0",
        "manyring_device_size_bytes{device=\"ro\"} 1048576",
        "manyring_queue_requests_total{device=\"vda\",queue=\"0\"} 5",
        "manyring_queue_read_bytes_total{device=\"vda\",queue=\"1\"} 12288",
        "manyring_queue_serve_seconds_bucket{device=\"vda\",queue=\"1\",op=\"read\",le=\"+Inf\"} 3",
        "manyring_queue_serve_seconds_count{device=\"vda\",queue=\"1\",op=\"read\"} 3",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    let samples: Vec<_> = text.lines().filter(|l| !l.starts_with('#')).collect();
    let names: HashSet<_> = samples.iter().map(|l| l.rsplit_once(' ').unwrap().0).collect();
    assert_eq!(names.len(), samples.len(), "a sample is there twice");
}

#[test]
fn clients_that_say_nothing_or_nonsense_stop_nobody() {
    let served = serve();
    let idle: Vec<_> = (0..40).map(|_| UnixStream::connect(&served.control).unwrap()).collect();
    let mut rude = UnixStream::connect(&served.control).unwrap();
    rude.write_all(b"\0\xff\r\n\r\n").unwrap();
    let mut half = UnixStream::connect(&served.control).unwrap();
    half.write_all(b"POST /v1/devices/vda/resize HTTP/1.1\r\ncontent-length: 9\r\n\r\n{").unwrap();
    served.get("/v1/devices/vda");
    let _client = served.work();
    drop((idle, rude, half));
    served.get("/v1/workers");
}

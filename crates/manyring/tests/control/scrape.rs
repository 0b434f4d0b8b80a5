//! `/metrics` as scrapers get it: its formats, its compression, its address, its size.

use crate::support::process::{self, Daemon, TIMEOUT};
use crate::support::program::{fetch, http, manyring, misused, refused};
use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A port of the loopback that nobody has.
fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

fn tcp(port: u16) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

/// The samples' names of a text, and those of its families.
fn names(text: &str) -> HashSet<String> {
    let words = text.lines().filter_map(|line| match line.strip_prefix("# TYPE ") {
        Some(family) => family.split(' ').next(),
        None => line.split(['{', ' ']).next().filter(|word| *word != "#"),
    });
    words.map(str::to_owned).collect()
}

#[test]
fn whoever_asks_for_nothing_gets_the_text_format() {
    let daemon = Daemon::run(
        "[daemon]\ncontrol = '@/control'\n\
         [[net]]\nname = 'lan'\nsocket_path = '@/lan'\nnull = true\n",
        &["control", "lan"],
    );
    let (status, head, text) = http(&daemon.socket_of("control"), "GET", "/metrics", "");
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
    assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
    for line in [
        "# TYPE manyring_build_info gauge",
        "# TYPE manyring_worker_ran_seconds_total counter",
        "# TYPE manyring_queue_serve_seconds histogram",
        "# TYPE process_cpu_seconds_total counter",
        "manyring_config_generation 1",
        "manyring_device_state{device=\"lan\",state=\"serving\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    // No guest has used a queue.
    assert!(!text.contains("queue=\""), "{text}");
}

#[test]
fn an_address_of_the_loopback_shows_metrics_and_nothing_else() {
    let port = free_port();
    let config = format!(
        "[daemon]\ncontrol = '@/control'\nmetrics_listen = '127.0.0.1:{port}'\n\
         [[net]]\nname = 'lan'\nsocket_path = '@/lan'\nnull = true\n"
    );
    let daemon = Daemon::run(&config, &["control", "lan"]);
    let (status, head, plain) = fetch(tcp(port), "/metrics", &[]);
    assert_eq!(status, 200);
    assert!(!head.contains("content-encoding"), "{head}");
    let (status, head, packed) = fetch(tcp(port), "/metrics", &["accept-encoding: gzip, br"]);
    assert_eq!(status, 200);
    assert!(head.contains("content-encoding: gzip"), "{head}");
    let mut unpacked = String::new();
    flate2::read::GzDecoder::new(packed.as_slice()).read_to_string(&mut unpacked).unwrap();
    assert_eq!(names(&unpacked), names(std::str::from_utf8(&plain).unwrap()));
    assert!(packed.len() * 3 < unpacked.len(), "{} of {}", packed.len(), unpacked.len());
    for path in ["/", "/v1/devices", "/v1/config"] {
        assert_eq!(fetch(tcp(port), path, &[]).0, 404, "{path}");
    }
    // Clients that say nothing keep nobody out.
    let silent: Vec<_> = (0..64).map(|_| tcp(port)).collect();
    assert_eq!(fetch(tcp(port), "/metrics", &[]).0, 200);
    drop((silent, daemon));
}

#[test]
fn an_address_that_other_hosts_reach_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("manyring.toml");
    let start = |listen: &str, wait: &str| {
        let text = format!(
            "[daemon]\nmetrics_listen = '{listen}'\n{wait}\n\
             [[net]]\nsocket_path = '{}/lan'\nnull = true\n",
            folder.path().display()
        );
        std::fs::write(&config, text).unwrap();
        let mut command = manyring();
        command.args(["run", "--config"]).arg(&config);
        command
    };
    for listen in ["0.0.0.0:9750", "[::]:9750", "192.0.2.1:9750"] {
        let error = misused(folder.path(), &mut start(listen, ""));
        assert!(
            error.contains("metrics_listen") && error.contains("not a loopback address"),
            "{error}"
        );
    }
    let error = misused(folder.path(), &mut start("localhost", ""));
    assert!(error.contains("metrics_listen"), "{error}");
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = refused(folder.path(), &mut start(&address, "wait = 0"));
    assert!(error.contains("metrics_listen") && error.contains(&address), "{error}");
}

#[test]
fn what_another_process_has_listened_at_is_had_when_it_ends() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let config = format!(
        "[daemon]\ncontrol = '@/control'\nmetrics_listen = '127.0.0.1:{port}'\n\
         [[net]]\nsocket_path = '@/lan'\nnull = true\n"
    );
    let daemon = Daemon::run(&config, &["control", "lan"]);
    assert_eq!(http(&daemon.socket_of("control"), "GET", "/metrics", "").0, 200);
    drop(taken);
    assert!(process::wait_until(|| daemon.log().contains("metrics_listen: listening on ")));
    assert_eq!(fetch(tcp(port), "/metrics", &[]).0, 200);
}

#[test]
fn a_thousand_devices_without_guests_are_small() {
    let mut config = "[daemon]\ncontrol = '@/control'\n".to_owned();
    for index in 0..1000 {
        let _ =
            write!(config, "[[net]]\nname = 'n{index}'\nsocket_path = '@/n{index}'\nnull = true\n");
    }
    let daemon = Daemon::run(&config, &["control", "n999"]);
    let stream = UnixStream::connect(daemon.socket_of("control")).unwrap();
    let (status, _, text) = fetch(stream, "/metrics", &[]);
    assert_eq!(status, 200);
    let text = String::from_utf8(text).unwrap();
    assert!(text.len() < 4 << 20, "{}", text.len());
    // Nobody uses them: there is one line for each thing that is to be said of a device.
    let of_one = text.matches("device=\"n7\"").count();
    assert!(of_one < 10, "{of_one}");
}

#[test]
fn dashboard_and_alerts_name_metrics_that_are_there() {
    let daemon = Daemon::run(
        "[daemon]\ncontrol = '@/control'\n[[net]]\nsocket_path = '@/lan'\nnull = true\n",
        &["control", "lan"],
    );
    let (_, _, text) = http(&daemon.socket_of("control"), "GET", "/metrics", "");
    let mut there = names(&text);
    let histograms: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" histogram"))
        .collect();
    there.extend(
        histograms
            .iter()
            .flat_map(|name| ["_bucket", "_count", "_sum"].map(|part| format!("{name}{part}"))),
    );
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    let dashboard = std::fs::read_to_string(contrib.join("grafana/manyring.json")).unwrap();
    serde_json::from_str::<serde_json::Value>(&dashboard).unwrap();
    let alerts = std::fs::read_to_string(contrib.join("prometheus/manyring.rules.yml")).unwrap();
    let mut count = 0;
    for word in [dashboard, alerts].iter().flat_map(|text| {
        { text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).map(str::to_owned) }
            .collect::<Vec<_>>()
    }) {
        let is_metric = word.starts_with("manyring_") || word.starts_with("process_");
        // A prefix, of which a pattern makes the rest.
        if is_metric && word != "manyring_queue_dropped_" {
            assert!(there.contains(&word), "{word}");
            count += 1;
        }
    }
    assert!(count > 20, "{count}");
    assert!(there.iter().any(|name| name.starts_with("manyring_queue_dropped_")));
}

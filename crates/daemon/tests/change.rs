//! Devices that come, change and go while the daemon runs: over the control API, by command, and
//! with a configuration that is read again.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod client;
mod process;
mod program;

use client::Client;
use process::{Daemon, PATIENCE, wait_until};
use program::{http, http_json, manyring, names_in, output_of, refused, shown};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A daemon without devices whose control socket is in a folder.
struct House {
    daemon: Daemon,
    control: PathBuf,
}

const EMPTY: &str = "[daemon]\ncontrol = '@/control'\nstate_dir = '@/state'\n";

impl House {
    fn run(configuration: &str) -> Self {
        let daemon = Daemon::run(configuration, &["control"]);
        let control = daemon.socket_of("control");
        Self { daemon, control }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.daemon.socket_of(name)
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, _, answer) = http(&self.control, method, path, &body);
        (status, serde_json::from_str(&answer).unwrap_or_default())
    }

    fn put(&self, name: &str, body: &Value) -> (u16, Value) {
        self.ask("PUT", &format!("/v1/devices/{name}"), body)
    }

    fn delete(&self, name: &str) -> u16 {
        self.ask("DELETE", &format!("/v1/devices/{name}"), &Value::Null).0
    }

    /// A disk that keeps nothing, with its socket beside the others.
    fn null(&self, name: &str) -> Value {
        json!({ "kind": "blk", "socket_path": self.at(name), "null": "1G", "num_queues": 1 })
    }

    fn generation(&self) -> u64 {
        let (status, head, _) = http(&self.control, "GET", "/v1/config", "");
        assert_eq!(status, 200);
        let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap();
        tag.trim_matches('"').parse().unwrap()
    }

    /// The daemon's descriptors, once their number changes no more.
    fn fds(&self) -> usize {
        let mut last = [0; 20];
        assert!(wait_until(|| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            last.rotate_left(1);
            last[19] = self.daemon.holdings().fds;
            last.iter().all(|fds| *fds == last[19])
        }));
        last[19]
    }

    fn names(&self) -> Vec<String> {
        let all = shown(&self.control, "/v1/devices");
        let devices = all["devices"].as_array().unwrap();
        devices.iter().map(|device| device["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until the daemon has noticed that the device's client has left.
    fn is_left(&self, device: &str) {
        let path = format!("/v1/devices/{device}");
        assert!(wait_until(|| shown(&self.control, &path)["connected"] == false));
    }

    /// A command of the program that asks this daemon.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut program = manyring();
        program.args(arguments).arg("--control").arg(&self.control);
        program
    }
}

fn is_served(socket: &Path) {
    let mut client = Client::connect(socket, 1);
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, PATIENCE), 1);
}

fn image(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    path
}

#[test]
fn device_comes_and_goes_and_leaves_nothing() {
    let house = House::run(EMPTY);
    // What the first session of a process starts stays for the next ones.
    assert_eq!(house.put("first", &house.null("first")).0, 201);
    is_served(&house.at("first"));
    assert!(wait_until(|| house.delete("first") == 204));
    let before = (house.fds(), names_in(house.daemon.folder()));
    for _ in 0..3 {
        let (status, answer) = house.put("a", &house.null("a"));
        assert_eq!((status, &answer["steps"][0]["step"]), (201, &json!("add")), "{answer}");
        is_served(&house.at("a"));
        let device = shown(&house.control, "/v1/devices/a");
        assert_eq!((&device["state"], &device["origin"]), (&json!("serving"), &json!("api")));
        // Repeated, as callers do that have not heard the answer.
        let (status, answer) = house.put("a", &house.null("a"));
        assert_eq!((status, &answer["steps"]), (200, &json!([])), "{answer}");
        assert!(wait_until(|| house.delete("a") == 204), "its client has left");
        assert_eq!(house.delete("a"), 204, "gone already");
        assert_eq!(house.ask("GET", "/v1/devices/a", &Value::Null).0, 404);
        assert!(house.names().is_empty() && !house.at("a").exists());
    }
    let after = || (house.fds(), names_in(house.daemon.folder()));
    assert!(wait_until(|| after() == before), "{before:?}, then {:?}", after());
    assert!(house.daemon.terminate().success());
}

#[test]
fn device_in_use_is_not_removed_unless_it_is_forced() {
    let house = House::run(EMPTY);
    let file = image(house.daemon.folder(), "image");
    let disk = json!({ "kind": "blk", "socket_path": house.at("a"), "file": file });
    assert_eq!(house.put("a", &disk).0, 201);
    let mut client = Client::connect(&house.at("a"), 1);
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, PATIENCE), 1);
    let (status, answer) = house.ask("DELETE", "/v1/devices/a", &Value::Null);
    assert_eq!(status, 409, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("a front-end is connected"), "{answer}");
    let mut other = disk.clone();
    other["direct"] = json!(true);
    assert_eq!(house.put("a", &other).0, 409, "another disk is no small matter either");
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, PATIENCE), 1, "it works on");
    let forced = house.ask("DELETE", "/v1/devices/a?force=true", &Value::Null);
    assert_eq!(forced.0, 204);
    // The image's lock is free when the answer comes.
    assert_eq!(house.put("b", &disk).0, 201);
    assert_eq!(house.put("a", &disk).0, 409, "b has its socket and its file");
    is_served(&house.at("a"));
}

#[test]
fn front_end_that_connects_while_a_change_is_prepared_keeps_its_device() {
    let house = House::run(EMPTY);
    assert_eq!(house.put("a", &house.null("a")).0, 201);
    let file = image(house.daemon.folder(), "image");
    let holder = Daemon::blk(&["--blk-file", file.to_str().unwrap()]);
    let (control, names) = (house.control.clone(), || names_in(house.daemon.folder()));
    let body = json!({ "kind": "blk", "socket_path": house.at("other"), "file": file }).to_string();
    let put = move || http(&control, "PUT", "/v1/devices/a", &body);
    let put = std::thread::Builder::new().spawn(put).unwrap();
    // Its socket is bound, and its image is waited for. If that takes too long, it is refused too.
    wait_until(|| put.is_finished() || names().iter().any(|name| name.starts_with(".mr-")));
    let mut client = Client::connect(&house.at("a"), 1);
    drop(holder);
    let (status, _, answer) = put.join().unwrap();
    assert_eq!(status, 409, "{answer}");
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, PATIENCE), 1);
}

#[test]
fn device_for_one_session_is_gone_after_it_and_can_come_again() {
    let house = House::run(EMPTY);
    let mut once = house.null("a");
    once["one_off"] = json!(true);
    for _ in 0..2 {
        assert_eq!(house.put("a", &once).0, 201);
        is_served(&house.at("a"));
        assert!(wait_until(|| house.names().is_empty()));
        assert!(names_in(&house.at("state").join("devices")).is_empty());
        // The daemon goes on without any device: others can come.
        assert_eq!((house.delete("a"), house.delete("b")), (204, 204));
    }
    assert_eq!(house.put("b", &house.null("b")).0, 201);
    is_served(&house.at("b"));
}

#[test]
fn what_cannot_be_costs_only_itself_and_changes_nothing() {
    let house = House::run(EMPTY);
    assert_eq!(house.put("good", &house.null("good")).0, 201);
    let (before, fds) = (names_in(house.daemon.folder()), house.fds());
    let generation = house.generation();
    let missing = house.daemon.folder().join("none/s");
    for (name, body, status, words) in [
        ("b", json!({ "kind": "blk", "socket_path": missing, "null": "1G" }), 422, "socket_path"),
        ("b", json!({ "kind": "blk", "socket_path": house.at("b"), "file": missing }), 422, "file"),
        ("b", json!({ "kind": "blk", "socket_path": house.at("good"), "null": "1G" }), 409, "good"),
        ("b", json!({ "kind": "disk" }), 422, "kind"),
        ("b", json!({ "kind": "blk", "colour": 1 }), 422, "colour"),
        ("b", json!({ "kind": "blk", "fd": 3, "null": "1G" }), 422, "fd"),
        ("b", json!({ "kind": "blk", "name": "c", "null": "1G" }), 422, "name"),
        ("a%20b", json!({ "kind": "blk", "null": "1G" }), 422, "name"),
        ("b", json!([1]), 422, "body"),
    ] {
        let (found, answer) = house.put(name, &body);
        let error = answer["error"].as_str().unwrap_or_default();
        assert_eq!((found, error.contains(words)), (status, true), "{body}: {answer}");
    }
    assert_eq!((house.names(), house.generation()), (vec!["good".to_owned()], generation));
    assert_eq!(names_in(house.daemon.folder()), before);
    assert_eq!(house.fds(), fds);
    is_served(&house.at("good"));
}

#[test]
fn name_that_no_device_can_have_leads_to_no_file() {
    let house = House::run(EMPTY);
    let victim = house.at("victim.json");
    std::fs::write(&victim, "{}").unwrap();
    let absolute = house.at("victim").display().to_string().replace('/', "%2F");
    for name in ["..%2F..%2Fvictim", &absolute, "a%0Ab", "%00"] {
        assert_eq!(house.delete(name), 204, "{name}: there is no such device");
        assert!(victim.exists(), "{name}");
    }
}

#[test]
fn device_of_the_file_is_not_removed_over_the_api() {
    let (folder, house) = configured(&null("a"));
    let socket = folder.path().join("a");
    assert!(wait_until(|| socket.exists()));
    for how in ["", "?force=true"] {
        let (status, answer) = house.ask("DELETE", &format!("/v1/devices/a{how}"), &Value::Null);
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(status == 409 && error.contains("configuration file"), "{status}: {answer}");
    }
    is_served(&socket);
}

#[test]
fn device_that_is_replaced_takes_what_the_former_one_held() {
    let house = House::run(EMPTY);
    let file = image(house.daemon.folder(), "image");
    let disk = |more: Value| {
        let mut disk = json!({ "kind": "blk", "socket_path": house.at("a"), "file": file });
        disk.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        disk
    };
    assert_eq!(house.put("a", &disk(json!({}))).0, 201);
    let (status, answer) = house.put("a", &disk(json!({ "direct": true, "num_queues": 3 })));
    assert_eq!((status, &answer["steps"][0]["keys"]), (200, &json!(["file", "num_queues"])));
    assert_eq!(shown(&house.control, "/v1/devices/a")["queues"].as_array().unwrap().len(), 3);
    is_served(&house.at("a"));
    // One that cannot be leaves the former one as it was.
    let socket = house.daemon.folder().join("none/s");
    assert!(wait_until(|| house.put("a", &disk(json!({ "socket_path": socket }))).0 == 422));
    is_served(&house.at("a"));
    assert_eq!(shown(&house.control, "/v1/devices/a")["queues"].as_array().unwrap().len(), 3);
}

#[test]
fn what_a_front_end_has_seen_changes_with_its_next_session() {
    let house = House::run(EMPTY);
    let disk = |queues: u32| {
        let null = house.null("a");
        let mut disk = null.as_object().unwrap().clone();
        disk.insert("num_queues".to_owned(), json!(queues));
        Value::from(disk)
    };
    assert_eq!(house.put("a", &disk(1)).0, 201);
    let mut client = Client::connect(&house.at("a"), 1);
    let (status, answer) = house.put("a", &disk(3));
    assert_eq!((status, &answer["steps"][0]["step"]), (200, &json!("reconnect")), "{answer}");
    let device = || shown(&house.control, "/v1/devices/a");
    let queues = || device()["queues"].as_array().unwrap().len();
    // It is there all the time, also while it is replaced.
    assert_eq!((device()["pending_keys"].clone(), queues()), (json!(["num_queues"]), 1));
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, PATIENCE), 1, "its session goes on");
    drop(client);
    assert!(wait_until(
        || house.ask("GET", "/v1/devices/a", &Value::Null).0 == 200 && queues() == 3
    ));
    assert!(device()["pending_keys"].is_null());
    is_served(&house.at("a"));
}

#[test]
fn whoever_waits_for_events_hears_what_becomes_of_devices() {
    let house = House::run(EMPTY);
    let since = |number: u64| shown(&house.control, &format!("/v1/events?since={number}"));
    assert_eq!(house.put("a", &house.null("a")).0, 201);
    let first = since(0);
    assert_eq!((&first["events"][0]["event"], &first["lost"]), (&json!("serving"), &json!(false)));
    let last = first["last"].as_u64().unwrap();
    // The answer comes when something has happened.
    let control = house.control.clone();
    let wait = move || shown(&control, &format!("/v1/events?since={last}"));
    let waiting = std::thread::Builder::new().spawn(wait).unwrap();
    is_served(&house.at("a"));
    let heard = waiting.join().unwrap();
    let event = &heard["events"][0];
    assert_eq!((&event["event"], &event["device"]), (&json!("connected"), &json!("a")));
    house.is_left("a");
    assert_eq!(house.delete("a"), 204);
    let all = || -> Vec<_> {
        let events = since(0)["events"].clone();
        let events = events.as_array().unwrap().iter();
        events.map(|event| event["event"].as_str().unwrap().to_owned()).collect()
    };
    assert!(wait_until(|| all() == ["serving", "connected", "left", "removed"]), "{:?}", all());
    assert_eq!(since(77)["lost"], true, "a number of an earlier process");
    assert_eq!(since(u64::MAX)["lost"], true);
}

#[test]
fn device_that_comes_beside_five_hundred_costs_what_it_costs_alone() {
    let several = |count: usize| {
        let configuration: String = (0..count).map(|index| null(&format!("n{index}"))).collect();
        let house = House::run(&format!("{EMPTY}{configuration}"));
        assert!(wait_until(|| house.names().len() == count));
        let at = |index: usize| house.at(&format!("n{index}"));
        assert!(wait_until(|| (0..count).all(|index| at(index).exists())));
        assert_eq!(house.put("warm", &house.null("warm")).0, 201);
        let threads = || house.daemon.holdings().threads;
        let before = (house.fds(), threads());
        for round in 0..10 {
            assert_eq!(house.put(&format!("a{round}"), &house.null(&format!("a{round}"))).0, 201);
        }
        let added = house.fds() - before.0;
        assert!(wait_until(|| threads() <= before.1), "no thread for a device without a guest");
        for round in 0..10 {
            assert_eq!(house.delete(&format!("a{round}")), 204);
        }
        assert_eq!(house.fds(), before.0);
        added
    };
    assert_eq!(several(500), several(1));
}

#[test]
fn live_keys_change_at_once_and_no_others_are_taken() {
    let house = House::run(EMPTY);
    let lan = json!({ "kind": "net", "socket_path": house.at("lan"), "null": true, "mtu": 1400 });
    assert_eq!(house.put("lan", &lan).0, 201);
    let mtu = || shown(&house.control, "/v1/devices/lan")["mtu"].clone();
    let patch = |name: &str, keys: Value| house.ask("PATCH", &format!("/v1/devices/{name}"), &keys);
    let (status, answer) = patch("lan", json!({ "mtu": 1300 }));
    assert_eq!((status, &answer["steps"][0]["step"]), (200, &json!("live")), "{answer}");
    assert_eq!(mtu(), 1300);
    let output = output_of(&mut house.command(&["set", "lan", "mtu=1200"]));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "lan: live (mtu)\n");
    assert_eq!(mtu(), 1200);
    let is_kept = |mtu: &str| {
        let kept = std::fs::read_to_string(house.at("state").join("devices/lan.json")).unwrap();
        let planned = shown(&house.control, "/v1/config")["net"][0]["mtu"].to_string();
        assert!(kept.contains(&format!("\"mtu\":{mtu}")) && planned == mtu, "{kept}, {planned}");
    };
    is_kept("1200");
    assert_eq!(house.ask("POST", "/v1/devices/lan/mtu", &json!({ "mtu": 1100 })).0, 200);
    assert_eq!(mtu(), 1100);
    is_kept("1100");
    assert_eq!(house.ask("POST", "/v1/devices/lan/mtu", &json!({ "mtu": 1200 })).0, 200);
    for (name, keys, status, words) in [
        ("lan", json!({ "queue_pairs": 2 }), 422, "queue_pairs: is reconnect"),
        ("lan", json!({ "tap": "t" }), 422, "tap: is replace"),
        ("lan", json!({ "mtu": 1 }), 422, "mtu: 1 is not between"),
        ("lan", json!({ "colour": 1 }), 422, "colour: there is no such key"),
        ("none", json!({ "mtu": 1300 }), 404, "no device"),
    ] {
        let (found, answer) = patch(name, keys);
        let error = answer["error"].as_str().unwrap_or_default();
        assert_eq!((found, error.contains(words)), (status, true), "{answer}");
    }
    assert_eq!(mtu(), 1200);
}

#[test]
fn live_keys_are_those_of_a_device_that_is_served_later() {
    let house = House::run(EMPTY);
    let lan = |pairs: u32| {
        let socket = house.at("lan");
        json!({ "kind": "net", "socket_path": socket, "null": true, "mtu": 1400,
            "queue_pairs": pairs })
    };
    assert_eq!(house.put("lan", &lan(1)).0, 201);
    let device = || shown(&house.control, "/v1/devices/lan");
    let session = UnixStream::connect(house.at("lan")).unwrap();
    assert!(wait_until(|| device()["connected"] == true));
    for pairs in [2, 3, 2] {
        assert_eq!(house.put("lan", &lan(pairs)).1["steps"][0]["step"], json!("reconnect"));
    }
    assert_eq!(house.ask("PATCH", "/v1/devices/lan", &json!({ "mtu": 1300 })).0, 200);
    drop(session);
    assert!(wait_until(|| device()["queue_pairs"] == 2));
    assert_eq!(device()["mtu"], 1300, "it was changed after the rest was put off");
    // One that cannot be served yet.
    let folder = tempfile::tempdir().unwrap();
    let later = folder.path().join("later");
    let socket = later.join("lan").display().to_string();
    let (other, house) = configured(&format!(
        "[[net]]\nname = 'lan'\nsocket_path = '{socket}'\nnull = true\nmtu = 1400\n{}",
        null("good")
    ));
    let device = || shown(&house.control, "/v1/devices/lan");
    assert_eq!(device()["state"], "failed");
    assert_eq!(house.ask("PATCH", "/v1/devices/lan", &json!({ "mtu": 1300 })).0, 200);
    std::fs::create_dir(&later).unwrap();
    assert!(wait_until(|| device()["state"] == "serving"), "{}", house.daemon.log());
    assert_eq!(device()["mtu"], 1300);
    is_served(&other.path().join("good"));
}

#[test]
fn devices_of_the_api_are_there_again_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let config = EMPTY.replace('@', folder.path().to_str().unwrap());
    std::fs::write(at("manyring.toml"), &config).unwrap();
    let start = || {
        let mut command = manyring();
        // A process that was killed has left its socket.
        let _ = std::fs::remove_file(at("control"));
        command.arg("run").arg("--config").arg(at("manyring.toml"));
        let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &[at("control")]);
        House { daemon, control: at("control") }
    };
    let disk = |name: &str| json!({ "kind": "blk", "socket_path": at(name), "null": "1G" });
    let house = start();
    assert_eq!(house.put("kept", &disk("kept")).0, 201);
    assert_eq!(house.put("gone", &disk("gone")).0, 201);
    assert_eq!(house.delete("gone"), 204);
    drop(house);
    let house = start();
    assert!(wait_until(|| at("kept").exists()));
    assert_eq!(house.names(), ["kept"]);
    is_served(&at("kept"));
    assert!(house.daemon.terminate().success());
}

/// A configuration file, and a daemon that has read it.
fn configured(devices: &str) -> (TempDir, House) {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, devices);
    let (file, control) = (folder.path().join("manyring.toml"), folder.path().join("control"));
    let mut command = manyring();
    command.arg("run").arg("--config").arg(file);
    let sockets = [control.clone()];
    let daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &sockets);
    (folder, House { daemon, control })
}

fn write(folder: &TempDir, devices: &str) {
    let text = format!("[daemon]\ncontrol = '@/control'\n{devices}");
    let text = text.replace('@', folder.path().to_str().unwrap());
    std::fs::write(folder.path().join("manyring.toml"), text).unwrap();
}

fn null(name: &str) -> String {
    format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nnull = '1G'\nnum_queues = 1\n")
}

#[test]
fn configuration_that_is_read_again_changes_what_differs_and_no_more() {
    let (folder, house) = configured(&(null("stays") + &null("goes") + &null("grows")));
    let at = |name: &str| folder.path().join(name);
    assert!(wait_until(|| ["stays", "goes", "grows"].iter().all(|name| at(name).exists())));
    let mut client = Client::connect(&at("stays"), 1);
    assert_eq!(
        house.put("own", &json!({ "kind": "blk", "socket_path": at("own"), "null": "1G" })).0,
        201
    );
    let grows = null("grows").replace("num_queues = 1", "num_queues = 2");
    write(&folder, &(null("stays") + &grows + &null("comes") + "[daemon.unknown]\n"));
    assert_eq!(house.ask("POST", "/v1/reload", &Value::Null).0, 422, "nothing is done by half");
    write(&folder, &("workers = 7\n".to_owned() + &null("stays") + &grows + &null("comes")));
    let steps = json!([
        { "device": "goes", "step": "remove" },
        { "device": "grows", "step": "reconnect", "keys": ["num_queues"] },
        { "device": "comes", "step": "add" },
        { "device": "[daemon]", "step": "restart", "keys": ["workers"] },
    ]);
    let generation = house.generation();
    let (status, dry) = house.ask("POST", "/v1/reload?dry_run=true", &Value::Null);
    assert_eq!((status, &dry["steps"], &dry["generation"]), (200, &steps, &json!(generation)));
    assert!(at("goes").exists() && !at("comes").exists());
    let output = output_of(&mut house.command(&["reload"]));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("grows: reconnect (num_queues)\n"), "{text}");
    assert!(text.contains("[daemon]: restart (workers)\n"), "{text}");
    assert_eq!(house.generation(), generation + 1);
    assert!(!at("goes").exists());
    let mut names = house.names();
    names.sort();
    assert_eq!(names, ["comes", "grows", "own", "stays"]);
    is_served(&at("comes"));
    house.is_left("comes");
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, PATIENCE), 1, "a device that stays has not noticed");
    // A signal does the same.
    write(&folder, &(null("stays") + &grows));
    house.daemon.send(rustix::process::Signal::HUP);
    assert!(wait_until(|| !at("comes").exists()), "{}", house.daemon.log());
    assert!(wait_until(|| house.daemon.log().contains("configuration reloaded")));
}

#[test]
fn file_that_was_read_first_is_carried_out_first() {
    let (folder, house) = configured(&null("a"));
    let file = folder.path().join("manyring.toml");
    // Who reads the file now gets it slowly.
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    let reload = || {
        let control = house.control.clone();
        let ask = move || http(&control, "POST", "/v1/reload", "").0;
        std::thread::Builder::new().spawn(ask).unwrap()
    };
    let first = reload();
    let mut slow = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    write(&folder, &null("b"));
    let second = reload();
    // It has time to come first.
    std::thread::sleep(std::time::Duration::from_millis(500));
    slow.write_all(text.as_bytes()).unwrap();
    drop(slow);
    assert_eq!((first.join().unwrap(), second.join().unwrap()), (200, 200));
    assert_eq!(house.names(), ["b"], "as the file says");
}

#[test]
fn fifty_changes_are_done_all_or_not_at_all() {
    let several = |range: std::ops::Range<usize>, bad: Option<usize>| {
        let one = |index| match bad {
            Some(bad) if bad == index => {
                let file = "file = '@/none/image'\n";
                null(&format!("d{index}")).replace("null = '1G'\n", file)
            }
            _ => null(&format!("d{index}")),
        };
        range.map(one).collect::<String>()
    };
    let (folder, house) = configured(&several(0..50, None));
    let names = || names_in(folder.path());
    let is_shown = |index| folder.path().join(format!("d{index}")).exists();
    assert!(wait_until(|| (0..50).all(is_shown) && names().len() == 52));
    let before = (names(), house.names(), house.generation(), house.fds());
    // Twenty-five go, twenty-five come, and the twelfth of those cannot be opened.
    write(&folder, &several(25..75, Some(61)));
    let (status, answer) = house.ask("POST", "/v1/reload", &Value::Null);
    assert_eq!(status, 422, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("d61: file"), "{answer}");
    let now = || (names(), house.names(), house.generation(), house.fds());
    assert!(wait_until(|| now() == before), "{:?}\n{before:?}", now());
    is_served(&folder.path().join("d3"));
    house.is_left("d3");
    write(&folder, &several(25..75, None));
    let (status, answer) = house.ask("POST", "/v1/reload", &Value::Null);
    assert_eq!((status, answer["steps"].as_array().unwrap().len()), (200, 50), "{answer}");
    is_served(&folder.path().join("d61"));
    assert!(house.daemon.terminate().success());
}

#[test]
fn whole_configuration_is_replaced_only_as_the_caller_has_seen_it() {
    let (folder, house) = configured(&null("a"));
    let whole = |devices: &str| {
        let text = format!("[daemon]\ncontrol = '@/control'\n{devices}");
        text.replace('@', folder.path().to_str().unwrap())
    };
    let put = |generation: u64, devices: &str| {
        let text = whole(devices);
        let head = format!("PUT /v1/config HTTP/1.1\r\nhost: x\r\nif-match: \"{generation}\"\r\n");
        let mut stream = UnixStream::connect(&house.control).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let rest = format!("connection: close\r\ncontent-length: {}\r\n\r\n{text}", text.len());
        stream.write_all((head + &rest).as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(put(7, &null("b")), "412");
    assert_eq!(put(1, &(null("a") + &null("b"))), "200");
    assert_eq!(house.names(), ["a", "b"]);
    assert_eq!(put(1, &null("c")), "412", "it has changed since");
    is_served(&folder.path().join("b"));
}

#[test]
fn commands_add_and_remove() {
    let house = House::run(EMPTY);
    let socket = house.at("vda");
    let socket = socket.to_str().unwrap();
    let add = ["add", "blk", "--name", "vda", "--null", "1G", "--socket-path", socket];
    let output = output_of(&mut house.command(&add));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "vda: add\n");
    is_served(&house.at("vda"));
    let output = output_of(&mut house.command(&add));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "vda: nothing to change\n");
    let remove = || output_of(&mut house.command(&["remove", "vda"])).status.success();
    assert!(wait_until(remove));
    assert!(!house.at("vda").exists());
    let output = output_of(&mut house.command(&[&add[..], &["--workers", "2"]].concat()));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.starts_with("manyring: --workers: "), "{error}");
}

#[test]
fn device_that_cannot_start_is_a_state_and_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let bad = "[[blk]]\nname = 'bad'\nsocket_path = '@/later/bad'\nnull = '1G'\n";
    let config = format!("[daemon]\ncontrol = '@/control'\n{bad}{}", null("good"));
    let config = config.replace('@', folder.path().to_str().unwrap());
    let file = folder.path().join("manyring.toml");
    std::fs::write(&file, &config).unwrap();
    let control = folder.path().join("control");
    let start = || {
        let mut command = manyring();
        command.arg("run").arg("--config").arg(&file);
        command
    };
    let daemon =
        Daemon::start(start(), tempfile::tempdir().unwrap(), std::slice::from_ref(&control));
    let device = || http_json(&control, "GET", "/v1/devices/bad", "").1;
    assert_eq!(
        (&device()["state"], &device()["waits_for"]),
        (&json!("failed"), &json!("socket_path"))
    );
    assert!(device()["reason"].as_str().unwrap().contains("No such file"), "{}", device());
    is_served(&folder.path().join("good"));
    std::fs::create_dir(folder.path().join("later")).unwrap();
    assert!(wait_until(|| device()["state"] == "serving"), "{}", daemon.log());
    assert!(wait_until(|| folder.path().join("later/bad").exists()));
    is_served(&folder.path().join("later/bad"));
    assert!(daemon.terminate().success());
    // Whoever waits for nothing is told at once.
    std::fs::remove_dir_all(folder.path().join("later")).unwrap();
    std::fs::write(&file, config.replace("[daemon]\n", "[daemon]\nwait = 0\n")).unwrap();
    let error = refused(folder.path(), &mut start());
    assert!(error.starts_with("manyring: [[blk]] bad: socket_path: "), "{error}");
}

//! Devices that come, change and go over the control API while the daemon runs.

use crate::support::changes::{EMPTY, Supervisor, configured, image, is_served, null};
use crate::support::client::Client;
use crate::support::process::{Daemon, TIMEOUT, only_in_default_form, wait_until};
use crate::support::program::{http, manyring, names_in, output_of, shown};
use serde_json::{Value, json};
use std::os::unix::net::UnixStream;

#[test]
fn device_comes_and_goes_and_leaves_nothing() {
    // Which descriptors the daemon has for device processes that are to come depends on when it
    // looks.
    if !only_in_default_form() {
        return;
    }
    let supervisor = Supervisor::run(EMPTY);
    // Threads and files that the first session of a process opens stay open for the next ones.
    assert_eq!(supervisor.put("first", &supervisor.null("first")).0, 201);
    is_served(&supervisor.at("first"));
    assert!(wait_until(|| supervisor.delete("first") == 204));
    let before = (supervisor.fds(), names_in(supervisor.daemon.folder()));
    for _ in 0..3 {
        let (status, answer) = supervisor.put("a", &supervisor.null("a"));
        assert_eq!((status, &answer["steps"][0]["step"]), (201, &json!("add")), "{answer}");
        is_served(&supervisor.at("a"));
        let device = shown(&supervisor.control, "/v1/devices/a");
        assert_eq!((&device["state"], &device["origin"]), (&json!("serving"), &json!("api")));
        // Repeated, as callers do that have not heard the answer.
        let (status, answer) = supervisor.put("a", &supervisor.null("a"));
        assert_eq!((status, &answer["steps"]), (200, &json!([])), "{answer}");
        assert!(wait_until(|| supervisor.delete("a") == 204), "its client has left");
        assert_eq!(supervisor.delete("a"), 204, "gone already");
        assert_eq!(supervisor.ask("GET", "/v1/devices/a", &Value::Null).0, 404);
        assert!(supervisor.names().is_empty() && !supervisor.at("a").exists());
    }
    let after = || (supervisor.fds(), names_in(supervisor.daemon.folder()));
    assert!(wait_until(|| after() == before), "{before:?}, then {:?}", after());
    assert!(supervisor.daemon.terminate().success());
}

#[test]
fn device_in_use_is_not_removed_unless_it_is_forced() {
    let supervisor = Supervisor::run(EMPTY);
    let file = image(supervisor.daemon.folder(), "image");
    let disk = json!({ "kind": "blk", "socket_path": supervisor.at("a"), "file": file });
    assert_eq!(supervisor.put("a", &disk).0, 201);
    let mut client = Client::connect(&supervisor.at("a"), 1);
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, TIMEOUT), 1);
    let (status, answer) = supervisor.ask("DELETE", "/v1/devices/a", &Value::Null);
    assert_eq!(status, 409, "{answer}");
    assert!(
        answer["error"]
            .as_str()
            .unwrap()
            .contains("a is in use by a VMM; unplug it there first, or use --force"),
        "{answer}"
    );
    let mut other = disk.clone();
    other["direct"] = json!(true);
    assert_eq!(supervisor.put("a", &other).0, 409, "another disk is no small matter either");
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, TIMEOUT), 1, "it works on");
    let forced = supervisor.ask("DELETE", "/v1/devices/a?force=true", &Value::Null);
    assert_eq!(forced.0, 204);
    // The image's lock is free when the answer comes.
    assert_eq!(supervisor.put("b", &disk).0, 201);
    assert_eq!(supervisor.put("a", &disk).0, 409, "b has its socket and its file");
    is_served(&supervisor.at("a"));
}

#[test]
fn front_end_that_connects_while_a_change_is_prepared_keeps_its_device() {
    let supervisor = Supervisor::run(EMPTY);
    assert_eq!(supervisor.put("a", &supervisor.null("a")).0, 201);
    let file = image(supervisor.daemon.folder(), "image");
    let holder = Daemon::blk(&["--blk-file", file.to_str().unwrap()]);
    let (control, names) = (supervisor.control.clone(), || names_in(supervisor.daemon.folder()));
    let body =
        json!({ "kind": "blk", "socket_path": supervisor.at("other"), "file": file }).to_string();
    let put = move || http(&control, "PUT", "/v1/devices/a", &body);
    let put = std::thread::Builder::new().spawn(put).unwrap();
    // Its socket is bound, and its image is waited for. If that takes too long, it is refused too.
    wait_until(|| put.is_finished() || names().iter().any(|name| name.starts_with(".mr-")));
    let mut client = Client::connect(&supervisor.at("a"), 1);
    drop(holder);
    let (status, _, answer) = put.join().unwrap();
    assert_eq!(status, 409, "{answer}");
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, TIMEOUT), 1);
}

#[test]
fn device_for_one_session_is_gone_after_it_and_can_come_again() {
    let supervisor = Supervisor::run(EMPTY);
    let mut once = supervisor.null("a");
    once["one_off"] = json!(true);
    for _ in 0..2 {
        assert_eq!(supervisor.put("a", &once).0, 201);
        is_served(&supervisor.at("a"));
        assert!(wait_until(|| supervisor.names().is_empty()));
        assert!(names_in(&supervisor.at("state").join("devices")).is_empty());
        // The daemon goes on without any device: others can come.
        assert_eq!((supervisor.delete("a"), supervisor.delete("b")), (204, 204));
    }
    assert_eq!(supervisor.put("b", &supervisor.null("b")).0, 201);
    is_served(&supervisor.at("b"));
}

#[test]
fn what_cannot_be_costs_only_itself_and_changes_nothing() {
    let supervisor = Supervisor::run(EMPTY);
    assert_eq!(supervisor.put("good", &supervisor.null("good")).0, 201);
    let (before, fds) = (names_in(supervisor.daemon.folder()), supervisor.fds());
    let generation = supervisor.generation();
    let missing = supervisor.daemon.folder().join("none/s");
    for (name, body, status, words) in [
        ("b", json!({ "kind": "blk", "socket_path": missing, "null": "1G" }), 422, "socket_path"),
        (
            "b",
            json!({ "kind": "blk", "socket_path": supervisor.at("b"), "file": missing }),
            422,
            "file",
        ),
        (
            "b",
            json!({ "kind": "blk", "socket_path": supervisor.at("good"), "null": "1G" }),
            409,
            "good",
        ),
        ("b", json!({ "kind": "disk" }), 422, "kind"),
        ("b", json!({ "kind": "blk", "colour": 1 }), 422, "colour"),
        ("b", json!({ "kind": "blk", "fd": 3, "null": "1G" }), 422, "fd"),
        ("b", json!({ "kind": "blk", "name": "c", "null": "1G" }), 422, "name"),
        ("a%20b", json!({ "kind": "blk", "null": "1G" }), 422, "name"),
        ("b", json!([1]), 400, "body"),
    ] {
        let (found, answer) = supervisor.put(name, &body);
        let error = answer["error"].as_str().unwrap_or_default();
        assert_eq!((found, error.contains(words)), (status, true), "{body}: {answer}");
    }
    assert_eq!(
        (supervisor.names(), supervisor.generation()),
        (vec!["good".to_owned()], generation)
    );
    assert_eq!(names_in(supervisor.daemon.folder()), before);
    assert_eq!(supervisor.fds(), fds);
    is_served(&supervisor.at("good"));
}

#[test]
fn name_that_no_device_can_have_leads_to_no_file() {
    let supervisor = Supervisor::run(EMPTY);
    let victim = supervisor.at("victim.json");
    std::fs::write(&victim, "{}").unwrap();
    let absolute = supervisor.at("victim").display().to_string().replace('/', "%2F");
    for name in ["..%2F..%2Fvictim", &absolute, "a%0Ab", "%00"] {
        assert_eq!(supervisor.delete(name), 204, "{name}: there is no such device");
        assert!(victim.exists(), "{name}");
    }
}

#[test]
fn device_of_the_file_is_not_removed_over_the_api() {
    let (folder, supervisor) = configured(&null("a"));
    let socket = folder.path().join("a");
    assert!(wait_until(|| socket.exists()));
    for how in ["", "?force=true"] {
        let (status, answer) =
            supervisor.ask("DELETE", &format!("/v1/devices/a{how}"), &Value::Null);
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(status == 409 && error.contains("configuration file"), "{status}: {answer}");
    }
    is_served(&socket);
}

#[test]
fn device_that_is_replaced_takes_what_the_former_one_held() {
    let supervisor = Supervisor::run(EMPTY);
    let file = image(supervisor.daemon.folder(), "image");
    let disk = |more: Value| {
        let mut disk = json!({ "kind": "blk", "socket_path": supervisor.at("a"), "file": file });
        disk.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        disk
    };
    assert_eq!(supervisor.put("a", &disk(json!({}))).0, 201);
    let (status, answer) = supervisor.put("a", &disk(json!({ "direct": true, "num_queues": 3 })));
    assert_eq!((status, &answer["steps"][0]["keys"]), (200, &json!(["file", "num_queues"])));
    assert_eq!(shown(&supervisor.control, "/v1/devices/a")["queues"].as_array().unwrap().len(), 3);
    is_served(&supervisor.at("a"));
    // One that cannot be leaves the former one as it was.
    let socket = supervisor.daemon.folder().join("none/s");
    assert!(wait_until(|| supervisor.put("a", &disk(json!({ "socket_path": socket }))).0 == 422));
    is_served(&supervisor.at("a"));
    assert_eq!(shown(&supervisor.control, "/v1/devices/a")["queues"].as_array().unwrap().len(), 3);
}

#[test]
fn what_a_front_end_has_seen_changes_with_its_next_session() {
    let supervisor = Supervisor::run(EMPTY);
    let disk = |queues: u32| {
        let null = supervisor.null("a");
        let mut disk = null.as_object().unwrap().clone();
        disk.insert("num_queues".to_owned(), json!(queues));
        Value::from(disk)
    };
    assert_eq!(supervisor.put("a", &disk(1)).0, 201);
    let mut client = Client::connect(&supervisor.at("a"), 1);
    let (status, answer) = supervisor.put("a", &disk(3));
    assert_eq!((status, &answer["steps"][0]["step"]), (200, &json!("reconnect")), "{answer}");
    let device = || shown(&supervisor.control, "/v1/devices/a");
    let queues = || device()["queues"].as_array().unwrap().len();
    // It is there all the time, also while it is replaced.
    assert_eq!((device()["pending_keys"].clone(), queues()), (json!(["num_queues"]), 1));
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, TIMEOUT), 1, "its session goes on");
    drop(client);
    assert!(wait_until(
        || supervisor.ask("GET", "/v1/devices/a", &Value::Null).0 == 200 && queues() == 3
    ));
    assert!(device()["pending_keys"].is_null());
    is_served(&supervisor.at("a"));
}

#[test]
fn whoever_waits_for_events_hears_what_becomes_of_devices() {
    let supervisor = Supervisor::run(EMPTY);
    let since = |number: u64| shown(&supervisor.control, &format!("/v1/events?since={number}"));
    assert_eq!(supervisor.put("a", &supervisor.null("a")).0, 201);
    let first = since(0);
    assert_eq!((&first["events"][0]["event"], &first["lost"]), (&json!("serving"), &json!(false)));
    let last = first["last"].as_u64().unwrap();
    // The answer comes when something has happened.
    let control = supervisor.control.clone();
    let wait = move || shown(&control, &format!("/v1/events?since={last}"));
    let waiting = std::thread::Builder::new().spawn(wait).unwrap();
    is_served(&supervisor.at("a"));
    let heard = waiting.join().unwrap();
    let event = &heard["events"][0];
    assert_eq!((&event["event"], &event["device"]), (&json!("connected"), &json!("a")));
    supervisor.is_left("a");
    assert_eq!(supervisor.delete("a"), 204);
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
        let supervisor = Supervisor::run(&format!("{EMPTY}{configuration}"));
        assert!(wait_until(|| supervisor.names().len() == count));
        let at = |index: usize| supervisor.at(&format!("n{index}"));
        assert!(wait_until(|| (0..count).all(|index| at(index).exists())));
        assert_eq!(supervisor.put("warm", &supervisor.null("warm")).0, 201);
        let threads = || supervisor.daemon.holdings().threads;
        let before = (supervisor.fds(), threads());
        for round in 0..10 {
            assert_eq!(
                supervisor.put(&format!("a{round}"), &supervisor.null(&format!("a{round}"))).0,
                201
            );
        }
        let added = supervisor.fds() - before.0;
        assert!(wait_until(|| threads() <= before.1), "no thread for a device without a guest");
        for round in 0..10 {
            assert_eq!(supervisor.delete(&format!("a{round}")), 204);
        }
        assert_eq!(supervisor.fds(), before.0);
        added
    };
    assert_eq!(several(500), several(1));
}

#[test]
fn live_keys_change_at_once_and_no_others_are_taken() {
    let supervisor = Supervisor::run(EMPTY);
    let lan =
        json!({ "kind": "net", "socket_path": supervisor.at("lan"), "null": true, "mtu": 1400 });
    assert_eq!(supervisor.put("lan", &lan).0, 201);
    let mtu = || shown(&supervisor.control, "/v1/devices/lan")["mtu"].clone();
    let patch =
        |name: &str, keys: Value| supervisor.ask("PATCH", &format!("/v1/devices/{name}"), &keys);
    let (status, answer) = patch("lan", json!({ "mtu": 1300 }));
    assert_eq!((status, &answer["steps"][0]["step"]), (200, &json!("live")), "{answer}");
    assert_eq!(mtu(), 1300);
    let output = output_of(&mut supervisor.command(&["set", "lan", "mtu=1200"]));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "lan: live (mtu)\n");
    assert_eq!(mtu(), 1200);
    let is_kept = |mtu: &str| {
        let kept =
            std::fs::read_to_string(supervisor.at("state").join("devices/lan.json")).unwrap();
        let planned = shown(&supervisor.control, "/v1/config")["net"][0]["mtu"].to_string();
        assert!(kept.contains(&format!("\"mtu\":{mtu}")) && planned == mtu, "{kept}, {planned}");
    };
    is_kept("1200");
    assert_eq!(supervisor.ask("POST", "/v1/devices/lan/mtu", &json!({ "mtu": 1100 })).0, 200);
    assert_eq!(mtu(), 1100);
    is_kept("1100");
    assert_eq!(supervisor.ask("POST", "/v1/devices/lan/mtu", &json!({ "mtu": 1200 })).0, 200);
    for (name, keys, status, words) in [
        (
            "lan",
            json!({ "queue_pairs": 2 }),
            422,
            "queue_pairs takes effect when the guest reconnects; PUT",
        ),
        ("lan", json!({ "tap": "t" }), 422, "tap takes effect when the device is removed"),
        ("lan", json!({ "mtu": 1 }), 422, "mtu: 1 is not between"),
        ("lan", json!({ "colour": 1 }), 422, "colour: unknown key"),
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
    let supervisor = Supervisor::run(EMPTY);
    let lan = |pairs: u32| {
        let socket = supervisor.at("lan");
        json!({ "kind": "net", "socket_path": socket, "null": true, "mtu": 1400,
            "queue_pairs": pairs })
    };
    assert_eq!(supervisor.put("lan", &lan(1)).0, 201);
    let device = || shown(&supervisor.control, "/v1/devices/lan");
    let session = UnixStream::connect(supervisor.at("lan")).unwrap();
    assert!(wait_until(|| device()["connected"] == true));
    for pairs in [2, 3, 2] {
        assert_eq!(supervisor.put("lan", &lan(pairs)).1["steps"][0]["step"], json!("reconnect"));
    }
    assert_eq!(supervisor.ask("PATCH", "/v1/devices/lan", &json!({ "mtu": 1300 })).0, 200);
    drop(session);
    assert!(wait_until(|| device()["queue_pairs"] == 2));
    assert_eq!(device()["mtu"], 1300, "it was changed after the rest was put off");
    // One that cannot be served yet.
    let folder = tempfile::tempdir().unwrap();
    let later = folder.path().join("later");
    let socket = later.join("lan").display().to_string();
    let (other, supervisor) = configured(&format!(
        "[[net]]\nname = 'lan'\nsocket_path = '{socket}'\nnull = true\nmtu = 1400\n{}",
        null("good")
    ));
    let device = || shown(&supervisor.control, "/v1/devices/lan");
    assert_eq!(device()["state"], "failed");
    assert_eq!(supervisor.ask("PATCH", "/v1/devices/lan", &json!({ "mtu": 1300 })).0, 200);
    std::fs::create_dir(&later).unwrap();
    assert!(wait_until(|| device()["state"] == "serving"), "{}", supervisor.daemon.log());
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
        Supervisor { daemon, control: at("control") }
    };
    let disk = |name: &str| json!({ "kind": "blk", "socket_path": at(name), "null": "1G" });
    let supervisor = start();
    assert_eq!(supervisor.put("kept", &disk("kept")).0, 201);
    assert_eq!(supervisor.put("gone", &disk("gone")).0, 201);
    assert_eq!(supervisor.delete("gone"), 204);
    drop(supervisor);
    let supervisor = start();
    assert!(wait_until(|| at("kept").exists()));
    assert_eq!(supervisor.names(), ["kept"]);
    is_served(&at("kept"));
    assert!(supervisor.daemon.terminate().success());
}

//! The screen of a model, line by line, and what keys make of it.

use super::*;
use crate::stats::Shown;
use crate::stats::table::queue_of;
use manyring_control::snapshot::{DeviceInfo, QueueInfo};
use manyring_serve::worker_view::{StuckInfo, WorkerInfo};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::json;
use std::time::Duration;
use tokio::time::Instant;

/// A disk whose queue has done this many requests of 4096 bytes.
pub(super) fn disk(name: &str, requests: u64, errors: u64) -> DeviceInfo {
    let device = json!({
        "name": name, "kind": "blk", "disk": "uring", "size": 1 << 30, "read_only": false,
        "logical_block_size": 512, "state": "serving", "origin": "file", "connected": true,
        "socket": format!("/run/manyring/{name}.sock"), "queues": [],
    });
    let mut device: DeviceInfo = serde_json::from_value(device).unwrap();
    let counters = [
        ("running", 1),
        ("requests", requests),
        ("bytes_read", requests * 4096),
        ("errors", errors),
        ("kicks", requests / 10),
        ("in_flight", 3),
    ];
    device.queues = vec![queue_of(0, &counters, "serve_ns", &[(81_919, requests)])];
    device
}

/// A network that has received this many packets, of which the eighth part was dropped.
pub(super) fn network(name: &str, packets: u64) -> DeviceInfo {
    let device = json!({
        "name": name, "kind": "net", "port": "tap", "interface": "tap0", "link": "up",
        "mac": "02:00:00:00:00:01", "mtu": null, "host_mtu": 1500, "queue_pairs": 1,
        "attached_pairs": 1, "state": "serving", "origin": "api", "connected": false,
        "socket": "/run/manyring/lan.sock", "queues": [],
    });
    let mut device: DeviceInfo = serde_json::from_value(device).unwrap();
    let counters = [
        ("packets", packets),
        ("bytes_passed", packets * 1000),
        ("dropped_small_buffers", packets / 8),
    ];
    let queue = queue_of(0, &counters, "wait_ns", &[(1023, packets)]);
    device.queues = vec![QueueInfo { name: Some("rx0".into()), ..queue }];
    device
}

pub(super) fn failed(name: &str, reason: &str) -> DeviceInfo {
    let device = json!({
        "name": name, "kind": "blk", "state": "failed", "origin": "file", "connected": false,
        "reason": reason, "socket": "/run/manyring/data.sock", "queues": [],
    });
    serde_json::from_value(device).unwrap()
}

fn worker(ran_ns: u64, hits: u64) -> WorkerInfo {
    let worker = json!({
        "index": 0, "running": true, "cpus": null, "queues": 2, "sleeps": ran_ns / 1_000_000,
        "slept_ns": 0, "ran_ns": ran_ns, "looked_ns": ran_ns / 2,
        "polling": { "spins_hit": hits, "spins_missed": hits / 4 },
    });
    serde_json::from_value(worker).unwrap()
}

/// Three devices at a time, in thousands of what they have done.
pub(super) fn three(done: u64) -> Shown {
    let devices = vec![
        disk("root", 20_000 * done, done),
        network("lan", 800 * done),
        failed("data", "/srv/data.img: No such file or directory (os error 2)"),
    ];
    Shown { devices, workers: vec![worker(400_000_000 * done, 40 * done)], stuck: Vec::new() }
}

/// A model that has seen both, two seconds apart.
pub(super) fn model(before: Shown, now: Shown) -> Model {
    let mut model = Model::new("/run/manyring/control".to_owned());
    let start = Instant::now();
    model.take(Ok(before), start);
    model.take(Ok(now), start + Duration::from_secs(2));
    model
}

/// The screen's lines, without the spaces at their ends.
fn screen(model: &mut Model) -> Vec<String> {
    screen_of(model, 80, 24)
}

pub(super) fn screen_of(model: &mut Model, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, model)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y: u16| -> String {
        (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned()
    };
    (0..height).map(line).collect()
}

pub(super) fn press(model: &mut Model, keys: &[KeyCode]) {
    for key in keys {
        model.press(KeyEvent::new(*key, KeyModifiers::NONE));
    }
}

pub(super) fn type_in(model: &mut Model, text: &str) {
    text.chars().for_each(|c| press(model, &[KeyCode::Char(c)]));
}

#[test]
fn eighty_columns_show_three_devices() {
    let mut model = model(three(0), three(2));
    let shown = screen(&mut model);
    let expected = [
        "manyring top  /run/manyring/control   1:DEVICES 2:queues 3:workers",
        "3 devices, 1 connected, 1 not served; 1 worker; 20.8k ops/s, in 82.7M, out 0",
        "DEVICE           KIND    STATE       OPS/s   IN/s  OUT/s     p99 FLIGHT LOST/s",
        "data             blk     failed          0      0      0       -      0      0",
        "lan              net     free          800   800k      0   1.0us      0    100",
        "root             blk     connected   20.0k  81.9M      0  81.9us      3      1",
    ];
    assert_eq!(shown[..6], expected, "{shown:#?}");
    let about = [
        "data (blk, from file): not served",
        "socket /run/manyring/data.sock",
        "failed: /srv/data.img: No such file or directory (os error 2)",
    ];
    assert_eq!(shown[18..21], about, "{shown:#?}");
    assert!(shown[23].starts_with("q leave"), "{shown:#?}");
}

#[test]
fn nothing_and_three_hundred_devices_have_a_screen_of_any_size() {
    let many = |done: u64| Shown {
        devices: (0..300).map(|n| disk(&format!("disk{n}"), done * n, 0)).collect(),
        ..Shown::default()
    };
    for (width, height) in [(80, 24), (20, 5), (200, 60), (1, 1)] {
        screen_of(&mut Model::new("c".to_owned()), width, height);
        screen_of(&mut model(Shown::default(), Shown::default()), width, height);
        screen_of(&mut model(many(0), many(100)), width, height);
    }
    let mut model = model(many(0), many(100));
    type_in(&mut model, "sss");
    let shown = screen(&mut model);
    assert!(shown[3].starts_with("disk299"), "the busiest first: {shown:#?}");
    press(&mut model, &[KeyCode::PageDown, KeyCode::Down]);
    let shown = screen(&mut model);
    assert!(shown.iter().any(|line| line.starts_with("disk283 ")), "{shown:#?}");
    press(&mut model, &[KeyCode::End]);
    let shown = screen(&mut model);
    assert!(shown.iter().any(|line| line.starts_with("disk0 ")), "{shown:#?}");
    assert!(shown.iter().any(|line| line.starts_with("disk0 (blk")), "{shown:#?}");
}

#[test]
fn queues_and_workers_have_tables_of_their_own() {
    let mut model = model(three(0), three(2));
    type_in(&mut model, "2");
    let shown = screen(&mut model);
    assert_eq!(shown[3].split_whitespace().take(4).collect::<Vec<_>>(), ["lan", "rx0", "0", "800"]);
    assert_eq!(shown.iter().filter(|line| line.starts_with("root ")).count(), 1, "{shown:#?}");
    assert!(shown.contains(&"lost/s: 100 small buffers".to_owned()), "{shown:#?}");
    type_in(&mut model, "3");
    let shown = screen(&mut model);
    let words: Vec<_> = shown[3].split_whitespace().collect();
    assert_eq!(words, ["0", "runs", "any", "2", "40", "20", "400", "80", "0", "-"], "{shown:#?}");
}

#[test]
fn a_device_opens_into_its_queues_and_escape_shows_all() {
    let mut model = model(three(0), three(2));
    press(&mut model, &[KeyCode::Down, KeyCode::Down, KeyCode::Enter]);
    assert_eq!((model.view, model.filter.as_str()), (View::Queues, "root"));
    assert_eq!(model.rows().len(), 1);
    press(&mut model, &[KeyCode::Esc]);
    assert_eq!(model.rows().len(), 2);
    type_in(&mut model, "/la");
    assert!(model.is_typing && screen(&mut model)[23].starts_with("names with: la_"));
    press(&mut model, &[KeyCode::Enter]);
    assert_eq!(model.rows().len(), 1);
    type_in(&mut model, "q");
    assert!(!model.is_typing);
}

#[test]
fn the_chosen_row_stays_chosen_whatever_the_order() {
    let mut model = model(three(0), three(2));
    press(&mut model, &[KeyCode::End]);
    type_in(&mut model, "r");
    let rows = model.rows();
    assert_eq!((rows[0].key.as_str(), model.chosen(&rows)), ("root", 0));
    type_in(&mut model, "r");
    let rows = model.rows();
    assert_eq!((rows[2].key.as_str(), model.chosen(&rows)), ("root", 2));
}

#[test]
fn a_picture_that_stands_still_does_not_change() {
    let mut model = model(three(0), three(2));
    type_in(&mut model, "p");
    let before = screen(&mut model);
    model.take(Ok(three(9)), Instant::now() + Duration::from_secs(9));
    assert_eq!(screen(&mut model), before);
    assert!(before[0].ends_with("PAUSED"), "{before:#?}");
}

#[test]
fn a_daemon_that_is_gone_is_named_and_its_last_numbers_stay() {
    let mut model = model(three(0), three(2));
    model.take(Err("/run/manyring/control: no answer from the daemon".to_owned()), Instant::now());
    let shown = screen(&mut model);
    assert!(shown[2].contains("no answer from the daemon"), "{shown:#?}");
    assert!(shown.iter().any(|line| line.starts_with("root ")), "{shown:#?}");
}

#[test]
fn a_thread_that_is_held_is_named_with_the_device_that_holds_it() {
    let mut now = three(2);
    now.stuck = vec![StuckInfo {
        process: String::new(),
        thread: "worker-0".into(),
        device: "root".into(),
        state: "D".into(),
        waits_in: "folio_wait".into(),
        stuck_ns: 2_500_000_000,
    }];
    let shown = screen(&mut model(three(0), now));
    assert_eq!(shown[2], "worker-0: stuck for 2.5 s by root, in folio_wait", "{shown:#?}");
}

#[test]
fn a_daemon_that_began_anew_shows_no_negative_rates() {
    let shown = screen(&mut model(three(9), three(0)));
    let line = shown.iter().find(|line| line.starts_with("root ")).unwrap();
    assert_eq!(line.split_whitespace().skip(3).collect::<Vec<_>>(), ["0", "0", "0", "-", "3", "0"]);
}

#[test]
fn what_a_device_says_of_itself_cannot_move_the_cursor() {
    let mut now = three(2);
    now.devices[2].reason = Some("\u{1b}[2J\u{7}gone".to_owned());
    let shown = screen(&mut model(three(0), now));
    assert!(!shown.iter().flat_map(|line| line.chars()).any(char::is_control), "{shown:#?}");
}

#[test]
fn help_is_whole_on_eighty_columns() {
    let mut model = model(three(0), three(2));
    type_in(&mut model, "?");
    let shown = screen(&mut model).join("\n");
    for line in HELP.lines() {
        assert!(shown.contains(line), "{line:?} is cut:\n{shown}");
    }
}

//! A configuration that is read again, by file, by the control API and by command: what differs is
//! carried out as a whole or not at all.

use crate::support::changes::{EMPTY, Supervisor, configured, is_served, null, write};
use crate::support::client::Client;
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::program::{http, http_json, manyring, names_in, output_of, refused};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

#[test]
fn configuration_that_is_read_again_changes_what_differs_and_no_more() {
    let (folder, supervisor) = configured(&(null("stays") + &null("goes") + &null("grows")));
    let at = |name: &str| folder.path().join(name);
    assert!(wait_until(|| ["stays", "goes", "grows"].iter().all(|name| at(name).exists())));
    let mut client = Client::connect(&at("stays"), 1);
    assert_eq!(
        supervisor.put("own", &json!({ "kind": "blk", "socket_path": at("own"), "null": "1G" })).0,
        201
    );
    let grows = null("grows").replace("num_queues = 1", "num_queues = 2");
    write(&folder, &(null("stays") + &grows + &null("comes") + "[daemon.unknown]\n"));
    assert_eq!(
        supervisor.ask("POST", "/v1/reload", &Value::Null).0,
        422,
        "nothing is done by half"
    );
    write(&folder, &("workers = 7\n".to_owned() + &null("stays") + &grows + &null("comes")));
    let steps = json!([
        { "device": "goes", "step": "remove" },
        { "device": "grows", "step": "reconnect", "keys": ["num_queues"] },
        { "device": "comes", "step": "add" },
        { "device": "[daemon]", "step": "restart", "keys": ["workers"] },
    ]);
    let generation = supervisor.generation();
    let (status, dry) = supervisor.ask("POST", "/v1/reload?dry_run=true", &Value::Null);
    assert_eq!((status, &dry["steps"], &dry["generation"]), (200, &steps, &json!(generation)));
    assert!(at("goes").exists() && !at("comes").exists());
    let output = output_of(&mut supervisor.command(&["reload"]));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("grows: reconnect (num_queues)\n"), "{text}");
    assert!(
        text.contains("[daemon] workers: changed in the file; needs a restart of the daemon\n"),
        "{text}"
    );
    assert_eq!(supervisor.generation(), generation + 1);
    assert!(!at("goes").exists());
    let mut names = supervisor.names();
    names.sort();
    assert_eq!(names, ["comes", "grows", "own", "stays"]);
    is_served(&at("comes"));
    supervisor.is_left("comes");
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, TIMEOUT), 1, "a device that stays has not noticed");
    // A signal does the same.
    write(&folder, &(null("stays") + &grows));
    supervisor.daemon.send(rustix::process::Signal::HUP);
    assert!(wait_until(|| !at("comes").exists()), "{}", supervisor.daemon.log());
    assert!(wait_until(|| supervisor.daemon.log().contains("configuration reloaded")));
}

#[test]
fn file_that_was_read_first_is_carried_out_first() {
    let (folder, supervisor) = configured(&null("a"));
    let file = folder.path().join("manyring.toml");
    // Who reads the file now gets it slowly.
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    let reload = || {
        let control = supervisor.control.clone();
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
    assert_eq!(supervisor.names(), ["b"], "as the file says");
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
    let (folder, supervisor) = configured(&several(0..50, None));
    let names = || names_in(folder.path());
    let is_shown = |index| folder.path().join(format!("d{index}")).exists();
    assert!(wait_until(|| (0..50).all(is_shown) && names().len() == 52));
    let before = (names(), supervisor.names(), supervisor.generation(), supervisor.fds());
    // Twenty-five go, twenty-five come, and the twelfth of those cannot be opened.
    write(&folder, &several(25..75, Some(61)));
    let (status, answer) = supervisor.ask("POST", "/v1/reload", &Value::Null);
    assert_eq!(status, 422, "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("d61: file"), "{answer}");
    let now = || (names(), supervisor.names(), supervisor.generation(), supervisor.fds());
    assert!(wait_until(|| now() == before), "{:?}\n{before:?}", now());
    is_served(&folder.path().join("d3"));
    supervisor.is_left("d3");
    write(&folder, &several(25..75, None));
    let (status, answer) = supervisor.ask("POST", "/v1/reload", &Value::Null);
    assert_eq!((status, answer["steps"].as_array().unwrap().len()), (200, 50), "{answer}");
    is_served(&folder.path().join("d61"));
    assert!(supervisor.daemon.terminate().success());
}

#[test]
fn whole_configuration_is_replaced_only_as_the_caller_has_seen_it() {
    let (folder, supervisor) = configured(&null("a"));
    let whole = |devices: &str| {
        let text = format!("[daemon]\ncontrol = '@/control'\n{devices}");
        text.replace('@', folder.path().to_str().unwrap())
    };
    let put = |generation: u64, devices: &str| {
        let text = whole(devices);
        let head = format!("PUT /v1/config HTTP/1.1\r\nhost: x\r\nif-match: \"{generation}\"\r\n");
        let mut stream = UnixStream::connect(&supervisor.control).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let rest = format!("connection: close\r\ncontent-length: {}\r\n\r\n{text}", text.len());
        stream.write_all((head + &rest).as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(put(7, &null("b")), "412");
    assert_eq!(put(1, &(null("a") + &null("b"))), "200");
    assert_eq!(supervisor.names(), ["a", "b"]);
    assert_eq!(put(1, &null("c")), "412", "it has changed since");
    is_served(&folder.path().join("b"));
}

#[test]
fn commands_add_and_remove() {
    let supervisor = Supervisor::run(EMPTY);
    let socket = supervisor.at("vda");
    let socket = socket.to_str().unwrap();
    let add = ["add", "blk", "--name", "vda", "--null", "1G", "--socket-path", socket];
    let output = output_of(&mut supervisor.command(&add));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "vda: add\n");
    is_served(&supervisor.at("vda"));
    let output = output_of(&mut supervisor.command(&add));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "vda: nothing to change\n");
    let remove = || output_of(&mut supervisor.command(&["remove", "vda"])).status.success();
    assert!(wait_until(remove));
    assert!(!supervisor.at("vda").exists());
    let output = output_of(&mut supervisor.command(&[&add[..], &["--workers", "2"]].concat()));
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

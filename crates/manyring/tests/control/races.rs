//! Operators and programs that ask for changes at the same time, again and again, or with a state
//! folder that takes nothing more: each is answered, and in the end the daemon serves what its
//! last answers and its files say.

use crate::support::changes::{EMPTY, Supervisor, configured, image, is_served, null, write};
use crate::support::client::Client;
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::program::{http, names_in, output_of, shown};
use crate::support::rings::StopAtEnd;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

/// The names in a folder that a change makes for its own use.
fn unfinished(folder: &Path) -> Vec<String> {
    let mut names = names_in(folder);
    names.retain(|name| name.starts_with(".mr-"));
    names
}

#[test]
fn several_who_put_one_name_at_once_are_served_one_after_the_other() {
    let supervisor = Supervisor::run(EMPTY);
    let kept = supervisor.at("state").join("devices/a.json");
    for round in 0..5 {
        let answers: Vec<_> = std::thread::scope(|scope| {
            let askers: Vec<_> = (1..9)
                .map(|size| {
                    let mut disk = supervisor.null("a");
                    disk["null"] = json!(format!("{size}M"));
                    let supervisor = &supervisor;
                    scope.spawn(move || supervisor.put("a", &disk))
                })
                .collect();
            askers.into_iter().map(|asker| asker.join().unwrap()).collect()
        });
        let created = answers.iter().filter(|(status, _)| *status == 201).count();
        assert_eq!(created, 1, "round {round}: {answers:?}");
        assert!(answers.iter().all(|(status, _)| [200, 201].contains(status)), "{answers:?}");
        let size = shown(&supervisor.control, "/v1/devices/a")["size"].as_u64().unwrap() >> 20;
        let record: Value = serde_json::from_slice(&std::fs::read(&kept).unwrap()).unwrap();
        assert_eq!(record["device"]["null"], format!("{size}M"), "what is kept is what is served");
        is_served(&supervisor.at("a"));
        supervisor.is_left("a");
        assert_eq!(supervisor.delete("a"), 204);
    }
    assert_eq!(unfinished(supervisor.daemon.folder()), [""; 0]);
    assert!(names_in(kept.parent().unwrap()).is_empty());
}

#[test]
fn more_commands_at_once_than_there_are_places_are_all_carried_out() {
    const COMMANDS: usize = 48;
    let supervisor = Supervisor::run(EMPTY);
    for command in ["add", "remove"] {
        let asking: Vec<_> = (0..COMMANDS)
            .map(|n| {
                let (name, socket) = (format!("d{n}"), supervisor.at(&format!("d{n}")));
                let socket = socket.to_str().unwrap();
                let add = ["blk", "--name", &name, "--null", "1M", "--socket-path", socket];
                let arguments = if command == "add" { &add[..] } else { &add[2..3] };
                let mut asks = supervisor.command(&[&[command], arguments].concat());
                asks.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        for asks in asking {
            let output = asks.wait_with_output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!((output.status.code(), said.as_str()), (Some(0), ""), "{command}");
        }
        assert_eq!(supervisor.names().len(), if command == "add" { COMMANDS } else { 0 });
    }
}

#[test]
fn device_that_is_removed_while_it_is_opened_is_gone_afterwards() {
    let supervisor = Supervisor::run(EMPTY);
    let file = image(supervisor.daemon.folder(), "image");
    let holder = Daemon::blk(&["--blk-file", file.to_str().unwrap()]);
    let disk = json!({ "kind": "blk", "socket_path": supervisor.at("a"), "file": file });
    std::thread::scope(|scope| {
        let put = scope.spawn(|| supervisor.put("a", &disk).0);
        // Its socket is bound, and its image, which another process has, is waited for.
        wait_until(|| put.is_finished() || !unfinished(supervisor.daemon.folder()).is_empty());
        let delete = scope.spawn(|| supervisor.delete("a"));
        drop(holder);
        let put = put.join().unwrap();
        assert!([201, 409].contains(&put), "{put}");
        assert_eq!(delete.join().unwrap(), 204);
    });
    assert!(supervisor.names().is_empty() && !supervisor.at("a").exists());
    assert_eq!(unfinished(supervisor.daemon.folder()), [""; 0]);
    // Nothing of it holds the image any more.
    assert_eq!(
        supervisor
            .put("b", &json!({ "kind": "blk", "socket_path": supervisor.at("b"), "file": file }))
            .0,
        201
    );
}

#[test]
fn signals_and_requests_at_once_end_with_what_the_file_and_the_answers_say() {
    let (folder, supervisor) = configured(&null("stays"));
    let at = |name: &str| folder.path().join(name);
    assert!(wait_until(|| at("stays").exists()));
    let mut client = Client::connect(&at("stays"), 1);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = StopAtEnd(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                supervisor.daemon.send(rustix::process::Signal::HUP);
            }
        });
        for round in 0..20 {
            let name = format!("f{round}");
            write(&folder, &(null("stays") + &null(&name)));
            let own = json!({ "kind": "blk", "socket_path": at("own"), "null": "1G" });
            assert_eq!(supervisor.put("own", &own).0, 201);
            assert_eq!(supervisor.ask("POST", "/v1/reload", &Value::Null).0, 200);
            assert!(at(&name).exists(), "it was read again after it was written");
            assert_eq!(supervisor.delete("own"), 204);
        }
    });
    write(&folder, &(null("stays") + &null("last")));
    assert_eq!(supervisor.ask("POST", "/v1/reload", &Value::Null).0, 200);
    assert_eq!(supervisor.names(), ["stays", "last"]);
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, TIMEOUT), 1, "a device that stays has not noticed");
    assert!(wait_until(|| unfinished(folder.path()).is_empty()));
    assert!(supervisor.daemon.terminate().success());
}

#[test]
fn of_two_who_replace_what_both_have_seen_one_is_told_that_it_has_changed() {
    let (folder, supervisor) = configured(&null("a"));
    let put = |generation: u64, name: &str| {
        let text = format!("[daemon]\ncontrol = '@/control'\n{}", null(name));
        let text = text.replace('@', folder.path().to_str().unwrap());
        let head = format!("PUT /v1/config HTTP/1.1\r\nhost: x\r\nif-match: \"{generation}\"\r\n");
        let rest = format!("connection: close\r\ncontent-length: {}\r\n\r\n{text}", text.len());
        let mut stream = UnixStream::connect(&supervisor.control).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all((head + &rest).as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    for round in 0..10 {
        let generation = supervisor.generation();
        let names = [format!("left{round}"), format!("right{round}")];
        let mut answers: Vec<_> = std::thread::scope(|scope| {
            let asked = names.each_ref().map(|name| scope.spawn(|| put(generation, name)));
            asked.into_iter().map(|asked| asked.join().unwrap()).zip(&names).collect()
        });
        answers.sort();
        assert_eq!((answers[0].0.as_str(), answers[1].0.as_str()), ("200", "412"));
        assert_eq!(
            supervisor.names(),
            [answers[0].1.clone()],
            "as the one who was not refused says"
        );
        assert_eq!(supervisor.generation(), generation + 1);
    }
}

#[test]
fn a_thousand_devices_are_read_again_while_others_ask() {
    let several = |count: usize| (0..count).map(|n| null(&format!("d{n}"))).collect::<String>();
    let (folder, supervisor) = configured(&null("stays"));
    let at = |name: &str| folder.path().join(name);
    assert!(wait_until(|| at("stays").exists()));
    let mut client = Client::connect(&at("stays"), 1);
    for count in [1000, 0] {
        write(&folder, &(null("stays") + &several(count)));
        let mut seen = 0;
        std::thread::scope(|scope| {
            let reload = scope.spawn(|| supervisor.ask("POST", "/v1/reload", &Value::Null));
            loop {
                let is_finished = reload.is_finished();
                client.submit_reads(0, 1);
                assert_eq!(client.wait_for(0, 1, TIMEOUT), 1);
                assert_eq!(http(&supervisor.control, "GET", "/v1/workers", "").0, 200);
                seen += 1;
                if is_finished {
                    break;
                }
            }
            let (status, answer) = reload.join().unwrap();
            let steps = answer["steps"].as_array().map(Vec::len);
            assert_eq!((status, steps), (200, Some(1000)), "{}", answer["error"]);
        });
        assert!(seen > 1, "the guest and those who ask were served during the reload");
        assert_eq!(supervisor.names().len(), count + 1);
        assert_eq!(at("d999").exists(), count == 1000);
    }
    // A device that is named twice in such a long file costs a line, and nothing else.
    write(&folder, &(null("stays") + &several(1000) + &null("d7")));
    let (status, answer) = supervisor.ask("POST", "/v1/reload", &Value::Null);
    assert!(status == 422 && answer["error"].as_str().unwrap().contains("d7"), "{answer}");
    assert_eq!(supervisor.names(), ["stays"]);
}

#[test]
fn clients_that_do_not_read_the_events_they_asked_for_hold_nobody_up() {
    let (folder, supervisor) = configured(&null("stays"));
    // Two events of each device.
    let come_and_go = |count: usize| {
        let devices = (0..count).map(|n| null(&format!("d{n}"))).collect::<String>();
        for devices in [devices.as_str(), ""] {
            write(&folder, &(null("stays") + devices));
            assert_eq!(supervisor.ask("POST", "/v1/reload", &Value::Null).0, 200);
        }
    };
    // Their answers are longer than what a socket holds.
    come_and_go(400);
    let asking: Vec<_> = (0..15)
        .map(|number| {
            let mut stream = UnixStream::connect(&supervisor.control).unwrap();
            let since = if number % 2 == 0 { 0 } else { 900 };
            let request = format!("GET /v1/events?since={since} HTTP/1.1\r\nhost: x\r\n\r\n");
            stream.write_all(request.repeat(8).as_bytes()).unwrap();
            stream
        })
        .collect();
    come_and_go(200);
    let events = shown(&supervisor.control, "/v1/events?since=0");
    assert_eq!(events["events"].as_array().unwrap().len(), 1024, "as many as are kept");
    assert_eq!(events["lost"], true);
    drop(asking);
    assert!(supervisor.daemon.terminate().success());
}

/// A state folder on a file system of its own, which can be full or read-only.
struct State {
    _folder: TempDir,
    mounted: PathBuf,
}

impl State {
    /// None: only root can mount one.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let mounted = folder.path().join("state");
        std::fs::create_dir(&mounted).unwrap();
        let state = Self { _folder: folder, mounted };
        state.mount("size=64k,mode=700");
        Some(state)
    }

    fn mount(&self, options: &str) {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "none"]).arg(&self.mounted);
        assert!(mount.status().unwrap().success(), "{options}");
    }

    /// A daemon that keeps its devices there.
    fn supervisor(&self) -> Supervisor {
        Supervisor::run(&EMPTY.replace("@/state", self.mounted.to_str().unwrap()))
    }

    /// Writes until there is no room left.
    fn fill(&self) -> PathBuf {
        let path = self.mounted.join("filler");
        let mut filler = std::fs::File::create(&path).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
        path
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.mounted).output();
    }
}

#[test]
fn state_folder_that_is_full_or_read_only_refuses_changes_and_costs_no_device() {
    let Some(state) = State::new() else { return };
    let supervisor = state.supervisor();
    assert_eq!(supervisor.put("a", &supervisor.null("a")).0, 201);
    let mut client = Client::connect(&supervisor.at("a"), 1);
    let refused = |(status, answer): (u16, Value), words: &str| {
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(status == 500 && error.contains("saving it failed: "), "{status}: {answer}");
        assert!(error.contains(words), "{error}");
    };
    let before =
        || (supervisor.names(), supervisor.generation(), names_in(&state.mounted.join("devices")));
    let (there, filler) = (before(), state.fill());
    let limit = json!({ "limit": { "read_iops": 7 } });
    let patch = |keys: &Value| supervisor.ask("PATCH", "/v1/devices/a", keys);
    refused(supervisor.put("b", &supervisor.null("b")), "No space left");
    refused(patch(&limit), "No space left");
    assert_eq!((before(), supervisor.at("b").exists()), (there.clone(), false));
    client.submit_reads(0, 8);
    assert_eq!(client.wait_for(0, 8, TIMEOUT), 8, "nothing limits it");
    let command = ["add", "blk", "--name", "b", "--null", "1G", "--socket-path"];
    let socket = supervisor.at("b");
    let mut add = supervisor.command(&[&command[..], &[socket.to_str().unwrap()]].concat());
    let output = output_of(&mut add);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
    state.mount("remount,ro");
    refused(supervisor.put("b", &supervisor.null("b")), "Read-only file system");
    refused(
        supervisor.ask("DELETE", "/v1/devices/a?force=true", &Value::Null),
        "Read-only file system",
    );
    assert_eq!(before(), there);
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, TIMEOUT), 1, "it was not removed");
    // Changes that need no room on the disk are made while it is full; the others when it has room.
    state.mount("remount,rw");
    drop(client);
    supervisor.is_left("a");
    assert_eq!(supervisor.delete("a"), 204);
    std::fs::remove_file(filler).unwrap();
    assert_eq!(supervisor.put("b", &supervisor.null("b")).0, 201);
    is_served(&supervisor.at("b"));
    drop(supervisor);
    assert_eq!(state.supervisor().names(), ["b"], "as the next daemon finds it");
}

//! Who may ask for what at the control sockets, and that nobody keeps others from asking.

use crate::support::process::{Daemon, TIMEOUT, copy_program, is_root_or_left_out, wait_until};
use crate::support::program::{self, http, http_json};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};

/// Somebody else than the daemon's user.
const OTHER: [&str; 3] = ["--reuid=4711", "--regid=4711", "--clear-groups"];

#[test]
fn clients_that_ask_nothing_keep_nobody_out() {
    let daemon = Daemon::run("[daemon]\ncontrol = '@/control'\n", &["control"]);
    let control = daemon.socket_of("control");
    let mut idle: Vec<_> = (0..64).map(|_| UnixStream::connect(&control).unwrap()).collect();
    // Each of them has sent half of a request.
    idle.iter_mut().for_each(|stream| {
        let _ = stream.write_all(b"GET /v1/devices HTTP/1.1\r\nhost: x\r\n");
    });
    for _ in 0..3 {
        assert_eq!(http(&control, "GET", "/v1/devices", "").0, 200);
    }
    // Those who lost their place are told by the end of their connection, the others by the clock.
    for stream in &mut idle {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP/1.1 200"), "{answer:?}");
    }
    assert_eq!(http(&control, "GET", "/v1/devices", "").0, 200);
}

#[test]
fn clients_that_were_answered_or_do_not_end_their_requests_keep_nobody_out() {
    let daemon = Daemon::run("[daemon]\ncontrol = '@/control'\n", &["control"]);
    let control = daemon.socket_of("control");
    let clients = |request: &str| -> Vec<_> {
        let connect = |_| {
            let mut stream = UnixStream::connect(&control).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            stream
        };
        (0..16).map(connect).collect()
    };
    let mut answered = clients("GET /v1/workers HTTP/1.1\r\nhost: x\r\n\r\n");
    for stream in &mut answered {
        let mut start = [0; 15];
        stream.read_exact(&mut start).unwrap();
        assert_eq!(&start, b"HTTP/1.1 200 OK");
    }
    assert_eq!(http(&control, "GET", "/v1/workers", "").0, 200, "they stay, and wait for nothing");
    drop(answered);
    // A byte now and then, which is no silence.
    let head = "PUT /v1/devices/a HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n";
    let mut slow = clients(head);
    let have_gone = || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        slow.retain_mut(|stream| stream.write_all(b" ").is_ok());
        slow.is_empty()
    };
    assert!(wait_until(have_gone), "they have no end");
    assert_eq!(http(&control, "GET", "/v1/workers", "").0, 200);
}

/// The most memory that a process has had at a time, in KiB.
fn most_memory(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim_end_matches("kB").trim().parse().unwrap()
}

#[test]
fn clients_with_the_largest_bodies_at_once_take_the_memory_of_few() {
    const SIZE: usize = 2 << 20;
    let daemon = Daemon::run("[daemon]\ncontrol = '@/control'\n", &["control"]);
    let control = daemon.socket_of("control");
    let before = most_memory(&daemon);
    // No text, so that nothing of it is carried out.
    let body = vec![0xff; SIZE];
    let statuses: Vec<_> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..64)
            .map(|_| {
                scope.spawn(|| {
                    let mut stream = UnixStream::connect(&control).unwrap();
                    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
                    let head = "PUT /v1/config HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
                    let head = format!("{head}content-length: {SIZE}\r\n\r\n");
                    // One that is turned away cannot send all of it.
                    let _ = stream.write_all(head.as_bytes());
                    let _ = stream.write_all(&body);
                    let mut start = [0; 12];
                    let _ = stream.read_exact(&mut start);
                    String::from_utf8_lossy(&start).into_owned()
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert!(statuses.iter().any(|status| status.ends_with("400")), "{statuses:?}");
    let others = statuses.iter().filter(|status| !status.ends_with("400"));
    // The kernel drops the answer with the rest of a body that nobody reads.
    let is_turned_away = |status: &&String| status.ends_with("503") || status.starts_with('\0');
    assert!(others.clone().all(|status| is_turned_away(&status)), "{statuses:?}");
    let grown = most_memory(&daemon).saturating_sub(before);
    assert!(grown < 5 * (SIZE as u64 >> 10), "{grown} KiB for bodies of {SIZE} bytes");
    assert_eq!(http(&control, "GET", "/v1/devices", "").0, 200);
}

/// The memory that a process has now, in KiB.
fn memory(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim_end_matches("kB").trim().parse().unwrap()
}

#[test]
fn a_configuration_has_a_bound_and_leaves_little_memory_taken() {
    const SIZE: usize = 2 << 20;
    /// The memory of one configuration would be several times as much, and is given back before the
    /// answer is sent: no thread keeps a part of it.
    const LEFT_KIB: u64 = 4 << 10;
    let daemon = Daemon::run("[daemon]\ncontrol = '@/control'\n", &["control"]);
    let control = daemon.socket_of("control");
    let folder = daemon.folder().display().to_string();
    let mut text = format!("[daemon]\ncontrol = '{folder}/control'\n");
    for n in 0..6000 {
        text += &format!("[[blk]]\nname = 'd{n}'\nsocket_path = '{folder}/d{n}'\nnull = '1M'\n");
    }
    text += &"#".repeat(SIZE - text.len());
    let before = memory(&daemon);
    let left: Vec<_> = (0..12)
        .map(|_| {
            let (status, _, answer) = http(&control, "PUT", "/v1/config?dry_run=true", &text);
            assert_eq!(status, 200, "{}", &answer[..answer.len().min(300)]);
            memory(&daemon).saturating_sub(before)
        })
        .collect();
    let is_little = left.iter().all(|kib| *kib < LEFT_KIB);
    assert!(is_little, "{left:?} KiB are left of a configuration of {SIZE} bytes");
    text += "#";
    let (status, _, answer) = http(&control, "PUT", "/v1/config?dry_run=true", &text);
    assert!(status == 413 && answer.contains("2097152 bytes at most"), "{status} {answer}");
    let file = daemon.folder().join("long.toml");
    std::fs::write(&file, &text).unwrap();
    let mut command = program::manyring();
    let output = program::output_of(command.arg("run").arg("--config").arg(&file));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("long.toml: is longer than 2097152 bytes"), "{said}");
}

#[test]
fn a_name_that_no_device_can_have_is_refused_and_never_an_error_of_the_daemon() {
    let config =
        "[daemon]\ncontrol = '@/control'\nstate_dir = '@/state'\n[[limit]]\nname = 'g'\niops = 5\n";
    let daemon = Daemon::run(config, &["control"]);
    let control = daemon.socket_of("control");
    let socket = daemon.folder().join("z").display().to_string();
    let device = json!({ "kind": "blk", "null": "1M", "socket_path": socket }).to_string();
    let long = "a".repeat(65);
    for name in [".", "..", "%2E", "a%2Fb", "%2F", "..%2Fa", "%20", "%00", "a%0Ab", "%22", &long] {
        let (status, answer) = http_json(&control, "PUT", &format!("/v1/devices/{name}"), &device);
        let error = answer["error"].as_str().unwrap_or_default().to_owned();
        assert!(
            status == 422 && error.contains("name: must be 1 to 64"),
            "{name}: {status} {error}"
        );
        for (method, path, body) in [
            ("GET", format!("/v1/devices/{name}"), ""),
            ("PATCH", format!("/v1/devices/{name}"), "{\"read_only\": true}"),
            ("DELETE", format!("/v1/devices/{name}"), ""),
            ("POST", format!("/v1/devices/{name}/resize"), ""),
            ("POST", format!("/v1/devices/{name}/link"), "{\"up\": true}"),
            ("POST", format!("/v1/devices/{name}/mtu"), "{\"mtu\": 1500}"),
            ("POST", format!("/v1/devices/{name}/announce"), ""),
            ("PUT", format!("/v1/limits/{name}"), "{\"iops\": 7}"),
        ] {
            let (status, _, answer) = http(&control, method, &path, body);
            let is_gone = method == "DELETE" && status == 204;
            assert!(is_gone || (400..500).contains(&status), "{method} {path}: {status} {answer}");
        }
    }
    // The name of a device that a body has in vain is none either.
    assert_eq!(http_json(&control, "GET", "/v1/devices", "").1["devices"], json!([]));
    let kept = std::fs::read_dir(daemon.folder().join("state/devices")).unwrap().count();
    assert_eq!(kept, 0);
}

#[test]
fn socket_that_only_shows_changes_nothing() {
    let config = "[daemon]\ncontrol = '@/control'\ncontrol_read = '@/read'\n\
        control_read_mode = '0666'\n\
        [[net]]\nname = 'lan'\nsocket_path = '@/lan'\nnull = true\n";
    let daemon = Daemon::run(config, &["control", "read", "lan"]);
    let (control, read) = (daemon.socket_of("control"), daemon.socket_of("read"));
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&control), mode(&read)), (0o600, 0o666));
    for path in ["/v1/devices", "/v1/devices/lan", "/v1/workers", "/v1/config", "/metrics"] {
        assert_eq!(http(&read, "GET", path, "").0, 200, "{path}");
    }
    for (method, path, body) in [
        ("PUT", "/v1/devices/new", r#"{"kind": "blk", "null": "1G"}"#),
        ("DELETE", "/v1/devices/lan", ""),
        ("PUT", "/v1/config", ""),
        ("POST", "/v1/reload", ""),
        ("POST", "/v1/devices/lan/link", r#"{"up": false}"#),
    ] {
        let (status, answer) = http_json(&read, method, path, body);
        assert_eq!(status, 403, "{method} {path}: {answer}");
    }
    assert_eq!(http_json(&control, "GET", "/v1/devices/lan", "").1["link"], "up");
}

/// Asks as somebody else.
fn ask_as_other(program: &Path, arguments: &[&str]) -> Output {
    Command::new("setpriv").args(OTHER).arg(program).args(arguments).output().unwrap()
}

#[test]
#[allow(clippy::disallowed_methods, reason = "the kernel notes the user of the thread")]
fn another_user_has_no_process_take_over() {
    if !is_root_or_left_out() {
        return;
    }
    let config = "[daemon]\ncontrol = '@/control'\ncontrol_mode = '0666'\n";
    let daemon = Daemon::run(config, &["control"]);
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(daemon.folder(), open).unwrap();
    let control = daemon.socket_of("control");
    // A socket of the daemon's user who says nothing.
    let body = json!({ "socket": "/run/udev/control" }).to_string();
    let asked = std::thread::spawn(move || {
        let user = rustix::process::Uid::from_raw(4711);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        http_json(&control, "POST", "/v1/takeover", &body)
    });
    let (status, answer) = asked.join().unwrap();
    assert_eq!(status, 403, "{answer}");
}

#[test]
fn another_user_names_only_what_the_operator_allows() {
    if !is_root_or_left_out() {
        return;
    }
    let config = "[daemon]\ncontrol = '@/control'\ncontrol_mode = '0666'\nstate_dir = '@/state'\n\
        allow_paths = ['@/vms']\n";
    let daemon = Daemon::run(config, &["control"]);
    let (folder, control) = (daemon.folder(), daemon.socket_of("control"));
    let public = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    public(folder, 0o755);
    let program = folder.join("program");
    copy_program(&program);
    public(&program, 0o755);
    std::fs::create_dir(folder.join("vms")).unwrap();
    for image in ["vms/a.img", "secret.img"] {
        let path = folder.join(image);
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        public(&path, 0o600);
    }
    let add = |name: &str, image: &str, socket: &str| {
        let at = |name: &str| folder.join(name).display().to_string();
        let (image, socket, control) = (at(image), at(socket), control.display().to_string());
        let arguments = [
            "add",
            "blk",
            "--name",
            name,
            "--control",
            &control,
            "--blk-file",
            &image,
            "--socket-path",
            &socket,
        ];
        let output = ask_as_other(&program, &arguments);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (status, error) = add("a", "secret.img", "vms/a");
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("file: ") && error.contains("allow_paths"), "{error}");
    let (status, error) = add("a", "vms/a.img", "a");
    assert!(status == Some(1) && error.contains("socket_path: "), "{error}");
    // A link that leads out of the folder does not count as a file below it.
    std::os::unix::fs::symlink("../secret.img", folder.join("vms/b.img")).unwrap();
    assert_eq!(add("b", "vms/b.img", "vms/b").0, Some(1));
    let (status, error) = add("a", "vms/a.img", "vms/a");
    assert_eq!(status, Some(0), "{error}");
    assert!(folder.join("vms/a").exists());
    let device = http_json(&control, "GET", "/v1/devices/a", "").1;
    assert_eq!((&device["state"], &device["origin"]), (&json!("serving"), &json!("api")));
    let says = |words: &str| wait_until(|| daemon.log().contains(words));
    assert!(says("uid=4711") && says("comm=\"program\""), "{}", daemon.log());
    let secret = folder.join("secret.img");
    let (status, _) = http_json(
        &control,
        "PUT",
        "/v1/devices/c",
        &json!({ "kind": "blk", "socket_path": folder.join("c"), "file": secret }).to_string(),
    );
    assert_eq!(status, 201, "the daemon's own user is not bound");
    assert!(wait_until(|| http_json(&control, "GET", "/v1/devices/c", "").0 == 200));
}

/// A whole line of the log, and an order to a terminal.
const FORGED: &str = "2026-11-29T06:00:00Z  INFO changed uid=0\u{1b}[2J";

#[test]
#[allow(clippy::disallowed_methods, reason = "the kernel notes the user of the thread")]
fn another_user_forges_no_line_of_the_log_and_is_named_in_each_refusal() {
    if !is_root_or_left_out() {
        return;
    }
    let config = "[daemon]\ncontrol = '@/control'\ncontrol_mode = '0666'\n\
        allow_paths = ['@/vms']\n";
    let daemon = Daemon::run(config, &["control"]);
    let (folder, control) = (daemon.folder().to_owned(), daemon.socket_of("control"));
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::create_dir(folder.join("vms")).unwrap();
    let odd = folder.join(format!("vms/x\n{FORGED}"));
    std::fs::write(&odd, "short").unwrap();
    let (socket, other) = (folder.join(format!("vms/s\n{FORGED}")), folder.join("vms/z"));
    let asked = std::thread::spawn(move || {
        let user = rustix::process::Uid::from_raw(4711);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        let put = |name: &str, keys: Value| {
            let mut device = json!({ "kind": "blk", "socket_path": other });
            device.as_object_mut().unwrap().append(&mut keys.as_object().unwrap().clone());
            http_json(&control, "PUT", &format!("/v1/devices/{name}"), &device.to_string())
        };
        let refused = [
            put("a", json!({ "file": odd })),
            put("b", json!({ "file": "/etc/shadow" })),
            put("c", json!({ "null": "1M", "socket_path": odd })),
        ];
        (put("d", json!({ "null": "1M", "socket_path": socket })), refused)
    });
    let (made, refused) = asked.join().unwrap();
    assert_eq!(made.0, 201, "{made:?}");
    for (status, answer) in &refused {
        assert!((400..600).contains(status), "{answer}");
        assert!(!answer.to_string().contains("/proc/self"), "{answer}");
    }
    let name = folder.join("vms/x").display().to_string();
    assert!(refused[0].1.to_string().contains(&name), "{refused:?}");
    let is_refusal = |line: &&str| line.contains("control request refused");
    let all = || wait_until(|| daemon.log().lines().filter(is_refusal).count() == 3);
    assert!(all(), "{}", daemon.log());
    assert!(wait_until(|| daemon.log().contains("listening")), "{}", daemon.log());
    let log = daemon.log();
    assert!(!log.lines().any(|line| line.starts_with(&FORGED[..20])), "{log}");
    assert!(!log.chars().any(|c| c.is_control() && c != '\n'), "{log:?}");
    assert!(
        !log.lines().any(|line| line.contains("error=") && line.contains("/proc/self")),
        "{log}"
    );
    let lines: Vec<_> = log.lines().filter(is_refusal).collect();
    for (line, (name, said)) in
        lines.iter().zip([("a", "vms/x"), ("b", "/etc/shadow"), ("c", "vms/x")])
    {
        for part in ["uid=4711 pid=", "comm=\"", "method=\"PUT\"", "status=", said] {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert!(line.contains(&format!("path=\"/v1/devices/{name}\"")), "{line}");
    }
}

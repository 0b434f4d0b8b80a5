//! The operator is answered: by a daemon that has no file descriptor left, and, where nobody
//! answers, by the command itself.
#![allow(clippy::disallowed_methods, reason = "the silent daemon has threads of its own")]

use crate::support::process::{Daemon, wait_until};
use crate::support::program::{http, manyring, output_of};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

#[test]
fn a_daemon_without_file_descriptors_answers_the_operator() {
    let config = "[daemon]\ncontrol = '@/control'\n\
        [[blk]]\nname = 'd'\nsocket_path = '@/d'\nmemory = '1M'\n";
    let daemon = Daemon::run(config, &["d", "control"]);
    let control = daemon.socket_of("control");
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
    let maximum = getrlimit(Resource::Nofile).maximum;
    // It answers, so it has set a descriptor aside.
    assert_eq!(http(&control, "GET", "/v1/devices", "").0, 200);
    leave_none_free(&daemon);
    // One after the other: each gives the descriptor back.
    for _ in 0..3 {
        let (status, _, body) = http(&control, "GET", "/v1/devices", "");
        assert_eq!(status, 200, "{body}");
        assert!(body.contains("\"d\""), "{body}");
    }
    // Clients that stay, with nothing or half a line, make place for the next one.
    let idle = UnixStream::connect(&control).unwrap();
    assert_eq!(http(&control, "GET", "/v1/devices", "").0, 200);
    assert!(wait_until(|| is_closed(&idle)), "the one that said nothing is still there");
    let mut half = UnixStream::connect(&control).unwrap();
    half.write_all(b"GET /v1/dev").unwrap();
    let output = output_of(manyring().args(["link", "d", "up", "--control"]).arg(&control));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("not a network device"), "the daemon's own refusal: {said}");
    prlimit(pid, Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    assert!(daemon.terminate().success());
}

/// As if front-ends had taken all descriptors that the daemon may have: no number below the limit
/// is free.
fn leave_none_free(daemon: &Daemon) {
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
    let maximum = getrlimit(Resource::Nofile).maximum;
    let folder = format!("/proc/{}/fd", daemon.pid());
    let numbers = std::fs::read_dir(folder).unwrap().flatten();
    let open: Vec<u64> =
        numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let first_free = (0..).find(|number| !open.contains(number)).unwrap();
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(first_free), maximum }).unwrap();
}

/// True if the daemon has closed its end.
fn is_closed(mut stream: &UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    matches!(stream.read(&mut [0]), Ok(0))
}

#[test]
fn a_command_ends_with_a_sentence_where_nobody_answers() {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    // A daemon that is stopped: it accepts, reads, and says nothing.
    let listener = UnixListener::bind(&control).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || stream.read_to_end(&mut Vec::new()));
        }
    });
    let commands: [&[&str]; 6] = [
        &["stats"],
        &["stats", "d"],
        &["resize", "d", "1G"],
        &["link", "d", "up"],
        &["mtu", "d", "1500"],
        &["announce", "d"],
    ];
    let ask = &|words: &[&str]| output_of(manyring().args(words).arg("--control").arg(&control));
    std::thread::scope(|scope| {
        for words in commands {
            scope.spawn(move || {
                let output = ask(words);
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
                assert!(said.contains("no answer from the daemon within 5 s"), "{words:?}: {said}");
            });
        }
    });
}

//! The operator is answered: by a daemon that has no file descriptor left, and, where nobody
//! answers, by the command itself.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(clippy::disallowed_methods, reason = "the silent daemon has threads of its own")]

mod process;
mod program;

use process::Daemon;
use program::{http, manyring, output_of};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};

#[test]
fn a_daemon_without_file_descriptors_answers_the_operator() {
    let config = "[daemon]\ncontrol = '@/control'\n\
        [[blk]]\nname = 'd'\nsocket_path = '@/d'\nmemory = '1M'\n";
    let daemon = Daemon::run(config, &["d", "control"]);
    let control = daemon.socket_of("control");
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
    let maximum = getrlimit(Resource::Nofile).maximum;
    // As if front-ends had taken all that the daemon may have: no number below the limit is free.
    let folder = format!("/proc/{}/fd", daemon.pid());
    let numbers = std::fs::read_dir(folder).unwrap().flatten();
    let open: Vec<u64> =
        numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let first_free = (0..).find(|number| !open.contains(number)).unwrap();
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(first_free), maximum }).unwrap();
    // One after the other: each gives the descriptor back.
    for _ in 0..3 {
        let (status, _, body) = http(&control, "GET", "/v1/devices", "");
        assert_eq!(status, 200, "{body}");
        assert!(body.contains("\"d\""), "{body}");
    }
    // A client that stays keeps it for no longer than it stays.
    let idle = UnixStream::connect(&control).unwrap();
    drop(idle);
    let output = output_of(manyring().args(["link", "d", "up", "--control"]).arg(&control));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("no network device"), "the daemon's own refusal: {said}");
    prlimit(pid, Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    assert!(daemon.terminate().success());
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
    let commands: [&[&str]; 5] = [
        &["stats"],
        &["stats", "d"],
        &["resize", "d", "1G"],
        &["link", "d", "up"],
        &["mtu", "d", "1500"],
    ];
    let ask = &|words: &[&str]| output_of(manyring().args(words).arg("--control").arg(&control));
    std::thread::scope(|scope| {
        for words in commands {
            scope.spawn(move || {
                let output = ask(words);
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
                assert!(said.contains("has not answered within 5 s"), "{words:?}: {said}");
            });
        }
    });
}

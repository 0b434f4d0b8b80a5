//! Things that another process holds - a socket's name, an image, the control socket - cost the
//! devices that need them, and are taken as soon as that process lets go.

use crate::support::client::Client;
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use crate::support::program::{http, http_json, manyring, names_in, output_of, refused, shown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, TempDir};

fn image() -> NamedTempFile {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    image
}

/// The state and the key of a device.
fn state_of(control: &Path, name: &str) -> (String, Option<String>) {
    let device = shown(control, &format!("/v1/devices/{name}"));
    let text = |key: &str| device[key].as_str().map(str::to_owned);
    (text("state").unwrap(), text("waits_for"))
}

fn waits(control: &Path, name: &str, key: &str) -> bool {
    state_of(control, name) == ("waiting".to_owned(), Some(key.to_owned()))
}

fn is_served(socket: &Path) {
    let mut client = Client::connect(socket, 1);
    client.submit_reads(0, 1);
    assert_eq!(client.wait_for(0, 1, TIMEOUT), 1);
}

/// A configuration in `folder` with these devices, and the control socket that it names.
fn configured(folder: &TempDir, devices: &str) -> (PathBuf, PathBuf) {
    let (file, control) = (folder.path().join("manyring.toml"), folder.path().join("control"));
    let text = format!("[daemon]\ncontrol = '@/control'\n{devices}");
    std::fs::write(&file, text.replace('@', folder.path().to_str().unwrap())).unwrap();
    (file, control)
}

#[test]
fn ring_whose_image_another_process_holds_starts_as_soon_as_that_one_lets_go() {
    let image = image();
    let file = image.path().to_str().unwrap();
    let keys = ["--lock-with-rings", "--num-queues", "2", "--blk-file", file];
    let (source, destination) = (Daemon::blk(&keys), Daemon::blk(&keys));
    let holder = Client::connect(&source.socket(), 1);
    let mut client = Client::connect(&destination.socket(), 2);
    client.submit_reads(0, 1);
    client.submit_reads(1, 1);
    let waits =
        || destination.log().matches("locking the image failed; the guest's rings wait").count();
    assert!(wait_until(|| waits() > 0), "{}", destination.log());
    // The front-end says nothing more, and its guest has kicked already.
    drop(holder);
    for queue in 0..2 {
        assert_eq!(client.wait_for(queue, 1, TIMEOUT), 1, "{}", destination.log());
    }
    assert_eq!(waits(), 1, "it is told once: {}", destination.log());
    // The next ring has the image while those run, and gives it back with them.
    drop(client);
    is_served(&source.socket());
}

#[test]
fn image_that_another_process_holds_costs_its_own_device_until_it_is_free() {
    let image = image();
    let file = image.path().to_str().unwrap();
    let holder = Daemon::blk(&["--blk-file", file]);
    let config = format!(
        "[daemon]\ncontrol = '@/control'\n\
         [[blk]]\nname = 'held'\nsocket_path = '@/held'\nfile = '{file}'\n\
         [[blk]]\nname = 'good'\nsocket_path = '@/good'\nnull = '1G'\n"
    );
    let daemon = Daemon::run(&config, &["good", "control"]);
    let control = daemon.socket_of("control");
    is_served(&daemon.socket_of("good"));
    assert!(waits(&control, "held", "file"));
    let why = format!("[[blk]] held: file: {file} is in use by another process");
    let reason = format!("{why} (pid {})", holder.pid());
    let device = shown(&control, "/v1/devices/held");
    assert_eq!(device["reason"].as_str(), Some(reason.as_str()));
    let all = shown(&control, "/v1/devices");
    let names: Vec<_> = all["devices"].as_array().unwrap().iter().map(|d| &d["name"]).collect();
    assert_eq!(names, ["held", "good"]);
    let (_, _, metrics) = http(&control, "GET", "/metrics", "");
    assert!(metrics.contains("manyring_device_waiting{device=\"held\",key=\"file\"} 1\n"));
    assert!(metrics.contains("manyring_device_waiting{device=\"good\",key=\"\"} 0\n"));
    let stats = output_of(manyring().arg("stats").arg("--control").arg(&control));
    let stats = String::from_utf8(stats.stdout).unwrap();
    assert!(stats.contains(&format!("held waits: {reason}\n")), "{stats}");
    let (status, answer) = http_json(&control, "POST", "/v1/devices/held/resize", "");
    assert!(status == 409 && answer["error"].as_str().unwrap().contains(&reason), "{answer}");
    // The refused request above is a line of its own.
    let log = daemon.log();
    let waits = |line: &&str| line.contains("the device is waiting") && line.contains(&why);
    assert_eq!(log.lines().filter(waits).count(), 1, "{log}");
    assert!(!daemon.socket_of("held").exists());
    // The holder ends without a word, as a process that is killed.
    drop(holder);
    assert!(wait_until(|| daemon.socket_of("held").exists()), "{}", daemon.log());
    is_served(&daemon.socket_of("held"));
    assert_eq!(state_of(&control, "held"), ("serving".to_owned(), None));
    assert!(daemon.log().contains("device is ready"), "{}", daemon.log());
    assert!(daemon.terminate().success());
}

#[test]
fn socket_that_another_process_holds_costs_its_own_device_until_it_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let taken = UnixListener::bind(folder.path().join("held")).unwrap();
    let socket = folder.path().join("held");
    let config = format!(
        "[daemon]\ncontrol = '@/control'\n\
         [[blk]]\nname = 'good'\nsocket_path = '@/good'\nnull = '1G'\n\
         [[blk]]\nname = 'held'\nsocket_path = '{}'\nnull = '1G'\n",
        socket.display()
    );
    let daemon = Daemon::run(&config, &["good", "control"]);
    let control = daemon.socket_of("control");
    is_served(&daemon.socket_of("good"));
    assert!(wait_until(|| waits(&control, "held", "socket_path")));
    assert!(daemon.log().contains("in use: another process listens there"), "{}", daemon.log());
    drop(taken);
    assert!(wait_until(|| state_of(&control, "held").0 == "serving"));
    assert!(wait_until(|| daemon.log().matches("listening").count() == 2), "{}", daemon.log());
    is_served(&socket);
    assert!(daemon.terminate().success());
    assert!(names_in(folder.path()).is_empty());
}

#[test]
fn control_socket_that_another_process_holds_costs_no_guest() {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let taken = UnixListener::bind(&control).unwrap();
    let option = control.to_str().unwrap();
    let daemon = Daemon::blk(&["--null", "1G", "--control", option]);
    is_served(&daemon.socket());
    drop(taken);
    assert!(wait_until(|| daemon.log().contains("control: listening")), "{}", daemon.log());
    assert_eq!(state_of(&control, "blk0").0, "serving");
    assert!(daemon.terminate().success());
}

#[test]
fn daemon_that_waits_ends_at_once_when_it_is_told_to() {
    let image = image();
    let holder = Daemon::blk(&["--blk-file", image.path().to_str().unwrap()]);
    let folder = tempfile::tempdir().unwrap();
    let devices = format!("[[blk]]\nsocket_path = '@/s'\nfile = '{}'\n", image.path().display());
    let (file, control) = configured(&folder, &devices);
    let mut command = manyring();
    command.arg("run").arg("--config").arg(&file);
    let mut daemon = Daemon::start(command, tempfile::tempdir().unwrap(), &[control]);
    let (status, took) = daemon.stop();
    assert!(status.success(), "{status} after {took:?}");
    assert_eq!(names_in(folder.path()), ["manyring.toml"]);
    assert!(holder.terminate().success());
}

#[test]
fn start_ends_when_the_time_to_wait_is_over_unless_another_device_is_served() {
    let image = image();
    let file = image.path().to_str().unwrap();
    let holder = Daemon::blk(&["--blk-file", file]);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let mut command = manyring();
    command.args(["blk", "--wait", "1", "--blk-file", file, "--socket-path"]).arg(&socket);
    let output = output_of(&mut command);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let last = error.lines().last().unwrap();
    assert!(last.starts_with(&format!("manyring: --blk-file: {file} is in use")), "{error}");
    let config = format!(
        "[daemon]\nwait = 1\n[[blk]]\nname = 'held'\nsocket_path = '@/held'\nfile = '{file}'\n\
         [[blk]]\nname = 'good'\nsocket_path = '@/good'\nnull = '1G'\n"
    );
    let daemon = Daemon::run(&config, &["good"]);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    is_served(&daemon.socket_of("good"));
    assert!(holder.terminate().success());
    assert!(wait_until(|| daemon.socket_of("held").exists()), "{}", daemon.log());
    assert!(daemon.terminate().success());
}

#[test]
fn wrong_configuration_is_refused_though_another_device_would_have_to_wait() {
    let image = image();
    let holder = Daemon::blk(&["--blk-file", image.path().to_str().unwrap()]);
    let folder = tempfile::tempdir().unwrap();
    let devices = format!(
        "[[blk]]\nname = 'held'\nsocket_path = '@/s'\nfile = '{}'\n\
         [[blk]]\nname = 'worse'\nsocket_path = '@/none/u'\nnull = '1G'\n",
        image.path().display()
    );
    let (file, _) = configured(&folder, &devices);
    let error = refused(folder.path(), manyring().arg("run").arg("--config").arg(&file));
    let error = error.lines().last().unwrap();
    assert!(error.starts_with("manyring: [[blk]] worse: socket_path: cannot listen"), "{error}");
    assert!(holder.terminate().success());
}

#[test]
fn image_that_cannot_be_served_when_it_comes_free_keeps_its_device_waiting_and_says_why() {
    let image = image();
    let file = image.path().to_str().unwrap();
    let holder = Daemon::blk(&["--blk-file", file]);
    let config = format!(
        "[daemon]\ncontrol = '@/control'\n\
         [[blk]]\nname = 'held'\nsocket_path = '@/held'\nfile = '{file}'\n"
    );
    let daemon = Daemon::run(&config, &["control"]);
    let control = daemon.socket_of("control");
    assert!(waits(&control, "held", "file"));
    image.as_file().set_len(1000).unwrap();
    assert!(holder.terminate().success());
    let reason = || shown(&control, "/v1/devices/held")["reason"].to_string();
    assert!(wait_until(|| reason().contains("not whole sectors")), "{}", daemon.log());
    image.as_file().set_len(1024).unwrap();
    assert!(wait_until(|| daemon.socket_of("held").exists()), "{}", daemon.log());
    assert!(daemon.terminate().success());
}

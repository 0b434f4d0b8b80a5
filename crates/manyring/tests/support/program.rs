//! The program from outside: run to its end, asked over HTTP, and what it leaves in a folder.

use super::process::{TIMEOUT, copy_program, wait_until};
use serde_json::Value;
use std::fs::Permissions;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The program.
pub(crate) fn manyring() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
    command.stdin(Stdio::null());
    command
}

/// A copy of the program where everybody can start it and make sockets.
pub(crate) fn program_for_all(folder: &Path) -> PathBuf {
    let program = folder.join("program");
    copy_program(&program);
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(folder, Permissions::from_mode(0o1777)).unwrap();
    program
}

/// Runs a program to its end; one that serves instead of ending is killed, and fails the test.
pub(crate) fn output_of(command: &mut Command) -> Output {
    errors_of(command.stdout(Stdio::piped()))
}

/// Runs a program to its end, like [`output_of`], with its standard output as it is set.
fn errors_of(command: &mut Command) -> Output {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    // The program's errors in these tests fit into a pipe.
    let ended = wait_until(|| child.try_wait().unwrap().is_some());
    if !ended {
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert!(ended, "{command:?} does not end: {output:?}");
    output
}

/// Sends one HTTP request to a socket; status, head in lower case, and body of the answer.
pub(crate) fn http(socket: &Path, method: &str, path: &str, body: &str) -> (u16, String, String) {
    let head = format!("{method} {path} HTTP/1.1\r\ncontent-length: {}\r\n", body.len());
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let (status, head, body) = exchange(stream, &head, body);
    (status, head, String::from_utf8(body).unwrap())
}

/// Asks for a path with further lines of the head; the body of the answer as it is.
pub(crate) fn fetch(
    stream: impl Read + Write,
    path: &str,
    more: &[&str],
) -> (u16, String, Vec<u8>) {
    let more: String = more.iter().map(|line| format!("{line}\r\n")).collect();
    exchange(stream, &format!("GET {path} HTTP/1.1\r\n{more}"), "")
}

fn exchange(mut stream: impl Read + Write, head: &str, body: &str) -> (u16, String, Vec<u8>) {
    let request = format!("{head}host: x\r\nconnection: close\r\n\r\n{body}");
    // In one write: the server may answer and close before it has read a body that it refuses.
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("a whole answer");
    let head = String::from_utf8(answer[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), answer[end + 4..].to_vec())
}

/// Sends a request whose answer is JSON. Returns its status, and its body.
pub(crate) fn http_json(socket: &Path, method: &str, path: &str, body: &str) -> (u16, Value) {
    let (status, head, body) = http(socket, method, path, body);
    assert!(head.contains("content-type: application/json"), "{head}");
    (status, serde_json::from_str(&body).unwrap())
}

/// The answer of a control socket to `GET path`, which must succeed.
pub(crate) fn shown(control: &Path, path: &str) -> Value {
    let (status, value) = http_json(control, "GET", path, "");
    assert_eq!(status, 200, "{path}: {value}");
    value
}

/// The names in a folder, sorted.
pub(crate) fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Size, times, mode and inode of everything in a folder.
pub(crate) fn state_of(folder: &Path) -> Vec<(String, u64, i64, i64, u32, u64)> {
    names_in(folder)
        .into_iter()
        .map(|name| {
            let m = std::fs::symlink_metadata(folder.join(&name)).unwrap();
            (name, m.len(), m.mtime(), m.mtime_nsec(), m.mode(), m.ino())
        })
        .collect()
}

/// The error of a start that the host refuses, and that must leave the folder as it is.
pub(crate) fn refused(folder: &Path, command: &mut Command) -> String {
    refused_as_it_is(folder, command.stdout(Stdio::piped()))
}

/// The error of [`refused`] where standard output is something else than a pipe.
pub(crate) fn refused_as_it_is(folder: &Path, command: &mut Command) -> String {
    error_of(folder, command, 1)
}

/// The error of a start with a wrong option or configuration, that must leave the folder as it is.
pub(crate) fn misused(folder: &Path, command: &mut Command) -> String {
    misused_as_it_is(folder, command.stdout(Stdio::piped()))
}

/// The error of [`misused`] where standard output is something else than a pipe.
pub(crate) fn misused_as_it_is(folder: &Path, command: &mut Command) -> String {
    error_of(folder, command, 2)
}

fn error_of(folder: &Path, command: &mut Command, code: i32) -> String {
    let before = state_of(folder);
    let Output { status, stderr, stdout } = errors_of(command);
    let text = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(code), "{command:?}: {text}");
    assert!(stdout.is_empty(), "{command:?}: {stdout:?}");
    assert_eq!(text.lines().count(), 1, "{command:?}: {text}");
    assert!(text.starts_with("manyring: "), "{command:?}: {text}");
    assert_eq!(state_of(folder), before, "{command:?}: {text}");
    text
}

/// Starts `manyring run` with this configuration, in which `@` stands for the folder: the error
/// names the file, and has these words.
pub(crate) fn refused_configuration(folder: &Path, config: &str, words: &[&str]) {
    let file = folder.join("manyring.toml");
    std::fs::write(&file, config.replace('@', folder.to_str().unwrap())).unwrap();
    let error = misused(folder, manyring().arg("run").arg("--config").arg(&file));
    for word in words.iter().chain([&file.to_str().unwrap()]) {
        assert!(error.contains(word), "{config}\n-> {error}");
    }
}

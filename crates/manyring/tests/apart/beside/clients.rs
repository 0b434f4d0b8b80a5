//! Beside clients of the control socket that say nothing, half of something, or far too much. They
//! are the prober's user's, so they leave it a place: who has asked nothing loses its own to others
//! of the same user that come.

use super::Beside;
use crate::support::prober::RETRY_DELAY;
use std::io::Write;
use std::os::unix::net::UnixStream;

#[test]
fn neighbours_of_clients_of_the_control_socket_wait_for_nothing() {
    let mut beside = Beside::new();
    let control = beside.daemon.socket_of("control");
    beside.bear("clients of the control socket that ask nothing", || {
        let clients: Vec<_> = (0..2).map(|_| UnixStream::connect(&control)).collect();
        std::thread::sleep(RETRY_DELAY);
        drop(clients);
    });
    beside.bear("clients of the control socket that ask half of something", || {
        let clients: Vec<_> = (0..2).map(|_| UnixStream::connect(&control)).collect();
        for mut client in clients.iter().flatten() {
            let _ = client.write_all(b"POST /v1/devices/good/link HTTP/1.1\r\nhost: x\r\nconten");
        }
        std::thread::sleep(RETRY_DELAY);
        drop(clients);
    });
    let large = vec![b'x'; 64 << 10];
    beside.bear("bodies that are far too large", || {
        let mut client = UnixStream::connect(&control).unwrap();
        let head =
            "POST /v1/devices/good/link HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n";
        let _ = client.write_all(head.as_bytes());
        let _ = client.write_all(&large);
        std::thread::sleep(RETRY_DELAY);
    });
    beside.bear("requests that are none", || {
        let mut client = UnixStream::connect(&control).unwrap();
        let _ = client.write_all(&large);
        std::thread::sleep(RETRY_DELAY);
    });
    beside.bear("all that is shown, again and again", || {
        for path in ["/v1/devices", "/metrics", "/v1/workers"] {
            assert_eq!(crate::support::program::http(&control, "GET", path, "").0, 200);
        }
    });
}

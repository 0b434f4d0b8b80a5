//! The xenstore client against a server: one that keeps the protocol, and ones that do not.

use crate::server::{Server, TIMEOUT, await_until};
use manyring_transport::xenbus::{Changed, Store, StoreEndpoint, StoreError, Transaction, Tries};
use manyring_wire::xen::store::{ErrorName, StoreHeader, StoreOp};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

fn connect(server: &Server) -> Store {
    Store::open(&StoreEndpoint::Socket(server.socket.clone()), 0).unwrap()
}

/// A store whose server is this function.
fn store_of(serve: impl FnOnce(UnixStream) + Send + 'static) -> (Store, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("xenstore");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || serve(listener.accept().unwrap().0));
    (Store::open(&StoreEndpoint::Socket(socket), 0).unwrap(), folder)
}

/// Does something in a transaction until nobody comes between.
async fn transaction<T>(
    store: &Store,
    body: impl AsyncFn(&Transaction) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let mut tries = Tries::default();
    loop {
        let tx = store.begin().await?;
        let result = body(&tx).await;
        if let Some(value) = tries.end(tx, result).await? {
            return Ok(value);
        }
    }
}

/// Reads one request.
fn request(stream: &mut UnixStream) -> (StoreHeader, Vec<u8>) {
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let header = StoreHeader::parse(&header).unwrap();
    let mut payload = vec![0; header.size as usize];
    stream.read_exact(&mut payload).unwrap();
    (header, payload)
}

fn reply(kind: u32, req_id: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap();
    [&StoreHeader { kind, req_id, tx_id: 0, size }.emit()[..], payload].concat()
}

/// Until the client closes.
fn hold(mut stream: UnixStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

#[tokio::test]
async fn nodes_are_read_written_listed_and_removed() {
    let server = Server::start();
    server.write("backend/vbd/7/51712/state", "1");
    let store = connect(&server);
    let state = "backend/vbd/7/51712/state";
    assert_eq!(store.read(state).await.unwrap().as_deref(), Some(&b"1"[..]));
    assert_eq!(store.read("/local/domain/0/backend/x").await.unwrap(), None);
    assert_eq!(store.children("backend/vbd").await.unwrap().unwrap(), ["7"]);
    assert_eq!(store.children("backend/vif").await.unwrap(), None);
    let body = async |tx: &Transaction| {
        tx.write("a/b", b"1").await?;
        tx.remove("no/such").await?;
        tx.read_all(&["a/b".to_owned(), "a/c".to_owned()]).await
    };
    assert_eq!(transaction(&store, body).await.unwrap(), [Some(b"1".to_vec()), None]);
    assert_eq!(server.read("a/b").as_deref(), Some("1"));
    assert_eq!(server.transactions(), (1, 0));
}

#[tokio::test]
async fn list_that_does_not_fit_into_a_message_comes_in_parts() {
    let server = Server::start();
    let expected: Vec<_> = (10_000..11_000).map(|n: u32| n.to_string()).collect();
    for name in &expected {
        server.write(&format!("backend/vbd/{name}"), "");
    }
    let store = connect(&server);
    assert_eq!(store.children("backend/vbd").await.unwrap().unwrap(), expected);
}

#[tokio::test]
async fn path_that_xenstore_does_not_permit_is_refused_before_it_is_sent() {
    let store = connect(&Server::start());
    let error = store.read("a b").await.unwrap_err().to_string();
    assert!(
        error.starts_with("xenstore path \"/local/domain/0/a b\": path has the byte 0x20 at 17"),
        "{error}"
    );
    let body = async |tx: &Transaction| tx.write("a", &[b'x'; 4090]).await;
    let error = transaction(&store, body).await.unwrap_err().to_string();
    assert_eq!(error, "xenstore WRITE of /local/domain/0/a does not fit into a message");
}

#[tokio::test]
async fn watch_fires_at_once_and_for_each_path_below_until_it_is_dropped() {
    let server = Server::start();
    let store = connect(&server);
    let mut watch = store.watch();
    watch.add("backend/vbd").await.unwrap();
    watch.add("/local/domain/7/device/vbd/51712").await.unwrap();
    let of = |paths: &[&str]| Changed::Paths(paths.iter().map(|&path| path.to_owned()).collect());
    let mut seen = BTreeSet::new();
    while seen.len() < 2 {
        let Changed::Paths(paths) = watch.changed().await.unwrap() else { panic!("many") };
        seen.extend(paths);
    }
    assert_eq!(
        Changed::Paths(seen),
        of(&["/local/domain/7/device/vbd/51712", "/local/domain/0/backend/vbd"])
    );
    server.write("backend/vbd/7/51712/state", "1");
    assert_eq!(watch.changed().await.unwrap(), of(&["/local/domain/0/backend/vbd/7/51712/state"]));
    server.write("backend/vif/7/0/state", "1");
    server.write("/local/domain/7/device/vbd/51712/state", "1");
    let front = of(&["/local/domain/7/device/vbd/51712/state"]);
    assert_eq!(watch.changed().await.unwrap(), front);
    watch.remove("backend/vbd");
    store.read("x").await.unwrap();
    assert_eq!(server.watches(), 1);
    drop(watch);
    store.read("x").await.unwrap();
    assert_eq!(server.watches(), 0);
}

#[tokio::test]
async fn flood_of_events_is_told_as_many_and_costs_no_memory() {
    let server = Server::start();
    let store = connect(&server);
    let mut watch = store.watch();
    watch.add("flood").await.unwrap();
    watch.changed().await.unwrap();
    let guest = server.clone();
    let flood = std::thread::spawn(move || {
        (0..1000).for_each(|n| guest.write(&format!("flood/{n}"), ""));
    });
    await_until("the flood is over", || flood.is_finished()).await;
    // The server sends in order: what it sent before this reply has come.
    store.read("x").await.unwrap();
    assert_eq!(watch.changed().await.unwrap(), Changed::Many);
    server.write("flood/1", "");
    let expected = Changed::Paths(BTreeSet::from(["/local/domain/0/flood/1".to_owned()]));
    assert_eq!(watch.changed().await.unwrap(), expected);
}

#[tokio::test]
async fn transaction_that_meets_other_writers_is_tried_again_within_a_bound() {
    let server = Server::start();
    let store = connect(&server);
    let body = async |tx: &Transaction| tx.write("a", b"1").await;
    server.refuse_transactions(5);
    transaction(&store, body).await.unwrap();
    assert_eq!(server.transactions(), (1, 0));
    server.refuse_transactions(u32::MAX);
    assert_eq!(transaction(&store, body).await, Err(StoreError::Contended));
    server.refuse_transactions(0);
    let failed = async |tx: &Transaction| {
        tx.write("a", b"2").await?;
        tx.write("/bad path", b"").await
    };
    assert!(matches!(transaction(&store, failed).await, Err(StoreError::Path { .. })));
    store.read("x").await.unwrap();
    assert_eq!((server.transactions(), server.read("a").as_deref()), ((1, 1), Some("1")));
}

#[tokio::test]
async fn answers_in_another_order_and_in_single_bytes_reach_who_asked() {
    let (store, _folder) = store_of(|mut stream| {
        let (first, _) = request(&mut stream);
        let (second, _) = request(&mut stream);
        let event = reply(StoreOp::WatchEvent.id(), 0, b"somewhere\x0099\0");
        let one = reply(StoreOp::Read.id(), first.req_id, b"one");
        let two = reply(StoreOp::Read.id(), second.req_id, b"two");
        for byte in [two, event, one].concat() {
            stream.write_all(&[byte]).unwrap();
        }
        hold(stream);
    });
    let (one, two) = tokio::join!(store.read("first"), store.read("second"));
    assert_eq!((one.unwrap().unwrap(), two.unwrap().unwrap()), (b"one".to_vec(), b"two".to_vec()));
}

#[tokio::test]
async fn event_that_comes_before_a_reply_is_kept_for_its_watch() {
    let (store, _folder) = store_of(|mut stream| {
        let (watch, payload) = request(&mut stream);
        let token = payload.split(|byte| *byte == 0).nth(1).unwrap().to_vec();
        let event = [&b"a/b\0"[..], &token, b"\0"].concat();
        let ok = reply(StoreOp::Watch.id(), watch.req_id, b"OK\0");
        stream.write_all(&[reply(StoreOp::WatchEvent.id(), 0, &event), ok].concat()).unwrap();
        hold(stream);
    });
    let mut watch = store.watch();
    watch.add("a").await.unwrap();
    let expected = Changed::Paths(BTreeSet::from(["a/b".to_owned()]));
    assert_eq!(watch.changed().await.unwrap(), expected);
}

#[tokio::test]
async fn server_that_goes_away_fails_all_who_wait_and_all_who_come() {
    let server = Server::start();
    let store = connect(&server);
    let mut watch = store.watch();
    watch.add("a").await.unwrap();
    watch.changed().await.unwrap();
    let expected = "connection to xenstore lost: the server has closed the connection";
    let (waiting, lost, ()) = tokio::join!(watch.changed(), store.lost(), async {
        server.hang_up();
    });
    assert_eq!(waiting.unwrap_err().to_string(), expected);
    assert_eq!(lost.to_string(), expected);
    let late = store.read("a").await.unwrap_err();
    assert!(late.is_lost() && late.to_string() == expected, "{late}");
    let (store, _folder) = store_of(|mut stream| drop(request(&mut stream)));
    let error = store.read("a").await.unwrap_err();
    assert!(error.is_lost(), "{error}");
}

#[tokio::test]
async fn server_that_lies_is_left_with_what_it_did() {
    let read = StoreOp::Read.id();
    let long = StoreHeader { kind: read, req_id: 1, tx_id: 0, size: 4097 }.emit().to_vec();
    type Lie = (&'static str, fn(u32) -> Vec<u8>, Option<Vec<u8>>);
    let cases: [Lie; 6] = [
        (
            "the server sent an answer without a request (READ)",
            |id| reply(StoreOp::Read.id(), id + 9, b""),
            None,
        ),
        ("the server answered READ with WRITE", |id| reply(StoreOp::Write.id(), id, b"OK\0"), None),
        ("message 99 is no reply", |id| reply(99, id, b""), None),
        ("WATCH_EVENT reply is malformed", |_| reply(StoreOp::WatchEvent.id(), 0, b"only\0"), None),
        ("ERROR reply is malformed", |id| reply(StoreOp::Error.id(), id, b""), None),
        ("message 2 has a payload of 4097 bytes, 4096 at most", |_| Vec::new(), Some(long)),
    ];
    for (expected, answer, bytes) in cases {
        let (store, _folder) = store_of(move |mut stream| {
            let (header, _) = request(&mut stream);
            stream.write_all(&bytes.unwrap_or_else(|| answer(header.req_id))).unwrap();
            hold(stream);
        });
        let error = store.read("a").await.unwrap_err();
        assert_eq!(error, StoreError::Lost(expected.to_owned()));
    }
}

#[tokio::test]
async fn error_without_a_name_is_a_refusal_and_no_end() {
    let (store, _folder) = store_of(|mut stream| {
        for _ in 0..2 {
            let (header, _) = request(&mut stream);
            stream.write_all(&reply(StoreOp::Error.id(), header.req_id, b"ENEW\0")).unwrap();
        }
        hold(stream);
    });
    for _ in 0..2 {
        let error = store.read("a").await.unwrap_err();
        let expected = ErrorName::Unknown;
        assert!(matches!(error, StoreError::Refused { error, .. } if error == expected));
        assert!(!error.is_lost());
    }
}

/// The clock of the runtime is stopped and goes on when nothing else is to be done, so that the
/// test waits for no real time.
#[tokio::test]
async fn server_that_is_silent_is_given_up_after_its_time() {
    let (store, _folder) = store_of(hold);
    tokio::time::pause();
    let error = store.read("a").await.unwrap_err();
    assert_eq!(error.to_string(), "xenstore request READ timed out after 10 seconds");
    assert!(error.is_passing() && !error.is_lost());
}

#[tokio::test]
async fn more_requests_than_wait_at_a_time_are_all_answered() {
    let server = Server::start();
    let store = connect(&server);
    let paths: Vec<_> = (0..3000).map(|n| format!("n/{n}")).collect();
    for path in &paths {
        server.write(path, path);
    }
    let body = async |tx: &Transaction| tx.read_all(&paths).await;
    let values = tokio::time::timeout(TIMEOUT, transaction(&store, body)).await.unwrap().unwrap();
    assert!(
        values.iter().zip(&paths).all(|(value, path)| value.as_deref() == Some(path.as_bytes()))
    );
}

#[tokio::test]
async fn xenstore_that_is_not_there_is_named() {
    let endpoint = StoreEndpoint::Socket("/no/such/socket".into());
    let error = Store::open(&endpoint, 0).unwrap_err().to_string();
    assert!(error.starts_with("cannot open xenstore at /no/such/socket: No such file"), "{error}");
    let endpoint = StoreEndpoint::Device("/no/such/device".into());
    let error = Store::open(&endpoint, 0).unwrap_err().to_string();
    assert!(error.starts_with("cannot open xenstore at /no/such/device: No such file"), "{error}");
}

/// All requests are sent before the connection's task runs: nothing here waits for a reply.
#[tokio::test]
async fn transaction_that_is_dropped_while_many_requests_wait_is_ended_at_the_server() {
    use std::future::Future;
    let server = Server::start();
    let store = connect(&server);
    let tx = store.begin().await.unwrap();
    let paths: Vec<_> = (0..400).map(|n| format!("n/{n}")).collect();
    let mut reads: Vec<_> = paths.iter().map(|path| Box::pin(store.read(path))).collect();
    let mut tx = Some(tx);
    tokio::task::unconstrained(std::future::poll_fn(|context| {
        for read in &mut reads {
            assert!(read.as_mut().poll(context).is_pending());
        }
        drop(tx.take());
        std::task::Poll::Ready(())
    }))
    .await;
    for read in reads {
        assert_eq!(read.await.unwrap(), None);
    }
    store.read("x").await.unwrap();
    assert_eq!(server.transactions(), (0, 1), "committed and dropped");
}

#[tokio::test]
async fn transaction_whose_beginning_is_given_up_is_ended_at_the_server() {
    use std::future::Future;
    let server = Server::start();
    let store = connect(&server);
    let mut begin = Some(Box::pin(store.begin()));
    std::future::poll_fn(|context| {
        assert!(begin.as_mut().unwrap().as_mut().poll(context).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
    drop(begin.take());
    await_until("the transaction is dropped", || server.transactions() == (0, 1)).await;
}

/// A domain that is not privileged may have ten transactions open (`quota-transactions`).
#[tokio::test]
async fn transactions_of_many_tasks_never_pass_the_quota_of_a_domain() {
    let server = Server::start();
    let store = connect(&server);
    let tasks: Vec<_> = (0..100)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let body = async |tx: &Transaction| tx.read("x").await;
                assert_eq!(transaction(&store, body).await.unwrap(), None);
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(server.transactions(), (100, 0));
    assert!(server.most_open() <= 5, "{} at a time", server.most_open());
}

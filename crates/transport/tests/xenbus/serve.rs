//! A device from its nodes to its end, by the runner, against a server and hand-written nodes.

use crate::server::{Server, await_until};
use manyring_device::Later;
use manyring_transport::xenbus::state::Config;
use manyring_transport::xenbus::{
    Command, DeviceId, Discovery, Endpoint, Host, HostError, Presence, Store, serve,
};
use manyring_wire::xen::device::{Assignment, Disk, Offer};
use std::sync::{Arc, Mutex};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

const BACK: &str = "backend/manyring/7/51712";
const FRONT: &str = "/local/domain/7/device/vbd/51712";

/// Notes what it is asked for.
#[derive(Clone, Debug, Default)]
struct Recorder {
    asked: Arc<Mutex<Vec<String>>>,
}

impl Recorder {
    fn note(&self, what: impl Into<String>) {
        self.asked.lock().unwrap().push(what.into());
    }

    fn asked(&self) -> String {
        self.asked.lock().unwrap().join(", ")
    }
}

impl Host for Recorder {
    fn queues_max(&self) -> u32 {
        4
    }

    fn open<'a>(
        &'a mut self,
        assignment: &'a Assignment,
    ) -> Later<'a, Result<(Offer, Disk), HostError>> {
        self.note(format!("open {}", assignment.params));
        let offer = Offer {
            flush: true,
            persistent: true,
            ring_page_order_max: 4,
            queues_max: 64,
            ..Offer::default()
        };
        let disk = Disk { sectors: 64, sector_size: 512, physical_sector_size: 512, info: 0 };
        Box::pin(std::future::ready(Ok((offer, disk))))
    }

    fn connect<'a>(&'a mut self, config: &'a Config) -> Later<'a, Result<(), HostError>> {
        let (queues, takeover) = (config.connection.queues.len(), config.takeover);
        self.note(format!("connect {queues} queues, takeover {takeover}"));
        Box::pin(std::future::ready(Ok(())))
    }

    fn disconnect(&mut self) -> Later<'_, ()> {
        self.note("disconnect");
        Box::pin(std::future::ready(()))
    }

    fn close(&mut self) {
        self.note("close");
    }
}

struct Served {
    host: Recorder,
    commands: mpsc::Sender<Command>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

fn id() -> DeviceId {
    DeviceId { kind: "manyring".to_owned(), domain: 7, device: 51712 }
}

fn start(store: &Store) -> Served {
    let host = Recorder::default();
    let (commands, received) = mpsc::channel(8);
    let (stop, stopped) = watch::channel(false);
    let (store, mut device) = (store.clone(), host.clone());
    let task = tokio::spawn(async move {
        serve(&store, id(), &mut device, received, stopped).await.unwrap();
    });
    Served { host, commands, stop, task }
}

/// What `xenstore-write` writes for a device.
fn write_nodes(server: &Server) {
    server.write_all(FRONT, &[("backend", BACK), ("state", "1")]);
    let back = [("frontend", FRONT), ("frontend-id", "7"), ("online", "1"), ("params", "/d.img")];
    server.write_all(BACK, &back);
    server.write(&format!("{BACK}/state"), "1");
}

/// Two queues of one page.
fn write_rings(server: &Server) {
    let nodes = [
        ("multi-queue-num-queues", "2"),
        ("queue-0/ring-ref", "8"),
        ("queue-0/event-channel", "5"),
        ("queue-1/ring-ref", "9"),
        ("queue-1/event-channel", "6"),
        ("state", "3"),
    ];
    server.write_all(FRONT, &nodes);
}

fn connect(server: &Server) -> Store {
    Store::open(&Endpoint::Socket(server.socket.clone()), 0).unwrap()
}

#[tokio::test]
async fn device_whose_nodes_appear_is_found_served_and_ended_when_they_vanish() {
    let server = Server::start();
    let store = connect(&server);
    let kinds = ["vbd", "manyring"].map(str::to_owned).to_vec();
    let mut discovery = Discovery::new(store.clone(), kinds).await.unwrap();
    write_nodes(&server);
    let mut found = Vec::new();
    while found.is_empty() {
        found = discovery.next().await.unwrap();
    }
    assert_eq!(found, [Presence::Appeared(id())]);
    let device = start(&store);
    let state = format!("{BACK}/state");
    server.await_node(&state, "2").await;
    assert_eq!(server.read(&format!("{BACK}/multi-queue-max-queues")).as_deref(), Some("4"));
    write_rings(&server);
    server.await_node(&state, "4").await;
    assert_eq!(server.read(&format!("{BACK}/sectors")).as_deref(), Some("64"));
    server.write_all(FRONT, &[("state", "4"), ("queue-1/ring-ref", "77")]);
    server.await_node(&state, "6").await;
    let error = server.read(&format!("error/{BACK}/error")).unwrap();
    assert_eq!(
        error,
        format!("{FRONT}/queue-1/ring-ref: the front-end changed it while connected")
    );
    server.remove(BACK);
    server.remove(FRONT);
    let mut gone = Vec::new();
    while gone.is_empty() {
        gone = discovery.next().await.unwrap();
    }
    assert_eq!(gone, [Presence::Vanished(id())]);
    device.commands.send(Command::Vanished).await.unwrap();
    device.task.await.unwrap();
    let asked = device.host.asked();
    let expected = "open /d.img, connect 2 queues, takeover false, disconnect, close";
    assert!(asked.starts_with(expected), "{asked}");
    assert_eq!(server.read(BACK), None, "nothing is written into a folder that was removed");
}

#[tokio::test]
async fn process_that_ends_leaves_the_nodes_and_the_next_takes_the_rings_over() {
    let server = Server::start();
    let store = connect(&server);
    write_nodes(&server);
    let state = format!("{BACK}/state");
    let first = start(&store);
    server.await_node(&state, "2").await;
    write_rings(&server);
    server.await_node(&state, "4").await;
    first.stop.send(true).unwrap();
    first.task.await.unwrap();
    assert_eq!(server.read(&state).as_deref(), Some("4"));
    let next = start(&store);
    let expected = "open /d.img, connect 2 queues, takeover true";
    await_until("the next process connects", || next.host.asked() == expected).await;
    let disk = Disk { sectors: 128, sector_size: 512, physical_sector_size: 512, info: 0 };
    next.commands.send(Command::Resized(disk)).await.unwrap();
    server.await_node(&format!("{BACK}/sectors"), "128").await;
    server.write(&format!("{FRONT}/state"), "6");
    server.await_node(&state, "6").await;
    next.commands.send(Command::Vanished).await.unwrap();
    next.task.await.unwrap();
}

#[tokio::test]
async fn front_end_that_hides_its_nodes_is_closed_and_its_device_waits_for_the_tool_stack() {
    let server = Server::start();
    let store = connect(&server);
    write_nodes(&server);
    let state = format!("{BACK}/state");
    let device = start(&store);
    server.await_node(&state, "2").await;
    write_rings(&server);
    server.await_node(&state, "4").await;
    server.deny(FRONT);
    server.await_node(&state, "6").await;
    assert!(device.host.asked().ends_with("disconnect"));
    device.commands.send(Command::Vanished).await.unwrap();
    device.task.await.unwrap();
}

#[tokio::test]
async fn device_runs_on_when_xenstore_has_no_room_for_a_transaction_once() {
    // The first transaction reads the back-end's nodes, the second those of the front-end.
    for count in [0, 1] {
        let server = Server::start();
        let store = connect(&server);
        write_nodes(&server);
        let state = format!("{BACK}/state");
        let device = start(&store);
        server.await_node(&state, "2").await;
        write_rings(&server);
        server.await_node(&state, "4").await;
        let before = device.host.asked();
        // Until nothing more is read.
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        server.refuse_one_transaction(count);
        server.write(&format!("{FRONT}/state"), "4");
        await_until("a transaction is refused", || server.has_refused()).await;
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        assert_eq!(device.host.asked(), before, "transaction {count}");
        assert!(!device.task.is_finished(), "transaction {count}");
    }
}

//! A device from its nodes to its end, by the runner, against a server and hand-written nodes.

use crate::server::{Server, await_until};
use manyring_device::PendingResult;
use manyring_transport::xenbus::state::Negotiated;
use manyring_transport::xenbus::{
    Command, DeviceId, Discovery, Host, HostError, Presence, Store, StoreEndpoint, serve,
};
use manyring_wire::xen::device::{Assignment, DiskGeometry, Offer};
use std::sync::{Arc, Mutex};
use std::time::Duration;
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
    ) -> PendingResult<'a, Result<(Offer, DiskGeometry), HostError>> {
        self.note(format!("open {}", assignment.params));
        let offer = Offer {
            flush: true,
            persistent: true,
            ring_page_order_max: 4,
            queues_max: 64,
            ..Offer::default()
        };
        let disk =
            DiskGeometry { sectors: 64, sector_size: 512, physical_sector_size: 512, info: 0 };
        Box::pin(std::future::ready(Ok((offer, disk))))
    }

    fn connect<'a>(
        &'a mut self,
        config: &'a Negotiated,
    ) -> PendingResult<'a, Result<(), HostError>> {
        let (queues, takeover) = (config.connection.queues.len(), config.takeover);
        self.note(format!("connect {queues} queues, takeover {takeover}"));
        Box::pin(std::future::ready(Ok(())))
    }

    fn disconnect(&mut self) -> PendingResult<'_, ()> {
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

/// Writes the nodes of a device, as `xenstore-write` does.
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
    Store::open(&StoreEndpoint::Socket(server.socket.clone()), 0).unwrap()
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
    let disk = DiskGeometry { sectors: 128, sector_size: 512, physical_sector_size: 512, info: 0 };
    next.commands.send(Command::Resized(disk)).await.unwrap();
    server.await_node(&format!("{BACK}/sectors"), "128").await;
    server.write(&format!("{FRONT}/state"), "6");
    server.await_node(&state, "6").await;
    server.remove(BACK);
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
    server.remove(BACK);
    device.commands.send(Command::Vanished).await.unwrap();
    device.task.await.unwrap();
}

/// A device whose two queues run.
async fn running(server: &Server, store: &Store) -> Served {
    write_nodes(server);
    let device = start(store);
    server.await_node(&format!("{BACK}/state"), "2").await;
    write_rings(server);
    server.await_node(&format!("{BACK}/state"), "4").await;
    device
}

#[tokio::test]
async fn device_that_is_told_late_of_a_folder_that_is_there_again_runs_on() {
    let server = Server::start();
    let store = connect(&server);
    let device = running(&server, &store).await;
    let before = device.host.asked();
    device.commands.send(Command::Vanished).await.unwrap();
    let disk = DiskGeometry { sectors: 128, sector_size: 512, physical_sector_size: 512, info: 0 };
    device.commands.send(Command::Resized(disk)).await.unwrap();
    server.await_node(&format!("{BACK}/sectors"), "128").await;
    assert_eq!(device.host.asked(), before);
    server.remove(BACK);
    device.commands.send(Command::Vanished).await.unwrap();
    device.task.await.unwrap();
}

#[tokio::test]
async fn device_runs_on_when_xenstore_has_no_room_for_a_transaction_once() {
    // The first transaction reads the back-end's nodes, the second those of the front-end.
    for count in [0, 1] {
        let server = Server::start();
        let store = connect(&server);
        let device = running(&server, &store).await;
        let before = device.host.asked();
        server.refuse_one_transaction(count);
        server.write(&format!("{FRONT}/state"), "4");
        await_until("a transaction is refused", || server.has_refused()).await;
        // The tool stack asks for the end, and the queues run until the front-end closes.
        server.write(&format!("{BACK}/online"), "0");
        server.await_node(&format!("{BACK}/state"), "5").await;
        assert_eq!(device.host.asked(), before, "transaction {count}");
    }
}

/// The operator takes the device away, and a minute passes.
async fn detach_in_silence(device: &Served) {
    device.commands.send(Command::Detach).await.unwrap();
    tokio::time::pause();
    tokio::time::sleep(Duration::from_secs(60)).await;
    tokio::time::resume();
}

#[tokio::test]
async fn device_runs_on_while_xenstore_is_silent_and_sees_later_what_has_changed() {
    let server = Server::start();
    let store = connect(&server);
    let device = running(&server, &store).await;
    let silence = server.silence();
    detach_in_silence(&device).await;
    assert_eq!(device.host.asked(), "open /d.img, connect 2 queues, takeover false");
    drop(silence);
    server.await_node(&format!("{BACK}/state"), "5").await;
    server.write(&format!("{FRONT}/state"), "6");
    server.await_node(&format!("{BACK}/state"), "6").await;
    assert!(device.host.asked().ends_with("disconnect"));
}

#[tokio::test]
async fn process_that_ends_while_xenstore_is_silent_ends_at_once() {
    let server = Server::start();
    let store = connect(&server);
    let device = running(&server, &store).await;
    let silence = server.silence();
    detach_in_silence(&device).await;
    device.stop.send(true).unwrap();
    device.task.await.unwrap();
    assert!(device.host.asked().ends_with("disconnect, close"));
    drop(silence);
}

#[tokio::test]
async fn device_runs_on_without_xenstore_and_its_rings_are_taken_over_with_the_next_connection() {
    let server = Server::start();
    let store = connect(&server);
    let device = running(&server, &store).await;
    server.hang_up();
    store.lost().await;
    // Whatever the task makes of it, it does so now.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(device.host.asked(), "open /d.img, connect 2 queues, takeover false");
    device.stop.send(true).unwrap();
    device.task.await.unwrap();
    assert!(device.host.asked().ends_with("disconnect, close"));
    let next = start(&connect(&server));
    let expected = "open /d.img, connect 2 queues, takeover true";
    await_until("the rings are taken over", || next.host.asked() == expected).await;
}

#[tokio::test]
async fn rings_are_taken_over_of_a_front_end_whose_nodes_could_not_be_read_at_first() {
    let server = Server::start();
    let store = connect(&server);
    let former = running(&server, &store).await;
    former.stop.send(true).unwrap();
    former.task.await.unwrap();
    // The first transaction reads the back-end's nodes, the others those of the front-end.
    server.refuse_transactions_after(1, 20);
    let next = start(&store);
    let expected = "open /d.img, connect 2 queues, takeover true";
    await_until("the rings are taken over", || next.host.asked() == expected).await;
    assert_eq!(server.read(&format!("{BACK}/state")).as_deref(), Some("4"));
}

//! The handshake: each row of its table, and what front-ends get wrong.

mod endings;
mod histories;

use super::*;
use manyring_wire::xen::blkif::{VDISK_READONLY, VDISK_REMOVABLE};
use manyring_wire::xen::device::{Connection, Discard, Queue};

const FRONT: &str = "/local/domain/7/device/vbd/51712";
const BACK: &str = "backend/vbd/7/51712";

fn id() -> DeviceId {
    DeviceId { kind: "vbd".to_owned(), domain: 7, device: 51712 }
}

fn nodes(list: &[(&str, &str)]) -> Nodes {
    list.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect()
}

fn offer() -> Offer {
    Offer {
        barrier: false,
        flush: true,
        discard: Some(Discard { alignment: 0, granularity: Some(4096), secure: false }),
        persistent: true,
        indirect_segments_max: 256,
        ring_page_order_max: 4,
        queues_max: 4,
    }
}

fn disk(sectors: u64) -> DiskGeometry {
    DiskGeometry { sectors, sector_size: 512, physical_sector_size: 4096, info: 0 }
}

/// A device, its nodes, and a host that does what it is asked.
struct World {
    back: Back,
    seen: Seen,
    /// The actions that were carried out, in short.
    done: Vec<String>,
    /// The configuration of the last `Connect`.
    config: Option<Negotiated>,
    is_running: bool,
    /// The host's answer to `Open` and `Connect`, if it refuses.
    refuses: Option<&'static str>,
    /// The host's answer to `Connect` alone.
    refuses_rings: Option<Event>,
    /// Answers are kept until `answer`.
    is_slow: bool,
    answers: Vec<Event>,
}

impl World {
    /// As the tool stack leaves a new device.
    fn new() -> Self {
        let back = nodes(&[
            ("frontend", FRONT),
            ("frontend-id", "7"),
            ("online", "1"),
            ("mode", "w"),
            ("params", "/disk.img"),
            ("state", "1"),
        ]);
        let seen = Seen { back, front: nodes(&[("state", "1")]) };
        Self {
            back: Back::new(id()),
            seen,
            done: Vec::new(),
            config: None,
            is_running: false,
            refuses: None,
            refuses_rings: None,
            is_slow: false,
            answers: Vec::new(),
        }
    }

    /// A device in use, whose front-end has one queue.
    fn connected() -> Self {
        let mut world = Self::new();
        world.look();
        world.rings("8");
        world.front("4");
        world.take();
        world
    }

    /// A back-end that was connected in a former process.
    fn left_behind(front: &str) -> Self {
        let mut world = Self::connected();
        world.back = Back::new(id());
        world.is_running = false;
        world.seen.front.insert("state".to_owned(), front.as_bytes().to_vec());
        world.take();
        world
    }

    fn set_back(&mut self, name: &str, value: &str) {
        self.seen.back.insert(name.to_owned(), value.as_bytes().to_vec());
    }

    fn set_front(&mut self, name: &str, value: &str) {
        self.seen.front.insert(name.to_owned(), value.as_bytes().to_vec());
    }

    /// The front-end writes a ring and its state `Initialised`.
    fn rings(&mut self, gref: &str) {
        self.set_front("ring-ref", gref);
        self.set_front("event-channel", "5");
        self.set_front("feature-persistent", "1");
        self.front("3");
    }

    fn front(&mut self, state: &str) {
        self.set_front("state", state);
        self.look();
    }

    /// A queue of the last connection meets a fault.
    fn fault(&mut self, text: &str) {
        let number = self.config.as_ref().map_or(0, |config| config.number);
        self.handle(Event::Fault { number, text: text.to_owned() });
    }

    fn look(&mut self) {
        self.handle(Event::Seen(self.seen.clone()));
    }

    /// The actions that were carried out since the last call.
    fn take(&mut self) -> String {
        std::mem::take(&mut self.done).join(", ")
    }

    fn answer(&mut self) {
        for event in std::mem::take(&mut self.answers) {
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        for action in self.back.handle(event) {
            let answer = self.act(action);
            if let Some(answer) = answer {
                self.answers.push(answer);
            }
        }
        if !self.is_slow {
            self.answer();
        }
    }

    fn act(&mut self, action: Action) -> Option<Event> {
        let refused = self.refuses.map(|text| Event::Failed(text.to_owned()));
        match action {
            Action::Open(assignment) => {
                self.done.push(format!("open {}", assignment.params));
                Some(refused.unwrap_or(Event::Opened { offer: offer(), disk: disk(64) }))
            }
            Action::Connect(config) => {
                assert!(!self.is_running, "connected twice");
                self.done.push(if config.takeover { "take over" } else { "connect" }.to_owned());
                self.config = Some(config);
                let refused = refused.or_else(|| self.refuses_rings.clone());
                self.is_running = refused.is_none();
                Some(refused.unwrap_or(Event::Started))
            }
            Action::Disconnect => {
                assert!(self.is_running, "disconnected without a connection");
                self.is_running = false;
                self.done.push("disconnect".to_owned());
                Some(Event::Stopped)
            }
            Action::Close => {
                self.done.push("close".to_owned());
                None
            }
            Action::Write(changes) => {
                self.write(&changes);
                None
            }
        }
    }

    fn write(&mut self, changes: &[Change]) {
        if !self.seen.back.contains_key("state") {
            self.done.push("nothing written".to_owned());
            return;
        }
        for Change { path, value } in changes {
            let name = path.strip_prefix(BACK).map(|rest| rest.trim_start_matches('/'));
            match (name, value) {
                (Some("state"), Some(value)) => {
                    let state = XenbusState::parse(value.as_bytes()).unwrap();
                    self.done.push(state.to_string());
                    self.set_back("state", value);
                }
                (Some("sectors"), Some(value)) => {
                    self.done.push(format!("sectors {value}"));
                    self.set_back("sectors", value);
                }
                (Some(name), Some(value)) => self.set_back(name, value),
                (None, Some(text)) => {
                    assert_eq!(path, &format!("error/{BACK}/error"));
                    self.done.push(format!("error {text}"));
                }
                (Some(name), None) => panic!("{name} is removed"),
                (None, None) => assert_eq!(path, &format!("error/{BACK}/error")),
            }
        }
    }

    fn says(&self, name: &str) -> &str {
        std::str::from_utf8(&self.seen.back[name]).unwrap()
    }
}

#[test]
fn new_device_is_opened_offered_connected_and_closed_in_order() {
    let mut world = World::new();
    world.look();
    assert_eq!(world.take(), "open /disk.img, InitWait");
    assert_eq!(world.says("multi-queue-max-queues"), "4");
    assert_eq!(world.says("max-ring-page-order"), "4");
    assert_eq!(world.says("feature-max-indirect-segments"), "256");
    assert_eq!(world.says("feature-discard"), "1");
    world.look();
    assert_eq!(world.take(), "", "our own writes are no news");
    world.rings("8");
    assert_eq!(world.take(), "connect, sectors 64, Connected");
    let config = world.config.clone().unwrap();
    assert_eq!(config.connection.queues, [Queue { ring_refs: vec![8], event_channel: 5 }]);
    assert!(config.persistent && !config.takeover);
    assert_eq!(world.says("physical-sector-size"), "4096");
    world.front("4");
    assert_eq!(world.take(), "");
    world.front("5");
    assert_eq!(world.take(), "Closing, disconnect");
    world.front("6");
    assert_eq!(world.take(), "Closed");
}

#[test]
fn front_end_that_comes_back_is_offered_the_disk_again() {
    for way in [&["5", "6", "1"][..], &["6", "1"], &["1"], &["5", "1"]] {
        let mut world = World::connected();
        way.iter().for_each(|state| world.front(state));
        let done = world.take();
        assert!(done.contains("disconnect") && done.ends_with("InitWait"), "{way:?}: {done}");
        assert!(!done.contains("open"), "{way:?}: {done}");
        world.rings("9");
        assert_eq!(world.take(), "connect, sectors 64, Connected", "{way:?}");
    }
}

#[test]
fn front_end_that_gives_other_rings_as_initialised_is_connected_to_them() {
    let mut world = World::connected();
    world.rings("8");
    assert_eq!(world.take(), "", "the same rings are no news");
    world.rings("9");
    assert_eq!(world.take(), "disconnect, InitWait, connect, sectors 64, Connected");
    assert_eq!(world.config.unwrap().connection.queues[0].ring_refs, [9]);
}

#[test]
fn node_that_changes_under_a_connection_closes_the_device_and_is_named() {
    let ring = "ring-ref: the front-end changed it while connected";
    for (name, value, expected) in [
        ("ring-ref", "9", ring),
        ("ring-ref", "x", "ring-ref: \"x\" is not a decimal number"),
        ("protocol", "x86_32-abi", "protocol: the front-end changed it while connected"),
        ("multi-queue-num-queues", "2", "queue-0/ring-ref: there is no such node"),
        ("state", "9", "state: 9 is not from 0 to 8"),
        ("state", "four", "state: \"four\" is not a decimal number"),
    ] {
        let mut world = World::connected();
        world.set_front(name, value);
        world.look();
        let expected = format!("error {FRONT}/{expected}, Closing, disconnect, Closed");
        assert_eq!(world.take(), expected);
        world.look();
        assert_eq!(world.take(), "");
    }
}

#[test]
fn wrong_node_of_the_front_end_is_told_and_a_restart_of_it_is_served() {
    for (name, value, expected) in [
        ("ring-ref", "", "ring-ref: \"\" is not a decimal number"),
        ("event-channel", "0", "event-channel: 0 is not from 1 to 4294967295"),
        ("ring-page-order", "5", "ring-page-order: 5 is not from 0 to 4"),
        ("multi-queue-num-queues", "5", "multi-queue-num-queues: 5 is not from 1 to 4"),
        ("protocol", "pdp11-abi", "protocol: \"pdp11-abi\" is no ABI that is served"),
        ("feature-persistent", "yes", "feature-persistent: \"yes\" is neither 0 nor 1"),
    ] {
        let mut world = World::new();
        world.look();
        world.rings("8");
        // Once connected; now the front-end restarts, and writes something else.
        ["5", "6", "1"].iter().for_each(|state| world.front(state));
        world.take();
        let right = world.seen.front.clone();
        world.set_front(name, value);
        world.front("3");
        assert_eq!(world.take(), format!("error {FRONT}/{expected}, Closed"));
        assert!(world.back.reason().unwrap().to_string().contains(expected));
        world.seen.front = right;
        world.front("3");
        assert_eq!(world.take(), "", "it has to begin anew");
        world.front("1");
        assert_eq!(world.take(), "InitWait");
        world.front("3");
        assert_eq!(world.take(), "connect, sectors 64, Connected");
        assert_eq!(world.back.reason(), None);
    }
}

#[test]
fn wrong_node_of_the_tool_stack_is_told_until_it_begins_anew() {
    let refused = |name: &str, value: &str| {
        let mut world = World::new();
        world.set_back(name, value);
        world.look();
        world.look();
        (world.take(), world)
    };
    for (name, value, expected) in [
        ("frontend-id", "8", "frontend-id: 8 contradicts the domain of this folder"),
        ("frontend", "device/vbd/1", "frontend: not an absolute path"),
        ("frontend", "/a b", "frontend: path has the byte 0x20 at 2"),
        ("mode", "rw", "mode: \"rw\" is not one of r, w, w!"),
        ("online", "", "online: \"\" is neither 0 nor 1"),
    ] {
        let (done, mut world) = refused(name, value);
        assert!(done.starts_with(&format!("error {BACK}/{expected}")), "{done}");
        assert!(done.ends_with(", Closed"), "{done}");
        world.seen.back = World::new().seen.back;
        world.look();
        assert_eq!(world.take(), "open /disk.img, InitWait");
    }
}

#[test]
fn disk_that_cannot_be_opened_closes_the_device_with_the_reason() {
    let mut world = World::new();
    world.refuses = Some("/disk.img: no such file");
    world.look();
    world.look();
    assert_eq!(world.take(), "open /disk.img, error /disk.img: no such file, Closed");
    world.refuses = None;
    world.front("6");
    assert_eq!(world.take(), "");
    world.front("1");
    assert_eq!(world.take(), "open /disk.img, InitWait");
}

#[test]
fn rings_that_cannot_be_mapped_close_the_device_with_the_reason() {
    let mut world = World::new();
    world.look();
    world.take();
    world.refuses = Some("grant 8 cannot be mapped");
    world.rings("8");
    assert_eq!(world.take(), "connect, error grant 8 cannot be mapped, Closed");
    assert_eq!(world.back.connected(), None);
}

#[test]
fn fault_of_a_running_queue_closes_the_device_with_the_reason() {
    let mut world = World::connected();
    world.fault("queue 0: req_prod jumps");
    assert_eq!(world.take(), "error queue 0: req_prod jumps, Closing, disconnect, Closed");
    world.fault("queue 1: the same");
    assert_eq!(world.take(), "", "a second fault comes too late");
    let former = world.config.clone().unwrap().number;
    world.front("6");
    world.front("1");
    world.rings("9");
    assert_eq!(world.take(), "InitWait, connect, sectors 64, Connected");
    world.handle(Event::Fault { number: former, text: "late".to_owned() });
    assert_eq!(world.take(), "", "it is no fault of this connection");
}

#[test]
fn front_end_that_does_not_wait_for_the_offer_is_connected() {
    let mut world = World::new();
    world.rings("8");
    assert_eq!(world.take(), "open /disk.img, InitWait, connect, sectors 64, Connected");
    let mut world = World::new();
    world.look();
    world.set_front("ring-ref", "8");
    world.set_front("event-channel", "5");
    world.front("4");
    assert_eq!(world.take(), "open /disk.img, InitWait, connect, sectors 64, Connected");
}

#[test]
fn front_end_whose_state_does_not_exist_yet_is_not_closed() {
    let mut world = World::new();
    world.seen.front.clear();
    world.look();
    assert_eq!(world.take(), "open /disk.img, InitWait");
    world.look();
    world.front("2");
    assert_eq!(world.take(), "");
    world.rings("8");
    assert_eq!(world.take(), "connect, sectors 64, Connected");
}

#[test]
fn folder_without_a_state_is_left_alone_until_the_tool_stack_writes_it() {
    let mut world = World::new();
    world.seen.back.remove("state");
    world.look();
    assert_eq!(world.take(), "");
    world.set_back("state", "1");
    world.look();
    assert_eq!(world.take(), "open /disk.img, InitWait");
}

#[test]
fn resize_while_connected_writes_the_size_and_the_state_again() {
    let mut world = World::connected();
    world.handle(Event::Resized(disk(128)));
    assert_eq!(world.take(), "sectors 128, Connected");
    world.front("6");
    world.handle(Event::Resized(disk(256)));
    assert_eq!(world.take(), "disconnect, Closed", "nobody looks at the size now");
    world.front("1");
    world.rings("8");
    assert_eq!(world.take(), "InitWait, connect, sectors 256, Connected");
}

#[test]
fn what_the_tool_stack_forbids_is_not_offered() {
    for (name, value, node, expected, info) in [
        ("mode", "r", "feature-discard", "0", VDISK_READONLY),
        ("discard-enable", "0", "feature-discard", "0", 0),
        ("removable", "1", "feature-discard", "1", VDISK_REMOVABLE),
    ] {
        let mut world = World::new();
        world.set_back(name, value);
        world.look();
        assert_eq!(world.says(node), expected, "{name}");
        world.rings("8");
        assert_eq!(world.says("info"), info.to_string(), "{name}");
        world.handle(Event::Resized(disk(128)));
        assert_eq!(world.says("info"), info.to_string(), "{name} after a resize");
    }
}

#[test]
fn hotplug_script_that_fails_closes_the_device_with_its_reason() {
    let mut world = World::new();
    world.look();
    world.set_back("hotplug-status", "connected");
    world.look();
    assert_eq!(world.take(), "open /disk.img, InitWait");
    world.set_back("hotplug-status", "error");
    world.set_back("hotplug-error", "no loop\ndevice");
    world.look();
    let text = "the hotplug script failed: no loop\\ndevice";
    assert_eq!(world.take(), format!("error {BACK}/hotplug-status: {text}, Closed"));
}

#[test]
fn what_comes_while_an_answer_is_awaited_counts_afterwards() {
    let mut world = World::new();
    world.look();
    world.take();
    world.is_slow = true;
    world.rings("8");
    world.front("6");
    assert_eq!(world.take(), "connect");
    world.is_slow = false;
    world.answer();
    assert_eq!(world.take(), "sectors 64, Connected, disconnect, Closed");
    world.is_slow = true;
    world.front("1");
    world.rings("8");
    world.seen = Seen::default();
    world.look();
    world.is_slow = false;
    world.answer();
    assert_eq!(world.take(), "InitWait, connect, disconnect, close");
}

//! Back-ends that come back, and devices that are detached or removed.

use super::*;

#[test]
fn restarted_back_end_takes_the_rings_of_a_connected_front_end_over() {
    let mut world = World::left_behind("4");
    world.look();
    assert_eq!(world.take(), "open /disk.img, take over, sectors 64, Connected");
    assert_eq!(world.config.clone().unwrap().connection.queues[0].ring_refs, [8]);
    world.front("5");
    world.front("6");
    assert_eq!(world.take(), "Closing, disconnect, Closed");
}

#[test]
fn restarted_back_end_meets_a_front_end_that_went_on_meanwhile() {
    for (front, expected) in [
        ("1", "open /disk.img, InitWait"),
        ("5", "open /disk.img, Closing"),
        ("6", "open /disk.img, Closed"),
    ] {
        let mut world = World::left_behind(front);
        world.look();
        assert_eq!(world.take(), expected);
    }
    let mut world = World::left_behind("4");
    world.set_front("multi-queue-num-queues", "99");
    world.look();
    let error = format!("error {FRONT}/multi-queue-num-queues: 99 is not from 1 to 4");
    assert_eq!(world.take(), format!("open /disk.img, {error}, Closed"));
}

#[test]
fn restarted_back_end_finishes_what_was_closing_and_leaves_what_was_closed() {
    let mut world = World::left_behind("4");
    world.set_back("state", "5");
    world.look();
    assert_eq!(world.take(), "open /disk.img, take over, sectors 64, Closing");
    world.front("6");
    assert_eq!(world.take(), "disconnect, Closed");
    let mut world = World::left_behind("6");
    world.set_back("state", "5");
    world.look();
    assert_eq!(world.take(), "Closed");
    let mut world = World::left_behind("4");
    world.set_back("state", "6");
    world.look();
    assert_eq!(world.take(), "");
    world.front("1");
    assert_eq!(world.take(), "open /disk.img, InitWait");
}

#[test]
fn tool_stack_that_detaches_waits_for_the_front_end() {
    let mut world = World::connected();
    world.set_back("online", "0");
    world.set_back("state", "5");
    world.look();
    assert_eq!(world.take(), "Closing", "it is served until it has closed");
    assert!(world.is_running);
    world.look();
    assert_eq!(world.take(), "");
    world.front("6");
    assert_eq!(world.take(), "disconnect, Closed");
    world.front("1");
    assert_eq!(world.take(), "", "it does not come back");
    world.seen = Seen::default();
    world.look();
    assert_eq!(world.take(), "close");
}

#[test]
fn tool_stack_that_detaches_an_unconnected_device_sees_it_closed() {
    for (name, value) in [("online", "0"), ("state", "5")] {
        let mut world = World::new();
        world.look();
        world.take();
        world.set_back(name, value);
        world.look();
        assert_eq!(world.take(), "Closed", "{name}");
        world.look();
        assert_eq!(world.take(), "", "{name}: it stays closed");
        let mut world = World::new();
        world.seen.front.clear();
        world.set_back(name, value);
        world.look();
        assert_eq!(world.take(), "Closed", "{name}: nothing is opened");
    }
}

#[test]
fn tool_stack_that_writes_a_closed_device_anew_has_it_opened_anew() {
    let mut world = World::connected();
    world.set_back("online", "0");
    world.front("6");
    world.take();
    world.seen = World::new().seen;
    world.set_back("params", "/other.img");
    world.look();
    assert_eq!(world.take(), "open /other.img, InitWait");
}

/// Folders that are removed and written again between two looks were never seen to be gone.
#[test]
fn disk_that_is_replaced_between_two_looks_is_served_and_not_the_former_one() {
    let waiting = || {
        let mut world = World::new();
        world.look();
        world
    };
    let closing = || {
        let mut world = World::connected();
        world.front("5");
        world
    };
    let mut stopping = World::connected();
    stopping.is_slow = true;
    stopping.front("1");
    for (mut world, way) in [
        (waiting(), "open /other.img, InitWait"),
        (World::connected(), "disconnect, open /other.img, InitWait"),
        (closing(), "open /other.img, InitWait"),
        (stopping, "open /other.img, InitWait"),
    ] {
        world.take();
        world.seen = World::new().seen;
        world.set_back("params", "/other.img");
        world.look();
        world.is_slow = false;
        world.answer();
        assert_eq!(world.take(), way);
        world.rings("9");
        assert_eq!(world.take(), "connect, sectors 64, Connected");
        assert_eq!(world.config.unwrap().assignment.params, "/other.img");
    }
}

#[test]
fn disk_that_the_tool_stack_changes_is_opened_before_the_next_connection() {
    let mut world = World::new();
    world.look();
    world.take();
    world.set_back("params", "/other.img");
    world.rings("8");
    let connected = "open /other.img, InitWait, connect, sectors 64, Connected";
    assert_eq!(world.take(), connected);
    world.set_back("params", "/third.img");
    world.look();
    assert_eq!(world.take(), "", "a connection stays with its disk");
    world.rings("9");
    let connected = "open /third.img, InitWait, connect, sectors 64, Connected";
    assert_eq!(world.take(), format!("disconnect, {connected}"));
}

#[test]
fn operator_who_detaches_waits_for_the_front_end_or_does_not() {
    let mut world = World::connected();
    world.handle(Event::Detach);
    assert_eq!(world.take(), "Closing");
    assert!(world.is_running);
    world.front("5");
    world.front("6");
    world.front("1");
    assert_eq!(world.take(), "disconnect, Closed");
    let mut world = World::connected();
    world.handle(Event::DetachNow);
    assert_eq!(world.take(), "Closing, disconnect, Closed");
    let mut world = World::new();
    world.look();
    world.take();
    world.handle(Event::Detach);
    assert_eq!(world.take(), "Closed");
}

#[test]
fn nodes_that_are_removed_end_the_device_without_a_write() {
    let mut world = World::connected();
    world.seen = Seen::default();
    world.look();
    assert_eq!(world.take(), "disconnect, close");
    let mut world = World::connected();
    world.seen.front.clear();
    world.look();
    assert_eq!(world.take(), "disconnect, Closed", "only the front-end's are gone");
    let mut world = World::new();
    world.look();
    world.take();
    world.seen = Seen::default();
    world.look();
    assert_eq!(world.take(), "close");
    world.look();
    assert_eq!(world.take(), "");
}

#[test]
fn process_that_ends_stops_its_queues_and_writes_nothing() {
    let mut world = World::connected();
    world.handle(Event::Leave);
    assert_eq!(world.take(), "disconnect");
    assert!(world.back.has_left());
    world.front("6");
    assert_eq!(world.take(), "");
    // While an answer is awaited.
    let mut world = World::new();
    world.look();
    world.take();
    world.is_slow = true;
    world.rings("8");
    world.handle(Event::Leave);
    assert_eq!(world.take(), "connect");
    world.is_slow = false;
    world.answer();
    assert_eq!(world.take(), "disconnect");
    assert!(world.back.has_left());
}

/// However often it looks, it does `done`, waits because of `text`, and tells the front-end
/// nothing.
fn waits(world: &mut World, done: &str, text: &str) {
    for _ in 0..2 {
        world.look();
        assert_eq!((world.take().as_str(), world.back.waits_for()), (done, Some(text)));
        assert_eq!(world.says("state"), "4");
    }
}

#[test]
fn disk_of_a_front_end_left_behind_that_cannot_be_opened_is_tried_again_and_not_closed() {
    let mut world = World::left_behind("4");
    world.refuses = Some("/disk.img: no such file");
    waits(&mut world, "open /disk.img", "/disk.img: no such file");
    world.refuses = None;
    world.look();
    assert_eq!(world.take(), "open /disk.img, take over, sectors 64, Connected");
    assert_eq!(world.back.waits_for(), None);
}

#[test]
fn front_end_left_behind_that_closes_while_its_disk_cannot_be_opened_is_let_go() {
    let mut world = World::left_behind("4");
    world.refuses = Some("/disk.img: no such file");
    world.look();
    world.set_back("state", "5");
    world.front("6");
    assert_eq!(world.take(), "open /disk.img, Closed");
}

#[test]
fn rings_left_behind_wait_for_what_the_host_lacks_and_are_closed_for_another_reason() {
    let mut world = World::left_behind("4");
    world.refuses_rings = Some(Event::Delayed("too many open files".to_owned()));
    waits(&mut world, "open /disk.img, take over", "too many open files");
    world.refuses_rings = None;
    world.look();
    assert_eq!(world.take(), "open /disk.img, take over, sectors 64, Connected");
    let mut world = World::left_behind("4");
    world.refuses_rings = Some(Event::Failed("no journal".to_owned()));
    world.look();
    assert_eq!(world.take(), "open /disk.img, take over, error no journal, Closed");
}

#[test]
fn front_end_left_behind_whose_nodes_are_removed_while_it_waits_is_forgotten() {
    let mut without_disk = World::left_behind("4");
    without_disk.refuses = Some("/disk.img: no such file");
    let mut without_rings = World::left_behind("4");
    without_rings.refuses_rings = Some(Event::Delayed("too many open files".to_owned()));
    for mut world in [without_disk, without_rings] {
        world.look();
        assert!(world.back.waits_for().is_some());
        world.take();
        world.seen = Seen::default();
        world.look();
        assert_eq!(world.take(), "close", "the disk is let go");
        assert_eq!((world.back.state(), world.back.waits_for()), (XenbusState::Unknown, None));
        world.look();
        assert_eq!(world.take(), "");
    }
}

#[test]
fn front_end_that_was_never_served_is_told_what_the_host_lacks() {
    let mut world = World::new();
    world.refuses_rings = Some(Event::Delayed("too many open files".to_owned()));
    world.look();
    world.rings("8");
    let expected = "open /disk.img, InitWait, connect, error too many open files, Closed";
    assert_eq!(world.take(), expected);
    world.refuses_rings = None;
    world.front("1");
    world.rings("8");
    assert_eq!(world.take(), "InitWait, connect, sectors 64, Connected");
}

#[test]
fn front_end_whose_back_end_was_killed_while_it_connected_is_connected_as_it_was_offered() {
    let killed = || {
        let mut world = World::new();
        world.look();
        world.back = Back::new(id());
        world.set_front("multi-queue-num-queues", "6");
        for queue in 0..6 {
            let number = (queue + 8).to_string();
            world.set_front(&format!("queue-{queue}/ring-ref"), &number);
            world.set_front(&format!("queue-{queue}/event-channel"), &number);
        }
        world.set_front("state", "3");
        world.take();
        world
    };
    // The former process offered more queues than this one does.
    let mut world = killed();
    world.set_back("multi-queue-max-queues", "8");
    world.look();
    assert_eq!(world.take(), "open /disk.img, connect, sectors 64, Connected");
    let config = world.config.clone().unwrap();
    assert!(config.inherited && !config.takeover && config.connection.queues.len() == 6);
    assert_eq!(world.says("multi-queue-max-queues"), "8", "the next process must know it");
    // Its event channels are its own from then on.
    world.front("6");
    world.front("1");
    world.seen.front.remove("multi-queue-num-queues");
    world.rings("9");
    assert!(!world.config.as_ref().unwrap().inherited);
    // One that took more than it was offered is not served.
    let mut world = killed();
    world.look();
    let error = format!("error {FRONT}/multi-queue-num-queues: 6 is not from 1 to 4");
    assert_eq!(world.take(), format!("open /disk.img, {error}, Closed"));
}

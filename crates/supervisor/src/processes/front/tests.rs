//! A front that is stopped while it gives its device to a device process.

use super::*;
use crate::processes::Handoff;
use crate::processes::fuzzing::{CompromisedProcess, network};
use manyring_config as config;
use manyring_engine::Surplus;
use manyring_protocol::message::Command;
use manyring_serve::assemble::Switches;
use std::task::{Context, Waker};

const NAME: &str = "d";
/// The orders of a network that is given: the device, its limit, and its interface.
const ORDERS: usize = 3;

/// What a front of a network refers to.
struct Of {
    processes: Processes,
    wanted: Wanted,
    part: Part,
}

impl Of {
    fn new() -> Self {
        let processes = Processes::new(Vec::new(), &mut Handoff::default(), Switches::default());
        let keys = format!("[[net]]\nname = '{NAME}'\nsocket_path = '/s'\nnull = true\n");
        let wanted = config::parse(&keys).unwrap().wanted().next().unwrap();
        Self { processes, wanted, part: network(NAME) }
    }

    fn front(&self) -> Front<'_> {
        let stats = &self.part.view.side.stats;
        Front {
            processes: &self.processes,
            wanted: &self.wanted,
            domain: "taken",
            counts: Arc::new(Counts::new(stats.clone(), None).unwrap()),
            part: &self.part,
            request_servers: JoinSet::new(),
            endings: Vec::new(),
            marks: Weak::new(),
            process: None,
            held: Vec::new(),
            journals: JournalStore::new(NAME, stats.count()),
            owner: None,
            waiting: None,
            asks: mpsc::channel(1).1,
            is_single: false,
            failures: Failures::default(),
        }
    }
}

#[test]
fn a_front_that_stops_while_it_gives_a_device_knows_which_device_process_has_it() {
    for places in 1..=ORDERS {
        let taken = CompromisedProcess::new().unwrap();
        let (process, runtime) = taken.parts();
        let _guard = runtime.enter();
        while process.places() > places {
            process.tell(Command::Ping { number: 0 }, Vec::new()).unwrap();
        }
        let of = Of::new();
        let mut front = of.front();
        let mut giving = Box::pin(front.give(process));
        // Polled here alone: the runtime would start the device process.
        let mut context = Context::from_waker(Waker::noop());
        let is_given = loop {
            if giving.as_mut().poll(&mut context).is_ready() {
                break true;
            }
            if process.places() == 0 {
                break false;
            }
            std::thread::yield_now();
        };
        // The device is removed, or the process is told to stop.
        drop(giving);
        assert_eq!(is_given, places == ORDERS, "{places} places");
        let knows = front.process.is_some();
        assert_eq!((process.has(NAME), knows), (is_given, is_given), "{places} places");
    }
}

#[test]
fn a_front_end_that_a_takeover_keeps_from_its_device_process_goes_to_the_next_one() {
    for places in [0, 1] {
        let taken = CompromisedProcess::new().unwrap();
        let (process, runtime) = taken.parts();
        let _guard = runtime.enter();
        while process.places() > places {
            process.tell(Command::Ping { number: 0 }, Vec::new()).unwrap();
        }
        let of = Of::new();
        let front = of.front();
        let socket = std::fs::File::open("/dev/null").unwrap();
        let socket = front.journals.hold(socket.into());
        let number = front.journals.add(socket, &Surplus::default()).unwrap();
        let mut telling = Box::pin(front.tell(process, front.journals.handing(number)));
        // Polled here alone: the runtime would start the device process.
        let mut context = Context::from_waker(Waker::noop());
        let is_told = telling.as_mut().poll(&mut context).is_ready();
        assert_eq!(is_told, places == 1);
        of.processes.pauses.send_replace(true);
        assert!(is_told || telling.as_mut().poll(&mut context).is_ready());
        // The takeover may fail before this device is asked for.
        assert_eq!(process.serves(), is_told, "one that was not told cannot serve");
        assert_eq!(process.has_yielded(), !is_told);
    }
}

//! A front that is stopped while it gives its device to a device process.

use super::*;
use crate::assemble::Switches;
use crate::processes::Handoff;
use crate::processes::fuzzing::{CompromisedProcess, network};
use manyring_config as config;
use std::task::{Context, Waker};

const NAME: &str = "d";
/// The orders of a network that is given: the device, its limit, and its interface.
const ORDERS: usize = 3;

#[test]
fn a_front_that_stops_while_it_gives_a_device_knows_which_device_process_has_it() {
    for places in 1..=ORDERS {
        let taken = CompromisedProcess::new().unwrap();
        let (process, runtime) = taken.parts();
        let _guard = runtime.enter();
        while process.places() > places {
            process.tell(Command::Ping { number: 0 }, Vec::new()).unwrap();
        }
        let processes = Processes::new(Vec::new(), &mut Handoff::default(), Switches::default());
        let keys = format!("[[net]]\nname = '{NAME}'\nsocket_path = '/s'\nnull = true\n");
        let wanted = config::parse(&keys).unwrap().wanted().next().unwrap();
        let part = network(NAME);
        let mut front = Front {
            processes: &processes,
            wanted: &wanted,
            domain: "taken",
            counts: Arc::new(Counts::new(part.view.side.stats.clone(), None).unwrap()),
            part: &part,
            request_servers: JoinSet::new(),
            endings: Vec::new(),
            marks: Weak::new(),
            process: None,
            held: Vec::new(),
            journals: JournalStore::new(NAME, part.view.side.stats.count()),
            owner: None,
            waiting: None,
            asks: mpsc::channel(1).1,
            is_single: false,
        };
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

//! Input: the control queue. Any bytes are a command or an error; any chain is answered or breaks
//! the queue; what is set is what there is.
#![no_main]

#[path = "../guest.rs"]
mod guest;

use arbitrary::Arbitrary;
use guest::{Guest, Spoil};
use libfuzzer_sys::fuzz_target;
use manyring_backend::net::switch::{Clock, PortOptions, Switch, SwitchOptions};
use manyring_device::fuzzing::SoloControl;
use manyring_device::net::NetSide;
use manyring_queue::DeviceQueue;
use manyring_wire::net::{Command, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ};
use std::sync::{Arc, LazyLock};
use tokio::runtime::{Builder, Runtime};

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_all().build().unwrap());

const PAIRS: usize = 4;

#[derive(Arbitrary, Debug)]
enum Step {
    /// A command, and room for its answer.
    Command {
        class: u8,
        command: u8,
        data: Vec<u8>,
        process: u8,
    },
    Spoil(Spoil),
    Serve,
}

fuzz_target!(|input: (u64, Vec<Step>)| {
    let (features, steps) = input;
    let features = features | VIRTIO_NET_F_CTRL_VQ | VIRTIO_NET_F_MQ;
    let guest = Guest::new(16, 65_530, true, true, true);
    let queue = DeviceQueue::new(guest.config, guest.memory.clone()).unwrap();
    // Its port takes whatever hash a driver sets.
    let clock = Clock::new(|| 5_000);
    let switch =
        Switch::new(SwitchOptions { name: "s".to_owned(), age: 300, group_fwd_mask: 0, clock });
    let port = Arc::new(switch.port(PortOptions::new("port", PAIRS)).unwrap());
    let mut solo = SoloControl::new(&RUNTIME, queue, port, features);
    for step in steps {
        match step {
            Step::Command { class, command, data, process } => {
                let bytes = [&[class % 8, command % 6][..], &data].concat();
                if let Ok(Command::MacAddr(mac)) = Command::parse(&bytes) {
                    assert!(mac[0] & 1 == 0);
                }
                guest.command(&bytes, process);
            }
            Step::Spoil(spoil) => guest.apply(&spoil),
            Step::Serve => {
                solo.serve(&RUNTIME);
                // A chain without a status byte breaks the queue and never comes back.
                assert_eq!(solo.queue().in_flight(), 0);
                assert!(solo.device().mac()[0] & 1 == 0);
                assert!(solo.hashed_pairs() <= PAIRS);
                assert!(solo.queue().available_count() == 0 || solo.queue().fault().is_some());
            }
        }
    }
});

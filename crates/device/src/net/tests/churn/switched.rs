//! Frames go from one guest to another through a switch while everything is done to their queues.

use super::*;
use manyring_backend::net::switch::{AGE, Clock, PortOptions, Switch, SwitchOptions, SwitchPort};

const RECEIVER: MacAddress = [2, 0, 0, 0, 0, 9];
const FEATURES: u64 = VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF;

fn port(switch: &Arc<Switch>, name: &str) -> Arc<SwitchPort> {
    Arc::new(switch.port(PortOptions::new(name, 1)).unwrap())
}

/// `to_all`: the frames go to everybody, as copies; else they are lent to the one receiver.
fn churn_switched(uring: bool, event_idx: bool, workers_max: usize, to_all: bool) {
    println!("uring {uring}, EVENT_IDX {event_idx}, {workers_max} workers, to all {to_all}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let pool = Pool::new(PoolOptions { workers_max, polling: Polling::up_to_us(1), uring });
    let options_of = |name: &str| SwitchOptions {
        name: name.to_owned(),
        age: AGE,
        group_fwd_mask: 0,
        clock: Clock::default(),
    };
    let switch = Switch::new(options_of("s0"));
    let floods_max = if to_all { u32::MAX } else { 1 };
    let sending = PortOptions { floods_max, ..PortOptions::new("tx", 1) };
    let ports = [port(&switch, "rx"), Arc::new(switch.port(sending).unwrap())];
    let mut hello = frame(0, 60);
    hello[6..12].copy_from_slice(&RECEIVER);
    ports[0].transmit(&hello).unwrap();
    let devices = ports.clone().map(|port| NetDevice::new(options(1), port, pool.clone()));
    for device in &devices {
        runtime.block_on(device.set_features(FEATURES));
    }
    let to = if to_all { [0xff; 6] } else { RECEIVER };
    let mut round = Round::default();
    for (index, device) in devices.iter().enumerate() {
        round.add(&runtime, device, (index, event_idx, true, to));
    }
    let mut random = u64::from(uring) + 2 * u64::from(event_idx) + 17;
    for _ in 0..DISTURBANCES {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
        let index = usize::try_from(random >> 63).unwrap();
        let disturbed = round.queues[index].disturb(&devices[index], random >> 20 & 0xfff_ffff);
        runtime.block_on(disturbed);
        goes_on(&round.frames);
    }
    let [rx, tx] = &devices;
    round.end(&runtime, &[rx, tx]);
    let counters = ports[1].counters();
    assert_eq!(counters.flooded.value() > 1, to_all, "the frames went another way");
}

#[test]
fn no_wake_up_and_no_byte_is_lost_between_two_guests_of_a_switch() {
    for (uring, event_idx, workers_max) in
        [(true, true, 2), (true, false, 1), (false, false, 2), (false, true, 1)]
    {
        churn_switched(uring, event_idx, workers_max, false);
    }
}

#[test]
fn no_wake_up_is_lost_for_copies_of_a_switch() {
    for (uring, workers_max) in [(true, 2), (false, 1)] {
        churn_switched(uring, true, workers_max, true);
    }
}

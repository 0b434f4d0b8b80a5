//! Input: xenstore. Any bytes of a stream are split, parsed or refused; what is parsed is emitted
//! as the same message again. Any nodes of a device are refused, or mean what they say.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use manyring_wire::xen::device::{Assignment, Connection, DiskGeometry, Nodes, Offer, QUEUES_MAX};
use manyring_wire::xen::keys::KEYS;
use manyring_wire::xen::state::XenbusState;
use manyring_wire::xen::store::{
    Answer, ErrorName, HEADER_SIZE, PAYLOAD_SIZE_MAX, Request, StoreHeader, refuse, reply, split,
    transaction_id,
};

#[derive(Arbitrary, Debug)]
struct Message {
    kind: u8,
    ids: (u32, u32),
    /// The difference between the length in the header and the size of the payload.
    lie: i8,
    payload: Vec<u8>,
}

#[derive(Arbitrary, Debug)]
struct Node {
    key: u8,
    queue: u8,
    page: u8,
    value: Vec<u8>,
}

#[derive(Arbitrary, Debug)]
struct Input {
    messages: Vec<Message>,
    rest: Vec<u8>,
    nodes: Vec<Node>,
    order: u8,
    queues: u8,
}

fuzz_target!(|input: Input| {
    read_stream(&input);
    read_nodes(&input);
});

fn read_stream(input: &Input) {
    let mut stream = Vec::new();
    for message in &input.messages {
        let size = (message.payload.len() as i64 + i64::from(message.lie.max(-8) / 16)).max(0);
        let size = u32::try_from(size).unwrap();
        let (req_id, tx_id) = (message.ids.0, message.ids.1 % 3);
        let header = StoreHeader { kind: u32::from(message.kind % 30), req_id, tx_id, size };
        stream.extend_from_slice(&header.emit());
        stream.extend_from_slice(&message.payload);
    }
    stream.extend_from_slice(&input.rest);
    let mut rest = &stream[..];
    while let Ok(Some(message)) = split(rest) {
        assert!(message.payload.len() <= PAYLOAD_SIZE_MAX && message.size() >= HEADER_SIZE);
        rest = &rest[message.size()..];
        let mut out = Vec::new();
        match Request::parse(&message) {
            Ok(request) => {
                // A payload may have held leading zeroes or reserved strings: compared is what it
                // means.
                let StoreHeader { req_id, tx_id, .. } = message.header;
                request.emit(req_id, tx_id, &mut out).unwrap();
                let again = split(&out).unwrap().unwrap();
                assert_eq!(Request::parse(&again), Ok(request));
                reply(&mut out, &message.header, message.payload).unwrap();
            }
            Err(error) => {
                refuse(&mut out, &message.header, error);
                let refused = split(&out).unwrap().unwrap();
                assert_eq!(Answer::parse(&refused), Ok(Answer::Refused(error)));
                assert_ne!(error, ErrorName::Unknown);
            }
        }
        if let Ok(Answer::Done(_, payload)) = Answer::parse(&message) {
            let _ = transaction_id(payload);
        }
    }
}

fn read_nodes(input: &Input) {
    let mut nodes = Nodes::new();
    for node in &input.nodes {
        let name = KEYS[usize::from(node.key) % KEYS.len()].name;
        let page = if node.page > 16 { String::new() } else { node.page.to_string() };
        let page = if name == "ring-ref" { page } else { String::new() };
        let name = match node.queue % 4 {
            3 => format!("{name}{page}"),
            queue => format!("queue-{queue}/{name}{page}"),
        };
        nodes.insert(name, node.value.clone());
        let _ = XenbusState::parse(&node.value);
    }
    let offer = Offer {
        ring_page_order_max: u32::from(input.order % 8),
        queues_max: u32::from(input.queues) * 3,
        ..Offer::default()
    };
    if let Ok(connection) = Connection::parse(&nodes, &offer) {
        assert!((1..=QUEUES_MAX as usize).contains(&connection.queues.len()));
        let pages = 1 << connection.ring_page_order;
        assert!(pages <= 16 && connection.ring_page_order <= offer.ring_page_order_max);
        assert!(connection.queues.iter().all(|queue| queue.ring_refs.len() == pages));
        let written: Nodes =
            connection.emit().into_iter().map(|(name, value)| (name, value.into_bytes())).collect();
        assert_eq!(Connection::parse(&written, &offer), Ok(connection));
    }
    if let Ok(disk) = DiskGeometry::parse(&nodes) {
        assert!(disk.sector_size.is_power_of_two());
        assert!((disk.sectors * 512).is_multiple_of(disk.sector_size.into()));
    }
    for error in [Assignment::parse(&nodes).err(), Offer::parse(&nodes).err()].into_iter().flatten()
    {
        assert!(error.to_string().len() < 300 && !error.to_string().contains(char::is_control));
    }
}

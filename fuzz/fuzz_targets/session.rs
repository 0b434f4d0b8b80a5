//! Input: the vhost-user socket. Any sequence of messages leaves the session in order: what it
//! starts is complete, what it names exists, and no file descriptor is made up.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use manyring_transport::vhost_user::session::{
    Answer, DeviceOffer, Effect, MemoryChange, Outcome, Session,
};
use manyring_wire::vhost_user::{
    CONFIG_SIZE_MAX, HEADER_SIZE, Header, PAYLOAD_SIZE_MAX, Reply, row_of,
};

const QUEUES: usize = 4;

#[derive(Arbitrary, Debug)]
struct Message {
    request: u8,
    flags: u8,
    fds: u8,
    /// Cut or extend the payload to the length in the table of messages.
    fit: bool,
    payload: Vec<u8>,
    /// The transport refuses what this message starts.
    refuse: bool,
}

fuzz_target!(|input: (u64, Vec<Message>)| {
    let (protocol, messages) = input;
    let offer = DeviceOffer {
        features: 0x1_3000_7e46,
        protocol,
        queue_count: QUEUES,
        queue_size_max: 32768,
    };
    let mut session = Session::new(offer);
    for mut message in messages {
        let request = u32::from(message.request % 46);
        if let Some(row) = row_of(request).filter(|_| message.fit) {
            let (min, max) = row.payload.sizes();
            let len = message.payload.len().clamp(min, max);
            message.payload.resize(len, 0);
        }
        let size = u32::try_from(message.payload.len()).unwrap();
        let flags = u32::from(message.flags & 0xf);
        let Ok(header) = Header::parse(&Header { request, flags, size }.emit()) else { continue };
        assert!(HEADER_SIZE + size as usize <= HEADER_SIZE + PAYLOAD_SIZE_MAX);
        let fds: Vec<u32> = (0..u32::from(message.fds % 10)).collect();
        let given = fds.len();
        match session.handle(header, &message.payload, fds) {
            Ok(outcome) => obey(&mut session, outcome, given, message.refuse),
            // The session has ended; a new one begins.
            Err(_) => session = Session::new(offer),
        }
    }
});

/// Does what the transport does with the effects.
fn obey(session: &mut Session, outcome: Outcome<u32>, given: usize, refuse: bool) {
    let mut used = 0;
    for effect in outcome.effects {
        match effect {
            Effect::Start(index) => {
                let vring = session.vring(index).unwrap();
                assert!(vring.size().is_power_of_two() && vring.addresses().is_some());
                if refuse {
                    session.refuse(index);
                }
            }
            Effect::Stop(index) => {
                assert!(index < QUEUES);
                session.stopped(index, 7.into());
            }
            Effect::FindBase(index) | Effect::Enable(index, _) | Effect::Relocate(index, _) => {
                assert!(index < QUEUES);
            }
            Effect::Kick(index, fd) | Effect::Call(index, fd) | Effect::Err(index, fd) => {
                assert!(index < QUEUES);
                used += usize::from(fd.is_some());
            }
            Effect::BackendChannel(_) => used += 1,
            Effect::SaveState(_) | Effect::LoadState(_) => used += 1,
            Effect::Log(log) => used += usize::from(log.is_some()),
            Effect::Inflight(region) => used += usize::from(region.is_some()),
            Effect::Memory(MemoryChange::Replace(regions)) => {
                used += regions.len();
                assert!(regions.iter().all(|(region, _)| region.is_sound()));
            }
            Effect::Memory(MemoryChange::Add(region, _)) => {
                used += 1;
                assert!(region.is_sound());
            }
            Effect::WriteConfig(access, bytes) => {
                assert!(access.offset + access.size <= CONFIG_SIZE_MAX);
                assert_eq!(bytes.len(), access.size as usize);
            }
            Effect::Memory(MemoryChange::Remove(_))
            | Effect::Features(_)
            | Effect::SendRarp(_)
            | Effect::SetMtu(_)
            | Effect::ResetConfig
            | Effect::Refuse(_) => {}
        }
    }
    assert!(used <= given, "{used} file descriptors out of {given}");
    match outcome.answer {
        Answer::Reply(reply) => assert!(reply.message(1).len() <= HEADER_SIZE + PAYLOAD_SIZE_MAX),
        Answer::Inflight(area, size) => {
            assert!(usize::from(area.queues) <= QUEUES && (20..=24).contains(&size));
        }
        Answer::Base(index) => assert!(session.vring(index).is_some()),
        Answer::Config(access) => {
            assert!(access.offset + access.size <= CONFIG_SIZE_MAX);
            let bytes = vec![0; access.size as usize];
            assert!(Reply::Config(access, bytes).emit().len() <= PAYLOAD_SIZE_MAX);
        }
        Answer::None | Answer::Ack | Answer::StateFd | Answer::CheckState { .. } => {}
    }
}

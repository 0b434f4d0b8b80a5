//! How a guest connects: a transport negotiates, maps memory, builds queues, and hands them to a
//! device.
//!
//! **transport** -> queue -> device -> backend. A transport acts once, when a guest arrives or
//! leaves. While a guest runs, its queues belong to the device's workers, and no request passes
//! through this crate. There are two transports, which share their shape and no code:
//!
//! ```text
//!              vhost_user                              xenbus
//! peer         a front-end (VMM) at a unix socket      a guest's front-end, by nodes of xenstore
//! input        messages with file descriptors          nodes, watches, grant references
//! decided by   session.rs: (state, message) ->         state.rs: (state, event) ->
//!                (state, effects, answer)                (state, actions)
//! done by      requests.rs, on a manyring_device::     serve.rs, on a Host that maps the grants
//!                Device                                  and starts the rings
//! output       memory, queues, enable, stop -> Device  rings, stop -> Host
//!              answers -> the front-end                nodes -> the guest and the tool stack
//! ```
//! A caller gives [`vhost_user::serve`] a [`Device`](manyring_device::Device), an
//! [`Endpoint`](vhost_user::Endpoint) and [`ServeOptions`](vhost_user::ServeOptions). The future
//! runs on a current-thread runtime of tokio until its `stop` turns true; it serves one front-end
//! after another. [`xenbus::serve`] does the same for one disk of one guest, whose
//! [`Host`](xenbus::Host) the caller implements; [`xenbus::Discovery`] finds the disks.
//!
//! ```text
//! accept -> loop: read a message -> Session::handle -> effects, in order -> the answer
//!        -> the front-end leaves, or breaks a rule: every queue stops, its requests end, memory
//!           is unmapped, file descriptors are closed -> accept
//! ```
//! The decisions behind this:
//! 1. **The negotiation is pure.** [`Session`](vhost_user::session::Session) and
//!    [`Back`](xenbus::state::Back) do no I/O, read no clock and own no file descriptor: a test is
//!    a list of messages, and each order in which a real front-end sends them is one.
//! 2. **A message is carried out completely, then answered.** Effects are done in their order. A
//!    message that removes memory is answered only when no request uses that memory any more.
//! 3. **A fault of the front-end ends its session** ([`FrontError`](vhost_user::FrontError)). A
//!    request that is refused has no other effect. Faults of the driver are found by the engine,
//!    and stop one queue.
//! 4. **All front-ends share one thread.** So it never waits for one of them: a message must be
//!    whole within 5 seconds, mapping and closing are done by a janitor of the device, and a
//!    front-end pays for the CPU time of its messages by waiting (`meter.rs`, `pace.rs`).
//! 5. **A session can outlive its process.** Another process keeps the socket and the session's own
//!    messages ([`SessionJournal`](vhost_user::SessionJournal)); the next process handles them
//!    again (`vhost_user/saved_session.rs` argues the order).
//!
//! A session as messages, with names instead of file descriptors:
//!
//! ```
//! use manyring_transport::vhost_user::session::{Answer, Effect, OFFERED, DeviceOffer, Session};
//! use manyring_wire::vhost_user::{FLAG_VERSION, Header, REQUESTS, Region, VringAddr};
//! use zerocopy::IntoBytes;
//!
//! let features = 1 << 32; // VIRTIO_F_VERSION_1
//! let offer = DeviceOffer { features, protocol: OFFERED, queue_count: 1, queue_size_max: 256 };
//! let mut session = Session::new(offer);
//! let mut send = |name: &str, payload: &[u8], fds: Vec<&'static str>| {
//!     let request = REQUESTS.iter().find(|row| row.name == name).unwrap().id;
//!     let size = payload.len().try_into().unwrap();
//!     session.handle(Header { request, flags: FLAG_VERSION, size }, payload, fds)
//! };
//!
//! // The features that the device offers, those that the driver accepts, and the guest's memory.
//! assert!(matches!(send("GET_FEATURES", &[], vec![]).unwrap().answer, Answer::Reply(_)));
//! let outcome = send("SET_FEATURES", features.as_bytes(), vec![]).unwrap();
//! assert_eq!(outcome.effects, [Effect::Features(features)]);
//! let region = Region { guest_addr: 0, size: 1 << 20, user_addr: 0x7000_0000, mmap_offset: 0 };
//! let table = [&1u64.to_ne_bytes(), region.as_bytes()].concat();
//! assert!(matches!(
//!     send("SET_MEM_TABLE", &table, vec!["memory"]).unwrap().effects[..],
//!     [Effect::Memory(_)]
//! ));
//!
//! // A ring, described in user addresses of the front-end. It starts with its kick.
//! send("SET_VRING_NUM", [0u32, 128].as_bytes(), vec![]).unwrap();
//! let (descriptor, available, used) = (0x7000_0000, 0x7000_1000, 0x7000_2000);
//! let ring = VringAddr { index: 0, flags: 0, descriptor, used, available, log: 0 };
//! send("SET_VRING_ADDR", ring.as_bytes(), vec![]).unwrap();
//! let outcome = send("SET_VRING_KICK", 0u64.as_bytes(), vec!["kick"]).unwrap();
//! assert_eq!(outcome.effects, [Effect::Kick(0, Some("kick")), Effect::Start(0)]);
//!
//! // A ring that the device does not have: the session must end.
//! assert!(send("SET_VRING_NUM", [9u32, 128].as_bytes(), vec![]).is_err());
//! ```
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod vhost_user;
pub mod xenbus;

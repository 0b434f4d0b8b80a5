//! xenstore messages against hand-made bytes, against each other, and against noise.

use super::*;
use crate::xen::path::Path;
use proptest::prelude::*;

fn path(text: &str) -> Path<'_> {
    Path::parse(text.as_bytes()).unwrap()
}

/// The bytes of a message, made by hand.
fn bytes(kind: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap();
    let words = [kind, 7, 9, size].map(u32::to_ne_bytes).concat();
    [words, payload.to_vec()].concat()
}

/// Parses the request `kind` with this payload outside of a transaction, as a server does.
fn request(kind: u32, payload: &[u8]) -> Result<Request<'_>, ErrorName> {
    let size = u32::try_from(payload.len()).unwrap();
    Request::parse(&Message { header: StoreHeader { kind, req_id: 7, tx_id: 0, size }, payload })
}

#[test]
fn stream_is_split_where_messages_are_whole_and_nowhere_else() {
    let stream = [bytes(2, b"/a\0"), bytes(1, b"")].concat();
    for end in 0..stream.len() {
        let message = split(&stream[..end]).unwrap();
        assert_eq!(message.is_some(), end >= HEADER_SIZE + 3, "{end} bytes");
    }
    let message = split(&stream).unwrap().unwrap();
    assert_eq!(message.header, StoreHeader { kind: 2, req_id: 7, tx_id: 9, size: 3 });
    assert_eq!((message.payload, message.size()), (&b"/a\0"[..], 19));
    let second = split(&stream[message.size()..]).unwrap().unwrap();
    assert_eq!((second.header.kind, second.payload), (1, &b""[..]));
}

#[test]
fn payload_of_4096_bytes_is_read_and_one_byte_more_ends_the_stream() {
    assert!(split(&bytes(11, &[1; PAYLOAD_SIZE_MAX])).unwrap().is_some());
    let size = PAYLOAD_SIZE_MAX + 1;
    let too_long = StoreMessageError::TooLong { kind: 11, size };
    assert_eq!(split(&bytes(11, &vec![1; size])), Err(too_long));
    let header = StoreHeader { kind: 11, req_id: 0, tx_id: 0, size: u32::MAX };
    let too_long = StoreMessageError::TooLong { kind: 11, size: u32::MAX as usize };
    assert_eq!(split(&header.emit()), Err(too_long));
}

#[test]
fn ids_of_operations_are_those_of_the_specification() {
    let ids: Vec<u32> = StoreOp::ALL.iter().map(|op| op.id()).collect();
    let expected: Vec<u32> = (0..=26).filter(|id| *id != 20).collect();
    assert_eq!(ids, expected);
    for op in StoreOp::ALL {
        assert_eq!(StoreOp::from_id(op.id()), Some(*op));
    }
    assert_eq!(
        (StoreOp::from_id(20), StoreOp::from_id(27), StoreOp::from_id(0xffff)),
        (None, None, None)
    );
    assert_eq!((StoreOp::Error.id(), StoreOp::WatchEvent.id(), StoreOp::Write.id()), (16, 15, 11));
}

#[test]
fn strings_are_cut_at_every_nul_and_what_has_no_nul_is_left_out() {
    let cut = |payload: &'static [u8]| strings(payload).collect::<Vec<_>>();
    assert_eq!(cut(b"a\0bc\0"), [&b"a"[..], b"bc"]);
    assert_eq!(cut(b"a\0\0"), [&b"a"[..], b""]);
    assert_eq!(cut(b"a\0rest"), [&b"a"[..]]);
    assert!(cut(b"").is_empty() && cut(b"rest").is_empty());
    assert_eq!(cut(b"\0"), [&b""[..]]);
}

#[test]
fn request_with_a_wrong_payload_is_refused_as_invalid() {
    let invalid: &[(StoreOp, &[u8])] = &[
        (StoreOp::Read, b""),
        (StoreOp::Read, b"/a"),
        (StoreOp::Read, b"/a\0b\0"),
        (StoreOp::Read, b"/a b\0"),
        (StoreOp::Write, b"/a"),
        (StoreOp::Write, b"\0value"),
        (StoreOp::Watch, b"/a\0"),
        (StoreOp::Watch, b"/a\0token\0one\0"),
        (StoreOp::Watch, b"/a//b\0token\0"),
        (StoreOp::Unwatch, b"@\x01\0token\0"),
        (StoreOp::TransactionEnd, b"t\0"),
        (StoreOp::TransactionEnd, b"T"),
        (StoreOp::Introduce, b"1\x002\0"),
        (StoreOp::Introduce, b"65536\x002\x003\0"),
        (StoreOp::Introduce, b"1\0--2\x003\0"),
        (StoreOp::GetDomainPath, b"+1\0"),
        (StoreOp::Release, b"\0"),
        (StoreOp::SetPerms, b"/a\0"),
        (StoreOp::SetPerms, b"/a\0x1\0"),
        (StoreOp::SetPerms, b"/a\0r1\0r\0"),
        (StoreOp::SetTarget, b"1\0"),
        (StoreOp::DirectoryPart, b"/a\0-1\0"),
    ];
    for (op, payload) in invalid {
        let name = op.name();
        assert_eq!(request(op.id(), payload), Err(ErrorName::Einval), "{name} {payload:?}");
    }
}

#[test]
fn operation_that_no_client_can_ask_for_is_refused_as_unknown() {
    for kind in [15, 16, 20, 27, 0xffff, u32::MAX] {
        assert_eq!(request(kind, b"/a\0"), Err(ErrorName::Enosys), "{kind}");
    }
}

#[test]
fn transaction_inside_a_transaction_is_refused() {
    let header = StoreHeader { kind: StoreOp::TransactionStart.id(), req_id: 1, tx_id: 3, size: 1 };
    let message = Message { header, payload: b"\0" };
    assert_eq!(Request::parse(&message), Err(ErrorName::Ebusy));
}

#[test]
fn value_may_hold_nul_bytes_and_may_be_empty() {
    let write = |value| Ok(Request::Write { path: path("/a"), value });
    assert_eq!(request(11, b"/a\0x\0y\0"), write(b"x\0y\0"));
    assert_eq!(request(11, b"/a\0"), write(b""));
}

#[test]
fn watch_with_a_reserved_string_has_no_depth() {
    let watched = Watched::Node(path("/a"));
    let watch = |depth| Ok(Request::Watch { watched, token: b"t", depth });
    assert_eq!(request(4, b"/a\0t\0"), watch(None));
    assert_eq!(request(4, b"/a\0t\0\0"), watch(None));
    assert_eq!(request(4, b"/a\0t\x003\0"), watch(Some(3)));
}

#[test]
fn server_sends_what_a_client_understands() {
    let asked = StoreHeader { kind: StoreOp::Read.id(), req_id: 4, tx_id: 2, size: 3 };
    let mut out = Vec::new();
    reply(&mut out, &asked, b"value").unwrap();
    refuse(&mut out, &asked, ErrorName::Eagain);
    event(&mut out, Watched::RELEASE_DOMAIN, b"dom").unwrap();
    let mut answers = Vec::new();
    let mut rest = &out[..];
    while let Some(message) = split(rest).unwrap() {
        let ids = (message.header.req_id, message.header.tx_id);
        answers.push((ids, Answer::parse(&message).unwrap()));
        rest = &rest[message.size()..];
    }
    let watched = Watched::RELEASE_DOMAIN;
    let expected = [
        ((4, 2), Answer::Done(StoreOp::Read, b"value")),
        ((4, 2), Answer::Refused(ErrorName::Eagain)),
        ((0, 0), Answer::Event { watched, token: b"dom" }),
    ];
    assert!(rest.is_empty());
    assert_eq!(answers, expected);
}

#[test]
fn what_is_too_long_or_has_a_nul_inside_is_not_sent_at_all() {
    let mut out = Vec::new();
    let value = vec![b'x'; PAYLOAD_SIZE_MAX - 2];
    let write = Request::Write { path: path("/a"), value: &value };
    let too_long = StoreMessageError::TooLong { kind: 11, size: PAYLOAD_SIZE_MAX + 1 };
    assert_eq!(write.emit(1, 0, &mut out), Err(too_long));
    let write = Request::Write { path: path("/a"), value: &value[1..] };
    let asked = StoreHeader { kind: 2, req_id: 0, tx_id: 0, size: 0 };
    assert!(reply(&mut out, &asked, &[0; PAYLOAD_SIZE_MAX + 1]).is_err());
    let nul = Err(StoreMessageError::Nul { name: "WATCH_EVENT" });
    assert_eq!(event(&mut out, Watched::RELEASE_DOMAIN, b"a\0b"), nul);
    let watch = Request::Watch { watched: Watched::RELEASE_DOMAIN, token: b"\0", depth: None };
    assert_eq!(watch.emit(1, 0, &mut out), Err(StoreMessageError::Nul { name: "WATCH" }));
    assert!(out.is_empty());
    write.emit(1, 0, &mut out).unwrap();
    assert_eq!(out.len(), HEADER_SIZE + PAYLOAD_SIZE_MAX);
}

#[test]
fn reply_that_is_not_whole_is_malformed() {
    let answer = |kind, payload| {
        let header = StoreHeader { kind, req_id: 0, tx_id: 0, size: 0 };
        Answer::parse(&Message { header, payload })
    };
    let malformed = |name| Err(StoreMessageError::Malformed { name });
    assert_eq!(answer(16, b"ENOENT"), malformed("ERROR"));
    assert_eq!(answer(15, b"/a\0token"), malformed("WATCH_EVENT"));
    assert_eq!(answer(15, b"/a b\0token\0"), malformed("WATCH_EVENT"));
    assert_eq!(answer(20, b""), Err(StoreMessageError::NotAReply { kind: 20 }));
    assert_eq!(answer(16, b"EWHATEVER\0"), Ok(Answer::Refused(ErrorName::Unknown)));
}

#[test]
fn every_error_name_comes_back_as_itself() {
    for error in ErrorName::ALL {
        assert_eq!(ErrorName::parse(error.name().as_bytes()), *error);
        assert_eq!(error.to_string(), error.name());
    }
    assert_eq!(ErrorName::Unknown.name(), "EIO");
}

#[test]
fn transaction_id_is_a_decimal_number_of_32_bits_and_not_zero() {
    assert_eq!(transaction_id(b"4294967295\0"), Some(u32::MAX));
    for wrong in [&b"0\0"[..], b"4294967296\0", b"-1\0", b"1", b"", b"\0"] {
        assert_eq!(transaction_id(wrong), None, "{wrong:?}");
    }
}

proptest! {
    #[test]
    fn request_emitted_parses_back(
        kind in 0..20_u8,
        text in "/?[a-zA-Z0-9_@-]{1,9}(/[a-z0-9-]{1,9}){0,3}",
        value in prop::collection::vec(any::<u8>(), 0..40),
        number in any::<u32>(),
        (low, high) in any::<(u16, u16)>(),
        gfn in any::<i64>(),
        list in prop::collection::vec((0..4_u8, any::<u16>()), 1..4),
    ) {
        // A path that begins with @ is a special event where a watch is set.
        let watched = Watched::parse(text.as_bytes()).unwrap();
        let node = path(&text);
        let token: Vec<u8> = value.iter().copied().filter(|byte| *byte != 0).collect();
        let accesses = [Access::None, Access::Read, Access::Write, Access::Both];
        let permission = |&(access, domain): &(u8, u16)| {
            Permission { access: accesses[usize::from(access)], domain }
        };
        let permissions = list.iter().map(permission).collect();
        // Nobody can write the smallest number of 64 bits as a minus and a positive number.
        let gfn = gfn.max(-i64::MAX);
        let request = match kind {
            0 => Request::Directory(node),
            1 => Request::DirectoryPart { path: node, offset: number },
            2 => Request::Read(node),
            3 => Request::GetPerms(node),
            4 => Request::Watch { watched, token: &token, depth: None },
            5 => Request::Watch { watched, token: &token, depth: Some(number) },
            6 => Request::Unwatch { watched, token: &token },
            7 => Request::TransactionStart,
            8 => Request::TransactionEnd { commit: number % 2 == 0 },
            9 => Request::Introduce { domain: low, gfn, port: number },
            10 => Request::Release(low),
            11 => Request::GetDomainPath(low),
            12 => Request::Write { path: node, value: &value },
            13 => Request::Mkdir(node),
            14 => Request::Rm(node),
            15 => Request::SetPerms { path: node, permissions },
            16 => Request::IsDomainIntroduced(low),
            17 => Request::Resume(low),
            18 => Request::SetTarget { domain: low, target: high },
            _ => Request::Optional(StoreOp::Control, &value),
        };
        let mut out = Vec::new();
        request.emit(number, 0, &mut out).unwrap();
        let message = split(&out).unwrap().unwrap();
        prop_assert_eq!(message.size(), out.len());
        prop_assert_eq!((message.header.req_id, message.header.tx_id), (number, 0));
        prop_assert_eq!(Request::parse(&message), Ok(request));
    }

    #[test]
    fn noise_is_refused_or_understood_and_never_more(
        kind in 0..30_u32, payload in prop::collection::vec(0..128_u8, 0..60)
    ) {
        let stream = bytes(kind, &payload);
        let message = split(&stream).unwrap().unwrap();
        let _ = Request::parse(&message);
        let _ = Answer::parse(&message);
        let _ = split(&payload);
    }
}

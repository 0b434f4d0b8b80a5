//! Negotiations, replies and addresses, sound and spoiled.

use super::*;
use proptest::prelude::*;

fn greeting(flags: u16) -> Vec<u8> {
    [&b"NBDMAGICIHAVEOPT"[..], &flags.to_be_bytes()].concat()
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut out = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    out.extend(data);
    out
}

fn info_export(size: u64, flags: u16) -> Vec<u8> {
    [&0u16.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

fn info_blocks(sizes: [u32; 3]) -> Vec<u8> {
    let sizes = sizes.map(u32::to_be_bytes).concat();
    [&3u16.to_be_bytes()[..], &sizes].concat()
}

/// Feeds a whole conversation; returns what the client has sent, and how it ended.
fn converse(wish: ExportRequest, server: &[u8]) -> (Vec<u8>, Result<Progress, NbdError>) {
    let (mut handshake, mut out) = (Handshake::new(wish).unwrap(), Vec::new());
    let mut rest = server;
    let mut last = Ok(Progress::More);
    while handshake.needs() > 0 && handshake.needs() <= rest.len() {
        let (now, later) = rest.split_at(handshake.needs());
        rest = later;
        last = handshake.take(now, &mut out);
        if last.is_err() {
            break;
        }
    }
    (out, last)
}

fn go(replies: &[Vec<u8>]) -> Result<Progress, NbdError> {
    let server = [greeting(3), reply(8, 1, &[])].concat();
    converse(ExportRequest::default(), &[server, replies.concat()].concat()).1
}

#[test]
fn a_negotiation_ends_with_the_export() {
    let wish = ExportRequest { name: "vm".to_owned(), tls: false };
    let flags = HAS_FLAGS | SEND_FLUSH | CAN_MULTI_CONN;
    let server = [
        greeting(3),
        reply(8, 1, &[]),
        reply(7, 3, &info_export(1 << 30, flags)),
        reply(7, 3, &[0, 1, b'n']),
        reply(7, 3, &info_blocks([512, 4096, 1 << 20])),
        reply(7, 1, &[]),
    ];
    let (out, end) = converse(wish, &server.concat());
    let blocks = Blocks { min: 512, preferred: 4096, max: 1 << 20 };
    let export = Export { size: 1 << 30, flags, blocks, structured: true };
    assert_eq!(end, Ok(Progress::Done(export)));
    let option = |number: u32, data: &[u8]| {
        let len = u32::try_from(data.len()).unwrap().to_be_bytes();
        [&b"IHAVEOPT"[..], &number.to_be_bytes(), &len, data].concat()
    };
    let named = [0, 0, 0, 2, b'v', b'm', 0, 1, 0, 3];
    assert_eq!(out, [vec![0, 0, 0, 3], option(8, &[]), option(7, &named)].concat());
}

#[test]
fn a_server_without_structured_replies_or_block_sizes_is_served_as_the_specification_says() {
    let server = [
        greeting(1),
        reply(8, 1 << 31 | 1, b"no"),
        reply(7, 3, &info_export(512, HAS_FLAGS)),
        reply(7, 1, &[]),
    ];
    let Ok(Progress::Done(export)) = converse(ExportRequest::default(), &server.concat()).1 else {
        panic!("no export");
    };
    assert!(!export.structured);
    assert_eq!(export.blocks, Blocks { min: 1, preferred: 4096, max: 32 << 20 });
}

#[test]
fn tls_begins_after_the_server_has_agreed_and_never_without() {
    let wish = ExportRequest { name: String::new(), tls: true };
    let agreed = [greeting(3), reply(5, 1, &[])].concat();
    assert_eq!(converse(wish.clone(), &agreed).1, Ok(Progress::StartTls));
    for kind in [1, 2, 5].map(|error| 1 << 31 | error) {
        let refused = [greeting(3), reply(5, kind, &[])].concat();
        let end = converse(wish.clone(), &refused).1;
        assert_eq!(end, Err(NbdError::Refused(OptionRefused::NoTls)));
    }
}

#[test]
fn refusals_are_told_apart() {
    for (error, refused) in [
        (1, OptionRefused::NoGo),
        (2, OptionRefused::Policy),
        (5, OptionRefused::TlsRequired),
        (6, OptionRefused::Unknown),
        (7, OptionRefused::Shutdown),
        (9, OptionRefused::Other(9)),
    ] {
        let end = go(&[reply(7, 1 << 31 | error, b"a message")]);
        assert_eq!(end, Err(NbdError::Refused(refused)));
    }
}

#[test]
fn reply_without_the_error_bit_is_no_refusal() {
    let tls = ExportRequest { name: String::new(), tls: true };
    // The last one has all bits but that of errors.
    for kind in [0, 2, 4, 5, 6, 1 << 30, !(1 << 31)] {
        let unknown = Err(NbdError::Handshake("a reply of an unknown kind"));
        let starttls = [greeting(3), reply(5, kind, &[])].concat();
        assert_eq!(converse(tls.clone(), &starttls).1, unknown, "STARTTLS, {kind:#x}");
        let structured = [greeting(3), reply(8, kind, &[])].concat();
        assert_eq!(
            converse(ExportRequest::default(), &structured).1,
            unknown,
            "STRUCTURED, {kind:#x}"
        );
        assert_eq!(go(&[reply(7, kind, &[])]), unknown, "GO, {kind:#x}");
    }
}

#[test]
fn what_is_no_negotiation_is_an_error() {
    assert_eq!(converse(ExportRequest::default(), &[0; 18]).1, Err(NbdError::NoServer));
    assert_eq!(converse(ExportRequest::default(), &greeting(0)).1, Err(NbdError::OldStyle));
    let old = [&b"NBDMAGIC"[..], &0x0000_4202_8186_1253u64.to_be_bytes(), &[0, 0]].concat();
    assert_eq!(converse(ExportRequest::default(), &old).1, Err(NbdError::OldStyle));
    let long = reply(7, 3, &[0; 8193]);
    let export = reply(7, 3, &info_export(512, HAS_FLAGS));
    let spoiled: &[&[Vec<u8>]] = &[
        &[vec![0; 20]],
        &[reply(8, 1, &[])],
        &[reply(7, 2, &[])],
        &[long],
        &[reply(7, 3, &[0])],
        &[reply(7, 3, &[0, 0, 1])],
        &[reply(7, 3, &info_blocks([3, 4096, 4096]))],
        &[reply(7, 3, &info_blocks([1, 256, 4096]))],
        &[reply(7, 3, &info_blocks([1, 4096, 512]))],
        &[reply(7, 3, &info_blocks([1 << 17, 1 << 17, 1 << 20]))],
        &[reply(7, 1, &[])],
        &[reply(7, 3, &info_export(512, 0)), reply(7, 1, &[])],
        &[reply(7, 3, &info_export(u64::MAX, HAS_FLAGS)), reply(7, 1, &[])],
        &[export.repeat(65)],
    ];
    for replies in spoiled {
        assert!(matches!(go(replies), Err(NbdError::Handshake(_))), "{replies:?}");
    }
    let name = "n".repeat(4097);
    assert!(Handshake::new(ExportRequest { name, tls: false }).is_err());
}

#[test]
fn a_command_is_read_as_it_was_written() {
    for kind in [CommandKind::Read, CommandKind::Write, CommandKind::Disconnect] {
        let command = Command { kind, flags: 1, cookie: 7 << 40, offset: 1 << 50, len: 4096 };
        assert_eq!(Command::parse(&command.emit()), Some(command));
    }
    assert_eq!(Command::parse(&[0; COMMAND_SIZE]), None);
}

#[test]
fn replies_are_parsed_when_their_heads_are_whole() {
    let simple = Reply::simple(28, 5);
    assert_eq!(Reply::parse(&simple[..15]), Ok(None));
    let reply = Reply::Simple { error: Some(ReplyError::NoSpace), cookie: 5 };
    assert_eq!(Reply::parse(&simple), Ok(Some(Replied { reply, size: 16 })));
    let chunk = Chunk { kind: ChunkKind::Data, is_last: true, cookie: 9, len: 9 };
    let bytes = chunk.emit();
    assert_eq!(Reply::parse(&bytes[..19]), Ok(None));
    let reply = Reply::Chunk(chunk);
    assert_eq!(Reply::parse(&bytes), Ok(Some(Replied { reply, size: 20 })));
}

#[test]
fn chunks_of_wrong_lengths_and_unknown_kinds_are_errors() {
    let chunk = |kind, len, is_last| Chunk { kind, is_last, cookie: 0, len }.emit();
    for bytes in [
        chunk(ChunkKind::None, 1, true),
        chunk(ChunkKind::None, 0, false),
        chunk(ChunkKind::Data, 8, true),
        chunk(ChunkKind::Hole, 11, true),
        chunk(ChunkKind::Error, 5, true),
        chunk(ChunkKind::Error, 1 << 20, true),
    ] {
        assert!(matches!(Reply::parse(&bytes), Err(NbdError::Reply(_))), "{bytes:?}");
    }
    let mut unknown = chunk(ChunkKind::None, 0, true);
    unknown[7] = 9;
    assert!(Reply::parse(&unknown).is_err());
    unknown[6] = 0x80;
    unknown[19] = 6;
    let is_error = |r: &Replied| matches!(r.reply, Reply::Chunk(c) if c.kind == ChunkKind::Error);
    assert!(Reply::parse(&unknown).unwrap().as_ref().is_some_and(is_error), "an unknown error");
    assert!(matches!(Reply::parse(&[0; 16]), Err(NbdError::Reply(_))));
}

#[test]
fn addresses_are_read_as_libnbd_reads_them() {
    let tcp = |host: &str, port, export: &str| Uri {
        host: Host::Tcp(host.to_owned(), port),
        export: export.to_owned(),
        tls: false,
        certificates: None,
        hostname: None,
    };
    assert_eq!(Uri::parse("nbd://host"), Ok(tcp("host", 10809, "")));
    assert_eq!(Uri::parse("nbd://host:1/a%20b/c"), Ok(tcp("host", 1, "a b/c")));
    assert_eq!(Uri::parse("nbd://[::1]:9/x"), Ok(tcp("::1", 9, "x")));
    let unix = Uri::parse("nbds+unix:///vm?socket=/run/%6e.sock&tls-certificates=/etc/pki");
    let unix = unix.unwrap();
    assert_eq!((unix.host, unix.tls), (Host::Unix("/run/n.sock".to_owned()), true));
    assert_eq!((unix.export.as_str(), unix.certificates.as_deref()), ("vm", Some("/etc/pki")));
}

#[test]
fn addresses_that_are_none_say_why() {
    for (text, error) in [
        ("/run/a.sock", UriError::Scheme),
        ("http://host", UriError::Scheme),
        ("nbd:///", UriError::Host),
        ("nbd://host:0", UriError::Port),
        ("nbd://host:port", UriError::Port),
        ("nbd://[::1]x", UriError::Host),
        ("nbd://user@host", UriError::User),
        ("nbd+unix:///", UriError::Socket),
        ("nbd+unix:///?socket=a", UriError::Socket),
        ("nbd+unix://host/?socket=/a", UriError::Socket),
        ("nbd://host/%", UriError::Escape),
        ("nbd://host/%ff", UriError::Escape),
        ("nbd://host/%00", UriError::Escape),
        ("nbd://host/?a=1", UriError::Key("a".to_owned())),
        ("nbd://host/?socket=/a", UriError::Key("socket".to_owned())),
        ("nbd://host/?tls-hostname=a", UriError::NoTls),
    ] {
        assert_eq!(Uri::parse(text), Err(error), "{text}");
    }
}

proptest! {
    #[test]
    fn any_bytes_end_a_negotiation_or_ask_for_few_more(
        tls: bool,
        begins: bool,
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
    ) {
        let start = if begins { greeting(3) } else { Vec::new() };
        let wish = ExportRequest { name: String::new(), tls };
        let (out, _) = converse(wish, &[start, bytes].concat());
        prop_assert!(out.len() < 4096);
    }
}

/// A command of a client, as its own session writes it.
fn command(kind: CommandKind, cookie: u64, len: u32) -> Vec<u8> {
    let data = if kind == CommandKind::Write { len as usize } else { 0 };
    let head = Command { kind, flags: 0, cookie, offset: 4096, len }.emit();
    [&head[..], &vec![7; data]].concat()
}

#[test]
fn a_relay_marks_commands_and_gives_each_client_its_own_replies() {
    let (mut relay, mut out) = (Relay::default(), Vec::new());
    let write = command(CommandKind::Write, 5 << 32 | 3, 100);
    assert_eq!(relay.command(1, &write[..20], &mut out), Message::Needs);
    assert_eq!(relay.command(1, &write[..127], &mut out), Message::Needs);
    assert!(out.is_empty() && !relay.is_waiting(1));
    assert_eq!(relay.command(1, &[&write[..], &[9]].concat(), &mut out), Message::Command(128));
    assert_eq!(
        relay.command(258, &command(CommandKind::Read, 5 << 32 | 3, 8), &mut out),
        Message::Command(28)
    );
    let marked = [1u64, 258].map(|client| 5 << 32 | client << 16 | 3);
    let sent = [0, 128].map(|at| Command::parse(out[at..at + 28].try_into().unwrap()).unwrap());
    assert_eq!(sent.map(|command| command.cookie), marked);
    assert_eq!(out[28..128], [7; 100]);
    // The server answers the second one first, and its data come in two parts.
    let stream =
        [&Reply::simple(0, marked[1])[..], b"abcdefgh", &Reply::simple(5, marked[0])].concat();
    let (mut got, mut kept) = ([Vec::new(), Vec::new()], Vec::new());
    for byte in stream {
        kept.push(byte);
        let [first, second] = &mut got;
        let own = |client| Some(if client == 1 { first } else { second });
        let taken = relay.reply(&kept, own).unwrap();
        kept.drain(..taken);
    }
    let cookie = 5 << 32 | 3;
    assert_eq!(got[0], Reply::simple(5, cookie));
    assert_eq!(got[1], [&Reply::simple(0, cookie)[..], b"abcdefgh"].concat());
    assert!(!relay.is_waiting(1) && !relay.is_waiting(258));
}

#[test]
fn a_relay_carries_chunks_until_the_last_and_refuses_unknown_cookies() {
    let (mut relay, mut out, mut got) = (Relay::default(), Vec::new(), Vec::new());
    let read = command(CommandKind::Read, 1 << 32, 4);
    assert_eq!(relay.command(2, &read, &mut out), Message::Command(28));
    let chunk = |cookie, kind, is_last, len| Chunk { kind, is_last, cookie, len }.emit();
    let marked = 1 << 32 | 2 << 16;
    let data = [&chunk(marked, ChunkKind::Data, false, 12)[..], &[1; 12]].concat();
    for expected in [20, 12] {
        let at = got.len();
        assert_eq!(relay.reply(&data[at..], |_| Some(&mut got)), Ok(expected));
    }
    assert!(relay.is_waiting(2), "the reply goes on");
    let last = chunk(marked, ChunkKind::None, true, 0);
    assert_eq!(relay.reply(&last, |_| None), Ok(20));
    assert!(!relay.is_waiting(2));
    assert_eq!(got, [&chunk(1 << 32, ChunkKind::Data, false, 12)[..], &[1; 12]].concat());
    for unknown in [marked, 1 << 32, 1 << 32 | 3 << 16] {
        assert!(relay.reply(&Reply::simple(0, unknown), |_| None).is_err(), "{unknown:x}");
    }
    assert!(relay.reply(&[0xff; 16], |_| None).is_err());
}

#[test]
fn a_client_of_a_relay_ends_with_a_disconnect_or_with_what_is_no_command() {
    let (mut relay, mut out) = (Relay::default(), Vec::new());
    let ends = [
        command(CommandKind::Disconnect, 0, 0),
        vec![0; 28],
        // A cookie in which the client's place is not free.
        command(CommandKind::Read, 1 << 16, 4),
    ];
    for bytes in ends {
        assert_eq!(relay.command(1, &bytes, &mut out), Message::Ends);
    }
    assert!(out.is_empty() && !relay.is_waiting(1));
}

#[test]
fn what_is_as_long_or_as_large_as_it_may_be_is_taken() {
    let export = |size: u64| reply(7, 3, &info_export(size, HAS_FLAGS));
    let end = reply(7, 1, &[]);
    let is_done = |replies: &[Vec<u8>]| matches!(go(replies), Ok(Progress::Done(_)));
    assert!(is_done(&[export(i64::MAX.cast_unsigned()), end.clone()]));
    assert!(!is_done(&[export(1 << 63), end.clone()]));
    // 63 pieces of information, and the end.
    assert!(is_done(&[export(512).repeat(63), end.clone()]));
    assert!(!is_done(&[export(512).repeat(64), end.clone()]));
    // Information of a kind that this client does not use.
    let info = |len: usize| reply(7, 3, &[&[0, 9][..], &vec![0; len - 2]].concat());
    assert!(is_done(&[export(512), info(8192), info(2), end.clone()]));
    assert!(!is_done(&[export(512), info(8193), end.clone()]));
    let blocks = |sizes| is_done(&[export(512), reply(7, 3, &info_blocks(sizes)), end.clone()]);
    for sizes in [[1, 512, 512], [1 << 16, 1 << 16, 1 << 16], [512, 512, u32::MAX]] {
        assert!(blocks(sizes), "{sizes:?}");
    }
    for sizes in [[0, 512, 512], [1, 511, 512], [1, 512, 511], [1024, 512, 1024], [1, 768, 1024]] {
        assert!(!blocks(sizes), "{sizes:?}");
    }
    let name = "n".repeat(4096);
    assert!(Handshake::new(ExportRequest { name, tls: false }).is_ok());
    // Flags that this client does not know are not answered with.
    let (out, _) = converse(ExportRequest::default(), &greeting(0x8003));
    assert_eq!(out[..4], [0, 0, 0, 3]);
    let (out, _) = converse(ExportRequest::default(), &greeting(1));
    assert_eq!(out[..4], [0, 0, 0, 1]);
    assert_eq!(go(&[reply(7, 1 << 31 | 8, &[])]), Err(NbdError::Refused(OptionRefused::Other(8))));
}

#[test]
fn a_negotiation_that_has_ended_takes_nothing_more() {
    let (mut handshake, mut out) = (Handshake::new(ExportRequest::default()).unwrap(), Vec::new());
    let export = reply(7, 3, &info_export(512, HAS_FLAGS));
    for bytes in [greeting(3), reply(8, 1, &[]), export[..20].to_vec(), export[20..].to_vec()] {
        assert_eq!(handshake.take(&bytes, &mut out), Ok(Progress::More));
    }
    assert!(matches!(handshake.take(&reply(7, 1, &[]), &mut out), Ok(Progress::Done(_))));
    assert_eq!(handshake.needs(), 0);
    assert!(matches!(handshake.take(&[], &mut out), Err(NbdError::Handshake(_))));
}

#[test]
fn each_command_and_each_error_has_its_number() {
    use ReplyError::{Inval, Io, NoMem, NoSpace, NotSupported, Overflow, Perm, Shutdown};
    let kinds = [
        (CommandKind::Read, 0),
        (CommandKind::Write, 1),
        (CommandKind::Disconnect, 2),
        (CommandKind::Flush, 3),
        (CommandKind::Trim, 4),
        (CommandKind::WriteZeroes, 6),
    ];
    for (kind, number) in kinds {
        let command = Command { kind, flags: 3, cookie: 7 << 40, offset: 1 << 50, len: 4096 };
        let bytes = command.emit();
        assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 3, 0, number]);
        assert_eq!(Command::parse(&bytes), Some(command));
    }
    let mut unknown = command(CommandKind::Read, 1, 1);
    unknown[7] = 5;
    assert_eq!(Command::parse(unknown[..].try_into().unwrap()), None);
    for (number, error) in [
        (1, Perm),
        (5, Io),
        (12, NoMem),
        (22, Inval),
        (28, NoSpace),
        (75, Overflow),
        (95, NotSupported),
        (108, Shutdown),
        (4242, Io),
    ] {
        assert_eq!(ReplyError::of(number), Some(error), "{number}");
    }
    assert_eq!(ReplyError::of(0), None);
    assert_eq!(ErrorHead::parse(&[0, 0, 0, 28]), ErrorHead(NoSpace));
    assert_eq!(ErrorHead::parse(&[0; 4]), ErrorHead(Io));
    let hole = Hole::parse(&[0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 3, 4]);
    assert_eq!(hole, Hole { offset: 1 << 32 | 2, len: 0x304 });
}

#[test]
fn chunks_may_have_every_length_of_their_kind() {
    let head = |kind: u16, len: u32| {
        let mut bytes = Chunk { kind: ChunkKind::None, is_last: true, cookie: 9, len }.emit();
        bytes[6..8].copy_from_slice(&kind.to_be_bytes());
        Reply::parse(&bytes)
    };
    let error = 1 << 15;
    for (kind, parsed, lens) in [
        (0, ChunkKind::None, &[0][..]),
        (1, ChunkKind::Data, &[9, u32::MAX]),
        (2, ChunkKind::Hole, &[12]),
        (error | 1, ChunkKind::Error, &[6, 4110]),
        (error | 2, ChunkKind::Error, &[14, 4110]),
        (error | 77, ChunkKind::Error, &[6, 4110]),
    ] {
        for &len in lens {
            let reply = Reply::Chunk(Chunk { kind: parsed, is_last: true, cookie: 9, len });
            assert_eq!(head(kind, len), Ok(Some(Replied { reply, size: 20 })), "{kind:#x} {len}");
        }
    }
    for (kind, len) in [
        (2, 13),
        (error | 1, 5),
        (error | 1, 4111),
        (error | 2, 13),
        (error | 2, 4111),
        (error | 77, 5),
        (error | 77, 4111),
        (3, 0),
    ] {
        assert!(head(kind, len).is_err(), "{kind:#x} {len}");
    }
}

#[test]
fn an_address_may_name_the_certificates_host_and_a_port_of_its_own() {
    let uri = Uri::parse("nbds://a:2/?tls-hostname=b%41&tls-certificates=/c").unwrap();
    assert_eq!(uri.host, Host::Tcp("a".to_owned(), 2));
    let texts = (uri.hostname.as_deref(), uri.certificates.as_deref());
    assert_eq!((uri.tls, texts), (true, (Some("bA"), Some("/c"))));
    let unix = Uri::parse("nbd+unix:///?socket=/a").unwrap();
    assert_eq!((unix.host, unix.tls), (Host::Unix("/a".to_owned()), false));
    assert_eq!(Uri::parse("nbd://h:65535").unwrap().host, Host::Tcp("h".to_owned(), 65535));
    for text in ["nbd://h:65536", "nbd://h:", "nbd://h:-1"] {
        assert_eq!(Uri::parse(text), Err(UriError::Port), "{text}");
    }
    assert_eq!(Uri::parse("nbd+unix:///?tls-hostname=a&socket=/a"), Err(UriError::NoTls));
}

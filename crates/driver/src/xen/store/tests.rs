//! Tests of the simulated xenstore through the bytes of its clients.

mod twin;

use super::*;
use manyring_wire::xen::store::transaction_id;

/// A store, and what its clients have received.
struct Bed {
    store: SimulatedStore,
}

fn bed() -> Bed {
    Bed { store: SimulatedStore::new() }
}

fn path(text: &str) -> Path<'_> {
    Path::parse(text.as_bytes()).unwrap()
}

fn watched(text: &str) -> Watched<'_> {
    Watched::parse(text.as_bytes()).unwrap()
}

impl Bed {
    /// A request of a client and its answer. Events stay in the client's output.
    fn ask_in(&mut self, client: u64, transaction: u32, request: &Request<'_>) -> Served {
        const REQUEST: u32 = 77;
        let mut stream = Vec::new();
        request.emit(REQUEST, transaction, &mut stream).unwrap();
        self.store.receive(client, &mut stream);
        assert!(stream.is_empty());
        let output = self.store.output(client).unwrap();
        let (mut at, mut answer) = (0, None);
        while let Some(message) = split(&output[at..]).unwrap() {
            let size = message.size();
            match Answer::parse(&message).unwrap() {
                Answer::Event { .. } => at += size,
                parsed => {
                    assert_eq!(
                        (message.header.req_id, message.header.tx_id),
                        (REQUEST, transaction)
                    );
                    answer = Some(match parsed {
                        Answer::Done(op, payload) => {
                            assert_eq!(op, request.op());
                            Ok(payload.to_vec())
                        }
                        Answer::Refused(error) => Err(error),
                        Answer::Event { .. } => unreachable!(),
                    });
                    output.drain(at..at + size);
                }
            }
        }
        answer.unwrap()
    }

    fn ask(&mut self, client: u64, request: &Request<'_>) -> Served {
        self.ask_in(client, 0, request)
    }

    fn write(&mut self, client: u64, at: &str, value: &str) -> Served {
        self.ask(client, &Request::Write { path: path(at), value: value.as_bytes() })
    }

    fn read(&mut self, client: u64, at: &str) -> Result<String, ErrorName> {
        self.ask(client, &Request::Read(path(at))).map(|value| String::from_utf8(value).unwrap())
    }

    fn watch(&mut self, client: u64, at: &str, token: &str) -> Served {
        let token = token.as_bytes();
        self.ask(client, &Request::Watch { watched: watched(at), token, depth: None })
    }

    fn permit(&mut self, client: u64, at: &str, permissions: &str) -> Served {
        let parse = |entry: &str| Permission::parse(entry.as_bytes()).unwrap();
        let permissions = permissions.split(' ').map(parse).collect();
        self.ask(client, &Request::SetPerms { path: path(at), permissions })
    }

    fn begin(&mut self, client: u64) -> u32 {
        transaction_id(&self.ask(client, &Request::TransactionStart).unwrap()).unwrap()
    }

    fn commit(&mut self, client: u64, transaction: u32) -> Served {
        self.ask_in(client, transaction, &Request::TransactionEnd { commit: true })
    }

    /// The events that a client has received, as `path token`.
    fn events(&mut self, client: u64) -> Vec<String> {
        let output = std::mem::take(self.store.output(client).unwrap());
        let (mut at, mut events) = (0, Vec::new());
        while let Some(message) = split(&output[at..]).unwrap() {
            at += message.size();
            match Answer::parse(&message).unwrap() {
                Answer::Event { watched, token } => {
                    let token = std::str::from_utf8(token).unwrap();
                    events.push(format!("{} {token}", watched.as_str()));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(at, output.len());
        events
    }
}

fn ok() -> Served {
    Ok(Answer::OK.to_vec())
}

#[test]
fn values_are_read_back_and_parents_come_and_go_with_them() {
    let mut bed = bed();
    let dom0 = bed.store.connect(None);
    assert_eq!(bed.write(dom0, "/a/b/c", "1"), ok());
    assert_eq!(bed.read(dom0, "/a/b/c").as_deref(), Ok("1"));
    assert_eq!(bed.read(dom0, "/a/b").as_deref(), Ok(""));
    assert_eq!(bed.ask(dom0, &Request::Mkdir(path("/a/b/c"))), ok());
    assert_eq!(bed.read(dom0, "/a/b/c").as_deref(), Ok("1"), "a node that exists keeps its value");
    bed.write(dom0, "/a/x", "2").unwrap();
    assert_eq!(bed.ask(dom0, &Request::Directory(path("/a"))), Ok(b"b\0x\0".to_vec()));
    assert_eq!(bed.ask(dom0, &Request::Rm(path("/a/b"))), ok());
    assert_eq!(bed.read(dom0, "/a/b/c"), Err(ErrorName::Enoent));
    assert_eq!(bed.ask(dom0, &Request::Rm(path("/a/b"))), ok(), "it is gone already");
    assert_eq!(bed.ask(dom0, &Request::Rm(path("/a/b/c"))), Err(ErrorName::Enoent));
    assert_eq!(bed.ask(dom0, &Request::Rm(Path::ROOT)), Err(ErrorName::Einval));
    assert_eq!(bed.read(dom0, "relative"), Err(ErrorName::Einval));
}

#[test]
fn a_watch_fires_when_it_is_set_and_for_every_change_below() {
    let mut bed = bed();
    let (writer, watcher) = (bed.store.connect(None), bed.store.connect(None));
    bed.watch(watcher, "/a/b", "t1").unwrap();
    assert_eq!(bed.events(watcher), ["/a/b t1"], "though there is no such node");
    assert_eq!(bed.watch(watcher, "/a/b", "t1"), Err(ErrorName::Eexist));
    let near = Request::Watch { watched: watched("/a"), token: b"near", depth: Some(1) };
    bed.ask(watcher, &near).unwrap();
    bed.events(watcher);
    bed.write(writer, "/a/bc", "").unwrap();
    bed.write(writer, "/a/b/c", "1").unwrap();
    bed.permit(writer, "/a/b", "n0 r1").unwrap();
    let wanted = ["/a/bc near", "/a/b/c t1", "/a/b t1", "/a/b near"];
    assert_eq!(bed.events(watcher), wanted);
    bed.ask(writer, &Request::Mkdir(path("/a/b/c"))).unwrap();
    assert!(bed.events(watcher).is_empty(), "nothing was changed");
    // A node that is removed with a node above it is told under its own name.
    bed.watch(watcher, "/a/b/c", "deep").unwrap();
    bed.watch(watcher, "/a/b/never", "never").unwrap();
    bed.events(watcher);
    bed.ask(writer, &Request::Rm(path("/a"))).unwrap();
    assert_eq!(bed.events(watcher), ["/a/b t1", "/a near", "/a/b/c deep"]);
    let unwatch = Request::Unwatch { watched: watched("/a/b"), token: b"t1" };
    assert_eq!(bed.ask(watcher, &unwatch), ok());
    assert_eq!(bed.ask(watcher, &unwatch), Err(ErrorName::Enoent));
    bed.write(writer, "/a/b", "").unwrap();
    assert_eq!(bed.events(watcher), ["/a/b near"]);
}

#[test]
fn a_domains_relative_paths_begin_at_its_own_nodes_and_are_told_relative() {
    let mut bed = bed();
    bed.store.introduce(5);
    let (dom0, guest) = (bed.store.connect(None), bed.store.connect(Some(5)));
    bed.write(dom0, "/local/domain/5/device", "").unwrap();
    bed.permit(dom0, "/local/domain/5/device", "n5 r0").unwrap();
    bed.write(guest, "device/vbd/0/state", "1").unwrap();
    assert_eq!(bed.read(dom0, "/local/domain/5/device/vbd/0/state").as_deref(), Ok("1"));
    bed.watch(guest, "device", "rel").unwrap();
    bed.watch(guest, "/local/domain/5/device", "abs").unwrap();
    assert_eq!(bed.events(guest), ["device rel", "/local/domain/5/device abs"]);
    bed.write(dom0, "/local/domain/5/device/vbd/0/state", "4").unwrap();
    let wanted = ["device/vbd/0/state rel", "/local/domain/5/device/vbd/0/state abs"];
    assert_eq!(bed.events(guest), wanted);
    let home = bed.ask(guest, &Request::GetDomainPath(5)).unwrap();
    assert_eq!(home, b"/local/domain/5\0");
}

#[test]
fn a_domain_reads_and_writes_what_it_may_and_sees_no_more() {
    let mut bed = bed();
    [5, 6].into_iter().for_each(|domain| bed.store.introduce(domain));
    let dom0 = bed.store.connect(None);
    let (five, six) = (bed.store.connect(Some(5)), bed.store.connect(Some(6)));
    bed.write(dom0, "/backend/5", "of 5").unwrap();
    bed.permit(dom0, "/backend/5", "n0 r5").unwrap();
    assert_eq!(bed.read(five, "/backend/5").as_deref(), Ok("of 5"));
    assert_eq!(bed.read(six, "/backend/5"), Err(ErrorName::Eacces));
    assert_eq!(bed.write(five, "/backend/5", "x"), Err(ErrorName::Eacces));
    assert_eq!(bed.write(five, "/backend/5/x", "x"), Err(ErrorName::Eacces));
    assert_eq!(bed.ask(five, &Request::Rm(path("/backend/5"))), Err(ErrorName::Eacces));
    assert_eq!(bed.permit(five, "/backend/5", "b5"), Err(ErrorName::Eacces));
    assert_eq!(bed.read(five, "/backend/5/none"), Err(ErrorName::Enoent));
    assert_eq!(bed.read(six, "/backend/5/none"), Err(ErrorName::Eacces), "not even whether it is");
    // A node that a domain creates is its own, and it says who may read it.
    bed.permit(dom0, "/backend/5", "n0 b5").unwrap();
    bed.write(five, "/backend/5/own", "1").unwrap();
    let permissions = bed.ask(five, &Request::GetPerms(path("/backend/5/own"))).unwrap();
    assert_eq!(permissions, b"n5\0b5\0");
    assert_eq!(bed.permit(five, "/backend/5/own", "n5 r6"), ok());
    assert_eq!(bed.read(six, "/backend/5/own").as_deref(), Ok("1"));
    assert_eq!(bed.permit(five, "/backend/5/own", "n6"), Err(ErrorName::Eacces), "given away");
    // Nor is it told of what it may not read, unless that goes which it may.
    bed.watch(six, "/backend", "t").unwrap();
    bed.events(six);
    bed.write(dom0, "/backend/5", "secret").unwrap();
    bed.write(five, "/backend/5/own", "2").unwrap();
    bed.ask(five, &Request::Rm(path("/backend/5/own"))).unwrap();
    assert_eq!(bed.events(six), ["/backend/5/own t", "/backend/5/own t"]);
    assert!(bed.store.tree().is_counted());
}

#[test]
fn domains_that_come_and_go_are_told_to_domain_0() {
    let mut bed = bed();
    let (dom0, guest) = (bed.store.connect(None), bed.store.connect(Some(5)));
    bed.watch(dom0, "@introduceDomain", "in").unwrap();
    bed.watch(dom0, "@releaseDomain", "out").unwrap();
    assert_eq!(bed.events(dom0), ["@introduceDomain in", "@releaseDomain out"]);
    let introduce = Request::Introduce { domain: 5, gfn: 1, port: 1 };
    assert_eq!(bed.ask(guest, &introduce), Err(ErrorName::Eacces));
    assert_eq!(bed.watch(guest, "@releaseDomain", "out"), Err(ErrorName::Eacces));
    let known = |bed: &mut Bed| bed.ask(guest, &Request::IsDomainIntroduced(5)).unwrap();
    assert_eq!(known(&mut bed), b"F\0");
    assert_eq!(bed.ask(dom0, &introduce), ok());
    assert_eq!(bed.ask(dom0, &introduce), ok());
    assert_eq!(
        (known(&mut bed), bed.events(dom0)),
        (b"T\0".to_vec(), vec!["@introduceDomain in".into()])
    );
    assert_eq!(bed.ask(dom0, &Request::Release(5)), ok());
    assert_eq!(bed.events(dom0), ["@releaseDomain out"]);
    assert_eq!(bed.ask(dom0, &Request::Release(5)), Err(ErrorName::Enoent));
    assert!(bed.read(dom0, "/local/domain/5").is_ok(), "its nodes are the toolstack's to remove");
}

#[test]
fn a_transaction_sees_itself_and_others_see_it_when_it_is_committed() {
    let mut bed = bed();
    let (one, other) = (bed.store.connect(None), bed.store.connect(None));
    bed.write(one, "/a", "old").unwrap();
    bed.watch(other, "/", "t").unwrap();
    bed.events(other);
    let transaction = bed.begin(one);
    bed.ask_in(one, transaction, &Request::Write { path: path("/a"), value: b"new" }).unwrap();
    bed.ask_in(one, transaction, &Request::Mkdir(path("/b/c"))).unwrap();
    let read = Request::Read(path("/a"));
    assert_eq!(bed.ask_in(one, transaction, &read).as_deref(), Ok(&b"new"[..]));
    assert_eq!(bed.read(other, "/a").as_deref(), Ok("old"));
    assert_eq!(bed.ask_in(other, transaction, &read), Err(ErrorName::Enoent), "it is not its own");
    assert!(bed.events(other).is_empty());
    assert_eq!(bed.commit(one, transaction), ok());
    assert_eq!(bed.events(other), ["/a t", "/b/c t"]);
    assert_eq!(bed.read(other, "/a").as_deref(), Ok("new"));
    assert_eq!(bed.commit(one, transaction), Err(ErrorName::Enoent));
    let dropped = bed.begin(one);
    bed.ask_in(one, dropped, &Request::Rm(path("/a"))).unwrap();
    let end = Request::TransactionEnd { commit: false };
    assert_eq!(bed.ask_in(one, dropped, &end), ok());
    assert_eq!(bed.read(one, "/a").as_deref(), Ok("new"));
}

#[test]
fn a_transaction_is_refused_when_others_changed_what_it_saw_and_only_then() {
    let write = |at| Request::Write { path: path(at), value: b"2" };
    type Asks<'a> = Vec<Request<'a>>;
    let cases: [(Asks<'_>, Asks<'_>, bool); 8] = [
        (vec![Request::Read(path("/a"))], vec![write("/a")], true),
        (vec![Request::Read(path("/a"))], vec![write("/b")], false),
        (vec![Request::Read(path("/c"))], vec![write("/c")], true),
        (vec![Request::Directory(path("/d"))], vec![write("/d/new")], true),
        (vec![Request::Directory(path("/d"))], vec![write("/d/old")], false),
        (vec![write("/d/one")], vec![write("/d/two")], true),
        (vec![Request::Rm(path("/a"))], vec![Request::Rm(path("/a"))], true),
        // A value that comes back is not what was seen.
        (vec![Request::Read(path("/a"))], vec![Request::Rm(path("/a")), write("/a")], true),
    ];
    for (number, (seen, done, is_refused)) in cases.into_iter().enumerate() {
        let mut bed = bed();
        let (one, other) = (bed.store.connect(None), bed.store.connect(None));
        ["/a", "/b", "/d/old"].iter().for_each(|at| drop(bed.write(one, at, "1").unwrap()));
        let transaction = bed.begin(one);
        for request in &seen {
            let _ = bed.ask_in(one, transaction, request);
        }
        bed.ask_in(one, transaction, &write("/mine")).unwrap();
        done.iter().for_each(|request| drop(bed.ask(other, request).unwrap()));
        let wanted = if is_refused { Err(ErrorName::Eagain) } else { ok() };
        assert_eq!(bed.commit(one, transaction), wanted, "case {number}");
        assert_eq!(bed.read(one, "/mine").is_err(), is_refused, "case {number}");
    }
}

#[test]
fn long_lists_of_children_come_in_parts() {
    let mut bed = bed();
    let dom0 = bed.store.connect(None);
    let names: Vec<String> = (0..500).map(|n| format!("{n:020}")).collect();
    names.iter().for_each(|name| drop(bed.write(dom0, &format!("/d/{name}"), "").unwrap()));
    assert_eq!(bed.ask(dom0, &Request::Directory(path("/d"))), Err(ErrorName::E2big));
    let (mut list, mut generation) = (Vec::new(), None);
    loop {
        let offset = u32::try_from(list.len()).unwrap();
        let part = bed.ask(dom0, &Request::DirectoryPart { path: path("/d"), offset }).unwrap();
        let end = part.iter().position(|byte| *byte == 0).unwrap();
        assert_eq!(*generation.get_or_insert(part[..end].to_vec()), part[..end]);
        list.extend_from_slice(&part[end + 1..]);
        if list.ends_with(b"\0\0") {
            break;
        }
    }
    let wanted: String = names.iter().map(|name| format!("{name}\0")).collect::<String>() + "\0";
    assert_eq!(list, wanted.as_bytes());
}

#[test]
fn a_client_that_is_greedy_meets_its_bounds_and_others_do_not() {
    let mut bed = bed();
    bed.store.introduce(5);
    let (dom0, guest) = (bed.store.connect(None), bed.store.connect(Some(5)));
    bed.permit(dom0, "/local/domain/5", "n5").unwrap();
    // The home is its own: that is one of its nodes.
    let nodes = (0..).take_while(|n| bed.write(guest, &format!("n/{n}"), "").is_ok()).count();
    assert_eq!(nodes, 998);
    assert_eq!(bed.write(guest, "n/1", &"x".repeat(2049)), Err(ErrorName::Enospc));
    assert_eq!(bed.write(guest, "n/1", &"x".repeat(2048)), ok());
    assert_eq!(bed.permit(guest, "n/1", &["n5"; 17].join(" ")), Err(ErrorName::Enospc));
    let watches = (0..).take_while(|n| bed.watch(guest, "n", &format!("t{n}")).is_ok()).count();
    let transactions = (0..).take_while(|_| bed.ask(guest, &Request::TransactionStart).is_ok());
    assert_eq!((transactions.count(), watches), (10, 128));
    assert_eq!(bed.ask(guest, &Request::ResetWatches), ok());
    assert!(bed.watch(guest, "n", "again").is_ok());
    let transaction = bed.begin(guest);
    let seen = |n: u32| Request::Read(path(["n/1", "n/2"][n as usize % 2]));
    assert!((0..2000).all(|n| bed.ask_in(guest, transaction, &seen(n)).is_ok()), "the same ones");
    assert!(bed.store.tree().is_counted());
    assert_eq!(bed.write(dom0, "/n/1", "fine"), ok());
    assert!(bed.ask(guest, &Request::Rm(path("n"))).is_ok());
    assert!(bed.write(guest, "n/1", "room again").is_ok() && bed.store.tree().is_counted());
}

#[test]
fn a_client_that_does_not_read_its_events_is_disconnected_and_nobody_else() {
    let mut bed = bed();
    let (writer, deaf, other) =
        (bed.store.connect(None), bed.store.connect(None), bed.store.connect(None));
    bed.watch(deaf, "/a", &"t".repeat(3000)).unwrap();
    bed.watch(other, "/a", "t").unwrap();
    let told = (0..).take_while(|_| {
        bed.write(writer, "/a", "1").unwrap();
        bed.events(other);
        !bed.store.is_over(deaf)
    });
    assert!((300..400).contains(&told.count()));
    assert!(!bed.store.is_over(writer) && !bed.store.is_over(other));
    // Its requests are not even looked at until it reads.
    let mut stream = Vec::new();
    Request::Read(path("/a")).emit(1, 0, &mut stream).unwrap();
    let (before, waiting) = (bed.store.output(deaf).unwrap().len(), stream.len());
    bed.store.receive(deaf, &mut stream);
    assert_eq!((bed.store.output(deaf).unwrap().len(), stream.len()), (before, waiting));
}

#[test]
fn what_is_no_request_is_refused_and_what_is_no_message_ends_the_connection() {
    let mut bed = bed();
    let (client, other) = (bed.store.connect(None), bed.store.connect(None));
    let message = |kind: u32, size: u32, payload: &[u8]| {
        [&StoreHeader { kind, req_id: 1, tx_id: 0, size }.emit()[..], payload].concat()
    };
    for (kind, payload, error) in [
        (2, &b"/a"[..], ErrorName::Einval),
        (2, b"/a//b\0", ErrorName::Einval),
        (15, b"/a\0t\0", ErrorName::Enosys),
        (99, b"", ErrorName::Enosys),
        (0, b"check\0", ErrorName::Enosys),
    ] {
        let mut stream = message(kind, u32::try_from(payload.len()).unwrap(), payload);
        bed.store.receive(client, &mut stream);
        let output = std::mem::take(bed.store.output(client).unwrap());
        let answer = split(&output).unwrap().map(|message| Answer::parse(&message).unwrap());
        assert_eq!(answer, Some(Answer::Refused(error)), "{kind}");
    }
    // A message arrives in pieces, and the next one with its end.
    let two = [message(2, 3, b"/a\0"), message(1, 2, b"/\0")].concat();
    let mut stream = Vec::new();
    for byte in &two {
        stream.push(*byte);
        bed.store.receive(client, &mut stream);
    }
    assert!(stream.is_empty() && !bed.store.is_over(client));
    bed.store.receive(client, &mut message(2, 4097, b""));
    assert!(bed.store.is_over(client) && !bed.store.is_over(other));
}

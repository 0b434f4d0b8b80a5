//! The simulated Xen between processes: a front-end's half and a back-end's half that share pages
//! and signal each other, each of them killed under the other, and clients that misbehave.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod xenstore;

use manyring_driver::{SimXen, XenCalls, XenDomain};
use manyring_memory::{GrantAccess, GrantError, GrantMapper, GrantPages, GrantRef};
use manyring_wire::xen::store::{HEADER_SIZE, StoreHeader};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use xenstore::{TIMEOUT, XenStore};

/// Names the socket to the process that is the other half of a test.
const SOCKET: &str = "MANYRING_TEST_XEN";
const DOMAIN: u16 = 7;
/// Requests that the server has answered long after it has heard of the end of a connection.
const ROUNDS_MAX: usize = 10_000;
const DEVICE: &str = "/local/domain/7/device/vbd/51712";

/// The other half of the test `name`, as a process of its own. Killed when it is dropped.
struct Half(Child);

impl Half {
    fn start(name: &str, xen: &SimXen) -> Self {
        Self::start_at(name, xen.socket())
    }

    fn start_at(name: &str, socket: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", name, "--nocapture"]).env(SOCKET, socket);
        Self(child.stdout(Stdio::null()).spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Its end, which is that of a test that passed.
    fn join(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The socket, in a process that is the other half of a test.
fn half() -> Option<PathBuf> {
    std::env::var_os(SOCKET).map(PathBuf::from)
}

fn xen() -> (tempfile::TempDir, SimXen) {
    let folder = tempfile::tempdir().unwrap();
    let xen = SimXen::start(&folder.path().join("xenstored")).unwrap();
    (folder, xen)
}

/// A domain with the nodes that a toolstack would give it.
fn domain(socket: &Path) -> (XenDomain, XenStore) {
    let domain = XenDomain::create(socket, DOMAIN, 64, 512).unwrap();
    let mut toolstack = XenStore::connect(socket);
    toolstack.write(DEVICE, "");
    toolstack.permit(DEVICE, "n7 r0");
    let store = XenStore::of(domain.store().try_clone().unwrap());
    (domain, store)
}

fn mapper(calls: &XenCalls) -> GrantMapper {
    GrantMapper::Simulated(Arc::new(calls.attach(DOMAIN).unwrap()))
}

fn read(pages: &GrantPages, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pages.mapping().slice(0, len).unwrap().read_into(&mut bytes);
    bytes
}

/// The front-end of the test below: lends a page with a text, and waits for an answer.
fn lend_a_page(socket: &Path) {
    let (domain, mut store) = domain(socket);
    let page = domain.alloc_pages(1).unwrap();
    domain.page(page).unwrap().write_from(b"hello from 7");
    let gref = domain.grant(0, page, GrantAccess::Write).unwrap();
    let channel = domain.event_channel(0).unwrap();
    store.write("device/vbd/51712/ring-ref", gref.0);
    store.write("device/vbd/51712/event-channel", channel.port());
    store.write("device/vbd/51712/state", 3);
    channel.wait(TIMEOUT).unwrap();
    let mut answer = [0; 12];
    domain.page(page).unwrap().read_into(&mut answer);
    assert_eq!(&answer, b"hello from 0");
    assert!(!domain.end_access(gref), "the page is mapped");
    store.write("device/vbd/51712/state", 5);
    channel.wait(TIMEOUT).unwrap();
    assert!(domain.end_access(gref), "the page was unmapped before the event");
}

#[test]
fn two_processes_share_a_page_and_signal_each_other() {
    if let Some(socket) = half() {
        return lend_a_page(&socket);
    }
    let (_folder, xen) = xen();
    let mut store = XenStore::connect(xen.socket());
    store.watch("@introduceDomain", "in");
    store.watch("@releaseDomain", "out");
    let front = Half::start("two_processes_share_a_page_and_signal_each_other", &xen);
    store.next_event("in");
    store.await_value(&format!("{DEVICE}/state"), "3");
    let calls = XenCalls::connect(xen.socket()).unwrap();
    let gref = GrantRef(store.number(&format!("{DEVICE}/ring-ref")));
    let channel = calls.bind(DOMAIN, store.number(&format!("{DEVICE}/event-channel"))).unwrap();
    let pages = GrantPages::of_ring(mapper(&calls), &[gref]).unwrap();
    assert_eq!(read(&pages, 12), b"hello from 7");
    pages.mapping().slice(0, 12).unwrap().write_from(b"hello from 0");
    channel.notify();
    store.await_value(&format!("{DEVICE}/state"), "5");
    drop(pages);
    channel.notify();
    front.join();
    store.next_event("out");
    let gone = XenDomain::create(xen.socket(), DOMAIN, 1, 1);
    assert!(gone.is_ok(), "the domain ended with its process");
}

#[test]
fn a_front_end_that_is_killed_leaves_its_pages_to_who_has_them_mapped() {
    if let Some(socket) = half() {
        lend_a_page(&socket);
        return;
    }
    let (_folder, xen) = xen();
    let mut store = XenStore::connect(xen.socket());
    store.watch("@releaseDomain", "out");
    let name = "a_front_end_that_is_killed_leaves_its_pages_to_who_has_them_mapped";
    let mut front = Half::start(name, &xen);
    store.await_value(&format!("{DEVICE}/state"), "3");
    let calls = XenCalls::connect(xen.socket()).unwrap();
    let gref = GrantRef(store.number(&format!("{DEVICE}/ring-ref")));
    let port = store.number(&format!("{DEVICE}/event-channel"));
    let (mapper, channel) = (mapper(&calls), calls.bind(DOMAIN, port).unwrap());
    let pages = GrantPages::of_ring(mapper, &[gref]).unwrap();
    front.kill();
    store.next_event("out");
    channel.notify();
    pages.mapping().slice(0, 1).unwrap().write_byte(b'H');
    assert_eq!((read(&pages, 12), pages.is_broken()), (b"Hello from 7".to_vec(), false));
    assert!(calls.attach(DOMAIN).is_err() && calls.bind(DOMAIN, port).is_err());
    assert_eq!(store.number(&format!("{DEVICE}/state")), 3, "its nodes are the toolstack's");
}

/// The back-end of the test below: maps the page that it finds in xenstore, and stays.
fn map_a_page(socket: &Path) {
    let mut store = XenStore::connect(socket);
    let calls = XenCalls::connect(socket).unwrap();
    let gref = GrantRef(store.number(&format!("{DEVICE}/ring-ref")));
    let channel = calls.bind(DOMAIN, store.number(&format!("{DEVICE}/event-channel"))).unwrap();
    let pages = GrantPages::of_ring(mapper(&calls), &[gref]).unwrap();
    pages.mapping().slice(0, 6).unwrap().write_from(b"mapped");
    channel.notify();
    // Until it is killed.
    while channel.wait(TIMEOUT).is_ok() {}
}

#[test]
fn a_back_end_that_is_killed_has_its_pages_unmapped_and_another_takes_its_place() {
    if let Some(socket) = half() {
        return map_a_page(&socket);
    }
    let (_folder, xen) = xen();
    let (domain, mut store) = domain(xen.socket());
    let page = domain.alloc_pages(1).unwrap();
    let gref = domain.grant(0, page, GrantAccess::Write).unwrap();
    let channel = domain.event_channel(0).unwrap();
    store.write("device/vbd/51712/ring-ref", gref.0);
    store.write("device/vbd/51712/event-channel", channel.port());
    for round in 0..3 {
        domain.page(page).unwrap().write_from(b"fresh.");
        let name = "a_back_end_that_is_killed_has_its_pages_unmapped_and_another_takes_its_place";
        let mut back = Half::start(name, &xen);
        channel.wait(TIMEOUT).unwrap();
        assert_eq!(domain.page(page).unwrap().read_array(), Some(*b"mapped"), "round {round}");
        assert!(!domain.end_access(gref));
        back.kill();
        // The process is gone, and the server hears of it before it has served [`ROUNDS_MAX`]
        // reads.
        let mut other = XenStore::connect(xen.socket());
        let is_mapped = || domain.table().entry(gref).unwrap().is_mapped();
        let waits = (0..ROUNDS_MAX).take_while(|_| is_mapped() && other.read("/").is_some());
        assert!(waits.count() < ROUNDS_MAX, "the mark of a process that is gone");
    }
    assert!(domain.end_access(gref));
}

#[test]
fn references_that_a_domain_spoils_are_refused_and_those_of_others_are_mapped() {
    let (_folder, xen) = xen();
    let hostile = XenDomain::create(xen.socket(), 8, 64, 512).unwrap();
    let (fine, _store) = domain(xen.socket());
    let calls = XenCalls::connect(xen.socket()).unwrap();
    let grants = GrantMapper::Simulated(Arc::new(calls.attach(8).unwrap()));
    for gref in 0..512 {
        // Every bit of an entry is the domain's to set.
        let word = u64::from(gref).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let entry = manyring_memory::simgrant::GrantEntry(word);
        hostile.table().update(GrantRef(gref), |_| Ok(entry)).unwrap();
        let refused = GrantPages::of_ring(grants.clone(), &[GrantRef(gref)]);
        assert!(refused.is_err(), "no entry of these lends a page of the domain to us");
    }
    let page = fine.alloc_pages(1).unwrap();
    let gref = fine.grant(0, page, GrantAccess::Read).unwrap();
    let read_only = GrantPages::of_ring(mapper(&calls), &[gref]).unwrap_err();
    assert_eq!(read_only, GrantError::ReadOnly { gref: gref.0 });
    assert!(fine.end_access(gref), "what could not be mapped is not marked");
    let gref = fine.grant(0, page, GrantAccess::Write).unwrap();
    assert!(GrantPages::of_ring(mapper(&calls), &[gref]).is_ok());
}

/// True once the server has closed the connection.
fn is_closed(mut stream: UnixStream) -> bool {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn clients_that_misbehave_are_disconnected_and_others_are_served() {
    let (_folder, xen) = xen();
    let mut good = XenStore::connect(xen.socket());
    let header = |kind, size| StoreHeader { kind, req_id: 0, tx_id: 0, size }.emit();
    // Half a message, then silence: nobody waits for it.
    let mut silent = UnixStream::connect(xen.socket()).unwrap();
    silent.write_all(&header(2, 100)[..HEADER_SIZE - 1]).unwrap();
    let mut huge = UnixStream::connect(xen.socket()).unwrap();
    huge.write_all(&header(2, 5000)).unwrap();
    assert!(is_closed(huge));
    good.write("/a", "1");
    // One that asks and does not read is not read itself; when it leaves, that is all.
    let mut deaf = UnixStream::connect(xen.socket()).unwrap();
    deaf.set_nonblocking(true).unwrap();
    let requests = [&header(2, 3)[..], b"/a\0"].concat().repeat(100);
    while deaf.write(&requests).is_ok() {}
    good.write("/a", "2");
    assert_eq!(good.read("/a").as_deref(), Some("2"));
    drop((deaf, silent));
    // Calls that do not exist are refused; answers that nobody takes end the connection.
    let calls = || {
        let name = format!("{}.hypercall", xen.socket().display());
        UnixStream::connect(name).unwrap()
    };
    let mut odd = calls();
    odd.write_all(&[0xff; 16]).unwrap();
    let mut answer = [0; 16];
    odd.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..4], 38_u32.to_ne_bytes(), "ENOSYS");
    let mut flood = calls();
    while flood.write_all(&[0xff; 4096]).is_ok() {}
    assert!(is_closed(flood));
    good.write("/a", "3");
    assert_eq!(good.read("/a").as_deref(), Some("3"));
}

/// The server of the test below, in a process that may have few more fds than it has.
fn serve_with_few_fds(socket: &Path) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let limit = rustix::process::Rlimit { current: Some(open + 10), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let _xen = SimXen::start(socket).unwrap();
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

#[test]
fn clients_that_use_up_the_servers_fds_wait_and_those_before_them_are_served() {
    if let Some(socket) = half() {
        return serve_with_few_fds(&socket);
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("xenstored");
    let name = "clients_that_use_up_the_servers_fds_wait_and_those_before_them_are_served";
    let mut server = Half::start_at(name, &socket);
    while UnixStream::connect(&socket).is_err() {
        assert!(server.0.try_wait().unwrap().is_none(), "the server has ended");
        std::thread::yield_now();
    }
    let mut good = XenStore::connect(&socket);
    good.write("/a", "1");
    let greedy: Vec<_> = (0..60).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let mut late = UnixStream::connect(&socket).unwrap();
    for round in 0..100 {
        good.write("/a", round);
    }
    late.set_nonblocking(true).unwrap();
    late.write_all(
        &[&StoreHeader { kind: 2, req_id: 0, tx_id: 0, size: 3 }.emit()[..], b"/a\0"].concat(),
    )
    .unwrap();
    assert!(late.read(&mut [0]).is_err(), "nobody has accepted it");
    drop(greedy);
    late.set_nonblocking(false).unwrap();
    late.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut answer = [0; HEADER_SIZE + 2];
    late.read_exact(&mut answer).unwrap();
    assert_eq!(&answer[HEADER_SIZE..], b"99");
}

#[test]
fn a_name_that_is_taken_is_refused_and_left_alone() {
    let (folder, xen) = xen();
    assert!(SimXen::start(xen.socket()).is_err());
    let other = folder.path().join("other");
    std::fs::write(folder.path().join("other.hypercall"), "").unwrap();
    assert!(SimXen::start(&other).is_err() && !other.exists());
    XenStore::connect(xen.socket()).write("/a", "1");
    let socket = xen.socket().to_owned();
    drop(xen);
    assert!(!socket.exists() && SimXen::start(&socket).is_ok());
}

//! The neighbours of a guest whose disk has a bad server: one that reads nothing, that
//! answers in the smallest pieces or without end, that lies, that takes connections and ends them,
//! or that is gone. All of them have one worker.

use crate::support::prober::{NEIGHBOURS, Prober, SOCKETS, check};
use crate::support::process::{Daemon, TIMEOUT};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp, FrontEnd};
use manyring_wire::nbd::{
    CAN_MULTI_CONN, COMMAND_SIZE, Chunk, ChunkKind, Command, CommandKind, HAS_FLAGS, Reply,
    SEND_FLUSH,
};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// How the server treats a connection that has come as far as transmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
enum Manner {
    /// Answers each read with zeroes, everything else with success.
    Good,
    /// Reads nothing: the socket's buffers are soon full.
    Deaf,
    /// Reads what comes, and answers nothing.
    Silent,
    /// Answers reads in chunks of one byte.
    Crumbs,
    /// Sends chunks that are not whole replies, of errors and of nothing, for ever.
    Flood,
    /// Sends what is no reply, as much as the socket takes.
    Lies,
    /// Ends the connection.
    Ends,
}

const MANNERS: [Manner; 7] = [
    Manner::Good,
    Manner::Deaf,
    Manner::Silent,
    Manner::Crumbs,
    Manner::Flood,
    Manner::Lies,
    Manner::Ends,
];
pub(crate) const SIZE: u64 = 64 << 20;

/// A server on the loopback interface, whose manner can be changed.
struct Server {
    port: u16,
    manner: Arc<AtomicUsize>,
    /// Commands that connections of each manner were sent.
    asked: Arc<[AtomicUsize; MANNERS.len()]>,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let manner = Arc::new(AtomicUsize::new(Manner::Good as usize));
        let sockets = Arc::<Mutex<Vec<TcpStream>>>::default();
        let asked = Arc::<[AtomicUsize; MANNERS.len()]>::default();
        let (of_server, known, counts) = (manner.clone(), sockets.clone(), asked.clone());
        let accept = move || {
            for socket in listener.incoming() {
                let Ok(socket) = socket else { continue };
                known.lock().unwrap().push(socket.try_clone().unwrap());
                let manner = MANNERS[of_server.load(Ordering::SeqCst)];
                let counts = counts.clone();
                let serve = move || serve(socket, manner, &counts[manner as usize]);
                std::thread::Builder::new().spawn(serve).unwrap();
            }
        };
        std::thread::Builder::new().spawn(accept).unwrap();
        Self { port, manner, asked, sockets }
    }

    /// Ends all connections, and treats later ones so.
    fn set(&self, manner: Manner) {
        self.manner.store(manner as usize, Ordering::SeqCst);
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn serve(mut socket: TcpStream, manner: Manner, asked: &AtomicUsize) -> Option<()> {
    negotiate(&mut socket)?;
    loop {
        if manner == Manner::Deaf {
            // It looks whether there is a command, and leaves it there.
            socket.peek(&mut [0]).ok()?;
            asked.fetch_add(1, Ordering::SeqCst);
            std::thread::park();
        }
        let mut bytes = [0; COMMAND_SIZE];
        socket.read_exact(&mut bytes).ok()?;
        let command = Command::parse(&bytes)?;
        asked.fetch_add(1, Ordering::SeqCst);
        let is_write = command.kind == CommandKind::Write;
        std::io::copy(
            &mut (&mut socket).take(if is_write { command.len.into() } else { 0 }),
            &mut std::io::sink(),
        )
        .ok()?;
        socket.write_all(&answer(manner, &command)?).ok()?;
    }
}

/// The bytes that a server of this manner sends for a command, or `None` if it hangs up.
fn answer(manner: Manner, command: &Command) -> Option<Vec<u8>> {
    let Command { cookie, offset, len, .. } = *command;
    let chunk = |at: u64, bytes: &[u8], is_last| {
        let len = u32::try_from(bytes.len() + 8).unwrap();
        let head = Chunk { kind: ChunkKind::Data, is_last, cookie, len }.emit();
        [&head[..], &at.to_be_bytes(), bytes].concat()
    };
    let is_read = command.kind == CommandKind::Read;
    Some(match manner {
        Manner::Crumbs if is_read => (0..u64::from(len))
            .flat_map(|at| chunk(offset + at, &[0], at + 1 == u64::from(len)))
            .collect(),
        Manner::Good | Manner::Crumbs if is_read => chunk(offset, &vec![0; len as usize], true),
        Manner::Good | Manner::Crumbs => Reply::simple(0, cookie).to_vec(),
        Manner::Silent => Vec::new(),
        Manner::Flood => {
            let nothing = Chunk { kind: ChunkKind::None, is_last: false, cookie, len: 0 }.emit();
            nothing.repeat(50_000)
        }
        Manner::Lies => vec![0xff; 1 << 20],
        Manner::Deaf | Manner::Ends => return None,
    })
}

fn negotiate(socket: &mut TcpStream) -> Option<()> {
    greet(socket)?;
    offer(socket)
}

/// The first bytes of the server, and of the client.
pub(crate) fn greet(socket: &mut impl ReadWrite) -> Option<()> {
    socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").ok()?;
    socket.read_exact(&mut [0; 4]).ok()
}

/// Answers options until the client has chosen the disk.
pub(crate) fn offer(socket: &mut impl ReadWrite) -> Option<()> {
    loop {
        let mut head = [0; 16];
        socket.read_exact(&mut head).ok()?;
        let [option, len] =
            [8, 12].map(|at| u32::from_be_bytes(head[at..at + 4].try_into().unwrap()));
        socket.read_exact(&mut vec![0; len as usize]).ok()?;
        let mut reply = |kind: u32, data: &[u8]| {
            let head = [option, kind, u32::try_from(data.len()).unwrap()].map(u32::to_be_bytes);
            let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
            socket.write_all(&[&magic[..], &head.concat(), data].concat()).ok()
        };
        if option == 7 {
            let flags = HAS_FLAGS | SEND_FLUSH | CAN_MULTI_CONN;
            reply(3, &[&[0, 0][..], &SIZE.to_be_bytes(), &flags.to_be_bytes()].concat())?;
            return reply(1, &[]);
        }
        reply(1, &[])?;
    }
}

/// A stream that a server reads from and writes to.
pub(crate) trait ReadWrite: Read + Write {}

impl<T: Read + Write> ReadWrite for T {}

fn daemon(server: &Server, domains: &str) -> Daemon {
    let port = server.port;
    let text = format!(
        "[daemon]\ncontrol = '@/control'\nworkers = 1\ndomains = '{domains}'\n\
         [[blk]]\nname = 'bad'\nsocket_path = '@/bad'\nnbd = 'nbd://127.0.0.1:{port}/'\n\
         num_queues = 4\n{NEIGHBOURS}"
    );
    Daemon::run(&text, &[&SOCKETS[..], &["bad"]].concat())
}

#[test]
fn neighbours_of_a_disk_whose_server_is_bad_wait_for_nothing() {
    for domains in ["one", "user"] {
        neighbours_wait_for_nothing(domains);
    }
}

/// In the daemon itself, or in the device process of the neighbours.
fn neighbours_wait_for_nothing(domains: &str) {
    let server = Server::start();
    let daemon = daemon(&server, domains);
    let mut prober = Prober::at(&daemon, daemon.folder());
    const LEN: usize = 256 << 10;
    let options = BlkDriverOptions {
        queues: 4,
        queue_size: 32,
        buffer_size: u32::try_from(LEN).unwrap(),
        segment_size: 32 << 10,
        ..BlkDriverOptions::default()
    };
    for manner in MANNERS {
        let front = FrontEnd::connect(&daemon.socket_of("bad"), TIMEOUT).unwrap();
        let mut guest = BlkDriver::start(front, &options).unwrap();
        server.set(manner);
        let stalls = prober.beside(|is_over| {
            while !is_over.load(Ordering::Relaxed) {
                for queue in &mut guest.queues {
                    while queue.take().is_some() {}
                    let ops = [
                        DriverOp::WriteAny { sector: 0, len: LEN },
                        DriverOp::Read { sector: 0, len: LEN },
                        DriverOp::Flush,
                    ];
                    while ops.iter().all(|op| queue.submit(*op).unwrap().is_some()) {}
                    queue.publish().unwrap();
                }
            }
        });
        check(&format!("a server that is {manner:?}"), stalls);
        let asked = server.asked[manner as usize].load(Ordering::SeqCst);
        assert!(asked > 0, "{manner:?}: it was asked nothing");
        server.set(Manner::Good);
        // The server answers in the end the requests that it has kept.
        for queue in &mut guest.queues {
            while queue.in_flight() > 0 {
                assert_eq!(queue.wait(TIMEOUT).unwrap().status, 0, "{manner:?}");
            }
        }
    }
}

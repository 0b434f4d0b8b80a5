//! How a disk's server that breaks TLS disturbs the neighbours of the disk's guest, or one that
//! uses without end what TLS allows: tickets, new keys, records that hold almost nothing,
//! certificates, and records that never end. All of them have one worker.

use crate::servers::{SIZE, greet, offer};
use crate::support::prober::{NEIGHBOURS, Prober, SOCKETS, check};
use crate::support::process::{Daemon, TIMEOUT, wait_until};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverOp, FrontEnd};
use manyring_wire::nbd::{COMMAND_SIZE, Command, CommandKind, Reply};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, Stream};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The name in the server's certificate.
const HOST: &str = "storage.example";
/// By how much the daemon's memory may grow beside a server, in KiB.
const GROWTH_MAX: u64 = 48 << 10;

/// How the server treats a connection that is to speak TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
enum Manner {
    /// Answers every command.
    Good,
    /// Sends the head of a long record, and then a byte now and then.
    HalfRecord,
    /// Sends one message of the handshake in records of a byte each, as long as the client reads.
    Pieces,
    /// Changes the cipher without end.
    Ciphers,
    /// Sends a hundred certificates that have the authority's name and other keys.
    Lookalikes,
    /// Sends more certificates than a message of the handshake may hold.
    Chain,
    /// Sends tens of thousands of tickets before its first answer.
    Tickets,
    /// Asks for new keys without end instead of an answer.
    Keys,
    /// Answers in records of a few bytes.
    Crumbs,
}

const MANNERS: [Manner; 9] = [
    Manner::Good,
    Manner::HalfRecord,
    Manner::Pieces,
    Manner::Ciphers,
    Manner::Lookalikes,
    Manner::Chain,
    Manner::Tickets,
    Manner::Keys,
    Manner::Crumbs,
];

/// The TLS configuration of the servers of each manner.
struct Configs([Arc<ServerConfig>; MANNERS.len()]);

impl Configs {
    /// Writes the certificate of the authority that the client trusts into `folder`.
    fn new(folder: &Path) -> Self {
        let authority = || {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.distinguished_name.push(DnType::CommonName, "the authority");
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params
        };
        let key = KeyPair::generate().unwrap();
        let pem = authority().self_signed(&key).unwrap().pem();
        std::fs::write(folder.join("ca-cert.pem"), pem).unwrap();
        let issuer = Issuer::new(authority(), key);
        let own = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec![HOST.to_owned()]).unwrap();
        let leaf = leaf.signed_by(&own, &issuer).unwrap().der().clone();
        let other = || {
            let key = KeyPair::generate().unwrap();
            authority().self_signed(&key).unwrap().der().clone()
        };
        Self(MANNERS.map(|manner| {
            let others: Vec<CertificateDer<'static>> = match manner {
                Manner::Lookalikes => (0..100).map(|_| other()).collect(),
                Manner::Chain => vec![other(); 1000],
                _ => Vec::new(),
            };
            let chain = [vec![leaf.clone()], others].concat();
            let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(own.serialize_der()));
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ServerConfig::builder_with_provider(provider);
            let config = config.with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
            let config = config.with_no_client_auth().with_single_cert(chain, key);
            let mut config = config.unwrap();
            if manner == Manner::Tickets {
                config.send_tls13_tickets = 20_000;
            }
            if manner == Manner::Crumbs {
                // The least that rustls takes.
                config.max_fragment_size = Some(32);
            }
            Arc::new(config)
        }))
    }
}

/// A server on the loopback interface, whose manner can be changed.
struct Server {
    port: u16,
    manner: Arc<AtomicUsize>,
    /// Connections of each manner that have come as far as TLS.
    met: Arc<[AtomicUsize; MANNERS.len()]>,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
}

impl Server {
    fn start(configs: Configs) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let manner = Arc::new(AtomicUsize::new(Manner::Good as usize));
        let sockets = Arc::<Mutex<Vec<TcpStream>>>::default();
        let met = Arc::<[AtomicUsize; MANNERS.len()]>::default();
        let (of_server, known, counts) = (manner.clone(), sockets.clone(), met.clone());
        let accept = move || {
            for socket in listener.incoming() {
                let Ok(socket) = socket else { continue };
                known.lock().unwrap().push(socket.try_clone().unwrap());
                let manner = MANNERS[of_server.load(Ordering::SeqCst)];
                let (config, counts) = (configs.0[manner as usize].clone(), counts.clone());
                let serve = move || serve(socket, manner, &config, &counts[manner as usize]);
                std::thread::Builder::new().spawn(serve).unwrap();
            }
        };
        std::thread::Builder::new().spawn(accept).unwrap();
        Self { port, manner, met, sockets }
    }

    /// Ends all connections, and treats later ones so.
    fn set(&self, manner: Manner) {
        self.manner.store(manner as usize, Ordering::SeqCst);
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn serve(
    mut socket: TcpStream,
    manner: Manner,
    config: &Arc<ServerConfig>,
    met: &AtomicUsize,
) -> Option<()> {
    greet(&mut socket)?;
    // NBD_OPT_STARTTLS, and its acknowledgement.
    socket.read_exact(&mut [0; 16]).ok()?;
    let acknowledged = [5, 1, 0].map(u32::to_be_bytes).concat();
    let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
    socket.write_all(&[&magic[..], &acknowledged].concat()).ok()?;
    // The client has said hello: then it waits for what comes.
    socket.peek(&mut [0]).ok()?;
    met.fetch_add(1, Ordering::SeqCst);
    match manner {
        Manner::HalfRecord => {
            socket.write_all(&[22, 3, 3, 0x40, 0]).ok()?;
            loop {
                socket.write_all(&[2]).ok()?;
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Manner::Pieces => {
            // A server's hello of 60,000 bytes.
            let message = [&[2, 0, 0xea, 0x60][..], &[0; 60_000]].concat();
            let records: Vec<_> = message.iter().flat_map(|b| [22, 3, 3, 0, 1, *b]).collect();
            loop {
                socket.write_all(&records).ok()?;
            }
        }
        Manner::Ciphers => loop {
            socket.write_all(&[20, 3, 3, 0, 1, 1].repeat(10_000)).ok()?;
        },
        _ => under_tls(&mut socket, manner, config),
    }
}

/// Serves a connection under TLS, as the manner is.
fn under_tls(socket: &mut TcpStream, manner: Manner, config: &Arc<ServerConfig>) -> Option<()> {
    let mut connection = ServerConnection::new(config.clone()).unwrap();
    offer(&mut Stream::new(&mut connection, socket))?;
    loop {
        let mut stream = Stream::new(&mut connection, socket);
        let mut bytes = [0; COMMAND_SIZE];
        stream.read_exact(&mut bytes).ok()?;
        let command = Command::parse(&bytes)?;
        let len = command.len as usize;
        if command.kind == CommandKind::Write {
            stream.read_exact(&mut vec![0; len]).ok()?;
        }
        if manner == Manner::Keys {
            return ask_for_keys(socket, &mut connection);
        }
        let mut answer = Reply::simple(0, command.cookie).to_vec();
        if command.kind == CommandKind::Read {
            answer.resize(answer.len() + len, 0);
        }
        Stream::new(&mut connection, socket).write_all(&answer).ok()?;
    }
}

/// Asks for new keys until the client ends the connection.
fn ask_for_keys(socket: &mut TcpStream, connection: &mut ServerConnection) -> Option<()> {
    loop {
        connection.refresh_traffic_keys().ok()?;
        while connection.wants_write() {
            connection.write_tls(socket).ok()?;
        }
    }
}

fn daemon(server: &Server, folder: &Path, domains: &str) -> Daemon {
    let (port, folder) = (server.port, folder.display());
    let text = format!(
        "[daemon]\ncontrol = '@/control'\nworkers = 1\ndomains = '{domains}'\n\
         [[blk]]\nname = 'bad'\nsocket_path = '@/bad'\nnum_queues = 1\nnbd = \
         'nbds://127.0.0.1:{port}/?tls-certificates={folder}&tls-hostname={HOST}'\n{NEIGHBOURS}"
    );
    Daemon::run(&text, &[&SOCKETS[..], &["bad"]].concat())
}

fn resident_kib(daemon: &Daemon) -> u64 {
    let of = |process: u32| -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.map_or(0, |line| line.split_whitespace().next().unwrap().parse().unwrap())
    };
    daemon.processes().into_iter().map(of).sum()
}

#[test]
fn neighbours_of_a_disk_whose_server_abuses_tls_wait_for_nothing() {
    for domains in ["one", "user"] {
        neighbours_wait_for_nothing(domains);
    }
}

/// In the daemon itself, or in the device process of the neighbours.
fn neighbours_wait_for_nothing(domains: &str) {
    const LEN: usize = 256 << 10;
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(Configs::new(folder.path()));
    let daemon = daemon(&server, folder.path(), domains);
    let mut prober = Prober::at(&daemon, daemon.folder());
    let options = BlkDriverOptions {
        queue_size: 32,
        buffer_size: u32::try_from(LEN).unwrap(),
        segment_size: 32 << 10,
        ..BlkDriverOptions::default()
    };
    let front = FrontEnd::connect(&daemon.socket_of("bad"), TIMEOUT).unwrap();
    let mut guest = BlkDriver::start(front, &options).unwrap();
    guest.queues[0].run(DriverOp::Read { sector: SIZE / 512 - 1, len: 512 }).unwrap();
    let before = resident_kib(&daemon);
    for manner in MANNERS {
        server.set(manner);
        let queue = &mut guest.queues[0];
        let stalls = prober.beside(|is_over| {
            while !is_over.load(Ordering::Relaxed) {
                while queue.take().is_some() {}
                let ops = [
                    DriverOp::WriteAny { sector: 0, len: LEN },
                    DriverOp::Read { sector: 0, len: LEN },
                ];
                while ops.iter().all(|op| queue.submit(*op).unwrap().is_some()) {}
                queue.publish().unwrap();
            }
        });
        check(&format!("a server under TLS: {manner:?}"), stalls);
        let grown = resident_kib(&daemon).saturating_sub(before);
        assert!(grown < GROWTH_MAX, "{manner:?}: the daemon has {grown} KiB more");
        let is_met = || server.met[manner as usize].load(Ordering::SeqCst) > 0;
        assert!(wait_until(is_met), "{manner:?}: no connection has met it");
        server.set(Manner::Good);
        while queue.in_flight() > 0 {
            assert_eq!(queue.wait(TIMEOUT).unwrap().status, 0, "{manner:?}");
        }
    }
}

//! TLS: who is trusted, what is said of whom is not, and servers that break it.

use super::bench::{Bench, at_first, both, options, uri};
use super::server::{Act, Offer, SIZE, Server, data};
use crate::{Address, JoinError, NbdDisk, NbdOptions, Target, Uri};
use manyring_backend::blk::Op;
use proptest::prelude::*;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::path::PathBuf;
use std::sync::Arc;

/// The name in the server's certificate.
const HOST: &str = "storage.example";

/// An authority, with what it has signed.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// A certificate for `host` that is valid until this year, and its key.
    fn sign(&self, host: &str, until: i32) -> [String; 2] {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.not_after = date_time_ymd(until, 1, 1);
        [params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem()]
    }

    /// A server with a certificate for `host`. `asks`: clients must have one of this authority.
    fn server(&self, host: &str, until: i32, asks: bool) -> Arc<ServerConfig> {
        self.server_of(self.sign(host, until), asks, 1)
    }

    /// A server that shows its certificate `times` times.
    fn server_of(
        &self,
        [certificate, key]: [String; 2],
        asks: bool,
        times: usize,
    ) -> Arc<ServerConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider.clone());
        let config = config.with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.pem.as_bytes()).unwrap()).unwrap();
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        let config = match asks {
            true => config.with_client_cert_verifier(verifier.build().unwrap()),
            false => config.with_no_client_auth(),
        };
        let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap(); times];
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        Arc::new(config.with_single_cert(chain, key).unwrap())
    }
}

/// The files of a client.
struct Files(tempfile::TempDir);

impl Files {
    fn new(authority: &Authority) -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        files.put("ca-cert.pem", &authority.pem);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn put(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    fn identify(&self, authority: &Authority) {
        let [certificate, key] = authority.sign("client", 2100);
        self.put("client-cert.pem", &certificate);
        self.put("client-key.pem", &key);
    }

    fn options(&self, server: &Server) -> NbdOptions {
        let mut options = options(server);
        let uri = Uri {
            tls: true,
            certificates: Some(self.0.path().to_str().unwrap().to_owned()),
            hostname: Some(HOST.to_owned()),
            ..uri(server)
        };
        options.server = Arc::new(Address::of(&uri));
        options.target = Target::of(&uri);
        options
    }
}

/// A server that asks for certificates, and a client that has one.
fn pair() -> (Server, Files) {
    let authority = Authority::new("ours");
    let (server, files) = (Server::new(Offer::default()), Files::new(&authority));
    server.require_tls(authority.server(HOST, 2100, true));
    files.identify(&authority);
    (server, files)
}

const WRITE: Op = Op::Write { durable: false };

#[test]
fn requests_and_replies_go_through_tls() {
    both(|has_ring| {
        let (server, files) = pair();
        let mut bench = Bench::new(files.options(&server), has_ring);
        bench.fill(0, SIZE, 5);
        let half = SIZE / 2;
        assert_eq!(bench.run(&[(Op::Read, half, half), (WRITE, 0, half)]), [Ok(()); 2]);
        assert_eq!(bench.bytes(half, half), at_first(half, half));
        assert!(server.bytes()[..usize::try_from(half).unwrap()].iter().all(|byte| *byte == 5));
        assert_eq!(bench.losses(), 0);
    });
}

#[test]
fn a_server_that_is_restarted_is_trusted_again_and_has_the_requests_again() {
    let (server, files) = pair();
    server.law(|connection, _, _| if connection == 1 { Act::Close } else { Act::Serve });
    let mut bench = Bench::new(files.options(&server), true);
    bench.fill(0, 4096, 5);
    assert_eq!(bench.run(&[(WRITE, 0, 4096), (Op::Read, 8192, 4096)]), [Ok(()); 2]);
    assert_eq!((bench.losses(), bench.bytes(8192, 4096)), (1, at_first(8192, 4096)));
}

#[test]
fn who_is_not_trusted_is_named_in_one_line() {
    let [ours, theirs, namesake] = ["ours", "theirs", "ours"].map(Authority::new);
    let server = Server::new(Offer::default());
    let files = Files::new(&ours);
    let said = || match NbdDisk::open(files.options(&server)) {
        Err(error @ (JoinError::Tls(_) | JoinError::Nbd(_))) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(said(), "speaks no TLS");
    for (config, problem) in [
        (theirs.server(HOST, 2100, false), "has a certificate that no authority in ca-cert.pem"),
        (namesake.server(HOST, 2100, false), "has a certificate that no authority in ca-cert.pem"),
        (ours.server("other.example", 2100, false), "has a certificate for other.example, and not"),
        (ours.server(HOST, 2001, false), "has a certificate that is not valid today"),
        (ours.server(HOST, 2100, true), "refuses our certificate, or the lack of one"),
    ] {
        server.require_tls(config);
        let said = said();
        assert!(said.starts_with(problem) && !said.contains('\n'), "{said}");
    }
    // A certificate that the server does not know.
    files.identify(&theirs);
    let said_of_stranger = said();
    assert!(said_of_stranger.starts_with("refuses our certificate"), "{said_of_stranger}");
    files.identify(&ours);
    assert!(NbdDisk::open(files.options(&server)).is_ok());
    // A plain client, which the server does not take.
    assert!(NbdDisk::open(options(&server)).is_err());
}

#[test]
fn a_handshake_message_that_is_too_long_costs_the_handshake() {
    let (server, authority) = (Server::new(Offer::default()), Authority::new("ours"));
    let files = Files::new(&authority);
    // The message comes in several records, and its beginning is in the buffer when it is refused.
    server.require_tls(authority.server_of(authority.sign(HOST, 2100), false, 1000));
    let said = NbdDisk::open(files.options(&server)).unwrap_err().to_string();
    assert!(said.starts_with("has broken TLS: "), "{said}");
}

#[test]
fn a_file_that_cannot_be_used_is_named() {
    let (server, files) = pair();
    let said = || NbdDisk::open(files.options(&server)).unwrap_err().to_string();
    for (name, text, problem) in [
        ("client-key.pem", "", "nothing of the kind is in it"),
        ("client-cert.pem", "-----BEGIN CERTIFICATE-----\n", "it is no PEM file"),
        ("ca-crl.pem", "", "nothing of the kind is in it"),
        ("ca-cert.pem", "", "nothing of the kind is in it"),
    ] {
        files.put(name, text);
        let (said, path) = (said(), files.path(name));
        assert!(said.contains(&format!("{} cannot be used: {problem}", path.display())), "{said}");
    }
    std::fs::remove_file(files.path("ca-cert.pem")).unwrap();
    assert!(said().contains("ca-cert.pem cannot be used: No such file"), "{}", said());
}

#[test]
fn a_server_that_breaks_tls_costs_the_connection_and_no_request() {
    type Lie = fn() -> Act;
    const LIES: [(&str, Lie); 6] = [
        ("no record", || Act::Raw(vec![0xff; 4096])),
        ("a record of other keys", || Act::Raw([&[23, 3, 3, 0, 64][..], &[7; 64]].concat())),
        ("a record that is too long", || {
            Act::Raw([&[23, 3, 3, 0xff, 0xff][..], &[7; 99]].concat())
        }),
        ("an alert in the clear", || Act::Raw(vec![21, 3, 3, 0, 2, 2, 40])),
        ("new keys without end", || Act::NewKeys(1000)),
        ("a reply that is none", || Act::Send(data(1, 0, &[9; 99], true))),
    ];
    for (name, lie) in LIES {
        both(|has_ring| {
            let (server, files) = pair();
            server.law(move |connection, _, _| if connection == 1 { lie() } else { Act::Serve });
            let mut bench = Bench::new(files.options(&server), has_ring);
            bench.fill(0, SIZE, 7);
            assert_eq!(bench.run(&[(Op::Read, 8192, 4096)]), [Ok(())], "{name}");
            assert_eq!(bench.bytes(8192, 4096), at_first(8192, 4096), "{name}");
            assert_eq!(bench.losses(), 1, "{name}");
        });
    }
}

#[test]
fn new_keys_that_are_asked_for_now_and_then_cost_nothing() {
    let (server, files) = pair();
    server.law(|_, _, _| Act::NewKeys(3));
    let mut bench = Bench::new(files.options(&server), true);
    bench.fill(0, SIZE, 7);
    let requests: Vec<_> = (0..64).map(|at| (Op::Read, at * 4096, 4096)).collect();
    assert_eq!(bench.run(&requests), [Ok(()); 64]);
    assert_eq!((bench.losses(), bench.bytes(0, 64 * 4096)), (0, at_first(0, 64 * 4096)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_bytes_past_tls_cost_the_connection_at_most(
        kind in 19u8..25,
        len in 0usize..20_000,
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        has_ring: bool,
    ) {
        let (server, files) = pair();
        let [high, low] = u16::try_from(len).unwrap().to_be_bytes();
        let raw = [&[kind, 3, 3, high, low][..], &bytes].concat();
        server.law(move |connection, _, _| match connection {
            1 => Act::Raw(raw.clone()),
            _ => Act::Serve,
        });
        let options = NbdOptions {
            request_timeout: std::time::Duration::from_millis(400),
            ..files.options(&server)
        };
        let mut bench = Bench::new(options, has_ring);
        prop_assert_eq!(bench.run(&[(Op::Read, 8192, 4096)]), [Ok(())]);
        prop_assert_eq!(bench.bytes(8192, 4096), at_first(8192, 4096));
    }
}

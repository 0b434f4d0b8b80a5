//! `Tls`: a TLS 1.3 session over bytes that were received, and bytes to be sent. It has no socket.
//!
//! ```text
//! connect(name, ..)     with the certificates (`credentials.rs`)
//! shake(out)            false while the handshake needs more of the peer; `out` is to be sent
//! open(bytes, out)      decrypts what has come; plain() has it, consume() drops the first of it
//! seal(bytes, out)      encrypts what is to be sent
//! ```
//! rustls parses all that a server sends. A handshake runs on the disk's thread; later records are
//! opened by the worker that has received them, as much as one receive has brought at a time. A
//! server can ask for new keys without pause: rustls takes 32 such requests between two records
//! with data, and then ends the session.

use super::credentials::Credentials;
use rustix::io::Errno;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection, WebPkiServerVerifier};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, EncryptError, UnbufferedStatus, WriteTraffic,
};
use rustls::{AlertDescription, CertificateError, ClientConfig, Error, RootCertStore};
use std::fmt::{self, Debug, Formatter};
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes that a record needs beside its data: header, content type and tag, with some to spare.
const RECORD_MORE: usize = 64;
/// Bytes of data of a record at most.
const RECORD_MAX: usize = 16 << 10;

/// Why there is no TLS session, or why it ended. The text continues a sentence about the server.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of this host cannot be used.
    #[error("is not asked, because {} cannot be used: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why the file cannot be used.
        problem: String,
    },
    /// The URI has no name that a certificate could have.
    #[error("is not asked, because {0:?} is no name that a certificate has: say tls-hostname=NAME")]
    Name(String),
    /// The server's certificate is not trusted.
    #[error("has a certificate that no authority in ca-cert.pem has signed")]
    Stranger,
    /// The server's certificate is for other hosts.
    #[error("has a certificate for {presented}, and not for {expected:?}")]
    OtherHost {
        /// The name in the URI.
        expected: String,
        /// The names in the certificate.
        presented: String,
    },
    /// The server's certificate is too old, or too new.
    #[error("has a certificate that is not valid today")]
    NotToday,
    /// The server's certificate was revoked.
    #[error("has a certificate that ca-crl.pem revokes")]
    Revoked,
    /// The server wants a certificate that it trusts.
    #[error("refuses our certificate, or the lack of one (TLS alert {0:?})")]
    Refused(AlertDescription),
    /// The server has ended the connection in the place of its first answer under TLS. A server
    /// that does not trust the client's certificate may end it here, because with TLS 1.3 it sees
    /// that certificate only after the client's side of the handshake has ended.
    #[error(
        "has ended the connection after the TLS handshake: it may want a certificate that it trusts"
    )]
    Unanswered,
    /// The server has ended the session.
    #[error("has ended the TLS session")]
    Ended,
    /// Any other fault, of the server or of its certificate.
    #[error("has broken TLS: {0}")]
    Other(Error),
}

impl TlsError {
    /// The text, in which a file has its name alone.
    #[must_use]
    pub fn without_folder(&self) -> String {
        match self {
            Self::File { path, problem } => {
                let path = path.file_name().map(PathBuf::from).unwrap_or_default();
                Self::File { path, problem: problem.clone() }.to_string()
            }
            error => error.to_string(),
        }
    }
}

impl From<Error> for TlsError {
    fn from(error: Error) -> Self {
        match error {
            Error::InvalidCertificate(CertificateError::NotValidForNameContext {
                expected,
                presented,
            }) => Self::OtherHost {
                expected: expected.to_str().into_owned(),
                presented: names(&presented),
            },
            // If only the name of an authority in the file is right, the signature is wrong.
            Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            ) => Self::Stranger,
            Error::InvalidCertificate(CertificateError::Revoked) => Self::Revoked,
            Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            ) => Self::NotToday,
            Error::AlertReceived(
                alert @ (AlertDescription::CertificateRequired
                | AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::UnknownCA
                | AlertDescription::AccessDenied),
            ) => Self::Refused(alert),
            error => Self::Other(error),
        }
    }
}

/// The names of a certificate, which rustls gives as `DnsName("a")` and `IpAddress(::1)`.
fn names(presented: &[String]) -> String {
    let bare = |name: &String| {
        let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
        inner.unwrap_or(name).trim_matches('"').to_owned()
    };
    match presented {
        [] => "no name".to_owned(),
        names => names.iter().map(bare).collect::<Vec<_>>().join(", "),
    }
}

/// A TLS session on the connection to a server.
pub(super) struct Tls {
    connection: UnbufferedClientConnection,
    /// Received bytes that are not decrypted yet: less than a record, or a part of a message of the
    /// handshake.
    sealed: Vec<u8>,
    /// Decrypted bytes; those before `first` are consumed.
    plain: Vec<u8>,
    first: usize,
    /// Bytes that [`Self::seal`] will encrypt. The vector keeps its memory from call to call.
    unsealed: Vec<u8>,
}

impl Tls {
    /// A session that has not begun, with a server whose certificate has this name.
    ///
    /// # Errors
    /// [`TlsError::File`] or [`TlsError::Name`].
    pub(super) fn connect(host: &str, credentials: &Credentials) -> Result<Self, TlsError> {
        let host = host.to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_| TlsError::Name(host))?;
        let config = config(credentials)?;
        let connection = UnbufferedClientConnection::new(Arc::new(config), name)?;
        let (sealed, plain, unsealed) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { connection, sealed, plain, first: 0, unsealed })
    }

    /// Goes on with the handshake. True: it is over.
    ///
    /// # Errors
    /// [`TlsError`].
    pub(super) fn shake(&mut self, out: &mut Vec<u8>) -> Result<bool, TlsError> {
        self.run(&[], out)
    }

    /// Decrypts `bytes` from the socket. Messages of the session itself are appended to `out`.
    ///
    /// # Errors
    /// [`TlsError`]: the connection is over.
    pub(super) fn open(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), TlsError> {
        self.sealed.extend_from_slice(bytes);
        self.plain.drain(..self.first);
        self.first = 0;
        self.run(&[], out).map(drop)
    }

    /// The decrypted bytes that are not consumed yet.
    pub(super) fn plain(&self) -> &[u8] {
        &self.plain[self.first..]
    }

    /// Drops the first `n` of [`Self::plain`].
    pub(super) fn consume(&mut self, n: usize) {
        self.first = (self.first + n).min(self.plain.len());
    }

    /// Where to append what [`Self::seal`] will seal.
    pub(super) fn unsealed(&mut self) -> &mut Vec<u8> {
        &mut self.unsealed
    }

    /// Appends the records of what was put into [`Self::unsealed`] to `out`.
    ///
    /// # Errors
    /// [`TlsError`]: the connection is over.
    pub(super) fn seal(&mut self, out: &mut Vec<u8>) -> Result<(), TlsError> {
        if self.unsealed.is_empty() {
            return Ok(());
        }
        let mut bytes = std::mem::take(&mut self.unsealed);
        let sealed = self.run(&bytes, out);
        bytes.clear();
        bytes.shrink_to(4 * RECORD_MAX);
        self.unsealed = bytes;
        sealed.map(drop)
    }

    /// Appends the record by which a session ends.
    pub(super) fn close(&mut self, out: &mut Vec<u8>) {
        let state = self.connection.process_tls_records(&mut self.sealed).state;
        if let Ok(ConnectionState::WriteTraffic(mut traffic)) = state {
            append(out, RECORD_MORE, |room| match traffic.queue_close_notify(room) {
                Err(EncryptError::InsufficientSize(size)) => Err(size.required_size),
                written => Ok(written.unwrap_or(0)),
            });
        }
    }

    /// Lets rustls do all that it can: opens records, answers, and encrypts `data` when it may.
    /// True: the handshake is over.
    fn run(&mut self, mut data: &[u8], out: &mut Vec<u8>) -> Result<bool, TlsError> {
        let mut at = 0;
        let is_open = loop {
            let Self { connection, sealed, plain, .. } = &mut *self;
            let UnbufferedStatus { discard, state, .. } =
                connection.process_tls_records(&mut sealed[at..]);
            at += discard;
            match state {
                Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                    while let Some(record) = traffic.next_record() {
                        plain.extend_from_slice(record?.payload);
                    }
                }
                Ok(ConnectionState::EncodeTlsData(message)) => encode(message, out),
                Ok(ConnectionState::TransmitTlsData(sent)) => sent.done(),
                Ok(ConnectionState::WriteTraffic(traffic)) if !data.is_empty() => {
                    encrypt(traffic, std::mem::take(&mut data), out)?;
                }
                Ok(ConnectionState::WriteTraffic(_)) => break true,
                Ok(ConnectionState::BlockedHandshake) => break false,
                Ok(_) => return Err(TlsError::Ended),
                Err(error) => {
                    // An alert tells the server's log of the fault. rustls looks for it in what is
                    // left of the same bytes, in which it knows places: it panics in shorter ones.
                    let state = connection.process_tls_records(&mut sealed[at..]).state;
                    if let Ok(ConnectionState::EncodeTlsData(message)) = state {
                        encode(message, out);
                    }
                    return Err(error.into());
                }
            }
        };
        self.sealed.drain(..at);
        Ok(is_open)
    }
}

impl Debug for Tls {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("plain", &self.plain().len()).finish_non_exhaustive()
    }
}

/// Appends a message that the session itself sends, such as one of the handshake, to `out`.
fn encode(mut message: EncodeTlsData<'_, ClientConnectionData>, out: &mut Vec<u8>) {
    append(out, RECORD_MAX, |room| match message.encode(room) {
        Err(EncodeError::InsufficientSize(size)) => Err(size.required_size),
        written => Ok(written.unwrap_or(0)),
    });
}

/// Appends the records of `data` to `out`.
fn encrypt(
    mut traffic: WriteTraffic<'_, ClientConnectionData>,
    data: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), TlsError> {
    let records = data.len() / RECORD_MAX + 2;
    let mut result = Ok(());
    append(out, data.len() + records * RECORD_MORE, |room| match traffic.encrypt(data, room) {
        Err(EncryptError::InsufficientSize(size)) => Err(size.required_size),
        Err(EncryptError::EncryptExhausted) => {
            result = Err(TlsError::Other(Error::EncryptError));
            Ok(0)
        }
        Ok(n) => Ok(n),
    });
    result
}

/// Appends to `out` the bytes that `write` puts into a buffer of `len` bytes. `write` returns how
/// many it has written, or how many it needs.
fn append(
    out: &mut Vec<u8>,
    mut len: usize,
    mut write: impl FnMut(&mut [u8]) -> Result<usize, usize>,
) {
    let before = out.len();
    loop {
        out.resize(before + len, 0);
        match write(&mut out[before..]) {
            Ok(n) => return out.truncate(before + n),
            // `write` asks for more room once at most; half as much more ends the loop in any case.
            Err(needed) => len = needed.max(len + len / 2),
        }
    }
}

/// Builds rustls' configuration of the texts of the files.
fn config(credentials: &Credentials) -> Result<ClientConfig, TlsError> {
    let [authorities, revoked, certificate, key] = credentials.named();
    let mut roots = RootCertStore::empty();
    for certificate in all::<CertificateDer<'static>>(&authorities)? {
        roots.add(certificate).map_err(|error| unfit(&authorities, &error))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let verifier = match revoked.1 {
        Some(_) => verifier.with_crls(all::<CertificateRevocationListDer<'static>>(&revoked)?),
        None => verifier,
    };
    let verifier = verifier.build().map_err(|error| unfit(&revoked, &error))?;
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_webpki_verifier(verifier);
    if certificate.1.is_none() && key.1.is_none() {
        return Ok(config.with_no_client_auth());
    }
    let chain = all::<CertificateDer<'static>>(&certificate)?;
    let private = PrivateKeyDer::from_pem_slice(text(&key)?.as_bytes());
    let private = private.map_err(|error| unfit(&key, &said(&error)))?;
    config.with_client_auth_cert(chain, private).map_err(|error| unfit(&key, &error))
}

/// The path and the text of a file.
type Named<'a> = (PathBuf, Option<&'a str>);

fn unfit((path, _): &Named<'_>, problem: &dyn fmt::Display) -> TlsError {
    TlsError::File { path: path.clone(), problem: problem.to_string() }
}

fn text<'a>(file: &Named<'a>) -> Result<&'a str, TlsError> {
    file.1.ok_or_else(|| unfit(file, &Errno::NOENT))
}

/// All items of one kind in a PEM file: one at least.
fn all<T: PemObject>(file: &Named<'_>) -> Result<Vec<T>, TlsError> {
    let found = T::pem_slice_iter(text(file)?.as_bytes()).collect::<Result<Vec<T>, _>>();
    let found = found.map_err(|error| unfit(file, &said(&error)))?;
    if found.is_empty() {
        return Err(unfit(file, &"nothing of the kind is in it"));
    }
    Ok(found)
}

/// The error of a PEM file, in words for an operator.
fn said(error: &pem::Error) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        pem::Error::NoItemsFound => "nothing of the kind is in it".to_owned(),
        other => format!("it is no PEM file ({other})"),
    }
}

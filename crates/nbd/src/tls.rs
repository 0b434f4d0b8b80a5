//! `Tls`: a TLS 1.3 session without a socket: the caller passes received bytes in, and sends the
//! bytes that come out.
//!
//! ```text
//! connect(name, ..)     makes a session, with the certificates (`credentials.rs`)
//! shake(out)            false while the handshake needs more bytes of the server; send `out`
//! open(bytes, out)      decrypts received bytes, for plain() and consume(); send `out`
//! unsealed(), seal(out) encrypts the bytes that were appended to unsealed(); send `out`
//! ```
//! rustls parses all bytes of a server. The handshake runs on the disk's thread; later, the worker
//! that has received records decrypts them, at most as many bytes at a time as one receive returns.
//! A server can request key updates without end: rustls accepts 32 of them between two records with
//! data, and then ends the session.

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

/// Bytes that a record needs beside its data: header, content type and tag, rounded up.
const RECORD_MORE: usize = 64;
/// The most bytes of data of a record.
const RECORD_MAX: usize = 16 << 10;

/// Why there is no TLS session, or why it ended. The text continues a sentence about the server.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of this host cannot be used.
    #[error("cannot be authenticated: {} cannot be used: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why the file cannot be used.
        problem: String,
    },
    /// The URI has no name that a certificate could have.
    #[error("cannot be authenticated: {0:?} cannot be in a certificate; set tls-hostname=NAME")]
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
    /// The server's certificate has expired, or is not valid yet.
    #[error("has a certificate that is not valid today")]
    NotToday,
    /// The server's certificate was revoked.
    #[error("has a certificate that ca-crl.pem revokes")]
    Revoked,
    /// The server refuses the client's certificate, or demands one.
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
    /// The text of the error, in which a file has its name without the folder.
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
            // If an authority of the file has only the same name as the signer, rustls reports a
            // bad signature instead of an unknown issuer.
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
    /// Makes a session, before its handshake, with a server whose certificate must have the name
    /// `host`.
    ///
    /// # Errors
    /// [`TlsError::File`]: a certificate or key cannot be used. [`TlsError::Name`]: `host` is no
    /// name that a certificate can have.
    pub(super) fn connect(host: &str, credentials: &Credentials) -> Result<Self, TlsError> {
        let host = host.to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_| TlsError::Name(host))?;
        let config = config(credentials)?;
        let connection = UnbufferedClientConnection::new(Arc::new(config), name)?;
        let (sealed, plain, unsealed) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { connection, sealed, plain, first: 0, unsealed })
    }

    /// Continues the handshake with the bytes received so far. Returns true when it is complete.
    ///
    /// # Errors
    /// [`TlsError`]: the handshake failed; `out` may hold an alert to send.
    pub(super) fn shake(&mut self, out: &mut Vec<u8>) -> Result<bool, TlsError> {
        self.run(&[], out)
    }

    /// Decrypts `bytes` from the socket into [`Self::plain`]. Messages that TLS itself must send
    /// are appended to `out`.
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

    /// The buffer of the bytes that the next [`Self::seal`] will encrypt; the caller appends to it.
    pub(super) fn unsealed(&mut self) -> &mut Vec<u8> {
        &mut self.unsealed
    }

    /// Encrypts the bytes in [`Self::unsealed`], and appends the records to `out`.
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

    /// Appends the alert that ends a session (`close_notify`) to `out`.
    pub(super) fn close(&mut self, out: &mut Vec<u8>) {
        let state = self.connection.process_tls_records(&mut self.sealed).state;
        if let Ok(ConnectionState::WriteTraffic(mut traffic)) = state {
            append(out, RECORD_MORE, |room| match traffic.queue_close_notify(room) {
                Err(EncryptError::InsufficientSize(size)) => Err(size.required_size),
                written => Ok(written.unwrap_or(0)),
            });
        }
    }

    /// Runs rustls' state machine until it needs more bytes: decrypts records into `plain`, appends
    /// messages of the session to `out`, and encrypts `data` once the handshake allows it. Returns
    /// true if the handshake is complete.
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
                    // Send an alert, which tells the server why. rustls makes it in another call,
                    // which must get the rest of the same buffer: rustls remembers offsets in the
                    // buffer, and panics if the buffer is shorter.
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

/// Appends a message of TLS itself, such as one of the handshake, to `out`.
fn encode(mut message: EncodeTlsData<'_, ClientConnectionData>, out: &mut Vec<u8>) {
    append(out, RECORD_MAX, |room| match message.encode(room) {
        Err(EncodeError::InsufficientSize(size)) => Err(size.required_size),
        written => Ok(written.unwrap_or(0)),
    });
}

/// Encrypts `data`, and appends the records to `out`.
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
            // `write` should ask for more room once at most. The buffer grows by half in any case,
            // so that the loop ends.
            Err(needed) => len = needed.max(len + len / 2),
        }
    }
}

/// Builds rustls' configuration from the texts of the files.
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

/// Parses all items of one kind in a PEM file. Fails if there is none.
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

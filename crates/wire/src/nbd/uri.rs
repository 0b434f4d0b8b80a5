//! `Uri`: where an export is (`doc/uri.md` of NBD, with the query keys that libnbd has for TLS).

use super::PORT;

/// Where an NBD server is, and which export is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uri {
    /// The server.
    pub host: Host,
    /// The name of the export; empty: the server's default.
    pub export: String,
    /// The scheme is `nbds` or `nbds+unix`.
    pub tls: bool,
    /// `tls-certificates`: the folder with `ca-cert.pem`, and maybe `client-cert.pem` and
    /// `client-key.pem`.
    pub certificates: Option<String>,
    /// `tls-hostname`: the name that the server's certificate must have, if not the host's.
    pub hostname: Option<String>,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// The path of a Unix socket.
    Unix(String),
    /// A host name or address, and a port.
    Tcp(String, u16),
}

/// Why a text is no NBD URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    /// The scheme is missing, or is not one of NBD's.
    #[error("must begin with nbd://, nbds://, nbd+unix:/// or nbds+unix:///")]
    Scheme,
    /// A Unix URI without the path of its socket.
    #[error("lacks ?socket=PATH, an absolute path")]
    Socket,
    /// A TCP URI without its host.
    #[error("lacks the host")]
    Host,
    /// The port is not a number.
    #[error("the port is no number from 1 to 65535")]
    Port,
    /// A `%` without two hexadecimal digits, or escaped bytes that are not UTF-8.
    #[error("has a % that is not followed by two hexadecimal digits of UTF-8")]
    Escape,
    /// The URI names a user.
    #[error("a user is not supported (TLS with pre-shared keys)")]
    User,
    /// The query has a key that is not known.
    #[error("{0:?} is not known: socket, tls-certificates and tls-hostname are")]
    Key(String),
    /// The query has a TLS key, but the scheme is not one of TLS.
    #[error("tls-certificates and tls-hostname need nbds:// or nbds+unix://")]
    NoTls,
}

impl Uri {
    /// Parses a URI.
    ///
    /// # Errors
    /// [`UriError`].
    pub fn parse(text: &str) -> Result<Self, UriError> {
        let (scheme, rest) = text.split_once("://").ok_or(UriError::Scheme)?;
        let (is_unix, tls) = match scheme {
            "nbd" => (false, false),
            "nbds" => (false, true),
            "nbd+unix" => (true, false),
            "nbds+unix" => (true, true),
            _ => return Err(UriError::Scheme),
        };
        let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = before.split_once('/').unwrap_or((before, ""));
        if authority.contains('@') {
            return Err(UriError::User);
        }
        let (mut socket, mut certificates, mut hostname) = (None, None, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = Some(unescape(value)?);
            match key {
                "socket" if is_unix => socket = value,
                "tls-certificates" => certificates = value,
                "tls-hostname" => hostname = value,
                other => return Err(UriError::Key(other.to_owned())),
            }
        }
        if !tls && (certificates.is_some() || hostname.is_some()) {
            return Err(UriError::NoTls);
        }
        let host = if is_unix {
            let socket = socket.filter(|path| path.starts_with('/') && authority.is_empty());
            Host::Unix(socket.ok_or(UriError::Socket)?)
        } else {
            tcp(authority)?
        };
        Ok(Self { host, export: unescape(export)?, tls, certificates, hostname })
    }
}

fn tcp(authority: &str) -> Result<Host, UriError> {
    // An IPv6 address has colons, so it stands in brackets.
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest),
        None => match authority.find(':') {
            Some(at) => authority.split_at(at),
            None => (authority, ""),
        },
    };
    if host.is_empty() {
        return Err(UriError::Host);
    }
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => PORT,
        Some(digits) => digits.parse().ok().filter(|port| *port > 0).ok_or(UriError::Port)?,
        None => return Err(UriError::Host),
    };
    Ok(Host::Tcp(unescape(host)?, port))
}

/// A part of a URI without its escapes: `%20` becomes a space.
fn unescape(text: &str) -> Result<String, UriError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16));
        let (high, low) = (digit(), digit());
        let value = high.zip(low).and_then(|(high, low)| u8::try_from(high << 4 | low).ok());
        bytes.push(value.filter(|value| *value != 0).ok_or(UriError::Escape)?);
    }
    String::from_utf8(bytes).map_err(|_| UriError::Escape)
}

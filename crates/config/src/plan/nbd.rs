//! `NbdPlan`: a disk that is the export of an NBD server: the keys `nbd` and `reconnect`.

use super::super::tables::RawBlk;
use super::{Place, PlanError};
use manyring_nbd::{Host, Target, Uri};
use manyring_protocol::nbd::{ExportSpec, NAMES_MAX, NbdSpec, NbdTarget};
use serde::Serialize;

/// The address of the disk's server, and how long requests wait while the server is unreachable.
#[derive(Clone, Debug, Serialize)]
pub struct NbdPlan {
    /// The address as the operator wrote it.
    #[serde(rename = "uri")]
    pub text: String,
    /// The parsed address of the server and its export.
    #[serde(skip)]
    pub uri: Uri,
    /// Seconds for which requests wait for a server that is unreachable; `None`: for ever.
    #[serde(rename = "reconnect_seconds")]
    pub reconnect: Option<u64>,
}

/// The largest `reconnect` in seconds: a year.
const RECONNECT_MAX: u64 = 365 * 24 * 3600;

impl NbdPlan {
    /// Parses the keys `nbd` and `reconnect`; `None`: there is no key `nbd`.
    pub(super) fn new(raw: &RawBlk, place: &Place) -> Result<Option<Self>, PlanError> {
        let Some(text) = &raw.nbd else {
            return match raw.reconnect {
                Some(_) if !raw.needs_helper() => {
                    place.error("reconnect", format!("needs {}", place.key("nbd")))
                }
                _ => Ok(None),
            };
        };
        let uri = match Uri::parse(text) {
            // A certificate is checked against a host name, and a unix socket has none.
            Ok(uri) if uri.tls && matches!(uri.host, Host::Unix(_)) && uri.hostname.is_none() => {
                let problem = "lacks tls-hostname=NAME, the name in the server's certificate";
                return place.error("nbd", format!("{text:?} {problem}"));
            }
            Ok(uri) => uri,
            Err(error) => return place.error("nbd", format!("{text:?} {error}")),
        };
        let Target { export, tls } = Target::of(&uri);
        let export = serde_json::to_string(&export).map_or(usize::MAX, |text| text.len());
        if export > NAMES_MAX.0 || tls.is_some_and(|name| name.len() > NAMES_MAX.1) {
            return place.error("nbd", "the name of the export, or that of the host, is too long");
        }
        Ok(Some(Self { text: text.clone(), uri, reconnect: max_wait(raw, place)? }))
    }

    /// Makes the description of the disk for a device process.
    pub(super) fn spec(&self, told: ExportSpec) -> NbdSpec {
        let Self {
            uri,
            reconnect,
            // The address as the operator typed it; the supervisor shows it, and connects.
            text: _,
        } = self;
        // The supervisor alone uses the rest of the address.
        let Target { export, tls } = Target::of(uri);
        NbdSpec { target: NbdTarget { export, tls }, reconnect: *reconnect, told }
    }
}

/// Parses the key `reconnect`: seconds for which requests wait for a server that is unreachable;
/// `None`: for ever.
pub(super) fn max_wait(raw: &RawBlk, place: &Place) -> Result<Option<u64>, PlanError> {
    match raw.reconnect.as_deref() {
        None | Some("forever") => Ok(None),
        Some(text) => match seconds(text) {
            Some(seconds) => Ok(Some(seconds)),
            None => {
                let problem = format!("{text:?} is neither \"forever\" nor a time like 60s");
                place.error("reconnect", problem)
            }
        },
    }
}

/// Parses a time like `60s`, `5m` or `1h` into seconds, a year at most.
fn seconds(text: &str) -> Option<u64> {
    let unit = text.chars().last()?;
    let factor = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        _ => return None,
    };
    let number: u64 = text[..text.len() - 1].parse().ok()?;
    number.checked_mul(factor).filter(|seconds| *seconds <= RECONNECT_MAX)
}

#[cfg(test)]
mod tests {
    use super::super::DiskPlan;

    fn disk(keys: &str) -> Result<DiskPlan, String> {
        let text = format!("[[blk]]\nname = 'a'\nsocket_path = '/s'\n{keys}");
        crate::parse(&text).map(|plan| plan.blk[0].disk.clone())
    }

    #[test]
    fn a_disk_of_a_server_has_an_address_and_a_patience() {
        for (reconnect, expected) in [
            ("", None),
            ("reconnect = 'forever'", None),
            ("reconnect = '60s'", Some(60)),
            ("reconnect = '5m'", Some(300)),
            ("reconnect = '1h'", Some(3600)),
            ("reconnect = '0s'", Some(0)),
        ] {
            let found = disk(&format!("nbd = 'nbd://host/vm'\n{reconnect}"));
            let Ok(DiskPlan::Nbd(plan)) = found else { panic!("{reconnect}: {found:?}") };
            assert_eq!((plan.text.as_str(), plan.reconnect), ("nbd://host/vm", expected));
        }
    }

    #[test]
    fn names_that_are_longer_than_a_message_can_have_are_refused() {
        for (length, fits) in [(4000, true), (4096, false)] {
            let found = disk(&format!("nbd = 'nbd://h/{}'", "a".repeat(length)));
            assert_eq!(found.is_ok(), fits, "{length}: {found:?}");
        }
        let found = disk(&format!("nbd = 'nbds://h/?tls-hostname={}'", "a".repeat(254)));
        assert!(found.unwrap_err().contains("is too long"));
    }

    #[test]
    fn a_wrong_address_or_patience_names_its_key() {
        for (keys, problem) in [
            ("nbd = '/run/nbd.sock'", "nbd: \"/run/nbd.sock\" must begin with nbd://"),
            ("nbd = 'nbd+unix:///'", "nbd: \"nbd+unix:///\" lacks ?socket=PATH"),
            ("nbd = 'nbds+unix:///?socket=/s'", "lacks tls-hostname=NAME"),
            ("nbd = 'nbd://h'\nreconnect = 'never'", "reconnect: \"never\" is neither"),
            ("nbd = 'nbd://h'\nreconnect = '60'", "reconnect: \"60\" is neither"),
            ("nbd = 'nbd://h'\nreconnect = 's'", "reconnect: \"s\" is neither"),
            ("null = '1G'\nreconnect = '60s'", "reconnect: needs nbd"),
            ("nbd = 'nbd://h'\nnull = '1G'", "file: only one of file, null, memory and nbd"),
            ("nbd = 'nbd://h'\ndirect = true", "direct: needs file"),
        ] {
            let error = disk(keys).unwrap_err();
            assert!(error.contains(problem), "{keys}: {error}");
        }
    }
}

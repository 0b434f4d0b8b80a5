//! `NbdPlan`: the disk of an NBD server: the keys `nbd` and `reconnect`.

use super::super::raw::RawBlk;
use super::{Place, PlanError};
use manyring_nbd::{Host, Uri};
use serde::Serialize;

/// Where the disk is, and how long its server may be gone.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NbdPlan {
    /// As it was written.
    #[serde(rename = "uri")]
    pub(crate) text: String,
    #[serde(skip)]
    pub(crate) uri: Uri,
    /// Seconds for which requests wait for a server that is gone; `None`: for ever.
    #[serde(rename = "reconnect_seconds")]
    pub(crate) reconnect: Option<u64>,
}

/// Seconds at most: a year.
const RECONNECT_MAX: u64 = 365 * 24 * 3600;

impl NbdPlan {
    /// The disk that the keys name; `None`: they name none.
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
            // A certificate is for a name, and a socket has none.
            Ok(uri) if uri.tls && matches!(uri.host, Host::Unix(_)) && uri.hostname.is_none() => {
                let problem = "lacks tls-hostname=NAME, the name in the server's certificate";
                return place.error("nbd", format!("{text:?} {problem}"));
            }
            Ok(uri) => uri,
            Err(error) => return place.error("nbd", format!("{text:?} {error}")),
        };
        Ok(Some(Self { text: text.clone(), uri, reconnect: max_wait(raw, place)? }))
    }
}

/// Seconds for which requests wait for a server that is gone; `None`: for ever.
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

/// `60s`, `5m` or `1h` in seconds.
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
    use crate::config;

    fn disk(keys: &str) -> Result<DiskPlan, String> {
        let text = format!("[[blk]]\nname = 'a'\nsocket_path = '/s'\n{keys}");
        config::parse(&text).map(|plan| plan.blk[0].disk.clone())
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
            ("nbd = 'nbd://h'\ndomain = 'd'", "domain: cannot be combined with nbd"),
        ] {
            let error = disk(keys).unwrap_err();
            assert!(error.contains(problem), "{keys}: {error}");
        }
    }
}

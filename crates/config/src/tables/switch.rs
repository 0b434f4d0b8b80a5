//! The keys of a switch as they are written.

use serde::Deserialize;

/// `[[switch]]`
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawSwitch {
    /// Name of the switch, unique.
    pub name: Option<String>,
    /// Seconds without a frame from an address after which the switch forgets the address, 1 to
    /// 65536; default 300.
    pub age: Option<u32>,
    /// The groups 01:80:c2:00:00:00 to 0f to which frames are forwarded: bit n is group n, as in
    /// Linux's `group_fwd_mask`; default 0: none.
    pub group_fwd_mask: Option<u32>,
    /// The interface by which the guests of the switch reach the host. A tap is joined if it
    /// exists, else created.
    pub uplink: Option<String>,
    /// Kind of the uplink: `tap` (the default), `macvtap`, or `xdp`.
    pub uplink_kind: Option<String>,
}

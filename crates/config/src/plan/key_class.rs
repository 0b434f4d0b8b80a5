//! When a changed key takes effect: THE TABLE, a row for each key of a device.

/// When another value of a key takes effect while the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// At once, whoever is connected.
    Live,
    /// At the next session: a front-end that is connected keeps what it has seen.
    Reconnect,
    /// The device is removed and added again; refused while a front-end is connected.
    Replace,
}

impl Class {
    /// Its name in answers and documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Reconnect => "reconnect",
            Self::Replace => "replace",
        }
    }
}

/// The class of each key of `[[blk]]` and `[[net]]`.
/// Each key of a device, with what a change of the key costs.
pub(crate) const KEYS: [(&str, Class); 60] = {
    use Class::{Live, Reconnect, Replace};
    [
        ("name", Replace),
        ("kind", Replace),
        ("socket_path", Replace),
        ("fd", Replace),
        ("client", Replace),
        ("socket_owner", Replace),
        ("socket_group", Replace),
        ("socket_mode", Replace),
        ("one_off", Reconnect),
        ("handshake_timeout", Reconnect),
        ("memory_on_disk", Reconnect),
        ("memory_max", Reconnect),
        ("limit", Live),
        ("file", Replace),
        ("null", Replace),
        ("memory", Replace),
        ("nbd", Replace),
        ("reconnect", Replace),
        ("direct", Replace),
        ("lock_with_rings", Replace),
        ("format", Replace),
        ("read_only", Reconnect),
        ("logical_block_size", Reconnect),
        ("num_queues", Reconnect),
        ("queue_size", Reconnect),
        ("queue_workers", Reconnect),
        ("moderation", Reconnect),
        ("serial", Reconnect),
        ("cache", Reconnect),
        ("on_full", Reconnect),
        ("fault", Replace),
        ("domain", Replace),
        ("tap", Replace),
        ("must_exist", Replace),
        ("tap_fds", Replace),
        ("macvtap", Replace),
        ("xdp", Replace),
        ("zero_copy", Replace),
        ("generate", Replace),
        ("switch", Replace),
        ("vlan", Replace),
        ("trunk", Replace),
        ("isolated", Replace),
        ("anti_spoof", Replace),
        ("macs_max", Replace),
        ("floods_max", Replace),
        ("queue_pairs", Reconnect),
        ("reclaim", Reconnect),
        ("offload", Reconnect),
        ("mac", Reconnect),
        ("mtu", Live),
        ("speed", Reconnect),
        ("bridge", Reconnect),
        ("up", Reconnect),
        ("sndbuf", Reconnect),
        ("txqueuelen", Reconnect),
        ("merge", Reconnect),
        ("steer", Reconnect),
        ("hash_report", Reconnect),
        ("pcap", Replace),
    ]
};

/// The class of a key; none if there is no such key.
pub fn class_of(key: &str) -> Option<Class> {
    KEYS.iter().find(|(name, _)| *name == key).map(|(_, class)| *class)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys of a table, as the error for one that there is not tells them.
    fn keys(kind: &str) -> Vec<String> {
        let error = crate::device("a", &format!(r#"{{"kind": "{kind}", "none": 1}}"#));
        let error = error.unwrap_err();
        let names = error.split('`').skip(3).step_by(2);
        names.map(str::to_owned).collect()
    }

    #[test]
    fn every_key_of_a_device_has_a_class_and_no_other_key_has_one() {
        let all: Vec<_> = keys("blk").into_iter().chain(keys("net")).collect();
        assert!(all.len() > 50, "{all:?}");
        for key in &all {
            assert!(class_of(key).is_some(), "{key}");
        }
        for (key, _) in KEYS.iter().filter(|(key, _)| *key != "kind") {
            assert!(all.iter().any(|other| other == key), "{key}");
        }
    }
}

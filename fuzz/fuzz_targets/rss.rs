//! Input: the hash by which a guest chooses queues. Any bytes are a configuration or an error; a
//! configuration is written as it was read, and leads each frame to a pair that it names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use manyring_wire::net::flow::FLOW_BYTES;
use manyring_wire::net::rss::{HashConfig, HashReport, Hasher, KEY_SIZE_MAX, Rss, RssConfig};

fuzz_target!(|input: (Vec<u8>, Vec<Vec<u8>>)| {
    let (bytes, frames) = input;
    if let Ok(hash) = HashConfig::parse(&bytes) {
        assert!(hash.key.len() <= KEY_SIZE_MAX);
        let again = HashConfig::parse(&hash.emit());
        assert_eq!(again.as_ref(), Ok(&hash));
        let hasher = Hasher::new(hash);
        for frame in &frames {
            let found = hasher.hash_of(frame);
            assert!(found.report != HashReport::None || found.value == 0);
        }
    }
    let Ok(config) = RssConfig::parse(&bytes) else { return };
    assert_eq!(config.emit(), bytes);
    let rss = Rss::new(config.clone());
    for frame in &frames {
        let pair = rss.pair_of(frame);
        assert!(pair < config.pairs());
        let is_named = |named: &u16| pair == usize::from(*named);
        assert!(is_named(&config.unclassified) || config.table.iter().any(is_named));
        let start = &frame[..frame.len().min(FLOW_BYTES)];
        assert_eq!(rss.pair_of(start), pair, "more than the first bytes were looked at");
    }
});

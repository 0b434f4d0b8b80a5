//! Numbers that look random and are the same for the same seed.

/// A sequence of numbers (splitmix64).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `limit`, which is not 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// One of `all`, which is not empty.
    pub(super) fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        let index = self.below(all.len() as u64);
        all[usize::try_from(index).unwrap_or(0)]
    }
}

/// Every bit of the result depends on every bit of `x`.
pub(super) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Fills `bytes`, whole words of 8, with what belongs to the three numbers and nowhere else.
pub(super) fn stamp(bytes: &mut [u8], owner: u64, place: u64, version: u64) {
    let base = mix(owner ^ mix(place ^ mix(version)));
    let (words, _) = bytes.as_chunks_mut::<8>();
    let mut value = base;
    for word in words {
        *word = value.to_le_bytes();
        value = value.wrapping_add(base | 1).rotate_left(7);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_again_and_another_seed_others() {
        let of = |seed| {
            let mut random = Random::new(seed);
            [random.next(), random.below(10), random.pick(&[1, 2, 3])]
        };
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }

    #[test]
    fn stamps_of_other_owners_places_and_versions_differ_in_every_word() {
        let of = |owner, place, version| {
            let mut bytes = [0; 512];
            stamp(&mut bytes, owner, place, version);
            bytes
        };
        let one = of(1, 2, 3);
        assert_eq!(one, of(1, 2, 3));
        for other in [of(2, 2, 3), of(1, 3, 3), of(1, 2, 4), [0; 512]] {
            let pairs = one.chunks(8).zip(other.chunks(8));
            assert!(pairs.into_iter().all(|(a, b)| a != b));
        }
    }
}

//! The policy of returning buffers in groups, on scripted guests and a clock of their own.

use super::*;

/// A guest: how large its frames are while buffers go back at once and while they are kept, and
/// how far apart.
#[derive(Clone, Copy)]
struct Guest {
    size_without: u64,
    size_with: u64,
    gap_ns: u64,
}

const MERGING: Guest = Guest { size_without: 300, size_with: 500, gap_ns: 20_000 };
const ASKING: Guest = Guest { size_without: 300, size_with: 300, gap_ns: 20_000 };

struct Scene {
    policy: ReclaimPolicy,
    now_ns: u64,
}

impl Scene {
    fn new() -> Self {
        Self { policy: ReclaimPolicy::new(), now_ns: 1 }
    }

    /// Sends this many frames one by one. Returns for how many of them buffers were kept.
    fn send(&mut self, guest: Guest, frames: u64) -> u64 {
        let mut kept = 0;
        for _ in 0..frames {
            self.now_ns += guest.gap_ns;
            let size = if self.policy.keeps() { guest.size_with } else { guest.size_without };
            self.policy.on_burst(self.now_ns, 1, size);
            kept += u64::from(self.policy.keeps());
        }
        kept
    }
}

#[test]
fn buffers_are_kept_of_frames_that_become_longer_by_it_and_of_no_others() {
    for (what, size_without, size_with, gap_ns, is_kept) in [
        ("a stream of small writes", 300, 500, 20_000, true),
        ("a tenth longer", 300, 330, 20_000, true),
        ("as slow as it may be", 300, 500, 140_000, true),
        ("requests and answers", 300, 300, 20_000, false),
        ("a little longer", 300, 310, 20_000, false),
        ("shorter", 300, 200, 20_000, false),
        ("long frames", 1500, 3000, 20_000, false),
        ("too slow", 300, 500, 200_000, false),
        ("with pauses between", 300, 500, 1_000_000, false),
    ] {
        let kept = Scene::new().send(Guest { size_without, size_with, gap_ns }, 20_000);
        if is_kept {
            assert!(kept > 18_000, "{what}: {kept}");
        } else {
            assert!(kept < 1_000, "{what}: {kept}");
        }
    }
}

#[test]
fn a_trial_in_vain_is_short_and_each_one_is_twice_as_far_away() {
    let mut scene = Scene::new();
    // The waits are 8, 16, .. epochs: one trial in each of these stretches.
    let kept: Vec<u64> = (0..6).map(|power| scene.send(ASKING, 1024 << power)).collect();
    assert_eq!(kept, [GLANCE_FRAMES; 6]);
    // In the long run one frame in a thousand.
    let kept = scene.send(ASKING, 1_000_000);
    assert!((500..=1000).contains(&kept), "{kept}");
}

#[test]
fn a_stream_that_becomes_requests_and_answers_is_left_within_two_thousand_frames() {
    for request_size in [100, 300, 499, 700, 1000] {
        let mut scene = Scene::new();
        assert!(scene.send(MERGING, 10_000) > 9_000);
        let asking = Guest { size_without: request_size, size_with: request_size, ..MERGING };
        let kept = scene.send(asking, 50_000);
        let most = u64::from(ON_MAX) * EPOCH_FRAMES + 1024;
        assert!(kept <= most, "{request_size}: {kept} of {most}");
    }
}

#[test]
fn after_a_pause_buffers_go_back_at_once_until_the_next_trial() {
    let mut scene = Scene::new();
    scene.send(MERGING, 10_000);
    assert!(scene.policy.keeps());
    scene.now_ns += PAUSE_NS;
    assert_eq!(scene.send(MERGING, 100), 0);
    assert!(scene.send(MERGING, 10_000) > 9_000);
}

#[test]
fn a_clock_that_stands_or_a_burst_of_any_size_does_no_harm() {
    let mut scene = Scene::new();
    for frames in [1, 64, 10_000, 1] {
        scene.policy.on_burst(scene.now_ns, frames, frames * 60);
        scene.policy.on_burst(0, frames, frames * 65_553);
    }
}

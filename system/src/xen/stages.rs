//! The duration of each stage of a boot, as a line of its own.

use std::time::Instant;

/// Times stages, one after the other.
#[derive(Debug)]
pub(super) struct Stages {
    is_shown: bool,
    began: Instant,
}

impl Stages {
    /// The first stage begins.
    pub(super) fn begin(is_shown: bool) -> Self {
        Self { is_shown, began: Instant::now() }
    }

    /// A stage begins that does not follow on the last one.
    pub(super) fn again(&mut self) {
        self.began = Instant::now();
    }

    /// A stage has ended, and the next begins.
    pub(super) fn end(&mut self, stage: &str) {
        if self.is_shown {
            println!("  {stage:<44} {:>6.1} s", self.began.elapsed().as_secs_f64());
        }
        self.again();
    }
}

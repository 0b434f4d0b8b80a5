//! stub
pub(crate) mod fuzz {
    pub(crate) const SMOKE_SECONDS: u64 = 240;
    pub(crate) fn smoke(_s: u64) -> super::Outcome {
        Ok(())
    }
}
pub(crate) mod bench {
    pub(crate) fn smoke() -> super::Outcome {
        Ok(())
    }
}
pub(crate) mod deny {
    pub(crate) fn run() -> super::Outcome {
        Ok(())
    }
}
use manyring_system::Outcome;
pub(crate) fn loom() -> Outcome {
    Ok(())
}
pub(crate) fn run() -> Outcome {
    Ok(())
}

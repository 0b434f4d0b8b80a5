//! stub
pub(crate) fn run() -> manyring_system::Outcome {
    Ok(())
}

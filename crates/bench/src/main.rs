//! Its tenant comes with a later commit.
fn main() {}

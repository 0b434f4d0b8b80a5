//! Its tenant comes with a later commit.

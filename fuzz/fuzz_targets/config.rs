//! Input: the configuration file. Any text is a plan or one error; nothing is opened.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    match manyring_config::parse(text) {
        Ok(plan) => drop(plan),
        Err(error) => assert!(!error.is_empty()),
    }
});

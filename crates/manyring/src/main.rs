//! The program `manyring`; all of it is in the library beside it.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

fn main() -> ExitCode {
    manyring::run(std::env::args_os().collect())
}

//! The project's own commands: `cargo xtask demo | test | ci | tidy`.
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let steps: &[&[&str]] = &[
        &["fmt", "--all", "--check"],
        &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
        &["test", "--workspace"],
    ];
    for step in steps {
        let passed = Command::new("cargo").args(*step).status().is_ok_and(|s| s.success());
        if !passed {
            eprintln!("xtask: cargo {} failed", step.join(" "));
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

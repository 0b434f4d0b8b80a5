//! `cargo xtask arm64`: the tests of the crates that know formats, guest memory and rings, built
//! for 64-bit ARM and run under emulation of its user mode. The emulator keeps the stronger memory
//! order of the host, so it does not show what an ARM CPU may reorder: `cargo xtask loom` does.

use crate::cargo::{cargo, see};
use crate::package::ARM64;
use crate::programs::test;
use manyring_system::command::command;
use manyring_system::packages::need;
use manyring_system::{Outcome, check};

/// The crates whose tests need nothing of a host but its memory.
const CRATES: [&str; 3] = ["manyring-wire", "manyring-memory", "manyring-queue"];

/// Tests that the emulator cannot run, and why.
const LEFT_OUT: [(&str, &str); 5] = [
    ("a_device_that_does_not_know_the_request", "the emulator answers a request it does not know"),
    ("a_fault_outside_of_our_memory_ends", "it starts itself, and the host runs no such program"),
    ("a_fault_outside_of_our_memory_goes", "it starts itself, and the host runs no such program"),
    ("whoever_may_not_touch_or_unmap", "it starts itself, and the host runs no such program"),
    ("vast_files_leave_half_of_the_addre", "the emulator notes each page of terabytes"),
];

/// Builds the tests and runs them.
pub(crate) fn run() -> Outcome {
    need("a build for arm64", ARM64.packages)?;
    need("programs of arm64", &["qemu-user"])?;
    see(command("rustup").args(["target", "add", ARM64.target]))?;
    let mut tests = cargo(&["test", "--no-fail-fast", "--target", ARM64.target]);
    tests.args(CRATES.iter().flat_map(|name| ["--package", name])).envs(ARM64.linker);
    tests.args(["--lib", "--tests", "--"]);
    for (name, why) in LEFT_OUT {
        println!("xtask: {name}.. is left out: {why}");
        tests.args(["--skip", name]);
    }
    let runner = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER";
    let totals = test(tests.env(runner, "qemu-aarch64 -L /usr/aarch64-linux-gnu"))?;
    println!("\n{}", totals.report());
    check(totals.failed == 0, || "not every test passed for arm64".into())
}

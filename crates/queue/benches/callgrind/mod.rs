//! How the benches count instructions: the bench starts itself under valgrind, once for each row.
//!
//! A count must be the same on every run, whatever else the machine does, and on every x86-64. It
//! depends on the compiler, which is pinned, and on no time. The other influences are pinned here:
//! which `memcpy` the C library picks for the CPU that it finds, and the options of valgrind.

use std::process::Command;

/// Makes the C library copy 16 bytes at a time, as it does on the oldest x86-64: not 32, and not
/// with `rep movsb`. `AVX_Fast_Unaligned_Load` decides between 16 and 32; the rest is for functions
/// besides `memcpy`, in the names of older and newer releases.
const PLAIN_CPU: &str = "glibc.cpu.hwcaps=-AVX_Fast_Unaligned_Load,-AVX512VL,-AVX2,-AVX2_Usable,\
    -AVX,-ERMS,-FSRM,-SSSE3";

/// Instructions that this program executes in its own code and the C library's, not in the kernel,
/// between entry and return of the function `symbol` (a pattern of callgrind), when it is started
/// with `arguments`.
pub(crate) fn count(symbol: &str, arguments: &[&str]) -> f64 {
    let output = Command::new("valgrind")
        .args(["--command-line-only=yes", "--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg("--collect-atstart=no")
        .arg(format!("--toggle-collect={symbol}"))
        .arg(std::env::current_exe().unwrap())
        .args(arguments)
        .env("GLIBC_TUNABLES", PLAIN_CPU)
        .output()
        .expect("valgrind does not run: apt-get install valgrind");
    let text = String::from_utf8_lossy(&output.stderr);
    let collected = text
        .lines()
        .find_map(|line| line.split_once("Collected :"))
        .and_then(|(_, number)| number.trim().parse::<f64>().ok());
    let collected = collected.unwrap_or_else(|| panic!("valgrind says:\n{text}"));
    assert!(output.status.success() && collected > 0.0, "nothing in {symbol}:\n{text}");
    collected
}

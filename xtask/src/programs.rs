//! Test programs: built by cargo, run three at a time, shown one after another, and counted. One of
//! several modules runs as a process for each of them.

use crate::cargo::{self, cargo, forget_our_package};
use crate::forms::{Form, ISOLATE, runs_by_default_too};
use crate::watched::{Watched, to_end};
use manyring_system::command::output;
use manyring_system::runner::Totals;
use manyring_system::watch::{self, UnderWay};
use manyring_system::{Outcome, check, lanes};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Test programs that run at the same time. Most of them wait most of the time: for a time limit,
/// for a daemon's start.
const AT_ONCE: usize = 3;

/// How long a test program, or a module of one, may take. The longest take a hundred seconds.
const LIMIT: Duration = Duration::from_secs(400);

/// Runs the test programs of the workspace.
pub(crate) fn workspace() -> Outcome<Totals> {
    let (mut programs, start) = (Programs::default(), Instant::now());
    let (mut spent, mut success) = (Duration::ZERO, true);
    let built = built()?;
    check(!built.is_empty(), || "the workspace has no test program".into())?;
    let mut parts = Vec::new();
    for program in built {
        parts.extend(program.in_parts()?);
    }
    lanes::each(parts, AT_ONCE, run, |ended| {
        println!("{}", ended.text);
        ended.text.lines().for_each(|line| programs.hear(line));
        success &= ended.success;
        spent += ended.spent;
    });
    let (took, spent) = (start.elapsed().as_secs_f64(), spent.as_secs_f64());
    println!("\nthe test programs took {took:.1} s, and {spent:.1} s of CPU time");
    Ok(programs.end(success))
}

/// Runs the examples in the documentation of the workspace.
pub(crate) fn examples() -> Outcome<Totals> {
    test(&mut cargo(&["test", "--workspace", "--no-fail-fast", "--doc"]))
}

/// A test program that cargo has built, or a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Program {
    /// Its source, below the folder of all crates.
    source: String,
    path: PathBuf,
    /// Where cargo would run it: the folder of its package.
    folder: PathBuf,
    /// One module of it; `None`: all of it.
    part: Option<Part>,
}

/// A module of a test program, which runs as a process of its own: so long modules of one program
/// run beside each other, and what a test does to its process, no other module meets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Part {
    module: String,
    /// The whole names of its tests.
    tests: Vec<String>,
    form: Form,
}

/// Programs whose tests wait for most of their time, and the threads that they run on; others have
/// one for each CPU.
const WAITING: [(&str, &str); 1] = [("nbd/src/lib.rs", "6")];

/// The programs whose modules run one after another: their tests measure how long others wait, and
/// do to the machine what makes others wait.
const WHOLE: [&str; 1] = ["manyring/tests/apart/main.rs"];

impl Program {
    /// The program, or its parts if it is a folder of modules.
    fn in_parts(self) -> Outcome<Vec<Self>> {
        let is_folder = self.source.contains("/tests/") && self.source.ends_with("/main.rs");
        if !is_folder || WHOLE.contains(&self.source.as_str()) {
            return Ok(vec![self]);
        }
        let parts = parts(&self.list()?);
        check(!parts.is_empty(), || format!("{} lists no test", self.path.display()))?;
        let in_forms = parts.into_iter().flat_map(|part| {
            let forms = Form::of(&self.source, &part.module);
            forms.iter().map(move |form| Part { form: *form, ..part.clone() })
        });
        Ok(in_forms.map(|part| Self { part: Some(part), ..self.clone() }).collect())
    }

    /// What it lists: a line `NAME: test` for each of its tests.
    fn list(&self) -> Outcome<String> {
        let mut command = self.command();
        let list = || output(command.args(["--list", "--format", "terse"]));
        let listed = watch::within(&format!("the list of {}", self.source), LIMIT, list)?;
        Ok(String::from_utf8_lossy(&listed).into_owned())
    }

    /// The whole names of the tests that it runs.
    fn tests(&self) -> Outcome<Vec<String>> {
        if let Some(part) = &self.part {
            return Ok(part.tests.clone());
        }
        let listed = self.list()?;
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    }

    /// Runs it where and as cargo would.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        forget_our_package(&mut command);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        if let Some((_, threads)) = WAITING.iter().find(|(source, _)| *source == self.source) {
            command.env("RUST_TEST_THREADS", threads);
        }
        if self.part.as_ref().is_some_and(|part| part.form.is_isolated()) {
            command.env(ISOLATE, "1");
        }
        command
    }

    /// The line that cargo says of it, with the module and its form.
    fn line(&self) -> String {
        let words = |part: &Part| format!(", {}{}", part.module, part.form.words());
        let part = self.part.as_ref().map(words).unwrap_or_default();
        format!("     Running {}{part} ({})\n", self.source, self.path.display())
    }
}

/// The modules of a program that lists its tests, a line `MODULE::NAME: test` for each. A test of
/// no module is in `main`.
fn parts(listed: &str) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for test in listed.lines().filter_map(|line| line.strip_suffix(": test")) {
        let module = test.split_once("::").map_or("main", |(module, _)| module);
        let at = parts.iter().position(|part| part.module == module).unwrap_or_else(|| {
            parts.push(Part { module: module.to_owned(), ..Part::default() });
            parts.len() - 1
        });
        if let Some(part) = parts.get_mut(at) {
            part.tests.push(test.to_owned());
        }
    }
    parts
}

/// Builds the test programs of the workspace; their order is cargo's.
fn built() -> Outcome<Vec<Program>> {
    let mut build = cargo(&["test", "--workspace", "--no-run"]);
    build.args(["--message-format", "json-render-diagnostics"]).stderr(Stdio::inherit());
    let messages = watch::within("the build of the tests", cargo::LIMIT, || output(&mut build))?;
    Ok(String::from_utf8_lossy(&messages).lines().filter_map(built_program).collect())
}

/// A line of `cargo --message-format json` that says where a test program lies.
fn built_program(message: &str) -> Option<Program> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    if !message.pointer("/profile/test")?.as_bool()? {
        return None;
    }
    let path = message.get("executable")?.as_str()?.into();
    let manifest = Path::new(message.get("manifest_path")?.as_str()?);
    let source = Path::new(message.pointer("/target/src_path")?.as_str()?);
    let folder = manifest.parent()?;
    let source = source.strip_prefix(folder.parent()?).unwrap_or(source).display().to_string();
    Some(Program { source, path, folder: folder.to_owned(), part: None })
}

/// The result of a test program.
struct Ended {
    /// Its output, below the line that cargo would have printed above it.
    text: String,
    success: bool,
    /// CPU time of it and of what it waited for.
    spent: Duration,
}

fn run(program: Program) -> Ended {
    run_within(program, LIMIT)
}

fn run_within(program: Program, limit: Duration) -> Ended {
    // In the form in which cargo says it, which `Programs` reads.
    let mut text = program.line();
    let (_under_way, start) = (UnderWay::begin(text.trim()), Instant::now());
    let (success, spent) = match run_to_end(&program, limit, &mut text) {
        Ok(ended) => ended,
        Err(sentence) => {
            text.push_str(&format!("xtask: {sentence}\n"));
            (false, Duration::ZERO)
        }
    };
    let (took, cpu) = (start.elapsed().as_secs_f64(), spent.as_secs_f64());
    text.push_str(&format!("     Took {took:.1} s, and {cpu:.1} s of CPU time"));
    Ended { text, success, spent }
}

/// Whether it succeeded, and the CPU time that it used.
fn run_to_end(program: &Program, limit: Duration, text: &mut String) -> Outcome<(bool, Duration)> {
    let mut command = program.command();
    if let Some(part) = &program.part {
        command.arg("--exact").args(&part.tests);
    }
    let mut bytes = Vec::new();
    let ended = to_end(&mut command, limit, |chunk| bytes.extend_from_slice(chunk));
    let said = String::from_utf8_lossy(&bytes);
    text.push_str(&said);
    let Watched { status, spent, fault } =
        ended.map_err(|sentence| format!("{}: {sentence}", program.path.display()))?;
    let Some(fault) = fault else { return Ok((status.success(), spent)) };
    // A line of its own, whatever was said without an end of its line.
    text.push_str(&format!("\n{}{}\n", GIVEN_UP, fault.sentence));
    let tests = program.tests()?;
    for test in unfinished(&tests, &said, &fault.threads) {
        text.push_str(&format!("{HANGING}{test}\n"));
    }
    text.push_str(&fault.processes);
    Ok((false, spent))
}

/// The tests that had begun and not ended: those without a result that a thread of the program is
/// called after. The kernel keeps 15 bytes of a thread's name; libtest begins its tests in the
/// order in which it lists them, so of several with one beginning the first ones had begun.
fn unfinished<'a>(tests: &'a [String], said: &str, threads: &[String]) -> Vec<&'a str> {
    let mut threads = threads.to_vec();
    let has_result = |test: &str| {
        let line = format!("test {test} ... ");
        said.lines().any(|said| said.strip_prefix(&line).is_some_and(|how| !how.is_empty()))
    };
    let is_running = |test: &&str| {
        let name = &test.as_bytes()[..test.len().min(THREAD_NAME_MAX)];
        let thread = threads.iter().position(|thread| thread.as_bytes() == name);
        thread.map(|thread| threads.swap_remove(thread)).is_some()
    };
    tests.iter().map(String::as_str).filter(|test| !has_result(test)).filter(is_running).collect()
}

/// Bytes of a thread's name that the kernel keeps.
const THREAD_NAME_MAX: usize = 15;
/// In front of the reason why a program was given up.
const GIVEN_UP: &str = "xtask: given up: ";
/// In front of a test that had begun and not ended.
const HANGING: &str = "xtask: had begun and not ended: ";

/// Runs `cargo test` with arguments, shows in one piece what it says, and counts.
pub(crate) fn test(command: &mut Command) -> Outcome<Totals> {
    let _under_way = UnderWay::begin("cargo test");
    // The messages of cargo about test programs are parsed, whatever the user's settings are.
    command.env("CARGO_TERM_COLOR", "never").env("CARGO_TERM_QUIET", "false");
    let (mut programs, mut said) = (Programs::default(), Vec::new());
    let ended = to_end(command, cargo::LIMIT, |chunk| said.extend_from_slice(chunk))?;
    let mut text = String::from_utf8_lossy(&said).into_owned();
    if let Some(fault) = &ended.fault {
        text.push_str(&format!("\n{GIVEN_UP}{}\n{}", fault.sentence, fault.processes));
    }
    println!("{text}");
    text.lines().for_each(|line| programs.hear(line));
    Ok(programs.end(ended.status.success() && ended.fault.is_none()))
}

/// The output of the test programs of one `cargo test`, as it was parsed.
#[derive(Debug, Default)]
struct Programs {
    totals: Totals,
    /// How many have begun.
    begun: u64,
    /// The one that has not ended, and which module of it.
    running: Option<(String, String)>,
    /// The one that began last, whether it has ended or not.
    last: (String, String),
    /// Tests of that one which have passed without a look, because another run of it looks.
    elsewhere: u64,
}

impl Programs {
    fn hear(&mut self, line: &str) {
        if let Some(running) = program(line) {
            self.give_up();
            self.begun += 1;
            self.last = running.clone();
            self.running = Some(running);
        } else if let Some((passed, failed)) = parse_result(line) {
            self.running = None;
            self.totals.passed += passed.saturating_sub(std::mem::take(&mut self.elsewhere));
            self.totals.failed += failed;
        } else if let Some(name) = parse_failure(line) {
            self.totals.names.push(self.named(name));
        } else if let Some(why) = line.strip_prefix(GIVEN_UP) {
            self.running = None;
            self.totals.fail(&format!("{}{}", self.last.0, self.last.1), why);
        } else if let Some(test) = line.strip_prefix(HANGING) {
            self.totals.names.push(format!("{}: had begun and not ended", self.named(test)));
        } else if let Some(name) = line.strip_prefix("left out: ") {
            // A test says so of itself, and passes: a promise that is not checked.
            self.totals.fail(name, "the test was left out");
        } else if let Some(name) = line.strip_prefix("only in its default form: ") {
            let part = self.running.as_ref().map_or("", |(_, part)| part);
            match runs_by_default_too(part) {
                true => self.elsewhere += 1,
                false => {
                    self.totals.fail(name, "is one of the default form, in which nobody runs it")
                }
            }
        }
    }

    /// A test of the program that runs, with the form in which that does.
    fn named(&self, test: &str) -> String {
        let (program, part) = &self.last;
        let form = part.find(", in device processes").map_or("", |at| &part[at..]);
        format!("{program}::{test}{form}")
    }

    /// A program that has died has given no result.
    fn give_up(&mut self) {
        if let Some((name, part)) = self.running.take() {
            self.totals.fail(&(name + &part), "ended without a result");
        }
    }

    fn end(mut self, success: bool) -> Totals {
        self.give_up();
        if self.begun == 0 {
            self.totals.fail("cargo test", "no test program was run");
        } else if !success && self.totals.failed == 0 {
            self.totals.fail("cargo test", "it failed, and no test of it");
        }
        self.totals
    }
}

/// `     Running tests/plan.rs (target/debug/deps/plan-0123456789abcdef)`, or `   Doc-tests NAME`:
/// the program's name without its number. Behind the source there may be `, MODULE`, which comes
/// with it.
fn program(line: &str) -> Option<(String, String)> {
    if let Some(name) = line.trim_start().strip_prefix("Doc-tests ") {
        return Some((format!("Doc-tests {name}"), String::new()));
    }
    let (source, path) = line.trim_start().strip_prefix("Running ")?.split_once(" (")?;
    let file = path.strip_suffix(')')?.rsplit('/').next()?;
    let name = file.rsplit_once('-').map_or(file, |(name, _)| name);
    let part = source.find(", ").map_or("", |at| &source[at..]);
    Some((name.to_owned(), part.to_owned()))
}

/// `test result: ok. 3 passed; 0 failed; 0 ignored; ..`: how many passed and how many failed. An
/// ignored test is a promise that is not checked: it fails.
fn parse_result(line: &str) -> Option<(u64, u64)> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |name: &str| -> Option<u64> {
        let part = counts.split("; ").find_map(|part| part.strip_suffix(name))?;
        part.trim().parse().ok()
    };
    Some((count(" passed")?, count(" failed")? + count(" ignored")?))
}

/// `test NAME ... FAILED` or `test NAME ... ignored, WHY`: the name.
fn parse_failure(line: &str) -> Option<&str> {
    let (name, how) = line.strip_prefix("test ")?.split_once(" ... ")?;
    (how == "FAILED" || how.starts_with("ignored")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(said: &str, success: bool) -> Totals {
        let mut programs = Programs::default();
        said.lines().for_each(|line| programs.hear(line));
        programs.end(success)
    }

    #[test]
    fn what_cargo_builds_is_a_test_program_if_its_profile_is_that_of_tests() {
        let message = |test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/a/crates/queue/Cargo.toml",
                "target":{{"src_path":"/a/crates/queue/tests/pair.rs"}},
                "profile":{{"test":{test}}},"executable":"/t/deps/pair-0123456789abcdef"}}"#
            )
        };
        let path = "/t/deps/pair-0123456789abcdef".into();
        let source = "queue/tests/pair.rs".to_owned();
        let program = Program { source, path, folder: "/a/crates/queue".into(), part: None };
        assert_eq!(built_program(&message(true)), Some(program));
        assert_eq!(built_program(&message(false)), None);
        assert_eq!(built_program(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(built_program("   Compiling"), None);
    }

    #[test]
    fn a_test_program_that_ended_is_shown_and_what_it_used_is_said() {
        let of = |path: &str| {
            let source = "a/tests/b.rs".to_owned();
            run(Program { source, path: path.into(), folder: "/".into(), part: None })
        };
        let ended = of("/usr/bin/false");
        assert!(!ended.success, "{}", ended.text);
        let said = "     Running a/tests/b.rs (/usr/bin/false)\n     Took";
        assert!(ended.text.starts_with(said), "{}", ended.text);
        let ended = of("/no/such/program");
        assert!(!ended.success && ended.text.contains("/no/such/program: "), "{}", ended.text);
    }

    #[test]
    fn a_program_that_hangs_fails_with_the_tests_that_had_begun() {
        let folder = std::env::temp_dir().join(format!("manyring-hangs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        // As libtest: a thread is called after its test, and only what has ended is said.
        let script = "#!/bin/sh
if [ \"$1\" = --list ]; then echo 'a::ends: test'; echo 'sh: test'; echo 'sh2: test'; exit; fi
echo 'test a::ends ... ok'
sleep 1004\n";
        let (text, path) = (folder.join("text"), folder.join("sh"));
        std::fs::write(&text, script).unwrap();
        // By another process: a child of another test has what we write open for a moment, and
        // no program that is open for writing can be run.
        let mut install = manyring_system::command::command("install");
        output(install.args(["-m", "755"]).args([&text, &path])).unwrap();
        let program = Program { source: "a/b.rs".into(), path, folder: "/".into(), part: None };
        let ended = run_within(program, Duration::from_secs(2));
        assert!(!ended.success && ended.text.contains("sleep 1004\n"), "{}", ended.text);
        let names =
            ["sh: it did not end within 2 s and was ended", "sh::sh: had begun and not ended"];
        let totals = totals(&ended.text, ended.success);
        assert_eq!((totals.failed, totals.names), (1, names.map(str::to_owned).to_vec()));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_program_that_ended_well_and_left_its_output_open_fails() {
        let said = format!(
            "     Running a/b.rs (/t/b-0123)
test result: ok. 2 passed; 0 failed; 0 ignored
{GIVEN_UP}it ended, and left its output open in process 7, which was ended"
        );
        let names = ["b: it ended, and left its output open in process 7, which was ended"];
        let names = names.map(str::to_owned).to_vec();
        assert_eq!(totals(&said, false), Totals { passed: 2, failed: 1, names });
    }

    #[test]
    fn tests_had_begun_if_they_have_no_result_and_a_thread_has_their_name() {
        let tests = ["a::b", "a::c", "long::name::one", "long::name::other", "z"];
        let tests = tests.map(str::to_owned);
        let said = "test a::b ... ok\ntest a::c ... ";
        let threads = ["main", "a::b", "a::c", "long::name::oth", "signals"].map(str::to_owned);
        assert_eq!(unfinished(&tests, said, &threads), ["a::c", "long::name::other"]);
        assert_eq!(unfinished(&tests, "", &["long::name::one".to_owned()]), ["long::name::one"]);
    }

    #[test]
    fn each_module_of_a_program_is_a_part_and_no_test_is_in_none() {
        let listed = "a::one: test\nb::c::two: test\nthree: test\na::four: test\n";
        let part = |module: &str, tests: &[&str]| Part {
            module: module.to_owned(),
            tests: tests.iter().map(|test| (*test).to_owned()).collect(),
            form: Form::Default,
        };
        let expected = [
            part("a", &["a::one", "a::four"]),
            part("b", &["b::c::two"]),
            part("main", &["three"]),
        ];
        assert_eq!(parts(listed), expected);
    }

    #[test]
    fn a_part_runs_its_tests_alone_and_its_line_names_it() {
        for (form, words) in [(Form::Default, ""), (Form::AlsoIsolated, ", in device processes")] {
            let part = Part { module: "a".to_owned(), tests: vec!["a::one".to_owned()], form };
            let (source, path) = ("d/tests/e/main.rs".to_owned(), "/usr/bin/echo".into());
            let ended = run(Program { source, path, folder: "/".into(), part: Some(part) });
            let line = format!("     Running d/tests/e/main.rs, a{words} (/usr/bin/echo)");
            let said = format!("{line}\n--exact a::one\n     Took");
            assert!(ended.success && ended.text.starts_with(&said), "{}", ended.text);
            assert_eq!(program(&line), Some(("echo".to_owned(), format!(", a{words}"))));
        }
    }

    #[test]
    fn results_of_cargo_test_are_counted_and_ignored_tests_fail() {
        let line = "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(parse_result(line), Some((12, 0)));
        let line = "test result: FAILED. 1 passed; 2 failed; 3 ignored; 0 measured";
        assert_eq!(parse_result(line), Some((1, 5)));
        assert_eq!(parse_result("running 3 tests"), None);
    }

    const SAID: &str = "   Compiling manyring-daemon v0.1.0 (/a/crates/daemon)
     Running unittests src/lib.rs (target/debug/deps/manyring_daemon-0123456789abcdef)
running 2 tests
test plan::one ... ok
test plan::two ... FAILED
failures:
    plan::two
test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out
     Running tests/few_fds.rs (/t/deps/few_fds-0123456789abcdef)
test a_guest_waits ... ignored, too slow
test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out
     Running tests/idle.rs (/t/deps/idle-0123456789abcdef)
running 1 test
     Running tests/net.rs (/t/deps/net-0123456789abcdef)
test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";

    #[test]
    fn tests_that_failed_are_named_with_their_program_and_so_is_a_program_that_died() {
        let names = [
            "manyring_daemon::plan::two",
            "few_fds::a_guest_waits",
            "idle: ended without a result",
        ];
        let names = names.map(str::to_owned).to_vec();
        assert_eq!(totals(SAID, false), Totals { passed: 5, failed: 3, names });
    }

    #[test]
    fn a_test_that_says_that_it_was_left_out_has_failed() {
        let said = "     Running tests/kept.rs (/t/deps/kept-0123456789abcdef)
left out: change_that_is_kept, which needs root
test change_that_is_kept ... ok
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
        let names = vec!["change_that_is_kept, which needs root: the test was left out".into()];
        assert_eq!(totals(said, true), Totals { passed: 1, failed: 1, names });
    }

    #[test]
    fn a_module_says_its_form_where_a_test_of_it_fails_and_where_it_dies() {
        let said = "     Running d/tests/blk/main.rs, fault, in device processes (/t/deps/blk-0123)
only in its default form: fault::b
test fault::a ... FAILED
test fault::b ... ok
test result: FAILED. 1 passed; 1 failed; 0 ignored
     Running d/tests/blk/main.rs, live (/t/deps/blk-0123)";
        let names = ["blk::fault::a, in device processes", "blk, live: ended without a result"];
        let names = names.map(str::to_owned).to_vec();
        assert_eq!(totals(said, false), Totals { passed: 0, failed: 2, names });
    }

    #[test]
    fn the_last_program_may_die_too_and_nothing_run_is_nothing_passed() {
        let running = "     Running tests/net.rs (/t/deps/net-0123456789abcdef)";
        assert_eq!(totals(running, false).names, ["net: ended without a result"]);
        assert_eq!(totals("error: could not compile", false).failed, 1);
        assert_eq!(totals("", true).failed, 1);
        let ended = "   Doc-tests manyring_wire\ntest result: ok. 2 passed; 0 failed; 0 ignored";
        assert_eq!(totals(ended, true), Totals { passed: 2, ..Totals::default() });
        assert_eq!(totals(ended, false).names, ["cargo test: it failed, and no test of it"]);
    }
}

//! A thread of another process, made to do what its program never does: as after a fault by which a
//! guest runs code of its own there. The program itself has nothing for this: it is traced.

use nix::libc::user_regs_struct;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// The code written over the first instructions of the program, which ran once, at its start:
/// `syscall`, `mov [rdi], eax` and `mov eax, [rdi]`, each before a breakpoint.
const STUBS: [u8; 9] = [0x0f, 0x05, 0xcc, 0x89, 0x07, 0xcc, 0x8b, 0x07, 0xcc];
const CALL: u64 = 0;
const STORE: u64 = 3;
const LOAD: u64 = 6;
/// Where a text lies behind them.
const TEXT: u64 = 16;
/// Bytes below a thread's stack pointer that may be in use.
const RED_ZONE: u64 = 128;
const WORD: usize = 8;

/// A thread that was stopped, and does what it is told until it is dropped.
pub(crate) struct Taken {
    thread: Pid,
    saved: user_regs_struct,
    stubs: u64,
    /// The words of the program that were written over.
    words: Vec<(u64, i64)>,
}

impl Taken {
    /// Stops a thread of a process, wherever it is.
    pub(crate) fn take(process: i32, thread: i32) -> Self {
        let thread = Pid::from_raw(thread);
        ptrace::seize(thread, ptrace::Options::empty()).unwrap();
        ptrace::interrupt(thread).unwrap();
        let stopped = waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
        assert!(matches!(stopped, WaitStatus::PtraceEvent(..)), "{stopped:?}");
        let saved = ptrace::getregs(thread).unwrap();
        let mut taken =
            Self { thread, saved, stubs: first_instruction(process), words: Vec::new() };
        taken.write(0, &STUBS);
        taken
    }

    /// Which call it was in, and the first argument of that.
    pub(crate) fn was_in(&self) -> (i64, u64) {
        (self.saved.orig_rax.cast_signed(), self.saved.rdi)
    }

    /// Has it make a call of the system: the result, or a negative error.
    pub(crate) fn call(&mut self, number: i64, arguments: [u64; 6]) -> i64 {
        self.call_or_end(number, arguments).expect("the thread has ended")
    }

    /// Has it make a call for which the supervisor may kill it. `None`: it was killed before the
    /// call had a result.
    pub(crate) fn call_or_end(&mut self, number: i64, arguments: [u64; 6]) -> Option<i64> {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let rax = number.cast_unsigned();
        let registers = user_regs_struct { rax, rdi, rsi, rdx, r10, r8, r9, ..self.saved };
        self.run_or_end(CALL, registers).map(|registers| registers.rax.cast_signed())
    }

    /// Has it write a word to its memory.
    pub(crate) fn store(&mut self, address: u64, value: u32) {
        self.run(STORE, user_regs_struct { rdi: address, rax: value.into(), ..self.saved });
    }

    /// Has it read a word of its memory.
    pub(crate) fn load(&mut self, address: u64) -> u32 {
        let registers = user_regs_struct { rdi: address, ..self.saved };
        u32::try_from(self.run(LOAD, registers).rax & u64::from(u32::MAX)).unwrap()
    }

    /// The address of this text in its memory, with a zero behind it, until the next one.
    pub(crate) fn text(&mut self, text: &str) -> u64 {
        self.write(TEXT, &[text.as_bytes(), &[0]].concat());
        self.stubs + TEXT
    }

    /// An address of its memory that it does not use.
    pub(crate) fn scratch(&self) -> u64 {
        self.saved.rsp - 2048
    }

    fn run(&mut self, stub: u64, registers: user_regs_struct) -> user_regs_struct {
        self.run_or_end(stub, registers).expect("the thread has ended")
    }

    /// `None`: the process was killed before the thread came to the end of the stub.
    fn run_or_end(&mut self, stub: u64, registers: user_regs_struct) -> Option<user_regs_struct> {
        // No call of the system is under way that the kernel would begin again.
        let orig_rax = u64::MAX;
        let (rip, rsp) = (self.stubs + stub, (self.saved.rsp - RED_ZONE - 4096) & !15);
        ptrace::setregs(self.thread, user_regs_struct { rip, rsp, orig_rax, ..registers }).unwrap();
        let mut passed = None;
        loop {
            ptrace::cont(self.thread, passed).unwrap();
            match waitpid(self.thread, Some(WaitPidFlag::__WALL)).unwrap() {
                WaitStatus::Stopped(_, Signal::SIGTRAP) => break,
                // As the kernel gives it: the handler of denied calls is the device process's own.
                WaitStatus::Stopped(_, signal) => passed = Some(signal),
                WaitStatus::Signaled(_, Signal::SIGKILL, _) => return None,
                other => unreachable!("{other:?}"),
            }
        }
        // It may have been killed while it stood.
        ptrace::getregs(self.thread).ok()
    }

    /// Writes over the program's first instructions, or behind them.
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        for (index, chunk) in bytes.chunks(WORD).enumerate() {
            let address = self.stubs + offset + (index * WORD) as u64;
            let before = ptrace::read(self.thread, pointer(address)).unwrap();
            if !self.words.iter().any(|(known, _)| *known == address) {
                self.words.push((address, before));
            }
            let mut word = before.to_ne_bytes();
            word[..chunk.len()].copy_from_slice(chunk);
            ptrace::write(self.thread, pointer(address), i64::from_ne_bytes(word)).unwrap();
        }
    }
}

impl Drop for Taken {
    /// The thread goes on where it was, and begins the call again that it was in.
    fn drop(&mut self) {
        for (address, word) in &self.words {
            let _ = ptrace::write(self.thread, pointer(*address), *word);
        }
        let _ = ptrace::setregs(self.thread, self.saved);
        let _ = ptrace::detach(self.thread, None);
    }
}

fn pointer(address: u64) -> ptrace::AddressType {
    std::ptr::without_provenance_mut(usize::try_from(address).unwrap())
}

/// Where a process has the first instruction of its program.
fn first_instruction(process: i32) -> u64 {
    const AT_ENTRY: u64 = 9;
    let table = std::fs::read(format!("/proc/{process}/auxv")).unwrap();
    let words: Vec<_> =
        table.chunks_exact(WORD).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect();
    let entry = words.chunks_exact(2).find(|entry| entry[0] == AT_ENTRY);
    entry.expect("every program begins somewhere")[1]
}

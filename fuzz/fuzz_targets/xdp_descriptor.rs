//! Input: what comes back from a socket of AF_XDP. Whatever addresses and lengths the rings have, a
//! chunk is taken only if the kernel had it, once, and a frame only if all of it lies in its chunk.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use manyring_backend::net::xdp::fuzzing::Lent;

#[derive(Arbitrary, Debug)]
enum Step {
    /// The kernel gets a chunk.
    Give(u64),
    /// An address in the completion ring.
    Done(u64),
    /// A descriptor in the receive ring.
    Frame(u64, u32),
}

const FIRST: u64 = 3;
const SIZE: u64 = 2048;
const COUNT: u64 = 16;

fuzz_target!(|steps: Vec<Step>| {
    let mut lent = Lent::new(FIRST as u32, SIZE as u32, COUNT as u32);
    let mut with_kernel = [false; COUNT as usize];
    let number = |addr: u64| {
        let number = (addr / SIZE).checked_sub(FIRST).filter(|number| *number < COUNT)?;
        usize::try_from(number).ok()
    };
    for step in steps {
        match step {
            Step::Give(addr) => {
                // Near the chunks more often than anywhere.
                let addr = if addr % 4 == 0 { addr } else { addr % (SIZE * (FIRST + COUNT + 2)) };
                let may = number(addr).is_some_and(|number| !with_kernel[number]);
                assert_eq!(lent.give(addr), may);
                if let Some(number) = number(addr) {
                    with_kernel[number] = true;
                }
            }
            Step::Done(addr) => {
                let had = number(addr).filter(|number| std::mem::take(&mut with_kernel[*number]));
                assert_eq!(lent.take(addr), had.map(|_| addr - addr % SIZE));
            }
            Step::Frame(addr, len) => {
                let had = number(addr).filter(|number| std::mem::take(&mut with_kernel[*number]));
                let taken = lent.take_frame(addr, len);
                assert_eq!(taken.is_some(), had.is_some());
                let Some((chunk, frame)) = taken else { continue };
                let fits = len > 0 && addr % SIZE + u64::from(len) <= SIZE;
                assert_eq!((chunk, frame), (addr - addr % SIZE, fits.then_some((addr, len))));
            }
        }
    }
});

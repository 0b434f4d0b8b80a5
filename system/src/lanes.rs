//! Work that mostly waits, some of it at a time.

use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};

/// Does `work` on each of `items`, on `lanes` threads, and begins them in their order. `hear` gets
/// what came of an item when its work has ended, on the thread of the caller.
///
/// A process that a lane starts with [`crate::command`]'s `child` dies with the lane's thread, so a
/// lane ends when no item is left, and this function when all lanes have.
pub fn each<T: Send, R: Send>(
    items: Vec<T>,
    lanes: usize,
    work: impl Fn(T) -> R + Sync,
    mut hear: impl FnMut(R),
) {
    let waiting = Mutex::new(items.into_iter());
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    std::thread::scope(|scope| {
        let (ended, reports) = channel();
        for _ in 0..lanes {
            let (ended, next, work) = (ended.clone(), &next, &work);
            scope.spawn(move || {
                while let Some(item) = next() {
                    // The receiver reads until the last sender is gone, so a send cannot fail.
                    let _ = ended.send(work(item));
                }
            });
        }
        drop(ended);
        reports.into_iter().for_each(&mut hear);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn as_many_items_as_there_are_lanes_are_worked_on_at_a_time_and_all_are_heard_of() {
        // Each waits for two others: fewer lanes would wait for ever.
        let three = Barrier::new(3);
        let mut heard = Vec::new();
        let work = |item: u32| {
            three.wait();
            item * 10
        };
        each((1..=6).collect(), 3, work, |result| heard.push(result));
        heard.sort_unstable();
        assert_eq!(heard, [10, 20, 30, 40, 50, 60]);
    }

    #[test]
    fn one_lane_works_in_order() {
        let mut heard = Vec::new();
        each(vec![3, 1, 2], 1, |item| item, |item| heard.push(item));
        assert_eq!(heard, [3, 1, 2]);
    }
}

//! The balance when moves cannot be made: it tries them less and less often.
use super::*;
use crate::policy::polling::Polling;
use crate::pool::PoolOptions;
use crate::running::run::still::Still;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_queue_whose_disk_hangs_is_gathered_less_and_less() {
    let options = PoolOptions { workers_max: 2, polling: Polling::NEVER, uring: false };
    let (pool, hangs) = (Pool::new(options), Arc::new(AtomicBool::new(false)));
    let start = |unit| {
        let queue = Box::new(Still { hangs: hangs.clone(), ..Still::default() });
        pool.start(queue, Home { device: "disk".to_owned(), unit }).unwrap()
    };
    let (_first, second) = (start(0), start(1));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        assert!(second.move_to(1).await);
        hangs.store(true, Ordering::Relaxed);
        let balance = tokio::spawn(pool.clone().balance());
        let before = pool.reports.rest_ns();
        let heard = timeout(8 * LONG_WINDOW, async {
            while pool.reports.rest_ns() == before {
                // As a worker does that is woken now and then.
                pool.reports.resting();
                sleep(PAUSE).await;
            }
        });
        assert!(heard.await.is_ok(), "moves that were withdrawn count as made");
        assert_eq!(second.worker(), Some(1));
        balance.abort();
    });
    pool.quit();
}

#[test]
fn queues_that_hang_hold_up_no_move_of_others() {
    let options = PoolOptions { workers_max: 2, polling: Polling::NEVER, uring: false };
    let (pool, hangs) = (Pool::new(options), Arc::new(AtomicBool::new(false)));
    let start = |unit, hangs: Arc<AtomicBool>| {
        let queue = Box::new(Still { hangs, ..Still::default() });
        pool.start(queue, Home { device: "disk".to_owned(), unit }).unwrap()
    };
    let _first = start(0, Arc::default());
    let hanging: Vec<_> = (1..101).map(|unit| start(unit, hangs.clone())).collect();
    let free = start(101, Arc::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for queue in hanging.iter().chain([&free]) {
            assert!(queue.move_to(1).await);
        }
        hangs.store(true, Ordering::Relaxed);
        let balance = tokio::spawn(pool.clone().balance());
        // One after the other, the hundred are given up after ten seconds.
        let heard = timeout(5 * LONG_WINDOW, async {
            while free.worker() != Some(0) {
                pool.reports.resting();
                sleep(PAUSE).await;
            }
        });
        assert!(heard.await.is_ok(), "it waits for queues that hang");
        balance.abort();
        hangs.store(false, Ordering::Relaxed);
    });
    pool.quit();
}

#[test]
fn a_queue_that_cannot_stop_is_not_waited_for_by_who_would_move_it() {
    let options = PoolOptions { workers_max: 2, polling: Polling::NEVER, uring: false };
    let (pool, hangs) = (Pool::new(options), Arc::new(AtomicBool::new(true)));
    let home = Home { device: "disk".to_owned(), unit: 0 };
    let queue = pool.start(Box::new(Still { hangs, ..Still::default() }), home).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // As the balance has it, which looked just before the queue was to stop.
        let route = queue.route().clone();
        let stop = tokio::spawn(queue.stop());
        while route.worker().is_some() {
            tokio::task::yield_now().await;
        }
        let moved = timeout(LONG_WINDOW, route.move_to(1)).await;
        assert_eq!(moved, Ok(false), "no other queue would ever move");
        stop.abort();
    });
    pool.quit();
}

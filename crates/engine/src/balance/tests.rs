//! What comes of moves that cannot be made.
use super::*;
use crate::io::QueueIo;
use crate::life::Event;
use crate::orders::Order;
use crate::policy::polling::{Decision, Polling};
use crate::pool::PoolOptions;
use crate::run::{Happened, Run, Turned};
use crate::stats::QueueStats;
use crate::wait::Woken;
use manyring_queue::Base;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;

/// A queue that has nothing to do. While it hangs, something that it took does not end.
#[derive(Debug)]
struct Idle {
    hangs: Arc<AtomicBool>,
    stats: Arc<QueueStats>,
    guest: mpsc::Sender<Event>,
}

impl Run for Idle {
    fn attach(&mut self, _: &mut QueueIo<'_>) {}

    fn detach(&mut self, _: &mut QueueIo<'_>) {}

    fn turn(&mut self, _: &mut QueueIo<'_>) -> Turned {
        Turned { worked: false, taken: 0, is_overdue: true }
    }

    fn settle(&mut self, _: (Decision, bool), _: &mut QueueIo<'_>) -> bool {
        true
    }

    fn on_event(&mut self, _: Happened, _: Woken, _: &mut QueueIo<'_>) {}

    fn heed(&mut self, _: Order, _: &mut QueueIo<'_>) {}

    fn wake(&mut self, _: u64) {}

    fn prepare_sleep(&mut self) {}

    fn check_memory(&mut self) {}

    fn drain(&mut self) {}

    fn pause(&mut self) {}

    fn pauses_without_loss(&self) -> bool {
        true
    }

    fn resume(&mut self, _: u64) {}

    fn is_hot(&self) -> bool {
        true
    }

    fn is_overdue(&self, _: u64) -> bool {
        true
    }

    fn looks_at_ring(&self, _: Decision, _: u64) -> bool {
        false
    }

    fn awaits_disk(&self) -> bool {
        false
    }

    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    fn is_drained(&self) -> bool {
        !self.hangs.load(Ordering::Relaxed)
    }

    fn base(&self) -> Base {
        Base::default()
    }

    fn guest(&self) -> &mpsc::Sender<Event> {
        &self.guest
    }

    fn is_of_guest(&self, guest: &mpsc::Sender<Event>) -> bool {
        self.guest.same_channel(guest)
    }

    fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }
}

#[test]
fn a_queue_whose_disk_hangs_is_gathered_less_and_less() {
    let options = PoolOptions { workers_max: 2, polling: Polling::NEVER, uring: false };
    let (pool, hangs) = (Pool::new(options), Arc::new(AtomicBool::new(false)));
    let start = |unit| {
        let (hangs, stats) = (hangs.clone(), Arc::default());
        let queue = Idle { hangs, stats, guest: mpsc::channel(1).0 };
        pool.start(queue, Home { device: "disk".to_owned(), unit }).unwrap()
    };
    let (_first, second) = (start(0), start(1));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        assert!(second.move_to(1).await);
        hangs.store(true, Ordering::Relaxed);
        let balance = tokio::spawn(pool.clone().balance());
        let before = pool.told.rest_ns();
        let heard = timeout(8 * LONG_WINDOW, async {
            while pool.told.rest_ns() == before {
                // As a worker does that is woken now and then.
                pool.told.resting();
                sleep(PAUSE).await;
            }
        });
        assert!(heard.await.is_ok(), "moves that were withdrawn count as made");
        assert_eq!(second.worker(), Some(1));
        balance.abort();
    });
    pool.quit();
}

//! Another guest, which keeps a worker busy for ever.

use super::*;

/// A port on which a frame has always just arrived, of a length that no guest takes: its receiveq
/// has work in every turn of its worker, and its guest does nothing for it.
#[derive(Clone, Debug)]
pub(in crate::net::tests) struct Endless;

impl PortRx for Endless {
    fn recv(&mut self, _: &[GuestSlice]) -> Result<usize, Errno> {
        Ok(1)
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Always
    }
}

/// Another guest, whose receiveqs keep the first worker of the pool busy for ever.
pub(super) struct Busy {
    device: NetDevice,
    queues: Vec<Started>,
}

impl Busy {
    pub(super) async fn start(pool: &Arc<Pool>, queue_pairs: usize) -> Self {
        let port = Scripted::default();
        {
            let mut script = port.script();
            script.attached = vec![false; queue_pairs];
            script.endless = true;
        }
        let device = NetDevice::new(options(queue_pairs), Arc::new(port), pool.clone());
        let (events, mut queues) = (mpsc::channel(4).0, Vec::new());
        for pair in 0..queue_pairs {
            let mut ring = Ring::new(32, true);
            ring.driver.add(&[], &[(DATA, 2048)]).unwrap();
            ring.driver.publish();
            let [kick, call] = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
            let (config, memory, events) = (ring.config, ring.memory.clone(), events.clone());
            let index = 2 * pair;
            let mut queue = Started { index, config, memory, kick, call, events, handle: None };
            queue.start(&device).await;
            queues.push(queue);
        }
        Self { device, queues }
    }

    /// Frames that its queues have thrown away so far.
    fn frames(&self) -> u64 {
        let of = |queue: &Started| self.device.stats(queue.index).unwrap().dropped_short.value();
        self.queues.iter().map(of).sum()
    }

    pub(super) async fn stop(mut self) {
        for queue in &mut self.queues {
            queue.stop(&self.device).await;
        }
        assert!(self.frames() > 1000, "it was busy");
    }
}

#[test]
fn a_guest_of_one_busy_queue_gets_as_much_as_one_of_sixteen() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let pool =
        Pool::new(PoolOptions { workers_max: 1, polling: Polling::up_to_us(1), uring: true });
    let many = runtime.block_on(Busy::start(&pool, 16));
    let one = runtime.block_on(Busy::start(&pool, 1));
    let before = (many.frames(), one.frames());
    while many.frames() - before.0 < 200_000 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (many_got, one_got) = (many.frames() - before.0, one.frames() - before.1);
    // Equal shares, but for what a turn overdraws; without a budget it is a sixteenth.
    assert!(one_got * 4 > many_got, "{one_got} of one queue, {many_got} of sixteen");
    runtime.block_on(many.stop());
    runtime.block_on(one.stop());
}

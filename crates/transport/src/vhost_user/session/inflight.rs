//! The in-flight region of a session: which regions a front-end may ask for, and when it may set
//! one.

use super::{Answer, Effect, Outcome, Session, SessionError};
use manyring_wire::vhost_user::InflightArea;

impl Session {
    pub(super) fn inflight_of<F>(
        &self,
        name: &'static str,
        area: InflightArea,
        size: usize,
    ) -> Result<Outcome<F>, SessionError> {
        self.check_inflight(name, area)?;
        Ok(Outcome::of(Answer::Inflight(area, size)))
    }

    /// Sets the region in which rings record their chains in flight. Rings read it when they start,
    /// so it must be set while no ring runs.
    pub(super) fn set_inflight<F>(
        &mut self,
        name: &'static str,
        area: InflightArea,
        fd: Option<F>,
    ) -> Result<Vec<Effect<F>>, SessionError> {
        self.check_inflight(name, area)?;
        if self.vrings.iter().any(|v| v.running) {
            return Err(SessionError::InflightLate);
        }
        self.forget_refusals();
        Ok(vec![Effect::Inflight(fd.map(|fd| (area, fd)))])
    }

    /// Checks that a region has no more places, and no larger ones, than the device has rings.
    fn check_inflight(&self, name: &'static str, area: InflightArea) -> Result<(), SessionError> {
        let InflightArea { queues, queue_size, .. } = area;
        let count_max = self.offer.queue_count;
        let fits = (1..=count_max).contains(&usize::from(queues))
            && (1..=self.offer.queue_size_max).contains(&queue_size);
        if fits { Ok(()) } else { Err(SessionError::Inflight { name, queues, queue_size }) }
    }
}

//! `Live`: a value that the control thread sets and running queues read.

use std::sync::{Arc, Mutex, PoisonError};

/// A value that queues on several workers read. A worker loads it when the control thread tells it
/// to refresh, and then uses its own copy: so it takes no lock while it serves.
#[derive(Debug, Default)]
pub(crate) struct Live<T>(Mutex<Arc<T>>);

impl<T> Live<T> {
    pub(crate) fn new(value: T) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Arc::new(value))))
    }

    /// Sets the value. The caller must then tell the queues to refresh.
    pub(crate) fn set(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
    }

    /// Returns the present value.
    pub(crate) fn load(&self) -> Arc<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

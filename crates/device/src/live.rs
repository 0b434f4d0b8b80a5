//! `Live`: something that the control thread sets, and that running queues go by.

use std::sync::{Arc, Mutex, PoisonError};

/// What queues on several workers go by. A worker takes it when it is told to refresh, and then
/// looks at its own copy: never at the lock while it serves.
#[derive(Debug, Default)]
pub(crate) struct Live<T>(Mutex<Arc<T>>);

impl<T> Live<T> {
    pub(crate) fn new(value: T) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Arc::new(value))))
    }

    /// Sets it; who is to go by it must be told.
    pub(crate) fn set(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
    }

    /// What it is now.
    pub(crate) fn load(&self) -> Arc<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

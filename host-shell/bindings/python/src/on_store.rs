//! Python's handle of an object on a store.

use crate::error::ExceptionParts;
use crate::process;
use crate::store::{AtClose, PyStore};
use crate::wait;
use nvme_host::ProcessMark;
use nvme_host::lock::lock;
use std::sync::{Arc, Mutex};

/// An object on a store, until it or the store is closed.
pub struct OnStore<T: Send> {
    process: ProcessMark,
    what: &'static str,
    open: Arc<Mutex<Option<T>>>,
}

impl<T: Clone + Send + 'static> OnStore<T> {
    pub fn new(store: &PyStore, what: &'static str, value: T) -> Self {
        let open = Arc::new(Mutex::new(Some(value)));
        let at_close: Arc<dyn AtClose> = open.clone();
        store.at_close(&at_close);
        Self {
            process: ProcessMark::here(),
            what,
            open,
        }
    }

    /// Makes a handle of an object that opens its device itself.
    pub fn alone(what: &'static str, value: T) -> Self {
        Self {
            process: ProcessMark::here(),
            what,
            open: Arc::new(Mutex::new(Some(value))),
        }
    }

    /// # Errors
    /// When it is closed, and in a process that did not open it.
    pub fn get(&self) -> Result<T, ExceptionParts> {
        process::check(self.process, self.what)?;
        let open = lock(&self.open).clone();
        open.ok_or_else(|| {
            let cause = format!("the {}, or its store, is closed", self.what);
            ExceptionParts::usage(cause, "open it again, or close it later")
        })
    }
}

impl<T: Send> OnStore<T> {
    pub fn close(&self) {
        if process::check(self.process, self.what).is_err() {
            // The parent's: a clone that is never dropped keeps it from being dropped here.
            std::mem::forget(Arc::clone(&self.open));
            return;
        }
        // Before it is dropped, which may wait: others ask for it with the GIL.
        let value = lock(&self.open).take();
        wait::drop_elsewhere(self.process, value);
    }
}

impl<T: Send> Drop for OnStore<T> {
    fn drop(&mut self) {
        self.close();
    }
}

//! Objects that belong to the process that made them. A child of `fork` has none of the threads that serve
//! them: its calls are refused, and none of its parent's objects are dropped there.

use crate::error::ExceptionParts;
pub use crate::fork::check;
use crate::wait;
use nvme_host::ProcessMark;

/// A value that is dropped, without the GIL, by the process alone that made it.
pub struct OfProcess<T: Send> {
    process: ProcessMark,
    what: &'static str,
    /// There until it is dropped.
    value: Option<T>,
}

impl<T: Send> OfProcess<T> {
    pub fn new(what: &'static str, value: T) -> Self {
        Self {
            process: ProcessMark::here(),
            what,
            value: Some(value),
        }
    }

    /// # Errors
    /// In another process.
    pub fn get(&self) -> Result<&T, ExceptionParts> {
        check(self.process, self.what)?;
        let gone = || ExceptionParts::usage(format!("this {} is gone", self.what), "make it again");
        self.value.as_ref().ok_or_else(gone)
    }
}

impl<T: Send> Drop for OfProcess<T> {
    fn drop(&mut self) {
        wait::drop_elsewhere(self.process, self.value.take());
    }
}

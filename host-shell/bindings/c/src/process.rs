//! State of the process, which a child of `fork` replaces by an empty one.
//!
//! A child has a copy of its parent's memory and none of its threads: a lock may be held by a thread that does
//! not exist in the child, and the threads that serve an open device are missing. It must neither use nor drop
//! the objects that its parent left there.

use nvme_host::ProcessMark;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A value for each process: a child of `fork` leaves its parent's value alone and creates another one.
pub struct PerProcess<T> {
    /// The [mark](ProcessMark) of the process of `value`; 0 before the first use. Not its number alone, which a child
    /// may have from a parent of its parent that has ended.
    process: AtomicU64,
    value: T,
    of_child: OnceLock<Box<PerProcess<T>>>,
}

impl<T> PerProcess<T> {
    pub const fn new(value: T) -> Self {
        Self {
            process: AtomicU64::new(0),
            value,
            of_child: OnceLock::new(),
        }
    }

    /// Returns the value of this process. `inherit` creates that of a child whose parent has used its value.
    pub fn get(&self, inherit: impl FnOnce() -> T) -> &T {
        let mut known = self;
        // The last value in the chain belongs to this process or to its parent: a parent never sees values that
        // its child appends.
        while let Some(child) = known.of_child.get() {
            known = child;
        }
        let here = ProcessMark::here().word();
        let order = Ordering::Relaxed;
        match known.process.compare_exchange(0, here, order, order) {
            Err(process) if process != here => {
                let child = known.of_child.get_or_init(|| {
                    let child = Self::new(inherit());
                    child.process.store(here, order);
                    Box::new(child)
                });
                &child.value
            }
            _ => &known.value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn a_process_keeps_its_value_and_a_child_gets_its_own() {
        let value = PerProcess::new(Mutex::new(1));
        let inherit = || Mutex::new(10);
        *value.get(inherit).lock().unwrap() += 1;
        assert_eq!(*value.get(inherit).lock().unwrap(), 2);
        // As after a fork: the value is of another process, and a thread that is not here holds its lock.
        let _held = value.get(inherit).lock().unwrap();
        // It had the number of this one.
        let other = ProcessMark::here().word() ^ 1;
        value.process.store(other, Ordering::Relaxed);
        for wanted in [11, 12] {
            let mut of_child = value.get(inherit).lock().unwrap();
            *of_child += 1;
            assert_eq!(*of_child, wanted);
        }
    }
}

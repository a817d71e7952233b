//! Data memory of launches, kept alive for as long as a command or a kernel may access it. A launch that was
//! abandoned has no end that could be waited for: only a proof that the controller is quiet frees it.

use std::sync::Arc;

/// Keep-alive of memory that launches use, until it is proved to be unused. Leaks the memory when it is dropped without
/// such a proof, since a command or a kernel may still access it.
pub(super) struct KeepAlive<T>(Vec<Arc<T>>);

impl<T> Default for KeepAlive<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> KeepAlive<T> {
    /// Keeps `data` alive, together with the memory of earlier launches.
    pub fn keep(&mut self, data: &Arc<T>) {
        if !self.0.iter().any(|one| Arc::ptr_eq(one, data)) {
            self.0.push(Arc::clone(data));
        }
    }

    /// True if no command can access memory that is kept here.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Drops the references: every command of every launch has ended.
    pub fn release(&mut self) {
        self.0.clear();
    }
}

impl<T> Drop for KeepAlive<T> {
    fn drop(&mut self) {
        self.0.drain(..).for_each(std::mem::forget);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_launch_that_timed_out_was_given_stays_beside_what_the_next_is_given() {
        let (old, new) = (Arc::new(1), Arc::new(2));
        let mut held = KeepAlive::default();
        assert!(held.is_empty());
        held.keep(&old);
        held.keep(&new);
        held.keep(&new);
        assert_eq!((Arc::strong_count(&old), Arc::strong_count(&new)), (2, 2));
        held.release();
        assert!(held.is_empty());
        assert_eq!((Arc::strong_count(&old), Arc::strong_count(&new)), (1, 1));
    }

    #[test]
    fn what_nothing_has_proved_free_is_leaked() {
        let data = Arc::new(1);
        let mut held = KeepAlive::default();
        held.keep(&data);
        drop(held);
        assert_eq!(Arc::strong_count(&data), 2);
    }
}

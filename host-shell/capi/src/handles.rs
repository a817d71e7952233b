//! What is open, by handles that are never used twice and never dereferenced: a closed one is found to be closed.

use crate::status::{Failure, NVME_GPU_ERROR_CLOSED};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

/// No address of x86-64 or AArch64 begins like this.
const MARK: usize = 0x4E56 << 48;

/// Things that are open.
pub struct Handles<T> {
    live: RwLock<BTreeMap<usize, T>>,
}

impl<T: Clone> Handles<T> {
    #[expect(clippy::new_without_default, reason = "for statics")]
    pub const fn new() -> Self {
        Self {
            live: RwLock::new(BTreeMap::new()),
        }
    }

    /// A handle for `thing`.
    pub fn open<H>(&self, thing: T) -> *mut H {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let handle = MARK | NEXT.fetch_add(1, Ordering::Relaxed) << 4;
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        live.insert(handle, thing);
        std::ptr::without_provenance_mut(handle)
    }

    /// What `handle` stands for.
    ///
    /// # Errors
    /// [`NVME_GPU_ERROR_CLOSED`].
    pub fn get<H>(&self, handle: *const H, what: &str) -> Result<T, Failure> {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        live.get(&handle.addr()).cloned().ok_or_else(|| {
            let why = match handle.is_null() {
                true => "is NULL",
                false => "was closed, or is none of this library",
            };
            Failure::new(
                NVME_GPU_ERROR_CLOSED,
                format!("the handle of a {what} {why}"),
                "use a handle between its opening and its closing",
            )
        })
    }

    /// Takes `handle` away, if it is open.
    pub fn close<H>(&self, handle: *mut H) -> Option<T> {
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        live.remove(&handle.addr())
    }

    /// Takes away all that `is_wanted` does not keep.
    pub fn close_all(&self, mut is_closed: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        let closed = live.extract_if(.., |_, thing| is_closed(thing));
        closed.map(|(_, thing)| thing).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_used_once() {
        let handles = Handles::new();
        let one: *mut u8 = handles.open('a');
        let other: *mut u8 = handles.open('b');
        assert_ne!(one, other);
        assert_eq!(handles.get(one, "letter").unwrap(), 'a');
        assert_eq!(handles.close(one), Some('a'));
        assert_eq!(handles.close(one), None);
        let failure = handles.get(one, "letter").unwrap_err();
        assert_eq!(failure.status, NVME_GPU_ERROR_CLOSED);
        assert!(handles.open::<u8>('c') != one);
        assert_eq!(handles.close_all(|letter| *letter == 'b'), ['b']);
        assert!(handles.get(other, "letter").is_err());
        let null = std::ptr::null::<u8>();
        assert!(
            handles
                .get(null, "letter")
                .unwrap_err()
                .cause
                .contains("NULL")
        );
    }
}

//! Open objects, by handles that are never used twice and never dereferenced. So a handle that was closed, or
//! that belongs to a parent process before a fork, is recognised and refused.

use crate::process::PerProcess;
use crate::status::{CallFailure, NVME_GPU_ERROR_CLOSED};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

/// No address of x86-64 or AArch64 begins like this.
const MARK: usize = 0x4E56 << 48;

/// Number of the next handle; a child of `fork` continues counting.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Things that are open, those of each process apart: nothing of a parent is used or dropped by its child.
pub struct OpenHandles<T> {
    of_process: PerProcess<HandleTable<T>>,
}

/// The handles of one process.
struct HandleTable<T> {
    /// Handles below this number are of a parent.
    begin: usize,
    live: RwLock<BTreeMap<usize, T>>,
}

impl<T> HandleTable<T> {
    const fn new(begin: usize) -> Self {
        Self {
            begin,
            live: RwLock::new(BTreeMap::new()),
        }
    }
}

impl<T: Clone> OpenHandles<T> {
    #[expect(clippy::new_without_default, reason = "for statics")]
    pub const fn new() -> Self {
        Self {
            of_process: PerProcess::new(HandleTable::new(1)),
        }
    }

    fn table(&self) -> &HandleTable<T> {
        let inherit = || HandleTable::new(NEXT.load(Ordering::Relaxed));
        self.of_process.get(inherit)
    }

    /// True if `handle` was opened by a parent, before a fork.
    pub fn is_inherited<H>(&self, handle: *const H) -> bool {
        (MARK | 1 << 4..MARK | self.table().begin << 4).contains(&handle.addr())
    }

    /// Opens a handle for `thing`.
    pub fn open<H>(&self, thing: T) -> *mut H {
        let table = self.table();
        let handle = MARK | NEXT.fetch_add(1, Ordering::Relaxed) << 4;
        let mut live = table.live.write().unwrap_or_else(PoisonError::into_inner);
        live.insert(handle, thing);
        std::ptr::without_provenance_mut(handle)
    }

    /// Returns the object of `handle`.
    ///
    /// # Errors
    /// [`NVME_GPU_ERROR_CLOSED`]; [`NVME_GPU_ERROR_USAGE`](crate::status::NVME_GPU_ERROR_USAGE) for a handle
    /// that was opened before a fork.
    pub fn get<H>(&self, handle: *const H, what: &str) -> Result<T, CallFailure> {
        let table = self.table();
        let live = table.live.read().unwrap_or_else(PoisonError::into_inner);
        let found = live.get(&handle.addr()).cloned();
        found.ok_or_else(|| match handle.is_null() {
            true => closed(what, "is NULL"),
            false if self.is_inherited(handle) => CallFailure::usage(
                format!("the handle of a {what} was opened by another process, before a fork"),
                "open the device in the process that uses it",
            ),
            false => closed(what, "was closed, or is none of this library"),
        })
    }

    /// Takes `handle` away, if it is open in this process.
    pub fn close<H>(&self, handle: *mut H) -> Option<T> {
        let table = self.table();
        let mut live = table.live.write().unwrap_or_else(PoisonError::into_inner);
        live.remove(&handle.addr())
    }

    /// Takes away all of this process for which `is_closed` holds.
    pub fn close_all(&self, mut is_closed: impl FnMut(&T) -> bool) -> Vec<T> {
        let table = self.table();
        let mut live = table.live.write().unwrap_or_else(PoisonError::into_inner);
        let closed = live.extract_if(.., |_, thing| is_closed(thing));
        closed.map(|(_, thing)| thing).collect()
    }
}

fn closed(what: &str, why: &str) -> CallFailure {
    CallFailure::new(
        NVME_GPU_ERROR_CLOSED,
        format!("the handle of a {what} {why}"),
        "use a handle between its opening and its closing",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_used_once() {
        let handles = OpenHandles::new();
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

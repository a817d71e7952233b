//! Changes that another host makes: those that wait, and what they leave behind.

use crate::config::fault::Change;
use crate::memory::Lock;
use alloc::string::String;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// The serial number of a drive that took the place of the configured one.
const ANOTHER: &str = "SIM0REPLACED00000001";

/// What another host does, and has done.
pub(crate) struct Outside {
    waiting: Lock<Vec<Change>>,
    /// Changes wait, or their events have not been posted.
    is_pending: AtomicBool,
    mdts: AtomicU8,
    replaced: AtomicBool,
}

impl Outside {
    pub fn new(mdts: u8) -> Self {
        Self {
            waiting: Lock::default(),
            is_pending: AtomicBool::new(false),
            mdts: AtomicU8::new(mdts),
            replaced: AtomicBool::new(false),
        }
    }

    /// A change that the admin queue's next turn makes.
    pub fn push(&self, change: Change) {
        // The flag is stored under the lock, as in `settle`: there, a change that came in between would be forgotten.
        let mut waiting = self.waiting.lock();
        waiting.push(change);
        self.is_pending.store(true, Ordering::Release); // Release: pairs with is_pending.
    }

    /// The changes that wait. By the lock alone: the flag may be seen later than what made the caller look.
    pub fn take(&self) -> Vec<Change> {
        core::mem::take(&mut self.waiting.lock())
    }

    /// Whether completions have to wait for a change.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Acquire) // Acquire: pairs with push and settle.
    }

    /// The changes were made, and their events posted.
    pub fn settle(&self) {
        let waiting = self.waiting.lock();
        if waiting.is_empty() {
            self.is_pending.store(false, Ordering::Release); // Release: pairs with is_pending.
        }
    }

    pub fn mdts(&self) -> u8 {
        self.mdts.load(Ordering::Relaxed)
    }

    pub fn set_mdts(&self, mdts: u8) {
        self.mdts.store(mdts, Ordering::Relaxed);
    }

    pub fn replace(&self) {
        self.replaced.store(true, Ordering::Relaxed);
    }

    /// The serial number, where `configured` is that of the first drive.
    pub fn serial(&self, configured: &str) -> String {
        String::from(match self.replaced.load(Ordering::Relaxed) {
            true => ANOTHER,
            false => configured,
        })
    }
}

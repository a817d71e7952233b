//! Changes that another host makes to the device: the pending ones, and the lasting effects of
//! earlier ones.

use crate::config::fault::ExternalChange;
use crate::memory::SpinLock;
use alloc::string::String;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};

/// Serial number of a drive that replaced the configured one.
const ANOTHER: &str = "SIM0REPLACED00000001";

/// Changes by another host that are waiting, and the effects of those that were made.
pub(crate) struct ExternalChanges {
    waiting: SpinLock<Vec<ExternalChange>>,
    /// True while changes wait, or while their events have not been posted.
    is_pending: AtomicBool,
    mdts: AtomicU8,
    replaced: AtomicBool,
    /// Limit of the I/O queue pairs that are granted.
    most_pairs: AtomicU16,
}

impl ExternalChanges {
    pub fn new(mdts: u8) -> Self {
        Self {
            waiting: SpinLock::default(),
            is_pending: AtomicBool::new(false),
            mdts: AtomicU8::new(mdts),
            replaced: AtomicBool::new(false),
            most_pairs: AtomicU16::new(u16::MAX),
        }
    }

    /// Adds a change, which the admin queue makes when it is served next.
    pub fn push(&self, change: ExternalChange) {
        // The flag is stored under the lock, as in `finish`. Stored outside it, a `finish` in
        // between could clear the flag of a change that was just added, and that change would never
        // be made.
        let mut waiting = self.waiting.lock();
        waiting.push(change);
        self.is_pending.store(true, Ordering::Release); // Release: pairs with is_pending.
    }

    /// Takes the waiting changes. It looks at the list under the lock and not at the flag, whose
    /// store may become visible later than the event that made the caller look.
    pub fn take(&self) -> Vec<ExternalChange> {
        core::mem::take(&mut self.waiting.lock())
    }

    /// True if completions have to wait for a change.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Acquire) // Acquire: pairs with push and finish.
    }

    /// Clears the flag after the changes were made and their events posted, unless another change
    /// has been added.
    pub fn finish(&self) {
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

    pub fn most_pairs(&self) -> u16 {
        self.most_pairs.load(Ordering::Relaxed)
    }

    pub fn set_most_pairs(&self, pairs: u16) {
        self.most_pairs.store(pairs, Ordering::Relaxed);
    }

    pub fn replace(&self) {
        self.replaced.store(true, Ordering::Relaxed);
    }

    /// Returns the serial number; `configured` is that of the first drive.
    pub fn serial(&self, configured: &str) -> String {
        String::from(match self.replaced.load(Ordering::Relaxed) {
            true => ANOTHER,
            false => configured,
        })
    }
}

//! Copies that a lane starts and waits for later, as `cp.async` does.
// UNSAFETY: copies between addresses that the lane vouches for.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;

/// A copy that has not taken place yet.
struct PendingCopy {
    to: u64,
    from: u64,
    bytes: u32,
    /// Zeros that follow the bytes.
    zeros: u32,
}

impl PendingCopy {
    fn perform(&self) {
        let from = self.from as usize as *const u8;
        let to = self.to as usize as *mut u8;
        // SAFETY: the lane that started the copy vouches for both ranges until it has waited.
        unsafe {
            core::ptr::copy(from, to, self.bytes as usize);
            to.add(self.bytes as usize)
                .write_bytes(0, self.zeros as usize);
        }
    }
}

/// The copies of a lane.
///
/// Copies of odd lanes take place when they are started, copies of even lanes when they are waited for, so that a
/// kernel that relies on either fails its test.
#[derive(Default)]
pub(crate) struct LaneCopies {
    /// The current group.
    open: RefCell<Vec<PendingCopy>>,
    /// Groups that were committed, the oldest first.
    groups: RefCell<VecDeque<Vec<PendingCopy>>>,
}

impl LaneCopies {
    /// Starts a copy of `bytes` bytes and `zeros` zeros behind them.
    pub fn start(&self, is_early: bool, (to, from): (u64, u64), (bytes, zeros): (u32, u32)) {
        let copy = PendingCopy {
            to,
            from,
            bytes,
            zeros,
        };
        match is_early {
            true => copy.perform(),
            false => self.open.borrow_mut().push(copy),
        }
    }

    /// Commits the current group.
    pub fn commit(&self) {
        let group = self.open.take();
        self.groups.borrow_mut().push_back(group);
    }

    /// Ends all groups but the last `left`.
    pub fn wait(&self, left: usize) {
        let mut groups = self.groups.borrow_mut();
        while groups.len() > left {
            let group = groups.pop_front().unwrap_or_default();
            group.iter().for_each(PendingCopy::perform);
        }
    }
}

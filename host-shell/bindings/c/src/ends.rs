//! Those who want to know the end of an operation: eventfds, and threads that wait for the first of several.

use nvme_host::lock::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Those who want to know the end of an operation.
#[derive(Default)]
pub struct EndNotices(Mutex<NoticeState>);

#[derive(Default)]
struct NoticeState {
    is_told: bool,
    files: Vec<OwnedFd>,
    waiters: Vec<Weak<WakeupCall>>,
}

impl EndNotices {
    /// Tells all that the operation has ended.
    pub fn tell(&self) {
        let mut state = lock(&self.0);
        state.is_told = true;
        let (files, waiters) = (
            std::mem::take(&mut state.files),
            std::mem::take(&mut state.waiters),
        );
        drop(state);
        files.iter().for_each(raise);
        for waiter in waiters.iter().filter_map(Weak::upgrade) {
            waiter.wake();
        }
    }

    /// Tells no eventfd any more.
    pub fn cancel(&self) {
        lock(&self.0).files.clear();
    }

    /// True if the end was announced.
    pub fn is_told(&self) -> bool {
        lock(&self.0).is_told
    }

    /// Has `file` raised at the end; at once if it is over.
    pub fn add_file(&self, file: OwnedFd) {
        let mut state = lock(&self.0);
        match state.is_told {
            true => raise(&file),
            false => state.files.push(file),
        }
    }

    /// Has `waiter` woken at the end; at once if it is over.
    pub fn add_waiter(&self, waiter: &Arc<WakeupCall>) {
        let mut state = lock(&self.0);
        match state.is_told {
            true => waiter.wake(),
            false => {
                // Those of earlier waits that ended without this operation.
                state.waiters.retain(|one| one.strong_count() > 0);
                state.waiters.push(Arc::downgrade(waiter));
            }
        }
    }
}

/// Adds 1 to an eventfd. One that is full is readable already, and a write would wait.
fn raise(file: &OwnedFd) {
    let mut files = [PollFd::new(file, PollFlags::OUT)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    if poll(&mut files, Some(&at_once)).is_ok_and(|ready| ready == 1) {
        let _ = rustix::io::write(file, &1u64.to_ne_bytes());
    }
}

/// Wakes a thread that waits for one of several operations.
#[derive(Default)]
pub struct WakeupCall {
    is_awake: Mutex<bool>,
    changed: Condvar,
}

impl WakeupCall {
    fn wake(&self) {
        *lock(&self.is_awake) = true;
        self.changed.notify_all();
    }

    /// Sleeps until it is woken, `limit` at most.
    pub fn sleep(&self, limit: Duration) {
        let is_awake = lock(&self.is_awake);
        let slept = self
            .changed
            .wait_timeout_while(is_awake, limit, |awake| !*awake);
        *slept.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

//! Points at which a session looks for asynchronous events: with each admin command, before each submission, with each
//! check of CSTS by an idle queue, and before it ends. There is no thread that waits for them.

use super::{AdminSession, ControllerSession};
use crate::controller::notice::DeviceEvent;
use crate::error::{Error, Result};
use crate::lock::{lock, relax};
use std::sync::TryLockError;
use std::time::{Duration, Instant};

/// Deadline of an event's log page during shutdown and before facts are read again, which a controller that does not
/// answer must not delay.
const LAST_LOOK: Duration = Duration::from_millis(100);

impl ControllerSession {
    /// Looks for events unless another thread has the admin queue, which then does so itself.
    ///
    /// # Errors
    /// The error of a failed reset: a completion that makes no sense costs a reset.
    pub(crate) fn glance_at_events(&self) -> Result<()> {
        let mut admin = match self.admin.try_lock() {
            Ok(admin) => admin,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        self.look_for_events(&mut admin)
    }

    fn look_for_events(&self, admin: &mut AdminSession) -> Result<()> {
        if admin.failed.is_some() {
            return Ok(());
        }
        while let Some(done) = match admin.pair.queue().poll() {
            Ok(done) => done,
            Err(fault) => return self.reset_locked(admin, &fault.to_string(), None),
        } {
            admin.events.take(done);
        }
        self.admin_view.advance(&admin.pair);
        self.tend_events(admin);
        Ok(())
    }

    /// Looks for events if a completion has arrived that nobody has handled. If another thread has the admin queue,
    /// waits for that thread to handle it: until then the facts may be older than an event.
    #[inline]
    pub(crate) fn look(&self) {
        if self.admin_view.has_arrived() {
            self.look_at_arrivals();
        }
    }

    #[cold]
    fn look_at_arrivals(&self) {
        let deadline_ns = self.now_ns().saturating_add(self.timeout_ns());
        let mut spins = 0;
        while self.admin_view.has_arrived() {
            let mut admin = match self.admin.try_lock() {
                Ok(admin) => admin,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // Every thread that waits with the admin queue polls it, except within a reset.
                Err(TryLockError::WouldBlock) if self.now_ns() < deadline_ns => {
                    spins += 1;
                    relax(spins);
                    continue;
                }
                Err(TryLockError::WouldBlock) => lock(&self.admin),
            };
            // A controller that fails in it fails the commands that follow.
            let _ = self.look_for_events(&mut admin);
            return;
        }
    }

    /// Waits until the log pages of all events were read, for [`LAST_LOOK`] at most. Reading one re-arms its event,
    /// so a change after this call is announced by another event.
    pub(crate) fn settle_events(&self, admin: &mut AdminSession) -> Result<()> {
        let begin = Instant::now();
        let mut spins = 0;
        loop {
            self.look_for_events(admin)?;
            if admin.failed.is_some() || admin.events.is_quiet() || begin.elapsed() >= LAST_LOOK {
                return Ok(());
            }
            spins += 1;
            relax(spins);
        }
    }

    /// Continues with the events whose requests have completed.
    pub(crate) fn tend_events(&self, admin: &mut AdminSession) {
        let times = (self.now_ns(), self.timeout_ns());
        let AdminSession { pair, events, .. } = admin;
        events.work(pair.queue(), &self.device, times, &self.config.notify);
    }

    /// Reports the events since the last call and, before a shutdown, those whose log page is being
    /// read.
    pub(crate) fn last_events(&self, admin: &mut AdminSession) {
        let begin = Instant::now();
        while begin.elapsed() < LAST_LOOK {
            match admin.pair.queue().poll() {
                Ok(Some(done)) => {
                    admin.events.take(done);
                    continue;
                }
                Ok(None) => {}
                // The shutdown ends it all.
                Err(_) => return,
            }
            self.tend_events(admin);
            if admin.events.is_quiet() || self.is_gone() {
                return;
            }
            self.sleep_until(self.now_ns() + 50_000);
        }
    }

    /// Returns the events since the last call.
    pub(crate) fn events(&self) -> Result<Vec<DeviceEvent>> {
        let mut admin = lock(&self.admin);
        self.look_for_events(&mut admin)?;
        let events: Vec<_> = admin.events.kept.drain(..).collect();
        match &admin.failed {
            Some(cause) if events.is_empty() => Err(Error::Gone {
                cause: cause.clone(),
            }),
            _ => Ok(events),
        }
    }
}

//! The watch thread of a store's launches. Kernels report a command without an answer in host memory; this thread
//! then closes the gate, waits until every group has left, resets the controller and opens the gate again.

use super::state::RowsState;
use nvme_core::spec::nvm;
use nvme_driver::controller::session::{ControllerSession, UserFacts};
use nvme_driver::error::{Error, Result};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval of its checks. A command without an answer has already exceeded its deadline by then, so a few
/// milliseconds more do not matter, while a shorter interval would cost CPU time during every run.
const LOOK: Duration = Duration::from_millis(2);

/// Number of checks between two reports of the counts.
const LOOKS_PER_REPORT: u32 = 50;

/// Recovers the controller when a kernel reports trouble, and closes the gate for good when the namespace has
/// changed since launches were made for it. A thread has to watch this, because graphs and kernels of the
/// caller run without a call of the host.
pub(super) struct LaunchWatch {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LaunchWatch {
    pub fn start(
        state: &Arc<RowsState>,
        session: &Arc<ControllerSession>,
        footing: &Arc<UserFacts>,
    ) -> Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let (state, session) = (Arc::clone(state), Arc::clone(session));
        let footing = Arc::clone(footing);
        let watch = move || {
            let mut looks = 0u32;
            while stopped.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
                looks = (looks + 1) % LOOKS_PER_REPORT;
                if looks == 0 {
                    state.report_counts();
                }
                let changed = footing.check(nvm::opcode::READ);
                if matches!(changed, Err(Error::Changed { .. })) {
                    state.memory.board.gate().close_for_good();
                    return;
                }
                if !state.memory.board.gate().has_trouble() {
                    continue;
                }
                let reset = session.reset("a command of a GPU's gather or scatter got no answer");
                // If the reset failed, nothing has opened the gate again either.
                if reset.is_err() {
                    state.memory.board.gate().close_for_good();
                    // Threads that wait for an outcome then learn that nothing can be read again.
                    let _ = footing.check(nvm::opcode::READ);
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("nvme-gpu-watch".to_owned())
            .spawn(watch);
        let call = "starting the watch over gathers";
        let thread = thread.map_err(|source| Error::System { call, source })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for LaunchWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread panics only if a lock is poisoned, and has ended then.
            let _ = thread.join();
        }
    }
}

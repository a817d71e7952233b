//! Admin commands of this process that change facts on which handles rely. After such a command the handles read the
//! facts again. If the command erases a namespace, its handles are refused before the command is sent: otherwise a
//! thread could still write by the old block size.

use super::ControllerSession;
use crate::controller::effect::CommandEffect;
use crate::dma::DmaBuffer;
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::lock::lock;

impl ControllerSession {
    /// Calls `send` for an admin command with `effect`, and keeps the known facts in step. The
    /// caller has the admin queue.
    pub(super) fn with_effect(
        &self,
        effect: CommandEffect,
        send: impl FnOnce() -> Result<(u32, Option<DmaBuffer>)>,
    ) -> Result<(u32, Option<DmaBuffer>)> {
        if let CommandEffect::Erased(nsid) = effect {
            // Before the command is sent: other threads keep submitting while it runs, and with the old block
            // size or capacity they would write to other blocks than they mean to.
            self.facts.erase(nsid);
            self.keep_kernels_out();
        }
        let answer = send();
        match (&answer, effect) {
            (_, CommandEffect::Nothing) => {}
            (Err(Error::Command { .. }), CommandEffect::Erased(nsid)) => {
                self.facts.was_not_erased(nsid)
            }
            // A command without an answer may have been executed, so it counts as executed.
            (Ok(_), CommandEffect::Sanitized) => self.facts.alarm.erase(),
            (Err(error), CommandEffect::Sanitized) if !matches!(error, Error::Command { .. }) => {
                self.facts.alarm.erase();
            }
            _ => self.facts.alarm.raise(),
        }
        answer
    }

    /// Waits until no kernel is inside the gate, and admits those again whose namespace has not changed.
    fn keep_kernels_out(&self) {
        #[cfg(feature = "cuda")]
        {
            let queues: Vec<_> = lock(&self.queues).values().cloned().collect();
            for inner in queues {
                if let Some(lent) = &mut lock(&inner).lent {
                    lent.stop();
                    lent.resume(true);
                }
            }
        }
    }
}

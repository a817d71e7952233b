//! Admin commands of this process that change facts on which handles rely. After such a command the handles read the
//! facts again. If the command erases a namespace, its handles are refused before the command is sent: otherwise a
//! thread could still write by the old block size.

use super::ControllerSession;
use crate::controller::effect::CommandEffect;
use crate::dma::DmaBuffer;
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::lock::lock;

/// State of a queue that a GPU drives, before a namespace is erased.
#[derive(Clone, Copy)]
enum GpuUse {
    /// The kernels of a caller have given it back.
    Returned,
    /// No kernel relies on facts of the namespace any more.
    KeptOut,
}

impl ControllerSession {
    /// Calls `send` for an admin command with `effect`, and keeps the known facts in step. The
    /// caller has the admin queue.
    pub(super) fn with_effect(
        &self,
        effect: CommandEffect,
        send: impl FnOnce() -> Result<(u32, Option<DmaBuffer>)>,
    ) -> Result<(u32, Option<DmaBuffer>)> {
        if let CommandEffect::Erased(nsid) = effect {
            // Before the facts count as changed: that would shut kernels out for good.
            self.wait_for_kernels(GpuUse::Returned)?;
            // Before the command is sent: other threads keep submitting while it runs, and with the old block
            // size or capacity they would write to other blocks than they mean to.
            self.facts.erase(nsid);
            if let Err(error) = self.wait_for_kernels(GpuUse::KeptOut) {
                self.facts.was_not_erased(nsid);
                return Err(error);
            }
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

    /// Waits until every queue that a GPU drives is in the state `wanted`.
    ///
    /// # Errors
    /// [`Error::Usage`] when kernels still run: they could write by the old block size while the command is executed.
    fn wait_for_kernels(&self, wanted: GpuUse) -> Result<()> {
        #[cfg(feature = "cuda")]
        {
            let queues: Vec<_> = lock(&self.queues).values().cloned().collect();
            for inner in queues {
                let mut inner = lock(&inner);
                let is_reached = inner.lent.as_mut().is_none_or(|lent| match wanted {
                    GpuUse::Returned => lent.is_returned(),
                    GpuUse::KeptOut => lent.keep_out(),
                });
                if !is_reached {
                    return Err(Error::usage(
                        "kernels of this process have not ended that may use a namespace to be erased",
                        "wait for these kernels, end their use of the queues, and send the command again",
                    ));
                }
            }
        }
        let _ = wanted;
        Ok(())
    }
}

//! Proof that a controller can no longer touch the memory of commands, and the rules that bind it to those
//! commands.
//!
//! Invariant: a proof ends commands that the controller had before the proof was made, and no others. It
//! names one controller ([`ControllerIdentity`]), or one queue as it was created once. A queue that was created or
//! restarted later is another queue to it, and enabling the controller ends its effect.
//!
//! The order of calls: [`ControllerIdentity::new`] once for each controller; queues are bound to it when they are made;
//! [`BringupMachine`](crate::bringup::BringupMachine), [`ShutdownMachine`](crate::shutdown::ShutdownMachine) or
//! [`QueueDeletion`](crate::recovery::QueueDeletion) returns a proof; the queues are reclaimed with it.
//!
//! docs/adr/0007-what-a-proof-is-bound-to.md has the reasons.
//! docs/adr/0007-what-a-proof-is-bound-to.md has the reasons.

use crate::outcome::AbortReason;
use crate::spec::Qid;
use crate::sync::serial::{self, LastEvent};

/// The identity of a controller, made once for each by the implementor of [`RegisterAccess`](crate::RegisterAccess).
///
/// Queues are bound to it when they are made, proofs when they are issued. Two identities always count as two
/// controllers, even if both were made for one device.
#[derive(Debug)]
pub struct ControllerIdentity {
    id: u64,
    /// Time at which [`BringupMachine`](crate::bringup::BringupMachine) last set CC.EN.
    enabled: LastEvent,
}

impl ControllerIdentity {
    /// Makes the identity of a controller that no queue is bound to yet.
    #[allow(clippy::new_without_default, reason = "each one is another controller")]
    pub fn new() -> Self {
        Self {
            id: serial::next(),
            enabled: LastEvent::none(),
        }
    }

    pub(crate) fn id(&self) -> ControllerId {
        ControllerId(self.id)
    }

    /// Records that the controller is about to be enabled: proofs made before have no effect afterwards.
    pub(crate) fn enabling(&self) {
        self.enabled.happens();
    }

    /// Makes the proof that the controller answered CC.EN = 0 with CSTS.RDY = 0. The caller does
    /// not enable the controller before this returns. Otherwise the proof would end commands whose
    /// buffers the controller may touch again.
    pub(crate) fn quiesced(&self) -> Quiesced<'_> {
        Quiesced(QuiescedExtent::Controller {
            identity: self,
            at: serial::next(),
        })
    }
}

/// The number of a controller, for comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ControllerId(u64);

/// The number of a queue's controller, and the time at which the queue was made or restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueBinding {
    pub controller: ControllerId,
    made: u64,
}

impl QueueBinding {
    /// Binds a queue of this controller, made now.
    pub fn new(identity: &ControllerIdentity) -> Self {
        Self::made_now(identity.id())
    }

    /// Binds the same queue again, restarted now.
    pub fn again(self) -> Self {
        Self::made_now(self.controller)
    }

    fn made_now(controller: ControllerId) -> Self {
        Self {
            controller,
            made: serial::next(),
        }
    }

    /// Converts to words, for the state of a queue that a kernel drives.
    pub const fn words(self) -> [u64; 2] {
        [self.controller.0, self.made]
    }

    /// Converts from the words of [`words`](Self::words).
    pub const fn from_words([controller, made]: [u64; 2]) -> Self {
        Self {
            controller: ControllerId(controller),
            made,
        }
    }
}

/// A queue that takes no commands until it is restarted, the first step of its deletion: see
/// [`QueuePair::close`](crate::QueuePair::close),
/// [`QueueState::close`](crate::queue_state::QueueState::close).
///
/// It is consumed by one deletion:
/// ```compile_fail,E0382
/// # use nvme_core::{ClosedQueue, recovery::QueueDeletion};
/// fn twice(closed: ClosedQueue) {
///     let first = QueueDeletion::new(closed, 1_000);
///     let second = QueueDeletion::new(closed, 1_000);
/// }
/// ```
#[derive(Debug)]
#[must_use = "the queue takes no more commands: delete it"]
pub struct ClosedQueue {
    pub(crate) qid: Qid,
    pub(crate) binding: QueueBinding,
}

/// Proof that the controller can no longer touch the memory of commands: it answered CC.EN = 0 with CSTS.RDY
/// = 0 (its queues), or completed Delete I/O Submission Queue (that queue).
///
/// A proof of a controller ends the commands of queues that were bound to it before the proof was made, until
/// [`BringupMachine`](crate::bringup::BringupMachine) enables the controller. A proof of a queue ends the commands of
/// that queue until it is restarted. It has no effect on any other queue.
///
/// Only this crate can make one:
/// ```compile_fail,E0423
/// let proof = nvme_core::Quiesced(());
/// ```
/// There are no copies:
/// ```compile_fail,E0599
/// fn copy(proof: nvme_core::Quiesced<'_>) {
///     let again = proof.clone();
/// }
/// ```
/// Enabling the controller takes the proof away:
/// ```compile_fail,E0382
/// # use nvme_core::{Quiesced, QueuePair, bringup::BringupMachine};
/// fn late(machine: &mut BringupMachine<'_>, pair: &mut QueuePair<'_, u32>, proof: Quiesced<'_>) {
///     machine.enable(proof);
///     pair.reclaim(&proof);
/// }
/// ```
/// And it lives no longer than the registers it was made from:
/// ```compile_fail,E0515
/// # use nvme_core::{Quiesced, RegisterAccess, shutdown::{ShutdownMachine, ShutdownStep}};
/// fn keep<R: RegisterAccess>(registers: R, mut machine: ShutdownMachine) -> Option<Quiesced<'static>> {
///     match machine.step(&registers, 0) {
///         Ok(ShutdownStep::Done(proof)) => Some(proof),
///         _ => None,
///     }
/// }
/// ```
#[derive(Debug)]
#[must_use = "reclaim the memory that the controller no longer uses"]
pub struct Quiesced<'r>(QuiescedExtent<'r>);

#[derive(Debug)]
enum QuiescedExtent<'r> {
    Controller {
        identity: &'r ControllerIdentity,
        at: u64,
    },
    Queue(ClosedQueue),
}

impl Quiesced<'static> {
    /// Makes the proof that the controller completed the deletion of this submission queue.
    pub(crate) fn queue(closed: ClosedQueue) -> Self {
        Self(QuiescedExtent::Queue(closed))
    }
}

impl Quiesced<'_> {
    /// True if the proof ends the commands of this queue.
    pub(crate) fn covers(&self, qid: Qid, binding: QueueBinding) -> bool {
        match &self.0 {
            QuiescedExtent::Controller { at, .. } => {
                self.holds(binding.controller) && binding.made < *at
            }
            QuiescedExtent::Queue(closed) => closed.qid == qid && closed.binding == binding,
        }
    }

    /// True if the proof covers this controller, and the controller was not enabled since.
    pub(crate) fn holds(&self, controller: ControllerId) -> bool {
        match &self.0 {
            QuiescedExtent::Controller { identity, at } => {
                identity.id() == controller && identity.enabled.at() < *at
            }
            QuiescedExtent::Queue(_) => false,
        }
    }

    /// Returns the reason for the end of the commands.
    pub fn reason(&self) -> AbortReason {
        match self.0 {
            QuiescedExtent::Controller { .. } => AbortReason::ControllerReset,
            QuiescedExtent::Queue(_) => AbortReason::QueueDeleted,
        }
    }
}

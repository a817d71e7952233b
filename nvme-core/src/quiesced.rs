//! Proof that a controller can no longer touch the memory of commands, and which commands it ends.
//!
//! Invariant: a proof ends commands that the controller had before the proof was made, and no others. It
//! names one controller ([`Identity`]), or one queue as it was created once. A queue that was created or
//! restarted later is another one, and enabling the controller ends what the proof allows.
//!
//! docs/adr/0007-what-a-proof-is-bound-to.md has the reasons.

use crate::outcome::AbortReason;
use crate::spec::Qid;
use crate::sync::serial::{self, LastEvent};

/// Which controller: made once for each, by what implements [`Registers`](crate::Registers) for it.
///
/// Queues are bound to it when they are made, proofs when they are given. Two identities are two
/// controllers, whatever they were made for.
#[derive(Debug)]
pub struct Identity {
    id: u64,
    /// When CC.EN was last set by [`Bringup`](crate::bringup::Bringup).
    enabled: LastEvent,
}

impl Identity {
    /// The identity of a controller that no queue is bound to yet.
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

    /// The controller is about to be enabled: proofs made before end nothing any more.
    pub(crate) fn enabling(&self) {
        self.enabled.happens();
    }

    /// The controller answered CC.EN = 0 with CSTS.RDY = 0, and is not enabled again before this returns.
    pub(crate) fn quiesced(&self) -> Quiesced<'_> {
        Quiesced(Extent::Controller {
            identity: self,
            at: serial::next(),
        })
    }
}

/// Which controller, as a number to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ControllerId(u64);

/// Which queue: of which controller, and when it was made or restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    pub controller: ControllerId,
    made: u64,
}

impl Binding {
    /// A queue of this controller that is made now.
    pub fn new(identity: &Identity) -> Self {
        Self::made_now(identity.id())
    }

    /// The queue once more, restarted now.
    pub fn again(self) -> Self {
        Self::made_now(self.controller)
    }

    fn made_now(controller: ControllerId) -> Self {
        Self {
            controller,
            made: serial::next(),
        }
    }

    /// As words, for the state of a queue that a kernel drives.
    pub const fn words(self) -> [u64; 2] {
        [self.controller.0, self.made]
    }

    /// What [`words`](Self::words) gave.
    pub const fn from_words([controller, made]: [u64; 2]) -> Self {
        Self {
            controller: ControllerId(controller),
            made,
        }
    }
}

/// A queue that takes no more commands until it is restarted, which is what its deletion begins with:
/// see [`QueuePair::close`](crate::QueuePair::close), [`QueueState::close`](crate::queue_state::QueueState::close).
///
/// One deletion is made of it:
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
    pub(crate) binding: Binding,
}

/// Proof that the controller can no longer touch the memory of commands: it answered CC.EN = 0 with
/// CSTS.RDY = 0 (its queues), or completed Delete I/O Submission Queue (that queue).
///
/// A proof of a controller ends the commands of queues that were bound to it before the proof was made,
/// until [`Bringup`](crate::bringup::Bringup) enables the controller. A proof of a queue ends the
/// commands of that queue until it is restarted. On any other queue it does nothing.
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
/// # use nvme_core::{Quiesced, QueuePair, bringup::Bringup};
/// fn late(machine: &mut Bringup<'_>, pair: &mut QueuePair<'_, u32>, proof: Quiesced<'_>) {
///     machine.enable(proof);
///     pair.reclaim(&proof);
/// }
/// ```
/// And it lives no longer than the registers that gave it:
/// ```compile_fail,E0515
/// # use nvme_core::{Quiesced, Registers, shutdown::{Shutdown, Step}};
/// fn keep<R: Registers>(registers: R, mut machine: Shutdown) -> Option<Quiesced<'static>> {
///     match machine.step(&registers, 0) {
///         Ok(Step::Done(proof)) => Some(proof),
///         _ => None,
///     }
/// }
/// ```
#[derive(Debug)]
#[must_use = "reclaim what the controller has let go of"]
pub struct Quiesced<'r>(Extent<'r>);

#[derive(Debug)]
enum Extent<'r> {
    Controller { identity: &'r Identity, at: u64 },
    Queue(ClosedQueue),
}

impl Quiesced<'static> {
    /// The controller completed the deletion of this submission queue.
    pub(crate) fn queue(closed: ClosedQueue) -> Self {
        Self(Extent::Queue(closed))
    }
}

impl Quiesced<'_> {
    /// Whether the proof ends the commands of this queue.
    pub(crate) fn covers(&self, qid: Qid, binding: Binding) -> bool {
        match &self.0 {
            Extent::Controller { at, .. } => self.holds(binding.controller) && binding.made < *at,
            Extent::Queue(closed) => closed.qid == qid && closed.binding == binding,
        }
    }

    /// Whether the proof says that this controller is disabled, and it was not enabled since.
    pub(crate) fn holds(&self, controller: ControllerId) -> bool {
        match &self.0 {
            Extent::Controller { identity, at } => {
                identity.id() == controller && identity.enabled.at() < *at
            }
            Extent::Queue(_) => false,
        }
    }

    /// Why the commands end.
    pub fn reason(&self) -> AbortReason {
        match self.0 {
            Extent::Controller { .. } => AbortReason::ControllerReset,
            Extent::Queue(_) => AbortReason::QueueDeleted,
        }
    }
}

//! Proof that a controller can no longer touch the memory of commands, and the rules that bind it to those
//! commands.
//!
//! Invariant: a proof ends commands that the controller had before the proof was made, and no others. It
//! names one controller ([`Identity`]), or one queue as it was created once. A queue that was created or
//! restarted later is another queue to it, and enabling the controller ends its effect.
//!
//! The order of calls: [`Identity::new`] once for each controller; queues are bound to it when they are made;
//! [`Bringup`](crate::bringup::Bringup), [`Shutdown`](crate::shutdown::Shutdown) or
//! [`QueueDeletion`](crate::recovery::QueueDeletion) returns a proof; the queues are reclaimed with it.
//!
//! docs/adr/0007-what-a-proof-is-bound-to.md has the reasons.
//! docs/adr/0007-what-a-proof-is-bound-to.md has the reasons.

use crate::outcome::AbortReason;
use crate::spec::Qid;
use crate::sync::serial::{self, LastEvent};

/// The identity of a controller, made once for each by the implementor of [`Registers`](crate::Registers).
///
/// Queues are bound to it when they are made, proofs when they are issued. Two identities always count as two
/// controllers, even if both were made for one device.
#[derive(Debug)]
pub struct Identity {
    id: u64,
    /// Time at which [`Bringup`](crate::bringup::Bringup) last set CC.EN.
    enabled: LastEvent,
}

impl Identity {
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

    /// Makes the proof that the controller answered CC.EN = 0 with CSTS.RDY = 0. The caller does not enable
    /// the controller before this returns.
    pub(crate) fn quiesced(&self) -> Quiesced<'_> {
        Quiesced(Extent::Controller {
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
pub(crate) struct Binding {
    pub controller: ControllerId,
    made: u64,
}

impl Binding {
    /// Binds a queue of this controller, made now.
    pub fn new(identity: &Identity) -> Self {
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
    pub(crate) binding: Binding,
}

/// Proof that the controller can no longer touch the memory of commands: it answered CC.EN = 0 with CSTS.RDY
/// = 0 (its queues), or completed Delete I/O Submission Queue (that queue).
///
/// A proof of a controller ends the commands of queues that were bound to it before the proof was made, until
/// [`Bringup`](crate::bringup::Bringup) enables the controller. A proof of a queue ends the commands of that
/// queue until it is restarted. It has no effect on any other queue.
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
/// And it lives no longer than the registers it was made from:
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
    /// Makes the proof that the controller completed the deletion of this submission queue.
    pub(crate) fn queue(closed: ClosedQueue) -> Self {
        Self(Extent::Queue(closed))
    }
}

impl Quiesced<'_> {
    /// True if the proof ends the commands of this queue.
    pub(crate) fn covers(&self, qid: Qid, binding: Binding) -> bool {
        match &self.0 {
            Extent::Controller { at, .. } => self.holds(binding.controller) && binding.made < *at,
            Extent::Queue(closed) => closed.qid == qid && closed.binding == binding,
        }
    }

    /// True if the proof covers this controller, and the controller was not enabled since.
    pub(crate) fn holds(&self, controller: ControllerId) -> bool {
        match &self.0 {
            Extent::Controller { identity, at } => {
                identity.id() == controller && identity.enabled.at() < *at
            }
            Extent::Queue(_) => false,
        }
    }

    /// Returns the reason for the end of the commands.
    pub fn reason(&self) -> AbortReason {
        match self.0 {
            Extent::Controller { .. } => AbortReason::ControllerReset,
            Extent::Queue(_) => AbortReason::QueueDeleted,
        }
    }
}

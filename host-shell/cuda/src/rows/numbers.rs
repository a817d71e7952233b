//! Allocation of launch numbers, and the objects that abandoned launches still need. A number has summary words in
//! host memory; it is reused only after its launch has ended, since a late end would otherwise be taken for that of
//! another launch.

use super::kernels::RowKernels;
use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Largest number of launches in progress at a time, captured ones included.
pub(super) const LAUNCHES: u32 = 4096;
/// Keep-alive of a launch besides the words of its store: a cache, or the members of a stripe.
pub(super) type Named = Option<Arc<dyn Any + Send + Sync>>;
/// Number of abandoned launches at which their list is examined.
const FEW_ABANDONED: usize = 32;

/// The numbers of one store's launches.
pub(super) struct LaunchNumbers {
    pub(super) free: Vec<u32>,
    /// Numbers that are reserved, or launched with a handle, without those of graphs: each with its count of ended
    /// launches before.
    pub(super) held: HashMap<u32, u32>,
    /// Launches whose handle was dropped before their end.
    pub(super) abandoned: Vec<AbandonedLaunch>,
    /// Number of abandoned launches at which their list is examined again.
    pub(super) most_abandoned: usize,
    /// Numbers that scatters have had. A graph may run such a launch again at any time.
    pub(super) of_scatters: BTreeSet<u32>,
}

pub(super) struct AbandonedLaunch {
    pub(super) number: u32,
    pub(super) before: u32,
    /// Kept until it has ended.
    pub(super) _kernels: Option<Arc<RowKernels>>,
    pub(super) _named: Named,
}

impl Default for LaunchNumbers {
    fn default() -> Self {
        Self {
            free: (0..LAUNCHES).rev().collect(),
            held: HashMap::new(),
            abandoned: Vec::new(),
            most_abandoned: FEW_ABANDONED,
            of_scatters: BTreeSet::new(),
        }
    }
}

impl LaunchNumbers {
    /// Frees the numbers of abandoned launches that have ended, and returns the objects that they needed.
    pub(super) fn look_at_abandoned(&mut self, ended: impl Fn(u32) -> u32) -> Vec<AbandonedLaunch> {
        let has_ended = |one: &mut AbandonedLaunch| ended(one.number) != one.before;
        let over: Vec<AbandonedLaunch> = self.abandoned.extract_if(.., has_ended).collect();
        self.free.extend(over.iter().map(|one| one.number));
        self.most_abandoned = FEW_ABANDONED.max(2 * self.abandoned.len());
        over
    }

    /// Returns how many launches are those of graphs.
    pub fn of_graphs(&self) -> usize {
        LAUNCHES as usize - self.free.len() - self.held.len() - self.abandoned.len()
    }

    /// True if every launch has ended, apart from those of graphs.
    pub fn are_over(&self, ended: impl Fn(u32) -> u32) -> bool {
        let held = self.held.iter().map(|(number, before)| (*number, *before));
        let abandoned = self.abandoned.iter().map(|one| (one.number, one.before));
        held.chain(abandoned)
            .all(|(number, before)| ended(number) != before)
    }
}

//! Drives in stripes, as launches over several of them are given them.

use super::GatherLaunch;
use crate::QueueArray;

/// Limit of the members of a striped launch: each is handled by one lane of a warp.
pub const MEMBERS: u32 = 32;

/// A drive of a striped launch, as described in GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StripedMember {
    /// Queues, with a result cell for each row of each station.
    pub queues: QueueArray,
    /// Address of the words of the member's gate, which has a word for each station of the launch.
    pub gate: u64,
    /// Address of a `u32` for each station: the word of a [`GateReference`](crate::gate::GateReference) of the
    /// station's warps, or of its block if that uses this member alone.
    pub stations: u64,
    /// Address of the member's slot memory: [`STATION_BYTES`](super::STATION_BYTES) for each station.
    pub slots: u64,
    /// Address of the same slot memory for the member's controller.
    pub slots_iova: u64,
    /// Namespace.
    pub nsid: u32,
    /// Block size of the member's namespace, as log2 of bytes.
    pub block_shift: u32,
}

/// Parameters of a launch that gathers rows of several striped drives: `nvme_gather_striped`.
///
/// `queues`, `gate`, `slots` and `nsid` of the gather are not used: each member has its own. A row touches at
/// most two members, unless its table lies in several ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StripedGather {
    /// Parameters of the gather.
    pub gather: GatherLaunch,
    /// Address of a [`StripedMember`] for each drive.
    pub members: u64,
    /// log2 of the bytes of a stripe; there are fewer than 2^32 stripes.
    pub stripe_shift: u32,
    /// Number of members, at most [`MEMBERS`].
    pub member_count: u32,
}

/// Parameters of a launch that gathers rows of several striped drives by queues that its blocks own:
/// `nvme_gather_batched_striped`.
///
/// A block reads from one drive. Block k gathers those of the rows from row `k / member_count * rows_of_block` on that lie
/// on drive `k % member_count`. No row lies on two drives, or in two ranges of its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BatchedStripes {
    /// The launch and its drives. Behind the queues of each drive there is one for each of the first `owned` stations.
    pub striped: StripedGather,
    /// Rows that a block looks at, 1 to [`BLOCK_THREADS`](super::BLOCK_THREADS). A station has slots for all of them, and
    /// a queue has room for as many commands.
    pub rows_of_block: u32,
    /// Number of stations with a queue on each drive, at least 1.
    pub owned: u32,
}

//! The memory that the threads of a block share for their groups.

/// Words of groups: two for each of 32 warps, and one to broadcast.
pub(crate) const GROUP_WORDS: usize = 65;
/// Words of a block that reads by batches: one for each thread.
pub(crate) const BATCH_WORDS: usize = 256;
/// Words of both.
pub(crate) const SCRATCH: usize = GROUP_WORDS + BATCH_WORDS;

//! The size of the memory that the threads of a block share for their groups.

/// Two words for each of 32 warps, and one to broadcast.
pub(crate) const SCRATCH: usize = 65;

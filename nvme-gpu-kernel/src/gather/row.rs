//! A row of a lane, and the location of the ranges that a launch reads in place of rows.

use super::map::RowMap;
use crate::rows::RowBlocks;

/// A row of a lane.
#[derive(Clone, Copy)]
pub struct GatherRow<M: RowMap> {
    pub id: u64,
    /// Bytes of the row before the part that is read, and of that part.
    pub part: M::Part,
    pub place: RowBlocks,
    /// Address of its bytes in the slots, or in the line of the cache, once they are there.
    pub from: u64,
    pub code: i32,
    /// Striped member that its code is about.
    pub member: Option<u32>,
}

/// The location of a launch's ranges.
#[derive(Clone, Copy)]
pub enum RangeSource {
    /// Parameter of `nvme_read_ranges`.
    Parameter,
    /// Address of a list.
    Memory(u64),
}

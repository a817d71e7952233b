//! Ways, and where they lead.

use super::plan::Plan;
use crate::error::Result;

/// What each byte of the destination is before a way fills it.
pub(super) const SPOILT: u8 = 0xA5;

/// A way of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Our driver.
    Direct,
    CuFile,
    /// `pread` into pageable memory, then a copy.
    Pageable,
    /// `pread` into pinned memory, copies beside it.
    Pinned,
}

/// Where the bytes go, and the ways that lead there.
pub(super) trait Place {
    /// Each way, its name, and how it goes or why not.
    fn ways(&mut self) -> Vec<(Way, &'static str, Result<String>)>;

    /// What comes before `plan` is run, and is not timed.
    fn prepare(&mut self, plan: &Plan) -> Result<()>;

    /// Seconds of `plan` by `way`.
    fn run(&mut self, way: Way, plan: &Plan) -> Result<f64>;

    /// Seconds of its reads alone and of its copies alone, where they can be told apart.
    fn steps(&mut self, way: Way, plan: &Plan) -> Result<Option<(f64, f64)>>;

    /// The first bytes of the destination.
    fn take(&mut self, into: &mut [u8]) -> Result<()>;

    /// Overwrites the destination.
    fn spoil(&mut self) -> Result<()>;

    /// Bytes a second of copies to the destination, where a link leads there, and of copies inside of its memory, each
    /// byte counted as read and as written.
    fn limits(&mut self, runs: usize) -> Result<(Option<f64>, f64)>;
}

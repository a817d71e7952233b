//! Ways, and where they lead.

use super::plan::ReadPlan;
use nvme_driver::error::Result;

/// Byte that fills the destination before each path, so that missing data cannot pass for right data.
pub(super) const SPOILT: u8 = 0xA5;

/// A path by which bytes reach their destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BytePath {
    /// Our driver.
    Direct,
    CuFile,
    /// `pread` into pageable memory, then a copy.
    Pageable,
    /// `pread` into pinned memory, with copies at the same time.
    Pinned,
}

/// Destination of the bytes, and the paths that lead there.
pub(super) trait PathDestination {
    /// Returns each path with its name, and its description or the reason why it is unavailable.
    fn ways(&mut self) -> Vec<(BytePath, &'static str, Result<String>)>;

    /// Prepares a run of `plan`, outside of the timed part.
    fn prepare(&mut self, plan: &ReadPlan) -> Result<()>;

    /// Measures the seconds of `plan` by the path `way`.
    fn run(&mut self, way: BytePath, plan: &ReadPlan) -> Result<f64>;

    /// Returns the seconds of the path's reads alone and of its copies alone, if they can be measured separately.
    fn steps(&mut self, way: BytePath, plan: &ReadPlan) -> Result<Option<(f64, f64)>>;

    /// Copies the first bytes of the destination to the host.
    fn take(&mut self, into: &mut [u8]) -> Result<()>;

    /// Overwrites the destination.
    fn spoil(&mut self) -> Result<()>;

    /// Returns the rate in bytes a second of copies to the destination, if a link leads there, and of copies inside of
    /// its memory, each byte counted as read and as written.
    fn limits(&mut self, runs: usize) -> Result<(Option<f64>, f64)>;
}

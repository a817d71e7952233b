//! The same rows written back: `table[ids] = rows` by the GPU.
// UNSAFETY: launches a kernel over this module's own memory.
#![allow(unsafe_code)]

use super::{GatherCase, GatherFixture};
use crate::measure::median;
use nvme_driver::error::Result;
use serde_json::{Value, json};

impl GatherFixture {
    /// Measures the seconds of a scatter of the rows that were gathered last, which leaves the table unchanged; `None`
    /// if the GPU does not write them.
    pub(super) fn scatter(&self, case: &GatherCase) -> Result<Option<f64>> {
        let (rows, request) = (&self.drives.first, self.request(case, case.count));
        if self.drives.striped.is_some() || !rows.writes(&case.table, &request) {
            return Ok(None);
        }
        let seconds = self.timed(|stream| {
            // SAFETY: the memory is our own and outlives the launches: they are waited for.
            unsafe { rows.scatter(&case.table, &request, stream) }
        });
        seconds.map(Some)
    }

    /// Returns the number of rows a second that were requested to be written, including rows whose id was repeated.
    pub(super) fn written(case: &GatherCase, seconds: &[f64]) -> Option<Value> {
        if seconds.is_empty() {
            return None;
        }
        let rate = case.count as f64 / median(seconds);
        Some(json!({
            "rows_per_s": rate,
            "gb_per_s": rate * f64::from(case.table.row_bytes) / 1e9,
            "seconds": seconds,
        }))
    }
}

//! A product of matrices alone, and while rows are gathered in another stream: what gathers take from a model.

use super::gemm::{ProductBench, ProductShape};
use super::graphs::late;
use super::{GatherCase, GatherFixture};
use crate::measure::median;
use nvme_driver::error::Result;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Time that the products of a measurement take together, about.
const MEASURED: Duration = Duration::from_millis(300);
/// Most products of a measurement.
const MOST: u64 = 10_000;
/// Time from one lookup to the next.
const LOOKUP_EVERY: Duration = Duration::from_micros(200);

impl GatherFixture {
    /// Measures products alone, beside gathers of all rows one after the other, and beside a gather of the first number
    /// of rows of `--graph-rows` in a graph every 200 us.
    pub(super) fn beside_product(
        &self,
        case: &GatherCase,
        product: &ProductBench,
    ) -> Result<Value> {
        let one = product.measure(1, || Ok(()))?;
        let count = (MEASURED.as_secs_f64() * 1e3 / one.max(1e-3)) as u64;
        let count = count.clamp(1, MOST);
        let rows = self
            .job
            .graphs
            .rows
            .first()
            .copied()
            .unwrap_or(1)
            .min(case.count);
        let (graph, pending) = self.whole(case, rows)?;
        let (mut alone, mut long, mut few) = (Vec::new(), Vec::new(), Vec::new());
        let (mut gathered, mut seconds, mut lookups) = (0, 0.0, Vec::new());
        for _ in 0..self.job.cases.runs {
            alone.push(product.measure(count, || Ok(()))?);
            let began = Instant::now();
            long.push(product.measure(count, || {
                self.gather(case, None)?;
                gathered += case.count;
                Ok(())
            })?);
            seconds += began.elapsed().as_secs_f64();
            self.verify(case)?;
            few.push(product.measure(count, || {
                let began = Instant::now();
                lookups.push(self.replay(&graph, Some(&pending))?);
                while began.elapsed() < LOOKUP_EVERY {
                    std::hint::spin_loop();
                }
                Ok(())
            })?);
        }
        self.replay(&graph, Some(&pending))?;
        self.verify_first(case, rows)?;
        let ProductShape { m, n, k } = product.shape;
        let ms = median(&alone);
        Ok(json!({
            "m": m, "n": n, "k": k, "ms": ms,
            "of_it_beside_gathers": median(&long) / ms, "rows_per_s": gathered as f64 / seconds,
            "of_it_beside_lookups": median(&few) / ms,
            "lookup_rows": rows, "lookups": lookups.len(),
            "lookup_us_p50": median(&lookups), "lookup_us_p99": late(&lookups),
        }))
    }
}

//! Timeline of a pipeline: spans of reads and of products, their overlap, and the file for Perfetto and Chrome's
//! tracing. Overlap is the time during which a read and a product are in progress, as a share of the shorter of the
//! two.

use std::fmt::Write;

/// Kind of work of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanWork {
    /// Bytes are read from the drive, or from another source.
    Read,
    /// A product.
    Compute,
}

/// Work on one batch, from one time to another in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkSpan {
    /// Kind of work.
    pub work: SpanWork,
    /// The batch.
    pub batch: u64,
    /// The buffer that the batch lies in.
    pub slot: u32,
    /// Start in microseconds.
    pub begin_us: f64,
    /// End in microseconds.
    pub end_us: f64,
}

/// Time of reads and of products, and their overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkOverlap {
    /// Microseconds during which a read was in progress.
    pub read_us: f64,
    /// Microseconds during which a product was in progress.
    pub compute_us: f64,
    /// Microseconds with both.
    pub both_us: f64,
}

impl WorkOverlap {
    /// Returns the overlap as a share of the shorter time; 0 if one of them took no time.
    pub fn share(&self) -> f64 {
        let shorter = self.read_us.min(self.compute_us);
        match shorter > 0.0 {
            true => self.both_us / shorter,
            false => 0.0,
        }
    }
}

/// The spans of a run, and the number of spans that were dropped.
#[derive(Clone, Debug, Default)]
pub struct PipelineTrace {
    /// Spans in the order in which they were recorded.
    pub spans: Vec<WorkSpan>,
    /// Number of spans that were left out.
    pub dropped: u64,
}

/// Spans that are kept.
const MOST: usize = 200_000;

/// Numbers of the rows of the picture: reads, products, and the first buffer.
const READS: u32 = 1;
const PRODUCTS: u32 = 2;
const FIRST_SLOT: u32 = 10;

impl PipelineTrace {
    /// Keeps a span, if there is room.
    pub fn note(&mut self, span: WorkSpan) {
        match self.spans.len() < MOST {
            true => self.spans.push(span),
            false => self.dropped += 1,
        }
    }

    /// Drops spans that ended more than `us` microseconds before the end.
    pub fn keep_last(&mut self, us: f64) {
        let end = self
            .spans
            .iter()
            .map(|span| span.end_us)
            .fold(0.0, f64::max);
        let before = self.spans.len();
        self.spans.retain(|span| span.end_us >= end - us);
        self.dropped += (before - self.spans.len()) as u64;
    }

    /// Returns the times during which work of one kind was in progress, in order and without overlaps.
    fn busy(&self, work: SpanWork) -> Vec<(f64, f64)> {
        let of = self.spans.iter().filter(|span| span.work == work);
        let mut all: Vec<(f64, f64)> = of.map(|span| (span.begin_us, span.end_us)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut busy: Vec<(f64, f64)> = Vec::new();
        for (begin, end) in all {
            match busy.last_mut() {
                Some(last) if begin <= last.1 => last.1 = last.1.max(end),
                _ => busy.push((begin, end)),
            }
        }
        busy
    }

    /// Returns the overlap of reads and products.
    pub fn overlap(&self) -> WorkOverlap {
        let (reads, products) = (self.busy(SpanWork::Read), self.busy(SpanWork::Compute));
        let length =
            |all: &[(f64, f64)]| all.iter().fold(0.0, |sum, (begin, end)| sum + end - begin);
        let (mut both_us, mut at) = (0.0, 0);
        for (begin, end) in &reads {
            while at < products.len() && products[at].1 <= *begin {
                at += 1;
            }
            let beside = products[at..].iter().take_while(|product| product.0 < *end);
            both_us += beside
                .map(|product| product.1.min(*end) - product.0.max(*begin))
                .sum::<f64>();
        }
        WorkOverlap {
            read_us: length(&reads),
            compute_us: length(&products),
            both_us,
        }
    }

    /// Returns the batches as spans of their buffers: from the start of the read, or of the product if nothing was
    /// read, to the end.
    fn batches(&self) -> Vec<WorkSpan> {
        let mut all: Vec<WorkSpan> = Vec::new();
        for span in &self.spans {
            let same = |other: &&mut WorkSpan| other.batch == span.batch && other.slot == span.slot;
            match all.iter_mut().rev().take(64).find(same) {
                Some(batch) => {
                    batch.begin_us = batch.begin_us.min(span.begin_us);
                    batch.end_us = batch.end_us.max(span.end_us);
                }
                None => all.push(*span),
            }
        }
        all
    }

    /// Returns the trace in the format of trace events (JSON): a row for reads, one for products, and one for
    /// each buffer, in which the read and the product of a batch lie inside of the batch.
    pub fn to_json(&self, name: &str) -> String {
        let mut events = String::new();
        let mut event = |text: std::fmt::Arguments<'_>| {
            let comma = if events.is_empty() { "" } else { ",\n" };
            // Writing to a String cannot fail.
            let _ = write!(events, "{comma}{text}");
        };
        event(format_args!(
            r#"{{"ph":"M","pid":1,"name":"process_name","args":{{"name":"{}"}}}}"#,
            escaped(name)
        ));
        let slots = self.spans.iter().map(|span| span.slot + 1).max();
        let rows = [
            (READS, "reads".to_owned()),
            (PRODUCTS, "products".to_owned()),
        ];
        let buffers =
            (0..slots.unwrap_or(0)).map(|slot| (FIRST_SLOT + slot, format!("buffer {slot}")));
        for (row, name) in rows.into_iter().chain(buffers) {
            event(format_args!(
                r#"{{"ph":"M","pid":1,"tid":{row},"name":"thread_name","args":{{"name":"{name}"}}}}"#
            ));
        }
        let mut span = |row: u32, name: &str, of: &WorkSpan| {
            let (begin, took) = (of.begin_us, (of.end_us - of.begin_us).max(0.0));
            event(format_args!(
                r#"{{"ph":"X","pid":1,"tid":{row},"name":"{name}","ts":{begin:.3},"dur":{took:.3},"args":{{"batch":{},"buffer":{}}}}}"#,
                of.batch, of.slot
            ));
        };
        for batch in self.batches() {
            span(
                FIRST_SLOT + batch.slot,
                &format!("batch {}", batch.batch),
                &batch,
            );
        }
        for one in &self.spans {
            let (row, name) = match one.work {
                SpanWork::Read => (READS, "read"),
                SpanWork::Compute => (PRODUCTS, "product"),
            };
            span(row, name, one);
            span(FIRST_SLOT + one.slot, name, one);
        }
        format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{events}\n]}}\n")
    }
}

/// Returns `text` escaped for a string of JSON.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            _ if letter.is_control() => out.push(' '),
            _ => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(work: SpanWork, batch: u64, begin_us: f64, end_us: f64) -> WorkSpan {
        WorkSpan {
            work,
            batch,
            slot: (batch % 2) as u32,
            begin_us,
            end_us,
        }
    }

    fn of(spans: &[WorkSpan]) -> PipelineTrace {
        PipelineTrace {
            spans: spans.to_vec(),
            dropped: 0,
        }
    }

    #[test]
    fn the_time_with_both_under_way_is_that_of_the_spans() {
        use SpanWork::{Compute, Read};
        let trace = of(&[
            span(Read, 0, 0.0, 10.0),
            span(Compute, 0, 10.0, 14.0),
            span(Read, 1, 10.0, 20.0),
            span(Compute, 1, 20.0, 24.0),
            // Two reads at a time count once.
            span(Read, 2, 21.0, 30.0),
            span(Read, 3, 22.0, 26.0),
            span(Compute, 2, 40.0, 44.0),
        ]);
        let overlap = trace.overlap();
        assert_eq!((overlap.read_us, overlap.compute_us), (29.0, 12.0));
        // 10 to 14, and 21 to 24.
        assert_eq!(overlap.both_us, 7.0);
        assert!((overlap.share() - 7.0 / 12.0).abs() < 1e-12);
    }

    #[test]
    fn one_product_beside_many_reads_and_the_other_way_round() {
        use SpanWork::{Compute, Read};
        let many = [
            span(Read, 0, 0.0, 2.0),
            span(Read, 1, 4.0, 6.0),
            span(Read, 2, 9.0, 12.0),
        ];
        let trace = of(&[&many[..], &[span(Compute, 0, 1.0, 10.0)]].concat());
        assert_eq!(trace.overlap().both_us, 1.0 + 2.0 + 1.0);
        let turned: Vec<WorkSpan> = trace
            .spans
            .iter()
            .map(|one| WorkSpan {
                work: if one.work == Read { Compute } else { Read },
                ..*one
            })
            .collect();
        assert_eq!(of(&turned).overlap().both_us, 4.0);
        assert_eq!(of(&[span(Read, 0, 0.0, 5.0)]).overlap().share(), 0.0);
        assert_eq!(PipelineTrace::default().overlap(), WorkOverlap::default());
    }

    #[test]
    fn the_last_part_is_kept() {
        use SpanWork::{Compute, Read};
        let mut trace = of(&[
            span(Read, 0, 0.0, 10.0),
            span(Compute, 0, 90.0, 95.0),
            span(Read, 1, 10.0, 100.0),
        ]);
        trace.keep_last(10.0);
        assert_eq!((trace.spans.len(), trace.dropped), (2, 1));
        assert_eq!(trace.spans[0].begin_us, 90.0);
    }

    #[test]
    fn what_finds_no_room_is_counted() {
        let mut trace = PipelineTrace::default();
        for batch in 0..MOST as u64 + 3 {
            trace.note(span(SpanWork::Read, batch, 0.0, 1.0));
        }
        assert_eq!((trace.spans.len(), trace.dropped), (MOST, 3));
    }

    #[test]
    fn a_name_does_not_end_its_string() {
        let text = of(&[span(SpanWork::Read, 0, 1.0, 2.5)]).to_json("a \"b\" \\ \n");
        assert!(text.contains(r#""name":"a \"b\" \\  ""#), "{text}");
        assert!(text.contains(r#""ts":1.000,"dur":1.500"#), "{text}");
    }
}

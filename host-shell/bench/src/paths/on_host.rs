//! The ways into memory of the host, on a machine without a GPU.

use super::by_pread::{self, CopySink, PassSteps, STAGE};
use super::place::{self, BytePath, PathDestination};
use super::plan::ReadPlan;
use crate::measure::{median, side_by_side};
use nvme_driver::error::{Error, Result};
use nvme_store::{Store, StoreTransfer};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

/// Bytes of a copy whose speed is measured.
const COPIED: usize = 32 << 20;

pub(super) struct HostDestination<'a> {
    pub file: (&'a File, &'a Path),
    pub store: Option<&'a Store>,
    pub threads: usize,
    pub out: Vec<u8>,
}

/// A buffer, and the destination from byte `start` on.
struct HostCopies<'a> {
    buffer: Vec<u8>,
    out: &'a mut [u8],
    start: usize,
}

impl CopySink for HostCopies<'_> {
    fn stage(&mut self) -> Result<&mut [u8]> {
        Ok(&mut self.buffer)
    }

    fn send(&mut self, bytes: usize, to: usize) -> Result<()> {
        self.out[to - self.start..][..bytes].copy_from_slice(&self.buffer[..bytes]);
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Returns the parts of `out` that are `shares`, which follow one another.
fn split<'a>(out: &'a mut [u8], shares: &[Range<usize>]) -> Vec<(Range<usize>, &'a mut [u8])> {
    let mut rest = out;
    let one = |share: &Range<usize>| {
        let (mine, others) = std::mem::take(&mut rest).split_at_mut(share.len());
        rest = others;
        (share.clone(), mine)
    };
    shares.iter().map(one).collect()
}

impl HostDestination<'_> {
    fn by_pread(&mut self, plan: &ReadPlan, pass: PassSteps) -> Result<f64> {
        let sinks = split(&mut self.out, &plan.shares(self.threads));
        let sinks = sinks.into_iter().map(|(share, out)| {
            let start = share.start;
            let buffer = vec![0; STAGE];
            (share, HostCopies { buffer, out, start })
        });
        by_pread::run(plan, self.file, sinks, pass)
    }

    fn direct(&mut self, store: &Store, plan: &ReadPlan) -> Result<f64> {
        let shares = split(&mut self.out, &plan.shares(self.threads));
        let job = shares.into_iter().map(|(share, out)| {
            move || {
                let start = share.start;
                plan.parts(share).try_for_each(|part| {
                    let out = &mut out[part.start - start..part.end - start];
                    read_all(store, plan, part.start, out)
                })
            }
        });
        side_by_side(job.collect())
    }
}

/// Reads the parts of the plan that belong to `out`, which begins at byte `start` of the
/// destination, all of them at once.
fn read_all(store: &Store, plan: &ReadPlan, start: usize, out: &mut [u8]) -> Result<()> {
    let (mut transfers, mut at, mut rest) = (Vec::new(), start, out);
    while !rest.is_empty() {
        let (offset, together) = plan.source(at);
        let (mine, others) = rest.split_at_mut(together.min(rest.len()));
        at += mine.len();
        transfers.push(StoreTransfer::Read(offset, mine));
        rest = others;
    }
    store.transfer_all(&mut transfers).into_iter().collect()
}

impl PathDestination for HostDestination<'_> {
    fn ways(&mut self) -> Vec<(BytePath, &'static str, Result<String>)> {
        let without = || {
            Err(Error::environment(
                "there is no GPU",
                "name one with --gpu on a machine that has one",
            ))
        };
        let store = self.store.map(|_| {
            Ok(format!(
                "CPU threads submit, {} at a time; into host memory",
                self.threads
            ))
        });
        let by_pread = "pread into a buffer, then memcpy into host memory";
        vec![
            (BytePath::Direct, "direct", store.unwrap_or_else(without)),
            (BytePath::CuFile, "cufile", without()),
            (BytePath::Pageable, "cpu-memcpy", Ok(by_pread.to_owned())),
            (BytePath::Pinned, "cpu-pinned", without()),
        ]
    }

    fn prepare(&mut self, _: &ReadPlan) -> Result<()> {
        Ok(())
    }

    fn run(&mut self, way: BytePath, plan: &ReadPlan) -> Result<f64> {
        match (way, self.store) {
            (BytePath::Direct, Some(store)) => self.direct(store, plan),
            _ => self.by_pread(plan, PassSteps::Whole),
        }
    }

    fn steps(&mut self, way: BytePath, plan: &ReadPlan) -> Result<Option<(f64, f64)>> {
        if way != BytePath::Pageable {
            return Ok(None);
        }
        let read = self.by_pread(plan, PassSteps::ReadAlone)?;
        Ok(Some((read, self.by_pread(plan, PassSteps::CopyAlone)?)))
    }

    fn take(&mut self, into: &mut [u8]) -> Result<()> {
        into.copy_from_slice(&self.out[..into.len()]);
        Ok(())
    }

    fn spoil(&mut self) -> Result<()> {
        self.out.fill(place::SPOILT);
        Ok(())
    }

    /// Copies of memory by one thread.
    fn limits(&mut self, runs: usize) -> Result<(Option<f64>, f64)> {
        let (from, mut to) = (vec![1u8; COPIED], vec![0u8; COPIED]);
        let mut rates = Vec::new();
        for _ in 0..=runs {
            let begin = Instant::now();
            to.copy_from_slice(&from);
            rates.push(2.0 * COPIED as f64 / begin.elapsed().as_secs_f64());
            std::hint::black_box(&mut to);
        }
        Ok((None, median(&rates[1..])))
    }
}

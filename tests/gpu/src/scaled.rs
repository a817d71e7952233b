//! Rows whose elements are multiplied by scales that are stored apart from them: in one call and in halves, from a
//! drive and from stripes, compared with the CPU's result bit by bit.
// UNSAFETY: requests hold addresses of memory.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::by_host::{DRIVE, STRIPE, Scratch};
use crate::gather::{BYTES, CANARY, Drive, dice, text};
use crate::limits::limit;
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::code;
use nvme_host::Table;
use nvme_host::cuda::{DeviceMemory, GatherIds, GatherTarget, RowRequest};
use nvme_host::store::{
    Format, RowConversion, RowScales, RowWidening, ScaleFactor, ScaleFormat, ScaleMemory,
    WideFormat,
};
use std::sync::Arc;

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, device) in [("gather/scaled", DRIVE), ("stripes/scaled", STRIPE)] {
        report.test(name, |_| scaled(&Drive::open(bench, device, limit())?));
    }
    report.test("by-host/scaled", |_| {
        let file = Scratch::new()?;
        by_host(&Drive::open(bench, &file.device(), limit())?)
    });
}

/// Format of the elements, format of the scales and their columns, and the factor.
type Scaled = (Format, Option<(ScaleFormat, u32)>, ScaleFactor);

const KINDS: [Scaled; 7] = [
    (
        Format::F8E4M3,
        Some((ScaleFormat::E8M0, 32)),
        ScaleFactor::Times(1.0),
    ),
    (Format::F8E4M3, None, ScaleFactor::Times(0.037)),
    (
        Format::F8E4M3,
        Some((ScaleFormat::F32, 128)),
        ScaleFactor::Times(1.0),
    ),
    (
        Format::F8E5M2,
        Some((ScaleFormat::Bf16, 64)),
        ScaleFactor::Times(-3.0),
    ),
    (
        Format::F4E2M1,
        Some((ScaleFormat::E4M3, 16)),
        ScaleFactor::Times(0.0021),
    ),
    (
        Format::F4E2M1,
        Some((ScaleFormat::E4M3, 16)),
        ScaleFactor::Over(476.2),
    ),
    (
        Format::F4E2M1,
        Some((ScaleFormat::E8M0, 32)),
        ScaleFactor::Times(1.0),
    ),
];

/// The table of a kind, its conversion for the CPU and for the GPU, and the memory of the scales there.
struct ScaledTable {
    table: Table,
    by_cpu: RowConversion,
    by_gpu: RowConversion,
    _scales: DeviceMemory,
}

impl ScaledTable {
    fn new(
        drive: &Drive,
        (from, stored, factor): Scaled,
        to: WideFormat,
        (elements, first_byte): (u32, u64),
    ) -> Outcome<Self> {
        let row_bytes = u64::from(elements / from.block_elements() * from.block_bytes());
        let rows = ((BYTES - first_byte) / row_bytes).min(3000);
        let table = drive.store().table(first_byte, rows, row_bytes);
        let each = stored.map_or(0, |(format, columns)| {
            u64::from(elements.div_ceil(columns) * format.bytes())
        });
        let mut throw = dice(rows ^ each);
        let bytes: Vec<u8> = (0..rows * each).map(|_| throw(256) as u8).collect();
        // A driver allocates no memory of no bytes.
        let scales = DeviceMemory::new(drive.gpu(), bytes.len().max(16)).map_err(text)?;
        scales.upload(0, &bytes).map_err(text)?;
        let conversion = |memory| -> Outcome<RowConversion> {
            let scales = match stored {
                None => {
                    let (ScaleFactor::Times(scale) | ScaleFactor::Over(scale)) = factor;
                    RowScales::of_table(scale)
                }
                Some((format, columns)) => RowScales::new(format, columns, factor, memory),
            };
            Ok(RowConversion {
                widen: RowWidening { from, to },
                scales: Some(Arc::new(scales.map_err(text)?)),
            })
        };
        let on_gpu = ScaleMemory::Gpu {
            address: scales.address(),
            bytes: bytes.len() as u64,
        };
        Ok(Self {
            table: table.map_err(text)?,
            by_cpu: conversion(ScaleMemory::Host(bytes.into()))?,
            by_gpu: conversion(on_gpu)?,
            _scales: scales,
        })
    }

    /// Gathers `ids` by the CPU; returns rows, and their codes.
    fn expected(&self, ids: &[i64]) -> Outcome<(Vec<u8>, Vec<i32>)> {
        let mut out = vec![0; self.wide_bytes()? as usize * ids.len()];
        let mut codes = vec![0; ids.len()];
        let gather =
            self.table
                .gather_as(ids.into(), self.by_cpu.clone(), &mut out, Some(&mut codes));
        let _ = gather.map_err(text)?;
        Ok((out, codes))
    }

    fn wide_bytes(&self) -> Outcome<u64> {
        let (rows, stored) = (self.table.rows(), self.table.row_bytes());
        self.by_cpu.row_bytes(rows, stored).map_err(text)
    }

    /// Gathers `ids` on the GPU by `conversion`, in one call or in halves, and compares.
    fn compare(
        &self,
        drive: &Drive,
        conversion: &RowConversion,
        ids: &[i64],
        is_halved: bool,
    ) -> Outcome<usize> {
        let stride = self.wide_bytes()?;
        let stored: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let memory = |bytes: &[u8]| -> nvme_host::Result<DeviceMemory> {
            let memory = DeviceMemory::new(drive.gpu(), bytes.len())?;
            memory.upload(0, bytes)?;
            Ok(memory)
        };
        let of_ids = memory(&stored).map_err(text)?;
        let out = memory(&vec![CANARY; stride as usize * ids.len()]).map_err(text)?;
        let status = memory(&vec![CANARY; ids.len() * 4]).map_err(text)?;
        let (stream, count) = (drive.stream.handle(), ids.len() as u64);
        // SAFETY: the memory outlives the gather, which is waited for.
        let pending = unsafe {
            if is_halved {
                let ids = GatherIds {
                    ids: of_ids.address(),
                    wide_ids: true,
                    count,
                };
                let target = GatherTarget {
                    out: out.address(),
                    out_stride: stride,
                    status: status.address(),
                };
                let mut begun = self.table.begin_on_gpu(&ids, stream).map_err(text)?;
                begun.finish_as(&target, conversion.clone(), stream)
            } else {
                let request = RowRequest {
                    ids: of_ids.address(),
                    wide_ids: true,
                    count,
                    out: out.address(),
                    out_stride: stride,
                    status: status.address(),
                };
                self.table
                    .gather_as_on_gpu(&request, conversion.clone(), stream)
            }
        };
        pending.map_err(text)?.wait(limit()).map_err(text)?;
        let (wanted, wanted_codes) = self.expected(ids)?;
        let mut have = vec![0; wanted.len()];
        out.download(0, &mut have).map_err(text)?;
        let mut codes = vec![0; ids.len() * 4];
        status.download(0, &mut codes).map_err(text)?;
        let codes: Vec<_> = codes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|code| i32::from_le_bytes(*code))
            .collect();
        let differs = have
            .iter()
            .zip(&wanted)
            .position(|(have, wanted)| have != wanted);
        if let Some(at) = differs {
            let row = at / stride as usize;
            return Err(format!(
                "{:?}: row {row} (id {}) differs at byte {at}",
                self.by_cpu.widen, ids[row]
            ));
        }
        match codes == wanted_codes && codes.contains(&code::OK) {
            true => Ok(ids.len()),
            false => Err(format!("{:?}: codes {codes:?}", self.by_cpu.widen)),
        }
    }
}

/// Returns some ids of the table, and two that are not in it.
fn ids(table: &Table, count: u64, throw: &mut impl FnMut(u64) -> u64) -> Vec<i64> {
    let mut ids: Vec<i64> = (0..count).map(|_| throw(table.rows()) as i64).collect();
    ids[count as usize / 2] = table.rows() as i64 - 1;
    ids.extend([-1, table.rows() as i64]);
    ids
}

fn scaled(drive: &Drive) -> Outcome<String> {
    let (mut throw, mut rows) = (dice(91), 0);
    for (index, kind) in KINDS.into_iter().enumerate() {
        for to in [WideFormat::Bf16, WideFormat::F16, WideFormat::F32] {
            // Rows at multiples of 16, of 8 and of 4 bytes, and at any byte.
            for place in [(256, 4096), (256, 104), (512, 500), (160, 77)] {
                let of = ScaledTable::new(drive, kind, to, place)?;
                for (count, is_halved) in [(48, false), (48, true), (600, false)] {
                    // Many rows are tested for only some cases: only the launch differs.
                    if count == 600 && index % 3 != 0 {
                        continue;
                    }
                    let ids = ids(&of.table, count, &mut throw);
                    rows += of.compare(drive, &of.by_gpu, &ids, is_halved)?;
                }
            }
        }
    }
    let of = ScaledTable::new(drive, KINDS[0], WideFormat::Bf16, (256, 0))?;
    match of.compare(drive, &of.by_cpu, &[1, 2], false) {
        Err(refused) if refused.contains("memory of the host") => {}
        other => return Err(format!("scales of the host: {other:?}")),
    }
    Ok(format!("{rows} rows of {} kinds of scales", KINDS.len()))
}

/// Rows that a host thread moves use scales in host memory, and refuse those of the GPU.
fn by_host(drive: &Drive) -> Outcome<String> {
    let mut throw = dice(92);
    let mut rows = 0;
    for kind in KINDS {
        let of = ScaledTable::new(drive, kind, WideFormat::Bf16, (256, 104))?;
        let ids = ids(&of.table, 48, &mut throw);
        rows += of.compare(drive, &of.by_cpu, &ids, false)?;
        let refused = of.compare(drive, &of.by_gpu, &ids, false);
        let is_refused = matches!(&refused, Err(text) if text.contains("memory of a GPU"));
        if is_refused != kind.1.is_some() {
            return Err(format!("scales of the GPU: {refused:?}"));
        }
    }
    Ok(format!("{rows} rows"))
}

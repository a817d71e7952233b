//! Rows converted to a wider format: a gather stores each row in the last bytes of the space of its converted row, and
//! a second launch after it in the stream widens it there. Gathers of few rows of plain formats, by queues that blocks own,
//! convert in one launch.
//!
//! The gather fills a row that it could not read with zeros or NaN. The second launch, which does not know the status,
//! widens them like any row: to zeros or NaN, and to NaN if the scale is NaN. The row status and the counts of failures
//! are the gather's.

// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::super::driver::Gpu;
use super::super::pointer::KernelArgument;
use super::kernels::RowKernels;
use super::pending::PendingRows;
use super::request::{RowRequest, RowTable};
use super::slot::{LaunchSlot, Named};
use nvme_driver::error::{Error, Result};
use nvme_driver::widen::{FailedContent, RowConversion};
use nvme_formats::Format;
use nvme_gpu_kernel::rows::{BLOCK_WARPS, GatherLaunch, WidenLaunch, filled};
use nvme_gpu_kernel::wide_batch::{BatchWidening, is_plain};
use std::sync::Arc;

/// A request, and the conversion of its rows after they were read.
pub(super) struct WideRows {
    /// Gather of the rows in their stored format.
    pub stored: RowRequest,
    widened: Option<WidenLaunch>,
}

impl WideRows {
    /// Plans the gather; without a conversion, rows keep their stored format. The conversion comes with the address of
    /// its scales.
    ///
    /// # Errors
    /// [`Error::Usage`] for stored rows that are not whole blocks, and for an output that is not aligned to its
    /// elements or too narrow.
    pub fn new(
        table: &RowTable,
        request: &RowRequest,
        conversion: Option<(&RowConversion, u64)>,
    ) -> Result<Self> {
        let Some((RowConversion { widen, scales }, scales_at)) = conversion else {
            return Ok(Self {
                stored: *request,
                widened: None,
            });
        };
        let stored = u64::from(table.row_bytes);
        let elements = widen.elements(stored)?;
        let bytes = widen.row_bytes(stored)?;
        let unit = u64::from(widen.to.bytes());
        if !(request.out | request.out_stride).is_multiple_of(unit) || request.out_stride < bytes {
            return Err(Error::usage(
                format!(
                    "converted rows of {bytes} bytes at address {:#x} with a stride of {} bytes are not aligned, or overlap",
                    request.out, request.out_stride
                ),
                format!("use multiples of {unit} bytes, and rows that do not overlap"),
            ));
        }
        let before = bytes - stored;
        let stored = RowRequest {
            out: request.out + before,
            ..*request
        };
        let gather = GatherLaunch {
            ids: stored.ids,
            wide_ids: stored.wide_ids.into(),
            rows: table.rows,
            out: stored.out,
            out_stride: stored.out_stride,
            count: stored.count,
            lanes: 1,
            ..GatherLaunch::default()
        };
        // Rows that fit into slots have fewer than 2^32 elements.
        let widened = WidenLaunch {
            gather,
            format: widen.from as u32,
            wide: widen.to as u32,
            elements: elements as u32,
            before: before as u32,
            scales: scales_at,
            layout: scales.as_ref().map(|of| of.layout()).unwrap_or_default(),
        };
        Ok(Self {
            stored,
            widened: Some(widened),
        })
    }

    /// Returns the conversion with the address of its scales on `gpu`, which is checked there.
    ///
    /// # Errors
    /// As [`Gpu::judge`], and for scales in memory of the host.
    pub fn judged<'c>(
        conversion: Option<&'c RowConversion>,
        gpu: &Gpu,
        stream: u64,
    ) -> Result<Option<(&'c RowConversion, u64)>> {
        let Some(conversion) = conversion else {
            return Ok(None);
        };
        let Some(scales) = &conversion.scales else {
            return Ok(Some((conversion, 0)));
        };
        let mut address = scales.address()?;
        if let Some((at, bytes)) = scales.on_gpu() {
            address = gpu.judge(stream, &KernelArgument::read("scales", at, bytes, 1))?;
        }
        Ok(Some((conversion, address)))
    }

    /// Returns the content of rows that the gather cannot read, in the encoding of [`GatherLaunch::failed_as`]. Zeros
    /// are those of the stored format.
    pub fn failed_as(&self, failed: FailedContent) -> u32 {
        match failed {
            FailedContent::Zeros => self.widened.map_or(0, |widened| widened.format),
            FailedContent::Bytes(byte) => filled(byte),
        }
    }

    /// Returns the conversion by the launch that gathers, by queues that its blocks own; `None` for rows that keep their
    /// stored format, for formats that are not plain, and for an output that is not at multiples of 4 bytes.
    pub fn by_gather(&self) -> Option<BatchWidening> {
        let widened = self.widened.as_ref()?;
        let gather = &widened.gather;
        let out = gather.out - u64::from(widened.before);
        let is_even = (out | gather.out_stride).is_multiple_of(4);
        if !is_even || !is_plain(Format::of_number(widened.format)?) {
            return None;
        }
        Some(BatchWidening {
            out,
            ids: gather.ids,
            scales: widened.scales,
            layout: widened.layout,
            wide_ids: gather.wide_ids,
            format: widened.format,
            wide: widened.wide,
            elements: widened.elements,
        })
    }

    /// Returns the parameters of the second launch, except those by which it reports its end; `None` for rows that keep
    /// their stored format.
    pub fn launch(&self) -> Option<WidenLaunch> {
        self.widened
    }

    /// Enqueues the second launch in `stream`, as launch `slot`; `named` stays until it has ended.
    ///
    /// # Safety
    /// The rows were gathered before it in the stream. Ids, rows and scales stay valid until it has ended, and for as
    /// long as a graph that captured it may be launched.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub unsafe fn put(
        &self,
        kernels: &Arc<RowKernels>,
        (slot, named): (LaunchSlot, Named),
        stream: u64,
    ) -> Result<PendingRows> {
        let Some(widened) = self.widened.filter(|of| of.gather.count != 0) else {
            return Ok(PendingRows::nothing());
        };
        let blocks = widened.gather.count.div_ceil(BLOCK_WARPS.into());
        let blocks = blocks.min(kernels.widen_blocks.into()) as u32;
        let gather = GatherLaunch {
            station_count: kernels.widen_blocks,
            ..widened.gather
        };
        let slot = slot.put(gather, (kernels, named), stream, |gather| {
            let widened = WidenLaunch { gather, ..widened };
            // SAFETY: the kernel takes one `WidenLaunch`; the caller vouches for its addresses.
            unsafe { kernels.launch(stream, kernels.widen_rows, blocks, &widened) }
        })?;
        Ok(PendingRows::of_kernel(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_driver::widen::{RowScales, RowWidening};
    use nvme_formats::WideFormat;

    const TABLE: RowTable = RowTable {
        first_byte: 0,
        rows: 10,
        row_bytes: 36,
    };
    const REQUEST: RowRequest = RowRequest {
        ids: 0,
        wide_ids: true,
        count: 10,
        out: 1 << 40,
        out_stride: 256,
        status: 0,
    };

    #[test]
    fn stored_rows_go_to_the_last_bytes_of_wide_ones() {
        let widen = RowWidening {
            from: Format::Q4_0,
            to: WideFormat::F32,
        };
        let widen = RowConversion::from(widen);
        let wide = WideRows::new(&TABLE, &REQUEST, Some((&widen, 0))).unwrap();
        let widened = wide.widened.unwrap();
        assert_eq!((widened.elements, widened.before), (64, 256 - 36));
        assert_eq!(wide.stored.out, (1 << 40) + 220);
        assert_eq!(
            (widened.gather.out, widened.gather.count),
            (wide.stored.out, 10)
        );
        let zeros = FailedContent::Zeros;
        assert_eq!(Format::of_number(wide.failed_as(zeros)), Some(Format::Q4_0));
        let plain = WideRows::new(&TABLE, &REQUEST, None).unwrap();
        assert_eq!((plain.stored.out, plain.failed_as(zeros)), (1 << 40, 0));
        assert!(plain.widened.is_none());
    }

    #[test]
    fn plain_rows_at_multiples_of_4_bytes_are_converted_by_their_gather() {
        let by_gather = |from, to, request: RowRequest| {
            let widen = RowConversion::from(RowWidening { from, to });
            let wide = WideRows::new(&TABLE, &request, Some((&widen, 0))).unwrap();
            wide.by_gather()
        };
        let (plain, wide) = (Format::F8E4M3, WideFormat::Bf16);
        let found = by_gather(plain, wide, REQUEST).unwrap();
        assert_eq!((found.out, found.elements), (REQUEST.out, 36));
        assert_eq!(by_gather(Format::Q4_0, wide, REQUEST), None);
        for (out, out_stride) in [(REQUEST.out + 2, 256), (REQUEST.out, 258)] {
            let odd = RowRequest {
                out,
                out_stride,
                ..REQUEST
            };
            assert_eq!(by_gather(plain, wide, odd), None);
        }
    }

    #[test]
    fn outputs_that_are_too_narrow_or_not_aligned_are_refused() {
        let widen = RowConversion::from(RowWidening {
            from: Format::Q4_0,
            to: WideFormat::F32,
        });
        let widen = Some((&widen, 0));
        let refused = |request: RowRequest| WideRows::new(&TABLE, &request, widen).is_err();
        let out = REQUEST.out + 2;
        assert!(refused(RowRequest { out, ..REQUEST }));
        for out_stride in [252, 258] {
            assert!(refused(RowRequest {
                out_stride,
                ..REQUEST
            }));
        }
        let row_bytes = 35;
        let table = RowTable { row_bytes, ..TABLE };
        assert!(WideRows::new(&table, &REQUEST, widen).is_err());
    }

    #[test]
    fn scales_belong_to_the_ids_of_the_table() {
        let widen = RowConversion {
            widen: RowWidening {
                from: Format::F8E4M3,
                to: WideFormat::Bf16,
            },
            scales: Some(Arc::new(RowScales::of_table(0.5).unwrap())),
        };
        let request = RowRequest {
            ids: 1 << 41,
            ..REQUEST
        };
        let wide = WideRows::new(&TABLE, &request, Some((&widen, 77))).unwrap();
        let launch = wide.launch().unwrap();
        assert_eq!(
            (launch.scales, launch.layout.factor),
            (77, 0.5f32.to_bits())
        );
        let gather = launch.gather;
        assert_eq!((gather.ids, gather.wide_ids, gather.rows), (1 << 41, 1, 10));
    }
}

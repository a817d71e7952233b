//! Rows converted to a wider format: a gather puts the stored rows into the last bytes of the places of the wide ones,
//! and a second launch after it in the stream widens them there.
//!
//! A row that was not read is one of zeros when it was gathered, whatever failed it, and is widened to zeros: the second
//! launch knows no row status. The row status and the counts of failures are the gather's.

use super::request::{RowRequest, RowTable};
use nvme_driver::error::{Error, Result};
use nvme_driver::widen::RowWidening;
use nvme_gpu_kernel::rows::{GatherLaunch, WidenLaunch};

/// A request, and the conversion of its rows after they were read.
pub(super) struct WideRows {
    /// Gather of the rows in their stored format.
    pub stored: RowRequest,
    widened: Option<WidenLaunch>,
}

impl WideRows {
    /// Plans the gather; without `widen`, rows keep their stored format.
    ///
    /// # Errors
    /// [`Error::Usage`] for stored rows that are not whole blocks, and for an output that is not aligned to its
    /// elements or too narrow.
    pub fn new(table: &RowTable, request: &RowRequest, widen: Option<RowWidening>) -> Result<Self> {
        let Some(widen) = widen else {
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
        };
        Ok(Self {
            stored,
            widened: Some(widened),
        })
    }

    /// Returns the number of the format in whose encoding of zeros the gather fills rows that it cannot read; 0
    /// for rows that are not widened, which become zero bytes.
    pub fn failed_as(&self) -> u32 {
        self.widened.map_or(0, |widened| widened.format)
    }

    /// Returns the second launch, but for its end: `None` for rows that come out as they are stored.
    pub fn launch(&self) -> Option<WidenLaunch> {
        self.widened
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_formats::{Format, WideFormat};

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
        let wide = WideRows::new(&TABLE, &REQUEST, Some(widen)).unwrap();
        let widened = wide.widened.unwrap();
        assert_eq!((widened.elements, widened.before), (64, 256 - 36));
        assert_eq!(wide.stored.out, (1 << 40) + 220);
        assert_eq!(
            (widened.gather.out, widened.gather.count),
            (wide.stored.out, 10)
        );
        assert_eq!(Format::of_number(wide.failed_as()), Some(Format::Q4_0));
        let plain = WideRows::new(&TABLE, &REQUEST, None).unwrap();
        assert_eq!((plain.stored.out, plain.failed_as()), (1 << 40, 0));
        assert!(plain.widened.is_none());
    }

    #[test]
    fn outputs_that_are_too_narrow_or_not_aligned_are_refused() {
        let widen = Some(RowWidening {
            from: Format::Q4_0,
            to: WideFormat::F32,
        });
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
}

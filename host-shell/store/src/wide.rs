//! Gathers on the CPU that upcast or dequantise the elements of rows.

use super::row_ids::RowIds;
use super::table::{RowReport, Table};
use nvme_driver::error::{Error, Result};
use nvme_driver::widen::{FailedContent, RowConversion};

impl Table {
    /// Does the same as [`gather`](Self::gather), with rows of [`RowConversion::row_bytes`] bytes in `out`. `widen` is
    /// a [`RowWidening`](nvme_driver::widen::RowWidening), or one with scales in memory of the host.
    ///
    /// ```
    /// use nvme_store::{Format, Store, StoreOptions, WideFormat, RowWidening};
    ///
    /// # fn main() -> nvme_driver::Result<()> {
    /// # #[cfg(feature = "sim")] {
    /// let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default())?;
    /// // Row 1 of rows of two halves: 1.0 and -2.0.
    /// store.write_at(4, &[0x00, 0x3C, 0x00, 0xC0])?;
    /// let table = store.table(0, 2, 4)?;
    /// let widen = RowWidening { from: Format::F16, to: WideFormat::F32 };
    /// let mut out = [0; 8];
    /// table.gather_as((&[1i64]).into(), widen, &mut out, None)?.check()?;
    /// assert_eq!(out, [1.0f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat()[..]);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`gather`](Self::gather) and [`RowConversion::row_bytes`]; [`Error::Usage`] for scales in memory of a GPU.
    pub fn gather_as(
        &self,
        ids: RowIds<'_>,
        widen: impl Into<RowConversion>,
        out: &mut [u8],
        status: Option<&mut [i32]>,
    ) -> Result<RowReport> {
        let RowConversion { widen, scales } = &widen.into();
        let stored_bytes = self.row_bytes() as usize;
        let wide_bytes = widen.row_bytes(self.row_bytes())? as usize;
        let elements = widen.elements(self.row_bytes())?;
        if let Some(scales) = scales {
            scales.check(self.rows(), elements)?;
            scales.of_row(0, elements)?;
        }
        if wide_bytes.checked_mul(ids.len()) != Some(out.len()) {
            return Err(Error::usage(
                format!(
                    "a buffer of {} bytes does not fit {} converted rows of {wide_bytes} bytes exactly",
                    out.len(),
                    ids.len()
                ),
                "give as many bytes as the rows have once they are wide",
            ));
        }
        let mut own = Vec::new();
        let status = status.unwrap_or_else(|| {
            own.resize(ids.len(), 0);
            &mut own
        });
        // The stored rows lie at the end of the output, so that writing a wide row never overwrites a stored
        // one that is still to be converted.
        let first = out.len() - ids.len() * stored_bytes;
        let report = self.gather(ids, &mut out[first..], Some(status))?;
        let mut stored = vec![0; stored_bytes];
        for (row, code) in status.iter().enumerate() {
            let from = first + row * stored_bytes;
            stored.copy_from_slice(&out[from..from + stored_bytes]);
            let to = &mut out[row * wide_bytes..][..wide_bytes];
            match (*code, self.failed) {
                (super::status::OK, _) => {
                    let scales = match scales {
                        // A row that was read has an id of the table.
                        Some(scales) => scales.of_row(ids.get(row) as u64, elements)?,
                        None => Default::default(),
                    };
                    if !nvme_formats::widen_scaled(widen.from, widen.to, &stored, scales, to) {
                        return Err(Error::internal(
                            "lengths of a row that were checked do not fit",
                        ));
                    }
                }
                (_, FailedContent::Bytes(_)) => {
                    // NaN in the stored bytes is NaN in the wide ones, whatever the scales.
                    let none = Default::default();
                    let _ = nvme_formats::widen_scaled(widen.from, widen.to, &stored, none, to);
                }
                _ => to.fill(0),
            }
        }
        Ok(report)
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use crate::{FailedContent, Format, RowWidening, Store, StoreOptions, WideFormat};

    #[test]
    fn every_format_comes_out_as_its_elements_and_failed_rows_as_zeros() {
        let store = Store::open("sim:mem?size=1MiB", &StoreOptions::default()).unwrap();
        let image: Vec<u8> = (0..1u32 << 20)
            .map(|byte| (byte.wrapping_mul(2654435761) >> 13) as u8)
            .collect();
        store.write_at(0, &image).unwrap();
        for (from, to) in Format::ALL
            .into_iter()
            .flat_map(|from| [(from, WideFormat::F16), (from, WideFormat::F32)])
        {
            let row = from.block_bytes() as usize * 5;
            let table = store.table(77, 200, row as u64).unwrap();
            let widen = RowWidening { from, to };
            let wide = widen.row_bytes(row as u64).unwrap() as usize;
            if !matches!(from, Format::Mxfp4 | Format::F4E2M1) {
                let nans = FailedContent::nan_of("float32").unwrap();
                let nans = table.clone().with_failed_rows(nans);
                let mut out = vec![0; wide];
                let failed = nans.gather_as((&[-1i64]).into(), widen, &mut out, None);
                assert_eq!(failed.unwrap().failed, 1);
                let nan = to.bits_of(f32::NAN).to_le_bytes();
                for element in out.chunks(to.bytes() as usize) {
                    assert_eq!(element, &nan[..element.len()], "{from:?} {to:?}");
                }
            }
            let ids = [3i64, 199, -1, 3, 200, 0];
            let (mut out, mut status) = (vec![0xA5; 6 * wide], [9; 6]);
            let report = table
                .gather_as((&ids).into(), widen, &mut out, Some(&mut status))
                .unwrap();
            assert_eq!((report.failed, status), (2, [0, 0, -1, 0, -1, 0]));
            for (id, have) in ids.iter().zip(out.chunks_exact(wide)) {
                let mut expected = vec![0; wide];
                if (0..200).contains(id) {
                    let stored = &image[77 + *id as usize * row..][..row];
                    assert!(nvme_formats::widen(from, to, stored, &mut expected));
                }
                assert_eq!(have, expected, "{from:?} {to:?} {id}");
            }
        }
    }

    #[test]
    fn rows_that_are_not_whole_blocks_and_other_lengths_are_refused() {
        let store = Store::open("sim:mem?size=1MiB", &StoreOptions::default()).unwrap();
        let widen = RowWidening {
            from: Format::Q4_0,
            to: WideFormat::F16,
        };
        let table = store.table(0, 10, 35).unwrap();
        let error = table
            .gather_as((&[0i64]).into(), widen, &mut [0; 64], None)
            .unwrap_err();
        assert!(
            error.to_string().contains("whole blocks of Q4_0"),
            "{error}"
        );
        let table = store.table(0, 10, 36).unwrap();
        let error = table
            .gather_as((&[0i64]).into(), widen, &mut [0; 127], None)
            .unwrap_err();
        assert!(error.to_string().contains("127 bytes"), "{error}");
        assert!(
            table
                .gather_as((&[0i64]).into(), widen, &mut [0; 128], None)
                .is_ok()
        );
    }
}

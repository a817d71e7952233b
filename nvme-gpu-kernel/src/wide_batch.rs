//! Gathers of few rows that convert elements while they copy: parameters of one launch in place of two.

use nvme_formats::{Format, ScaleLayout};

/// Conversion of the rows of a gather by queues that its blocks own. Its gather's `out` is not used, and its
/// `unit_shift` need not hold for the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BatchWidening {
    /// Address of the first converted row; the address and the gather's `out_stride` are multiples of 4.
    pub out: u64,
    /// Address of the ids of the rows, which choose the scales; 0 for rows 0, 1, 2 and so on.
    pub ids: u64,
    /// Address of the scales of row 0 of the table, as in [`WidenLaunch`](crate::rows::WidenLaunch).
    pub scales: u64,
    /// Layout of the scales.
    pub layout: ScaleLayout,
    /// 1 if ids are `i64`, 0 if they are `i32`.
    pub wide_ids: u32,
    /// Number of a [`Format`] that [`is_plain`].
    pub format: u32,
    /// Number of a [`WideFormat`](nvme_formats::WideFormat).
    pub wide: u32,
    /// Elements of a row.
    pub elements: u32,
}

/// Parameters of a launch that gathers and converts: `nvme_gather_batched_wide` takes a
/// [`Batched`](crate::rows::Batched), `nvme_finish_batched_wide` a [`HalvedGather`](crate::rows::HalvedGather).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WidenedLaunch<T> {
    /// Parameters of the same launch without a conversion.
    pub launch: T,
    /// The conversion.
    pub widening: BatchWidening,
}

/// True if each 4 bytes of a row are elements that can be decoded alone. Blocks with scales inside are converted by
/// a launch after the gather.
pub const fn is_plain(format: Format) -> bool {
    format.block_bytes() <= 2
}

/// Returns the elements of a block of a format that [`is_plain`], and log2 of its bytes. Without a match, since the
/// compiler would make a table in memory of it.
#[inline(always)]
pub fn plain_block(format: Format) -> (u32, u32) {
    let is_half = (format == Format::F16) | (format == Format::Bf16);
    (1 + u32::from(format == Format::F4E2M1), u32::from(is_half))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_formats_have_no_scales_in_their_bytes() {
        let plain: Vec<_> = Format::ALL.into_iter().filter(|of| is_plain(*of)).collect();
        let wanted = [
            Format::F16,
            Format::Bf16,
            Format::F8E4M3,
            Format::F8E5M2,
            Format::F4E2M1,
        ];
        assert_eq!(plain, wanted);
        for format in plain {
            let (elements, shift) = plain_block(format);
            assert_eq!(elements, format.block_elements(), "{format:?}");
            assert_eq!(1 << shift, format.block_bytes(), "{format:?}");
        }
    }
}

//! Rows whose elements become wider on the way: what is stored, and what comes out.

use crate::error::{Error, Result};
use nvme_formats::{Format, Wide};

/// Stored elements of format `from` come out as `to`.
///
/// ```
/// use nvme_host::store::{Format, Wide, Widen};
///
/// let widen = Widen { from: Format::Q8_0, to: Wide::F16 };
/// assert_eq!(widen.row_bytes(34).unwrap(), 64);
/// assert!(widen.row_bytes(33).is_err(), "no whole blocks");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widen {
    /// What the drive holds.
    pub from: Format,
    /// What the output gets.
    pub to: Wide,
}

impl Widen {
    /// Bytes of a wide row whose stored row has `stored` bytes.
    ///
    /// # Errors
    /// [`Error::Usage`] where a stored row is not whole blocks of the format.
    pub fn row_bytes(self, stored: u64) -> Result<u64> {
        let elements = self.elements(stored)?;
        Ok(elements * u64::from(self.to.bytes()))
    }

    /// Elements of a row.
    ///
    /// # Errors
    /// As [`row_bytes`](Self::row_bytes).
    pub(crate) fn elements(self, stored: u64) -> Result<u64> {
        let block = self.from.block_bytes();
        self.from.elements(stored).ok_or_else(|| {
            Error::usage(
                format!(
                    "rows of {stored} bytes are not whole blocks of {:?}, which have {block} bytes",
                    self.from
                ),
                "check the size of a row, or gather without a change of format",
            )
        })
    }
}

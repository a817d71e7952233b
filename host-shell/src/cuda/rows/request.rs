//! Which rows are asked for, and where they go.

/// Rows of one size, one after the other, from any byte of a namespace on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTable {
    /// Where row 0 begins, in bytes.
    pub first_byte: u64,
    /// How many.
    pub rows: u64,
    /// Bytes of each.
    pub row_bytes: u32,
}

/// Rows that are asked for, and where they go; of a scatter where they come from. Addresses are the GPU's.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// `count` ids, `i64` when `wide_ids`, else `i32`. 0 means rows 0, 1, 2 and so on.
    pub ids: u64,
    /// Whether ids are `i64`.
    pub wide_ids: bool,
    /// How many ids.
    pub count: u64,
    /// Where the first row goes, or comes from.
    pub out: u64,
    /// Bytes from one row to the next there.
    pub out_stride: u64,
    /// An `i32` for each row that says what became of it, or 0.
    pub status: u64,
}

/// Bytes that are asked for, and where they go on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRange {
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
    /// Where they go: an address of the GPU.
    pub to: u64,
}

/// Ranges that a kernel lists in GPU memory, to be read by a launch after it. Addresses are the GPU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadList {
    /// A [`ListHead`](nvme_gpu_kernel::rows::ListHead), and then its [`Range`](nvme_gpu_kernel::rows::Range)s; a multiple
    /// of 8. First byte and place of each range are equal modulo 16, and its pieces are those of [`piece_bytes`].
    ///
    /// [`piece_bytes`]: crate::Store::listed_piece_bytes
    pub list: u64,
    /// Ranges at most.
    pub ranges: u32,
    /// Pieces of all of them at most.
    pub pieces: u64,
    /// Gets an `i32` for each piece that was listed: what became of it.
    pub status: u64,
}

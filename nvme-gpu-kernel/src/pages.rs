//! Pages of a page store between a staging memory of the GPU and the tensors of a cache: `nvme_check_pages` compares
//! pages that were read with what was committed, `nvme_copy_pages` copies them to their places, or from there.
//!
//! A staged page is a header of [`HEADER_BYTES`] bytes with the payload behind it, as on the drive. Its place in the
//! tensors is a list of [`PagePiece`]s at any addresses.

/// Bytes of a header, and of the part of a payload that a warp copies in one turn.
pub const HEADER_BYTES: u32 = 4096;

/// Codes of a page beside those of rows ([`rows::code`](crate::rows::code)): a page has the code of its first read that
/// failed.
pub mod page_code {
    /// The header differs from the header that was committed.
    pub const HEADER: i32 = -16;
    /// The payload has another checksum than was committed.
    pub const PAYLOAD: i32 = -17;
}

/// Bytes of a payload that lie at one address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PagePiece {
    /// Address of the first byte: any.
    pub address: u64,
    /// Number of the first byte in the payload: the bytes of the pieces before.
    pub first: u32,
    /// Number of bytes, at least 1.
    pub bytes: u32,
}

/// A page of a launch, in GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PageStaging {
    /// Address of the staged header, a multiple of 16; the payload follows it.
    pub staged: u64,
    /// Address of the page's [`PagePiece`]s, in the order of the payload, which they fill.
    pub pieces: u64,
    /// XXH3 of the payload that was committed.
    pub checksum: u64,
    /// XXH3 of the header that was committed.
    pub header_checksum: u64,
    /// Number of pieces.
    pub piece_count: u32,
    /// Bytes of the payload, at least 1.
    pub bytes: u32,
    /// Number of the first status of the page's reads.
    pub first_read: u32,
    /// Number of these statuses.
    pub reads: u32,
}

/// The result of a check, in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PageArrival {
    /// XXH3 of the payload as it arrived; 0 where it was not computed.
    pub checksum: u64,
    /// 0, the code of a read, or one of [`page_code`].
    pub code: i32,
    /// 0.
    pub reserved: u32,
}

/// Parameters of `nvme_check_pages`; a warp checks one page a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CheckPages {
    /// Address of `count` [`PageStaging`]s.
    pub pages: u64,
    /// Address of the statuses of the reads, an `i32` each.
    pub reads: u64,
    /// Address of an `i32` for each page in GPU memory, which receives its code.
    pub codes: u64,
    /// Address of a [`PageArrival`] for each page in host memory.
    pub arrivals: u64,
    /// Address of [`HEADER_BYTES`] bytes for each page in host memory: the header of a page that differs from what
    /// was committed, for the host to say why.
    pub headers: u64,
    /// Number of pages.
    pub count: u64,
}

/// Parameters of `nvme_copy_pages`; a block copies one page a turn, each of its warps [`HEADER_BYTES`] bytes a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CopyPages {
    /// Address of `count` [`PageStaging`]s.
    pub pages: u64,
    /// Address of an `i32` for each page, or 0: the pieces of a page with another code than 0 are zeroed.
    pub codes: u64,
    /// Number of pages.
    pub count: u64,
    /// 1 for copies from the pieces to the staging memory, whose last block is filled with zeros; 0 for the other way.
    pub stages: u32,
    /// 0.
    pub reserved: u32,
}

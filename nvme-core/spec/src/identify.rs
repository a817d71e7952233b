//! Identify data structures and the lists that Identify returns.
//!
//! Every field is at the specification's offset, asserted below each structure. 128-bit counts are byte
//! arrays, because they are not aligned to 16; [`u128`](super::log_page::u128) reads them. Fields hold the
//! raw value: where a field's doc says 0's based, a method returns the count.
//!
//! NVMe Base 2.0c, 5.17 (Identify command); NVM Command Set 1.0c, 4.1.5 (Identify command).

mod controller;
mod namespace;

pub use controller::{
    IdentifyController, PowerState, fna, lpa, oacs, oaes, oncs, sanicap, sgls, vwc,
};
pub use namespace::{IdentifyNamespace, LbaFormat, dlfeat, nsfeat};

use super::addr::Nsid;
use core::fmt::{self, Write};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of every structure that Identify returns.
pub const IDENTIFY_BYTES: usize = 4096;

/// A list of 1,024 namespace identifiers in ascending order, ended by the first 0 (CNS 02h and 10h).
///
/// The Changed Namespace List log page has the same form; a single FFFFFFFFh there means too many.
///
/// NVMe Base 2.0c, "Namespace List".
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ActiveNamespaces(pub [u32; 1024]);
const _: () = assert!(size_of::<ActiveNamespaces>() == IDENTIFY_BYTES);

impl ActiveNamespaces {
    /// Iterates over the identifiers up to the first 0.
    pub fn iter(&self) -> impl Iterator<Item = Nsid> + '_ {
        self.0
            .iter()
            .map(|&nsid| Nsid(nsid))
            .take_while(|&nsid| nsid != Nsid::NONE)
    }
}

/// Namespace identifier types of [`NamespaceDescriptor`].
pub mod nidt {
    /// IEEE extended unique identifier, 8 bytes.
    pub const EUI64: u8 = 1;
    /// Namespace globally unique identifier, 16 bytes.
    pub const NGUID: u8 = 2;
    /// UUID, 16 bytes.
    pub const UUID: u8 = 3;
    /// Command set identifier, 1 byte.
    pub const CSI: u8 = 4;
}

/// One namespace identification descriptor (CNS 03h).
///
/// NVMe Base 2.0c, 5.17.2.3 (Namespace Identification Descriptor list).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceDescriptor<'a> {
    /// Namespace identifier type: one of [`nidt`] or an unknown one.
    pub nidt: u8,
    /// Identifier, 1 to 255 bytes; the length is the controller's.
    pub nid: &'a [u8],
}

/// Iterates over the descriptors in `bytes`, up to the first of length 0 or the first that does not fit.
pub fn descriptors(bytes: &[u8]) -> impl Iterator<Item = NamespaceDescriptor<'_>> {
    let mut rest = bytes;
    core::iter::from_fn(move || {
        let &[nidt, nidl, _, _, ref tail @ ..] = rest else {
            return None;
        };
        if nidl == 0 {
            return None;
        }
        let (nid, tail) = tail.split_at_checked(nidl.into())?;
        rest = tail;
        Some(NamespaceDescriptor { nidt, nid })
    })
}

/// A padded text field, printed without the spaces and zeroes around it.
///
/// Bytes that are not printable ASCII, and the backslash, are written `\xNN`: two fields that differ then
/// look different, and no field can send control characters to a terminal.
///
/// NVMe Base 2.0c, "Data Types": ASCII strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrintableText<'a>(pub &'a [u8]);

impl<'a> PrintableText<'a> {
    /// Takes the text of a field that ends at its first 0, such as SUBNQN.
    pub fn of_nqn(bytes: &'a [u8]) -> Self {
        let end = bytes.iter().position(|byte| *byte == 0);
        Self(&bytes[..end.unwrap_or(bytes.len())])
    }
}

impl fmt::Display for PrintableText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_padding = |byte: &u8| matches!(byte, b' ' | 0);
        let start = self.0.iter().position(|byte| !is_padding(byte));
        let end = self.0.iter().rposition(|byte| !is_padding(byte));
        let (Some(start), Some(end)) = (start, end) else {
            return Ok(());
        };
        for byte in &self.0[start..=end] {
            match byte {
                b'\\' => f.write_str("\\x5c")?,
                b' '..=b'~' => f.write_char(char::from(*byte))?,
                byte => write!(f, "\\x{byte:02x}")?,
            }
        }
        Ok(())
    }
}

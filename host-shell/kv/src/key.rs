//! Keys of pages.

use std::fmt;

/// The name of a page: 128 bits of a SHA-256 over the fingerprint, the caller's hash of a block of tokens and the
/// number of the part. Two prompts of an attacker do not get one key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageKey(pub(crate) [u8; Self::BYTES]);

impl PageKey {
    /// Bytes of a key.
    pub const BYTES: usize = 16;

    /// Returns the key with these bytes, as [`as_bytes`](Self::as_bytes) gave them.
    pub fn of_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of the key.
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl fmt::Display for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageKey({self})")
    }
}

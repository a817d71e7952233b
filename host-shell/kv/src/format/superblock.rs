//! The superblock: sizes of the area, the name of the store, and the fingerprint of its pages.

use super::{InstanceId, StructureBlock, VERSION, block_of, ends_in_zeros, sealed};
use crate::fingerprint::{FIELDS, FingerprintDigest, MOST_FIELD_BYTES, ModelFingerprint};
use crate::layout::AreaLayout;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 8] = *b"NVMEKVSB";
/// States of a superblock.
const READY: u32 = 0;
const FORMATTING: u32 = 1;
/// Least bytes that a drive writes whole.
const SECTOR: usize = 512;
/// The most bytes of a fingerprint in its stored form.
const FINGERPRINT_BYTES: usize = FIELDS.len() * (2 + MOST_FIELD_BYTES);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct SuperWire {
    magic: [u8; 8],
    version: U32,
    state: U32,
    instance: InstanceId,
    area_bytes: U64,
    page_bytes: U32,
    slots: U32,
    log_blocks: U32,
    fingerprint_bytes: U32,
    digest: [u8; 32],
    fingerprint: [u8; FINGERPRINT_BYTES],
}

/// The first block of an area, and its second one, which is a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuperBlock {
    /// Name of the store.
    pub instance: InstanceId,
    /// Sizes of the area.
    pub layout: AreaLayout,
    /// Fingerprint of the pages.
    pub fingerprint: ModelFingerprint,
}

/// Reason why a block is no superblock of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SuperBlockFault {
    /// The block is zero.
    Blank,
    /// It does not begin as a superblock.
    Foreign,
    /// Its first sector is zero and others are not, as after a power cut during the first write of a superblock.
    Torn,
    /// Formatting was interrupted before the journal was made.
    Unfinished,
    /// It is one of another version.
    Version(u32),
    /// It begins as a superblock, and breaks this rule.
    Damaged(&'static str),
}

impl SuperBlock {
    /// Returns the block of a store that is ready, or of one whose journal is not made yet. `encoded` is the stored form
    /// of the fingerprint.
    pub(crate) fn to_block(&self, encoded: &[u8], is_ready: bool) -> StructureBlock {
        let state = if is_ready { READY } else { FORMATTING };
        let mut fingerprint = [0; FINGERPRINT_BYTES];
        fingerprint[..encoded.len()].copy_from_slice(encoded);
        let wire = SuperWire {
            magic: MAGIC,
            version: U32::new(VERSION),
            state: U32::new(state),
            instance: self.instance,
            area_bytes: U64::new(self.layout.area_bytes),
            page_bytes: U32::new(self.layout.page_bytes),
            slots: U32::new(self.layout.slots),
            log_blocks: U32::new(self.layout.log_blocks),
            fingerprint_bytes: U32::new(encoded.len() as u32),
            digest: FingerprintDigest::of(encoded).0,
            fingerprint,
        };
        block_of(wire.as_bytes())
    }

    /// Reads a superblock; `None` for a block that is none, is damaged, or has another version.
    pub fn parse(block: &StructureBlock) -> Option<Self> {
        Self::read(block).ok()
    }

    /// Returns the name of the store that a whole superblock is of, in any state and version.
    pub(crate) fn instance_of(block: &StructureBlock) -> Option<InstanceId> {
        let (wire, _) = SuperWire::ref_from_prefix(block).ok()?;
        (wire.magic == MAGIC && sealed(block).is_some()).then_some(wire.instance)
    }

    pub(crate) fn read(block: &StructureBlock) -> Result<Self, SuperBlockFault> {
        if block.iter().all(|byte| *byte == 0) {
            return Err(SuperBlockFault::Blank);
        }
        let Ok((wire, _)) = SuperWire::ref_from_prefix(block) else {
            return Err(SuperBlockFault::Foreign);
        };
        if block[..SECTOR].iter().all(|byte| *byte == 0) {
            return Err(SuperBlockFault::Torn);
        }
        if wire.magic != MAGIC {
            return Err(SuperBlockFault::Foreign);
        }
        if sealed(block).is_none() {
            return Err(SuperBlockFault::Damaged(
                "its checksum is not that of its content",
            ));
        }
        // The checksum is at the same place in every version, so that a version is never misread for damage.
        if wire.version.get() != VERSION {
            return Err(SuperBlockFault::Version(wire.version.get()));
        }
        match wire.state.get() {
            READY => {}
            FORMATTING => return Err(SuperBlockFault::Unfinished),
            _ => {
                return Err(SuperBlockFault::Damaged(
                    "its state is neither ready nor formatting",
                ));
            }
        }
        let layout = AreaLayout {
            area_bytes: wire.area_bytes.get(),
            page_bytes: wire.page_bytes.get(),
            slots: wire.slots.get(),
            log_blocks: wire.log_blocks.get(),
        };
        if !layout.is_sound() {
            return Err(SuperBlockFault::Damaged(
                "its parts do not fit into its area",
            ));
        }
        let encoded = wire
            .fingerprint
            .get(..wire.fingerprint_bytes.get() as usize);
        let encoded = encoded.filter(|bytes| FingerprintDigest::of(bytes).0 == wire.digest);
        let fingerprint = encoded.and_then(ModelFingerprint::decode);
        let Some(fingerprint) = fingerprint else {
            return Err(SuperBlockFault::Damaged(
                "its fingerprint is not that of its digest",
            ));
        };
        let superblock = Self {
            instance: wire.instance,
            layout,
            fingerprint,
        };
        let unused = &wire.fingerprint[wire.fingerprint_bytes.get() as usize..];
        let is_zero = unused.iter().all(|byte| *byte == 0);
        if !is_zero || !ends_in_zeros(block, size_of::<SuperWire>()) {
            return Err(SuperBlockFault::Damaged(
                "reserved bytes of it are not zero",
            ));
        }
        Ok(superblock)
    }
}

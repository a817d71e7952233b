//! The bytes of a medium that one store owns.

use crate::error::{KvError, Result};
use crate::fingerprint::{FingerprintDigest, ModelFingerprint};
use crate::format::{InstanceId, StructureBlock, SuperBlock, SuperBlockFault, UNIT, VERSION};
use crate::layout::AreaLayout;
use crate::medium::BlockMedium;
use nvme_store::RangeClaim;

/// Blocks of the log that are read with one call.
pub(crate) const LOG_BLOCKS_AT_ONCE: u32 = 256;

/// The place and the properties of a store, as its user names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AreaRequest {
    /// First byte of the area, a multiple of 4,096. Each rank of a shared drive has another area.
    pub offset: u64,
    /// Bytes of the area.
    pub bytes: u64,
    /// The most bytes of a page.
    pub page_bytes: u32,
    /// Fingerprint of the pages.
    pub fingerprint: ModelFingerprint,
}

impl AreaRequest {
    /// Checks that pages of `other` are those of this request: its fingerprint and its sizes.
    ///
    /// # Errors
    /// [`KvError::OtherModel`] and [`KvError::OtherSize`], which name the first field that differs.
    pub fn check_same(&self, other: &Self) -> Result<()> {
        check_fields(&self.fingerprint, (self.bytes, self.page_bytes), other)
    }
}

/// An area with its sizes and its name. Places count from its first byte.
pub(crate) struct StoreArea<M> {
    /// Dropped before the medium.
    pub _claim: Option<RangeClaim>,
    pub medium: M,
    pub offset: u64,
    pub layout: AreaLayout,
    pub instance: InstanceId,
    pub digest: FingerprintDigest,
}

impl<M: BlockMedium> StoreArea<M> {
    /// Reads from place `at` on; `structure` names it in errors.
    pub fn read(&self, at: u64, data: &mut [u8], structure: &str) -> Result<()> {
        let at = self.offset + at;
        let action = || format!("reading {structure} at byte {at}");
        let read = self.medium.read_at(at, data);
        read.map_err(|error| KvError::drive(action())(error))
    }

    /// Reads a structure; `None` if the drive cannot read this place, which is damage like any other.
    ///
    /// # Errors
    /// [`KvError::Drive`] if the drive answers nothing at all.
    pub fn read_block(&self, at: u64, structure: &str) -> Result<Option<StructureBlock>> {
        let mut block = [0; UNIT as usize];
        match self.read(at, &mut block, structure) {
            Ok(()) => Ok(Some(block)),
            Err(KvError::Drive { source, .. }) if is_of_place(&source) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads `count` blocks of the log, or those before the first one that the drive cannot read.
    ///
    /// # Errors
    /// As [`read_block`](Self::read_block).
    pub fn read_log(&self, half: usize, first: u32, count: u32) -> Result<Vec<StructureBlock>> {
        let mut bytes = vec![0; count as usize * UNIT as usize];
        let at = self.layout.log_at(half, first);
        match self.read(at, &mut bytes, "the log") {
            Ok(()) => Ok(bytes.as_chunks().0.to_vec()),
            Err(KvError::Drive { source, .. }) if is_of_place(&source) => {
                let mut blocks = Vec::new();
                for block in 0..u64::from(count) {
                    match self.read_block(at + block * UNIT, "the log")? {
                        Some(block) => blocks.push(block),
                        None => break,
                    }
                }
                Ok(blocks)
            }
            Err(error) => Err(error),
        }
    }

    /// Writes to place `at`; the bytes are durable when this returns.
    pub fn write_durable(&self, at: u64, data: &[u8], structure: &str) -> Result<()> {
        let at = self.offset + at;
        let written = self.medium.write_durable(at, data);
        written.map_err(KvError::drive(format!("writing {structure} at byte {at}")))
    }

    /// Writes both superblocks, one after the other, the second one first.
    pub fn write_superblocks(&self, block: &StructureBlock) -> Result<()> {
        self.write_durable(UNIT, block, "the superblock")?;
        self.write_durable(0, block, "the superblock")
    }

    pub fn flush(&self) -> Result<()> {
        let flushed = self.medium.flush();
        flushed.map_err(KvError::drive("flushing the drive"))
    }
}

/// True for an error of the place that was read, as of a worn block, and not of the whole drive.
pub(crate) fn is_of_place(error: &nvme_driver::Error) -> bool {
    use nvme_driver::Error;
    matches!(error, Error::Command { .. } | Error::File { .. })
}

/// Checks that an area can be where the request says.
///
/// # Errors
/// [`KvError::Usage`].
pub(crate) fn check_request<M: BlockMedium>(medium: &M, request: &AreaRequest) -> Result<()> {
    let block = u64::from(medium.block_bytes());
    if block == 0 || !UNIT.is_multiple_of(block) {
        return Err(KvError::usage(
            format!("the drive has blocks of {block} bytes, which do not divide {UNIT}"),
            "format the namespace with blocks of 512 or 4096 bytes",
        ));
    }
    if !request.offset.is_multiple_of(UNIT) {
        return Err(KvError::usage(
            format!(
                "the area begins at byte {}, which is no multiple of {UNIT}",
                request.offset
            ),
            "round it up",
        ));
    }
    let end = request.offset.checked_add(request.bytes);
    if end.is_none_or(|end| end > medium.bytes()) {
        return Err(KvError::usage(
            format!(
                "the area of {} bytes from byte {} on ends past the drive, which has {} bytes",
                request.bytes,
                request.offset,
                medium.bytes()
            ),
            "name an area inside the drive",
        ));
    }
    Ok(())
}

/// Claims the bytes of an area.
///
/// # Errors
/// [`KvError::Usage`] if an open area overlaps it in part.
pub(crate) fn claim<M: BlockMedium>(
    medium: &M,
    request: &AreaRequest,
) -> Result<Option<RangeClaim>> {
    medium
        .claim(request.offset, request.bytes)
        .map_err(|error| match error {
            nvme_driver::Error::Usage { cause, remedy } => {
                KvError::usage(format!("areas of pages may not overlap: {cause}"), remedy)
            }
            error => KvError::drive("claiming the area")(error),
        })
}

/// Reads the superblock, or its copy where the first one is not right, and the place of one that has to be mended.
///
/// # Errors
/// The reason that says the most about the two blocks.
pub(crate) fn read_superblock<M: BlockMedium>(
    medium: &M,
    offset: u64,
) -> Result<(SuperBlock, Option<u64>)> {
    let first = read_copy(medium, offset)?;
    let second = read_copy(medium, offset + UNIT)?;
    let worst = match (first, second) {
        (Ok(first), Ok(second)) => {
            let mended = (first != second).then_some(UNIT);
            return Ok((first, mended));
        }
        (Ok(first), Err(_)) => return Ok((first, Some(UNIT))),
        (Err(_), Ok(second)) => return Ok((second, Some(0))),
        // Formatting a blank area writes the second block first, and may leave a part of it.
        (Err(first), Err(SuperBlockFault::Foreign)) => first,
        (Err(first), Err(second)) if weight(second) > weight(first) => second,
        (Err(first), Err(_)) => first,
    };
    Err(match worst {
        SuperBlockFault::Blank | SuperBlockFault::Unfinished => KvError::Blank { offset },
        SuperBlockFault::Foreign => KvError::Foreign { offset },
        SuperBlockFault::Version(found) => KvError::Version {
            offset,
            found,
            known: VERSION,
        },
        SuperBlockFault::Damaged(cause) => KvError::damaged("the superblock", offset, cause),
    })
}

/// Reads one of the two superblocks.
///
/// # Errors
/// [`KvError::Drive`] if the drive answers nothing at all.
fn read_copy<M: BlockMedium>(
    medium: &M,
    at: u64,
) -> Result<std::result::Result<SuperBlock, SuperBlockFault>> {
    let mut block = [0; UNIT as usize];
    match medium.read_at(at, &mut block) {
        Ok(()) => Ok(SuperBlock::read(&block)),
        Err(error) if is_of_place(&error) => {
            Ok(Err(SuperBlockFault::Damaged("the drive could not read it")))
        }
        Err(error) => {
            let action = format!("reading the superblock at byte {at}");
            Err(KvError::drive(action)(error))
        }
    }
}

/// Orders reasons by what they say: that a store was here counts more than that a block is zero.
fn weight(rejected: SuperBlockFault) -> u32 {
    match rejected {
        SuperBlockFault::Blank => 0,
        SuperBlockFault::Foreign => 1,
        SuperBlockFault::Unfinished => 2,
        SuperBlockFault::Damaged(_) => 3,
        SuperBlockFault::Version(_) => 4,
    }
}

/// Checks that the store on the drive is the one that is asked for.
///
/// # Errors
/// [`KvError::OtherSize`], [`KvError::OtherModel`].
pub(crate) fn check_same(superblock: &SuperBlock, request: &AreaRequest) -> Result<()> {
    let found = &superblock.layout;
    check_fields(
        &superblock.fingerprint,
        (found.area_bytes, found.page_bytes),
        request,
    )
}

fn check_fields(
    fingerprint: &ModelFingerprint,
    (area_bytes, page_bytes): (u64, u32),
    given: &AreaRequest,
) -> Result<()> {
    if let Some((field, found, given)) = fingerprint.difference(&given.fingerprint) {
        return Err(KvError::OtherModel {
            field,
            found,
            given,
        });
    }
    for (field, found, given) in [
        ("area_bytes", area_bytes, given.bytes),
        ("page_bytes", page_bytes.into(), given.page_bytes.into()),
    ] {
        if found != given {
            return Err(KvError::OtherSize {
                field,
                found,
                given,
            });
        }
    }
    Ok(())
}

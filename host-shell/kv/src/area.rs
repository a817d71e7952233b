//! The bytes of a medium that one store owns.

use crate::error::{KvError, Result};
use crate::fingerprint::{FingerprintDigest, ModelFingerprint};
use crate::format::{InstanceId, StructureBlock, SuperBlock, SuperBlockFault, UNIT, VERSION};
use crate::layout::AreaLayout;
use crate::medium::BlockMedium;
use nvme_store::{RangeClaim, StoreTransfer};

/// Blocks of the log that are read with one call.
pub(crate) const LOG_BLOCKS_AT_ONCE: u32 = 256;
/// Bytes of an area that are zero before it counts as blank.
const BLANK_BYTES: u64 = 1 << 20;

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

    /// Reads structures with one call. The inner error is that of a place which the drive cannot read.
    ///
    /// # Errors
    /// [`KvError::Drive`] if the drive answers nothing at all.
    pub fn try_blocks<const N: usize>(
        &self,
        places: [u64; N],
        structure: &str,
    ) -> Result<[Result<StructureBlock>; N]> {
        let mut blocks = [[0; UNIT as usize]; N];
        let reads = places.iter().zip(&mut blocks);
        let mut reads: Vec<_> = reads
            .map(|(at, block)| StoreTransfer::Read(self.offset + at, &mut block[..]))
            .collect();
        let mut read = self.medium.transfer_all(&mut reads).into_iter();
        let mut failure = None;
        let blocks = std::array::from_fn(|number| {
            let action = format!(
                "reading {structure} at byte {}",
                self.offset + places[number]
            );
            match read.next() {
                Some(Ok(())) => Ok(blocks[number]),
                Some(Err(error)) => {
                    if !is_of_place(&error) {
                        failure.get_or_insert(KvError::drive(action.clone())(error.again()));
                    }
                    Err(KvError::drive(action)(error))
                }
                None => Err(KvError::drive(action)(nvme_driver::Error::internal(
                    "the medium has fewer ends than transfers",
                ))),
            }
        });
        failure.map_or(Ok(blocks), Err)
    }

    /// Reads structures with one call; `None` for one whose place the drive cannot read.
    ///
    /// # Errors
    /// As [`try_blocks`](Self::try_blocks).
    pub fn read_blocks<const N: usize>(
        &self,
        places: [u64; N],
        structure: &str,
    ) -> Result<[Option<StructureBlock>; N]> {
        let blocks = self.try_blocks(places, structure)?;
        Ok(blocks.map(Result::ok))
    }

    /// Fails if the superblock that counts is another store's: the area was formatted since this one was opened.
    pub fn check_instance(
        &self,
        superblocks: [Option<&StructureBlock>; 2],
        epoch: u32,
    ) -> Result<()> {
        // Formatting writes the first one second, and the journal behind it.
        let mut found = superblocks
            .into_iter()
            .flatten()
            .filter_map(SuperBlock::instance_of);
        match found.next() {
            Some(instance) if instance != self.instance => Err(KvError::Superseded {
                own: epoch,
                by: None,
            }),
            _ => Ok(()),
        }
    }

    /// Reads `count` blocks of the log, or those before the first one that the drive cannot read.
    ///
    /// # Errors
    /// As [`try_blocks`](Self::try_blocks).
    pub fn read_log(&self, half: usize, first: u32, count: u32) -> Result<Vec<StructureBlock>> {
        let mut bytes = vec![0; count as usize * UNIT as usize];
        let at = self.layout.log_at(half, first);
        match self.read(at, &mut bytes, "the log") {
            Ok(()) => Ok(bytes.as_chunks().0.to_vec()),
            Err(KvError::Drive { source, .. }) if is_of_place(&source) => {
                let mut blocks = Vec::new();
                for block in 0..u64::from(count) {
                    let [block] = self.read_blocks([at + block * UNIT], "the log")?;
                    match block {
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
/// The reason that says the most about the two blocks; [`KvError::Drive`] if neither is right, and one cannot be read.
pub(crate) fn read_superblock<M: BlockMedium>(
    medium: &M,
    request: &AreaRequest,
) -> Result<(SuperBlock, Option<u64>)> {
    let offset = request.offset;
    let copies = [offset, offset + UNIT].map(|at| read_copy(medium, at));
    let worst = match copies {
        // What the drive could not read may be a whole store, or foreign data.
        [Err(error), Ok(Err(_)) | Err(_)] | [Ok(Err(_)), Err(error)] => return Err(error),
        [Ok(Ok(first)), Ok(Ok(second))] => {
            let mended = (first != second).then_some(UNIT);
            return Ok((first, mended));
        }
        [Ok(Ok(first)), _] => return Ok((first, Some(UNIT))),
        [_, Ok(Ok(second))] => return Ok((second, Some(0))),
        [Ok(Err(first)), Ok(Err(second))] => match (first, second) {
            (SuperBlockFault::Blank, SuperBlockFault::Blank | SuperBlockFault::Torn) => {
                check_blank(medium, request)?;
                first
            }
            _ if weight(second) > weight(first) => second,
            _ => first,
        },
    };
    Err(match worst {
        SuperBlockFault::Blank | SuperBlockFault::Unfinished => KvError::Blank { offset },
        SuperBlockFault::Foreign | SuperBlockFault::Torn => KvError::Foreign { offset },
        SuperBlockFault::Version(found) => KvError::Version {
            offset,
            found,
            known: VERSION,
        },
        SuperBlockFault::Damaged(cause) => KvError::damaged("the superblock", offset, cause),
    })
}

/// Checks that the beginning of an area whose superblocks are blank is zero: file systems and volumes have theirs at
/// other places.
///
/// # Errors
/// [`KvError::Foreign`], [`KvError::Usage`] if an open area overlaps it in part, [`KvError::Drive`].
fn check_blank<M: BlockMedium>(medium: &M, request: &AreaRequest) -> Result<()> {
    let offset = request.offset;
    let begin = 2 * UNIT;
    let end = request.bytes.min(BLANK_BYTES).max(begin);
    let mut bytes = vec![0; (end - begin) as usize];
    let read = medium.read_at(offset + begin, &mut bytes);
    let action = || format!("reading the area at byte {}", offset + begin);
    read.map_err(|error| KvError::drive(action())(error))?;
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    // An open area that overlaps says more.
    Err(match claim(medium, request) {
        Err(error @ KvError::Usage { .. }) => error,
        _ => KvError::Foreign { offset },
    })
}

/// Reads one of the two superblocks.
///
/// # Errors
/// [`KvError::Drive`].
fn read_copy<M: BlockMedium>(
    medium: &M,
    at: u64,
) -> Result<std::result::Result<SuperBlock, SuperBlockFault>> {
    let mut block = [0; UNIT as usize];
    let read = medium.read_at(at, &mut block);
    let action = || format!("reading the superblock at byte {at}");
    read.map_err(|error| KvError::drive(action())(error))?;
    Ok(SuperBlock::read(&block))
}

/// Orders reasons by what they say: that a store was here counts more than that a block is zero.
fn weight(rejected: SuperBlockFault) -> u32 {
    match rejected {
        SuperBlockFault::Blank => 0,
        SuperBlockFault::Foreign | SuperBlockFault::Torn => 1,
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

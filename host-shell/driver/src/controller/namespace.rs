//! Blocking access to one namespace: any range of blocks and any length, split into commands by the limits of the
//! controller and kept in flight together. Bytes that are no whole blocks are the subject of the stores above.

use crate::controller::Controller;
use crate::controller::queue::{DriverQueue, QueueRefusal};
use crate::controller::queue_inner::QueueCompletion;
use crate::controller::session::ControllerSession;
use crate::dma::DmaBuffer;
use crate::error::{Error, Result};
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::identify::{dlfeat, oncs};
use nvme_core::spec::nvm::{self, DsmRange};
use nvme_core::spec::{Lba, Nsid, Sqe, Status};
use nvme_core::transfer::{RangeError, TransferLimits, TransferPiece, split};
use nvme_core::{CommandOutcome, SubmitError};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Number of commands that one blocking call keeps in flight.
const DEPTH: usize = 8;
/// Bytes of a bounce buffer: the limit of one command of a blocking call.
const BOUNCE_BYTES: u64 = 256 << 10;
/// Limit of repetitions of a command that a reset aborted. The command itself may be the cause of the resets,
/// so it is not repeated without end.
const RETRIES: u32 = 3;

/// A namespace, with its own queue pair and bounce buffers: blocking reads and writes of any length.
///
/// ```
/// use nvme_driver::core::spec::{Lba, Nsid};
/// use nvme_driver::{ControllerConfig, Controller, Error};
///
/// # fn main() -> nvme_driver::Result<()> {
/// # #[cfg(feature = "sim")] {
/// let device = nvme_driver::open("sim:mem?size=64MiB&block=512")?;
/// let controller = Controller::start(device, &ControllerConfig::default())?;
/// let mut namespace = controller.namespace(Nsid(1))?;
/// // 1 MiB is split into commands, as the controller allows.
/// let data: Vec<u8> = (0..1 << 20).map(|at| at as u8).collect();
/// namespace.write(Lba(100), &data)?;
/// let mut back = vec![0; data.len()];
/// namespace.read(Lba(100), &mut back)?;
/// assert_eq!(back, data);
/// // What does not fit is an error before anything is sent.
/// let past_the_end = namespace.read(Lba(namespace.blocks()), &mut back);
/// assert!(matches!(past_the_end, Err(Error::Usage { .. })));
/// # }
/// # Ok(())
/// # }
/// ```
pub struct Namespace {
    info: NamespaceInfo,
    limits: TransferLimits,
    queue: DriverQueue,
    buffers: Vec<DmaBuffer>,
    session: Arc<ControllerSession>,
    /// Optional commands, as Identify Controller says.
    oncs: u16,
    /// DLFEAT: the effect of deallocation, from Identify Namespace.
    dlfeat: u8,
}

impl Controller {
    /// Opens a namespace for blocking reads and writes, with a dedicated queue pair.
    ///
    /// # Errors
    /// As [`usable_namespace`](Self::usable_namespace).
    pub fn namespace(&self, nsid: Nsid) -> Result<Namespace> {
        let (info, identify) = self.usable(nsid)?;
        Namespace::new(self, info, identify.dlfeat)
    }
}

impl Namespace {
    fn new(controller: &Controller, info: NamespaceInfo, dlfeat: u8) -> Result<Self> {
        let block_bytes = u64::from(info.block_bytes);
        let max_bytes = controller.max_transfer().min(BOUNCE_BYTES.max(block_bytes));
        let limits = TransferLimits {
            block_bytes: info.block_bytes,
            blocks: info.blocks,
            max_bytes: Some(max_bytes),
            boundary_blocks: info.boundary_blocks,
        };
        let mut queue = controller.create_queue_pair(2 * DEPTH as u32)?;
        queue.goes_by(info);
        Ok(Self {
            info,
            limits,
            queue,
            buffers: Vec::new(),
            session: Arc::clone(controller.session()),
            oncs: controller.identify().oncs,
            dlfeat,
        })
    }

    /// Returns the identifier.
    pub fn nsid(&self) -> Nsid {
        self.info.nsid
    }

    /// Returns the size in blocks.
    pub fn blocks(&self) -> u64 {
        self.info.blocks
    }

    /// Returns the number of bytes per block.
    pub fn block_bytes(&self) -> u32 {
        self.info.block_bytes
    }

    /// Returns the properties from Identify Namespace.
    pub fn info(&self) -> &NamespaceInfo {
        &self.info
    }

    /// Returns the limits of one command.
    pub fn limits(&self) -> TransferLimits {
        self.limits
    }

    /// Returns the queue pair, for its counts.
    pub fn queue(&self) -> &DriverQueue {
        &self.queue
    }

    /// Checks that `blocks` blocks from `lba` on lie inside the namespace.
    ///
    /// # Errors
    /// [`Error::Usage`]; nothing is sent.
    pub fn check(&self, lba: Lba, blocks: u64) -> Result<()> {
        split(lba, blocks, self.limits)
            .map(drop)
            .map_err(|error| self.range_error(error, lba, blocks))
    }

    fn range_error(&self, error: RangeError, lba: Lba, blocks: u64) -> Error {
        match error {
            RangeError::Empty => Error::usage("the range has no blocks", "ask for at least 1"),
            RangeError::PastEnd { blocks: size } => Error::usage(
                format!(
                    "{blocks} blocks from LBA {lba} end past namespace {}, which has {size} blocks",
                    self.nsid()
                ),
                format!("the last LBA is {}", size.saturating_sub(1)),
            ),
            RangeError::BlockAboveMdts => Error::device(
                "one block is longer than the controller's largest transfer",
                "format with smaller blocks",
            ),
            RangeError::NoBlockSize => Error::device(
                format!("namespace {} has no valid block size", self.nsid()),
                "format it with 512 or 4096 byte blocks",
            ),
            RangeError::TooLong => {
                Error::usage("the range has 2^64 bytes or more", "ask for fewer blocks")
            }
        }
    }

    fn blocks_of(&self, bytes: usize) -> Result<u64> {
        let block = u64::from(self.info.block_bytes);
        let bytes = bytes as u64;
        if bytes == 0 || !bytes.is_multiple_of(block) {
            return Err(Error::usage(
                format!("{bytes} bytes are not a whole number of {block}-byte blocks"),
                format!("use a multiple of {block} bytes, at least one block"),
            ));
        }
        Ok(bytes / block)
    }

    /// Reads `data.len()` bytes (a multiple of the block size) from `lba` on.
    pub fn read(&mut self, lba: Lba, data: &mut [u8]) -> Result<()> {
        let blocks = self.blocks_of(data.len())?;
        let nsid = self.nsid();
        let command = |piece: TransferPiece| nvm::read(nsid, piece.lba, piece.blocks);
        let take = |at: Range<usize>, bytes: &[u8]| data[at].copy_from_slice(bytes);
        self.transfer("Read", lba, blocks, command, |_, _| (), take)
    }

    /// Writes `data` (a multiple of the block size) from `lba` on. Durable after [`flush`](Self::flush).
    pub fn write(&mut self, lba: Lba, data: &[u8]) -> Result<()> {
        let nsid = self.nsid();
        self.send("Write", lba, data, |piece| {
            nvm::write(nsid, piece.lba, piece.blocks)
        })
    }

    /// Writes `data` with force unit access: durable when this returns.
    pub fn write_fua(&mut self, lba: Lba, data: &[u8]) -> Result<()> {
        let nsid = self.nsid();
        self.send("Write (FUA)", lba, data, |piece| {
            let mut sqe = nvm::write(nsid, piece.lba, piece.blocks);
            sqe.cdw12 |= nvm::FUA;
            sqe
        })
    }

    /// Compares the blocks from `lba` on with `data`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when they differ, [`Error::Unsupported`] by ONCS.
    pub fn compare(&mut self, lba: Lba, data: &[u8]) -> Result<()> {
        self.needs(oncs::COMPARE, "Compare", "bit 0 of ONCS")?;
        let nsid = self.nsid();
        self.send("Compare", lba, data, |piece| {
            nvm::compare(nsid, piece.lba, piece.blocks)
        })
    }

    fn send(
        &mut self,
        what: &str,
        lba: Lba,
        data: &[u8],
        command: impl Fn(TransferPiece) -> Sqe,
    ) -> Result<()> {
        let blocks = self.blocks_of(data.len())?;
        let fill = |at: Range<usize>, bytes: &mut [u8]| bytes.copy_from_slice(&data[at]);
        self.transfer(what, lba, blocks, command, fill, |_, _| ())
    }

    /// Commits everything written to this namespace.
    pub fn flush(&mut self) -> Result<()> {
        let sqe = nvm::flush(self.nsid());
        self.single("Flush", sqe, None)
    }

    /// Sets `blocks` blocks from `lba` on to zero.
    ///
    /// # Errors
    /// [`Error::Unsupported`] by ONCS, and with `deallocate` by DLFEAT.
    pub fn write_zeroes(&mut self, lba: Lba, blocks: u64, deallocate: bool) -> Result<()> {
        self.needs(oncs::WRITE_ZEROES, "Write Zeroes", "bit 3 of ONCS")?;
        if deallocate && self.dlfeat & dlfeat::WRITE_ZEROES_DEALLOCATE == 0 {
            return Err(Error::Unsupported {
                what: "Deallocate in Write Zeroes",
                bit: "bit 3 of DLFEAT",
            });
        }
        // The command moves no data, so that MDTS does not limit it; one command names up to 65,536 blocks.
        let limits = TransferLimits {
            max_bytes: None,
            ..self.limits
        };
        let pieces =
            split(lba, blocks, limits).map_err(|error| self.range_error(error, lba, blocks))?;
        for piece in pieces {
            let mut sqe = nvm::write_zeroes(self.nsid(), piece.lba, piece.blocks);
            if deallocate {
                sqe.cdw12 |= nvm::DEAC;
            }
            self.single(&in_words("Write Zeroes", piece), sqe, None)?;
        }
        Ok(())
    }

    /// Deallocates ranges of blocks: at most 256 per command, as many commands as needed.
    ///
    /// # Errors
    /// [`Error::Unsupported`] by ONCS.
    pub fn deallocate(&mut self, ranges: &[(Lba, u32)]) -> Result<()> {
        self.needs(
            oncs::DATASET_MANAGEMENT,
            "Dataset Management",
            "bit 2 of ONCS",
        )?;
        if ranges.is_empty() {
            return Err(Error::usage(
                "there are no ranges to deallocate",
                "give at least one",
            ));
        }
        for (lba, blocks) in ranges {
            self.check(*lba, u64::from(*blocks))?;
        }
        for chunk in ranges.chunks(256) {
            let list: Vec<DsmRange> = chunk
                .iter()
                .map(|(lba, blocks)| DsmRange {
                    attributes: 0,
                    blocks: *blocks,
                    slba: lba.0,
                })
                .collect();
            let bytes = list.as_bytes();
            let mut buffer = DmaBuffer::new(&self.session.device, bytes.len())?;
            buffer.as_mut_slice().copy_from_slice(bytes);
            self.single(
                "Dataset Management",
                nvm::deallocate(self.nsid(), list.len() as u32),
                Some(buffer),
            )?;
        }
        Ok(())
    }

    /// Rejects an operation whose bit in ONCS is clear.
    fn needs(&self, bit: u16, what: &'static str, name: &'static str) -> Result<()> {
        match self.oncs & bit {
            0 => Err(Error::Unsupported { what, bit: name }),
            _ => Ok(()),
        }
    }

    fn single(&mut self, what: &str, sqe: Sqe, mut buffer: Option<DmaBuffer>) -> Result<()> {
        self.queue.check_current(self.info.nsid)?;
        for attempt in 0.. {
            let submitted = self.queue.submit(sqe, buffer.take());
            let cid = submitted.map_err(|refused| refused_as(what, refused.error))?;
            self.queue.ring();
            let done = loop {
                match self.queue.wait()? {
                    Some(done) if done.cid == cid => break done,
                    Some(_) => {}
                    None => return Err(Error::internal(format!("{what} was lost"))),
                }
            };
            if done.is_success() {
                return self.queue.check_current(self.info.nsid);
            }
            if !done.may_retry() || attempt == RETRIES {
                let error = self.queue.error_of(&done, what);
                return Err(self.queue.cause_of(self.info.nsid, sqe.opcode(), error));
            }
            buffer = done.buffer;
        }
        Ok(())
    }

    /// Returns the bounce buffers, which are as long as the longest piece and allocated on first
    /// use.
    fn bounce(&mut self) -> Result<Vec<DmaBuffer>> {
        if self.buffers.is_empty() {
            let bytes = self
                .limits
                .max_bytes
                .unwrap_or(BOUNCE_BYTES)
                .max(u64::from(self.info.block_bytes));
            let depth = DEPTH.min(self.queue.depth() as usize);
            for _ in 0..depth {
                self.buffers
                    .push(DmaBuffer::new(&self.session.device, bytes as usize)?);
            }
        }
        Ok(std::mem::take(&mut self.buffers))
    }

    /// Moves a range with several commands in flight. `fill` prepares a buffer before its command, `take` receives it
    /// afterwards; both are called with the range of the caller's data that the buffer holds.
    fn transfer(
        &mut self,
        what: &str,
        lba: Lba,
        blocks: u64,
        command: impl Fn(TransferPiece) -> Sqe,
        mut fill: impl FnMut(Range<usize>, &mut [u8]),
        mut take: impl FnMut(Range<usize>, &[u8]),
    ) -> Result<()> {
        self.queue.check_current(self.info.nsid)?;
        let mut pieces = split(lba, blocks, self.limits)
            .map_err(|error| self.range_error(error, lba, blocks))?
            .peekable();
        let block = self.info.block_bytes as usize;
        let place = |piece: TransferPiece| {
            piece.offset as usize..piece.offset as usize + piece.blocks as usize * block
        };
        let opcode = pieces.peek().map_or(0, |piece| command(*piece).opcode());
        let mut free = self.bounce()?;
        let mut pending: BTreeMap<u16, (TransferPiece, u32)> = BTreeMap::new();
        let mut again: Vec<(TransferPiece, u32)> = Vec::new();
        let mut failure: Option<Error> = None;
        loop {
            let mut rang = true;
            while failure.is_none() && !free.is_empty() {
                let Some((piece, tries)) = again
                    .pop()
                    .or_else(|| pieces.next().map(|piece| (piece, 0)))
                else {
                    break;
                };
                let Some(mut buffer) = free.pop() else { break };
                buffer.resize(piece.blocks as usize * block);
                fill(place(piece), buffer.as_mut_slice());
                match self.queue.submit(command(piece), Some(buffer)) {
                    Ok(cid) => {
                        pending.insert(cid.0, (piece, tries));
                        rang = false;
                    }
                    Err(refused) => {
                        free.extend(refused.buffer);
                        if refused.error != SubmitError::QueueFull || pending.is_empty() {
                            failure = Some(refused_as(what, refused.error));
                        } else {
                            again.push((piece, tries));
                        }
                        break;
                    }
                }
            }
            if !rang {
                self.queue.ring();
            }
            if pending.is_empty() {
                break;
            }
            // On an error of the queue itself the buffers in flight stay with it.
            let Some(done) = self.queue.wait()? else {
                return Err(Error::internal(format!("{what} was lost")));
            };
            let Some((piece, tries)) = pending.remove(&done.cid.0) else {
                continue;
            };
            if done.is_success() {
                if let Some(buffer) = &done.buffer {
                    take(place(piece), buffer.as_slice());
                }
            } else if done.may_retry() && tries < RETRIES {
                again.push((piece, tries + 1));
            } else {
                let error = self.error_of_piece(&done, what, piece);
                failure.get_or_insert(error);
            }
            free.extend(done.buffer);
        }
        self.buffers = free;
        let nsid = self.info.nsid;
        match failure {
            Some(error) => Err(self.queue.cause_of(nsid, opcode, error)),
            // A command that ended after a change of the namespace may have used other blocks than were meant.
            None => self.queue.check_current(nsid),
        }
    }

    fn error_of_piece(&self, done: &QueueCompletion, what: &str, piece: TransferPiece) -> Error {
        match done.outcome {
            CommandOutcome::Completed(status)
                if status.code() == Status::COMPARE_FAILURE.code() && !done.late =>
            {
                Error::Mismatch {
                    what: format!(
                        "the data differs within {} blocks from LBA {} on",
                        piece.blocks, piece.lba
                    ),
                }
            }
            _ => self.queue.error_of(done, &in_words(what, piece)),
        }
    }
}

fn refused_as(what: &str, refusal: QueueRefusal) -> Error {
    refusal.into_error(|error| {
        Error::device(format!("{what} could not be queued: {error}"), "try again")
    })
}

fn in_words(what: &str, piece: TransferPiece) -> String {
    match piece.blocks {
        1 => format!("{what} of LBA {}", piece.lba),
        blocks => format!("{what} of {blocks} blocks from LBA {}", piece.lba),
    }
}

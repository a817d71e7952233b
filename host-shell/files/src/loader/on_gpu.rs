//! Layers in GPU memory, read in a stream that belongs to the loader.
//!
//! The rule of docs/adr/0008 holds: no thread of ours calls the driver. Calls are made by the threads of the
//! caller that request a layer, drop one, or drop the loader.
// UNSAFETY: reads go to addresses of GPU memory, which the loader has.
#![allow(unsafe_code)]

use super::plan::{LayerPiece, LayerPlan, ModelLayers};
use super::verifier::{LayerVerifier, VerificationRun};
use nvme_core::spec::Status;
use nvme_cuda::{DeviceMemory, Gpu, LaunchSequence, PendingRows, ReadRange, Stream, StreamEvent};
use nvme_driver::error::{Error, Result};
use nvme_store::Store;
use nvme_store::status::{self, RowStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Cells begin at a multiple of this number of bytes.
const ALIGNMENT: u64 = 4096;

/// Returns the difference between a piece's positions in the store and in memory, modulo 16: it decides the
/// width of the copies.
fn unit(piece: &LayerPiece) -> u64 {
    piece.offset.wrapping_sub(piece.at) % 16
}

/// Stream and memory of a loader.
pub(super) struct LoaderGpu {
    gpu: Arc<Gpu>,
    stream: Stream,
    /// Verifier, for layers that have a manifest.
    verifier: Option<Arc<LayerVerifier>>,
    _memory: DeviceMemory,
}

/// The memory of a cell.
pub(super) struct GpuRoom {
    address: u64,
    /// Events in streams of the caller after which nothing reads the cell.
    free: Vec<StreamEvent>,
    /// Events that are not in use.
    spare: Vec<StreamEvent>,
}

/// The read of a layer in the loader's stream.
pub(super) struct GpuLoad {
    address: u64,
    pending: PendingRows,
    /// Event after the read and, where there is a manifest, after the hashing.
    loaded: Arc<StreamEvent>,
    verifying: Option<VerificationRun>,
}

impl LoaderGpu {
    /// Allocates memory for cells of these sizes.
    ///
    /// # Errors
    /// [`Error::Environment`] without as much.
    pub fn new(store: &Store, rooms: &[u64], layers: &ModelLayers) -> Result<(Self, Vec<GpuRoom>)> {
        let gpu = store.gpu().cloned();
        let gpu = gpu.ok_or_else(|| Error::internal("the store has no GPU"))?;
        let mut begins = Vec::with_capacity(rooms.len());
        let mut all = Some(0u64);
        for bytes in rooms {
            begins.push(all.unwrap_or(0));
            let end = all.and_then(|all| all.checked_add(*bytes));
            all = end.and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
        }
        let bytes = all.and_then(|all| usize::try_from(all).ok());
        let bytes = bytes
            .ok_or_else(|| Error::usage("more memory than a GPU can have", "use fewer slots"))?;
        let memory = DeviceMemory::new(&gpu, bytes)?;
        let rooms = begins.into_iter().map(|begin| GpuRoom {
            address: memory.address() + begin,
            free: Vec::new(),
            spare: Vec::new(),
        });
        let rooms = rooms.collect();
        let stream = Stream::urgent(&gpu)?;
        let made = Self {
            verifier: LayerVerifier::of(&gpu, layers)?,
            gpu,
            stream,
            _memory: memory,
        };
        Ok((made, rooms))
    }

    /// # Errors
    /// [`Error::Usage`] for a stream that is being captured.
    pub fn check_stream(&self, stream: u64) -> Result<()> {
        match self.gpu.is_captured(stream)? {
            true => Err(Error::usage(
                "a layer for a stream that is being captured: a graph would not read it again",
                "ask for the layer outside of the capture",
            )),
            false => Ok(()),
        }
    }

    /// Puts the reads of a layer into the stream, after all that reads the cell.
    pub fn start(
        &self,
        store: &Store,
        (layer, plan): (usize, &LayerPlan),
        room: &mut GpuRoom,
    ) -> Result<GpuLoad> {
        while let Some(event) = room.free.last() {
            event.before(self.stream.handle())?;
            room.spare.extend(room.free.pop());
        }
        let stream = self.stream.handle();
        let loaded = Arc::new(StreamEvent::untimed(&self.gpu)?);
        let pending = LaunchSequence::run(&self.gpu, stream, |sequence| {
            // The pieces of a launch are copied in the units of the one that fits worst.
            for pieces in plan.pieces().chunk_by(|a, b| unit(a) == unit(b)) {
                let ranges = pieces.iter().map(|piece| ReadRange {
                    offset: piece.offset,
                    bytes: piece.bytes,
                    to: room.address + piece.at,
                });
                let ranges: Vec<ReadRange> = ranges.collect();
                // SAFETY: the cell lies in memory of the loader, which is freed after the stream has ended.
                sequence.add(unsafe { store.read_ranges_on_gpu(&ranges, stream)? }, 0);
            }
            loaded.record_in(&self.stream)
        })?;
        let verifier = self.verifier.as_ref().filter(|_| !plan.chunks().is_empty());
        let verifying = match verifier {
            None => None,
            Some(verifier) => {
                // Reads into the cell wait until its present content was hashed.
                let until = match room.spare.pop() {
                    Some(event) => event,
                    None => StreamEvent::untimed(&self.gpu)?,
                };
                let verifying = verifier.start((layer, plan), room.address, &loaded, &until);
                room.free.push(until);
                Some(verifying?)
            }
        };
        Ok(GpuLoad {
            address: room.address,
            pending,
            loaded,
            verifying,
        })
    }

    /// Waits until no read writes to the memory any more. Freeing it waits for the streams of the caller.
    pub fn finish(&self) {
        // If the wait fails, the context was destroyed, and the memory with it.
        let _ = self.stream.finish();
        if let Some(verifier) = &self.verifier {
            verifier.finish();
        }
    }

    /// Records an event in `stream`: all work before it may read the cell.
    ///
    /// # Errors
    /// The driver's.
    pub fn used_until_now(&self, room: &mut GpuRoom, stream: u64) -> Result<()> {
        let event = match room.spare.pop() {
            Some(event) => event,
            None => StreamEvent::untimed(&self.gpu)?,
        };
        event.record_at(stream)?;
        room.free.push(event);
        Ok(())
    }
}

impl GpuLoad {
    /// Orders all later work of `stream` after the read.
    pub fn before(&self, stream: u64) -> Result<()> {
        self.loaded.before(stream)
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn is_done(&self) -> bool {
        let is_verified = || self.verifying.as_ref().is_none_or(VerificationRun::is_done);
        self.pending.is_settled() && is_verified()
    }

    /// Waits until the read has ended, `limit` at most; returns true if it has.
    pub fn wait(&self, limit: Duration) -> bool {
        let begin = Instant::now();
        self.pending.settles_within(limit)
            && self
                .verifying
                .as_ref()
                .is_none_or(|verifying| verifying.wait(limit.saturating_sub(begin.elapsed())))
    }

    /// Returns the reason why the read failed, once it has ended.
    pub fn failure(&self) -> Option<Error> {
        let failed = match self.pending.outcome()? {
            Ok(ended) => ended.failures,
            Err(error) => return Some(error),
        };
        if failed.rows == 0 {
            return self.verifying.as_ref().and_then(VerificationRun::failure);
        }
        let (_, code) = failed.first.unwrap_or((0, RowStatus::NotRun.code()));
        Some(of_code(code))
    }
}

/// Returns the error of a read that ended with a row status.
fn of_code(code: i32) -> Error {
    let (name, remedy) = status::describe(code);
    match u16::try_from(code) {
        Ok(code) if code > 0 => Error::Command {
            what: "a read by the GPU".to_owned(),
            status: Status(code),
        },
        _ if code == RowStatus::Gone.code() => Error::Gone {
            cause: format!("a read by the GPU: {name}"),
        },
        _ => Error::device(format!("a read by the GPU: {name}"), remedy),
    }
}

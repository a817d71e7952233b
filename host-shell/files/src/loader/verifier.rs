//! Hashes layers in memory of a GPU, in a stream beside the stream of the reads: a layer is verified while the next one
//! is read (docs/adr/0019).
//!
//! The kernel writes the hash of each chunk to memory of the host, which compares them when the kernel has ended.
// UNSAFETY: launches the kernel over memory of layers.
#![allow(unsafe_code)]

use super::chunk::LayerChunk;
use super::options::MOST_UNDER_WAY;
use super::plan::{LayerPlan, ModelLayers};
use nvme_cuda::{ChunkHasher, DeviceMemory, Gpu, HashedChunk, HostWords, Stream, StreamEvent};
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Pause between two polls of an event.
const NAP: Duration = Duration::from_micros(20);

/// The kernel, its stream, and the chunks of all layers.
pub(super) struct LayerVerifier {
    stream: Stream,
    hasher: ChunkHasher,
    /// A [`HashedChunk`] for each chunk, layer after layer.
    chunks: DeviceMemory,
    /// The number of each layer's first chunk.
    firsts: Vec<u64>,
    /// Hashes of the layers in progress: `stride` words for each.
    hashes: HostWords,
    stride: usize,
    /// Parts of `hashes` that no layer has.
    free: Mutex<Vec<usize>>,
}

/// The hashes of a layer under way.
pub(super) struct VerificationRun {
    verifier: Arc<LayerVerifier>,
    chunks: Arc<[LayerChunk]>,
    /// The layer's part of the hashes.
    part: usize,
    verified: Arc<StreamEvent>,
    verdict: OnceLock<HashVerdict>,
}

enum HashVerdict {
    Right,
    /// This chunk has this hash.
    Wrong(usize, u64),
    /// The driver's answer.
    Lost(String),
}

impl LayerVerifier {
    /// Creates the verifier if any layer has a manifest.
    ///
    /// # Errors
    /// Without memory, and when the driver rejects the kernel.
    pub fn of(gpu: &Arc<Gpu>, layers: &ModelLayers) -> Result<Option<Arc<Self>>> {
        let (mut firsts, mut table, mut stride) = (Vec::new(), Vec::new(), 0);
        let mut count = 0;
        for layer in layers.iter() {
            firsts.push(count);
            count += layer.chunks().len() as u64;
            stride = stride.max(layer.chunks().len());
            for one in layer.chunks() {
                let chunk = HashedChunk {
                    at: one.at,
                    bytes: one.chunk.bytes.into(),
                };
                table.extend(chunk.at.to_le_bytes());
                table.extend(chunk.bytes.to_le_bytes());
            }
        }
        if count == 0 {
            return Ok(None);
        }
        let chunks = DeviceMemory::new(gpu, table.len())?;
        chunks.upload(0, &table)?;
        // A layer is started when there is room, so that one more than the limit needs a part of the memory.
        let parts = MOST_UNDER_WAY + 1;
        Ok(Some(Arc::new(Self {
            stream: Stream::urgent(gpu)?,
            hasher: ChunkHasher::load(gpu)?,
            chunks,
            firsts,
            hashes: HostWords::new(gpu, parts.saturating_mul(stride))?,
            stride,
            free: Mutex::new((0..parts).collect()),
        })))
    }

    /// Verifies the layer at `address` after the event `loaded`, and records `loaded` and `until` again behind the
    /// verification.
    ///
    /// # Errors
    /// The driver's.
    pub fn start(
        self: &Arc<Self>,
        (layer, plan): (usize, &LayerPlan),
        address: u64,
        loaded: &Arc<StreamEvent>,
        until: &StreamEvent,
    ) -> Result<VerificationRun> {
        let first = self.firsts.get(layer).copied();
        let first = first.ok_or_else(|| Error::internal("a layer that has no chunks"))?;
        let part = lock(&self.free).pop();
        let part = part.ok_or_else(|| Error::internal("more layers under way than hashes"))?;
        if let Err(error) = self.put((first, plan), part, address, (loaded, until)) {
            // Nothing was launched.
            lock(&self.free).push(part);
            return Err(error);
        }
        Ok(VerificationRun {
            verifier: Arc::clone(self),
            chunks: Arc::clone(&plan.chunks),
            part,
            verified: Arc::clone(loaded),
            verdict: OnceLock::new(),
        })
    }

    fn put(
        &self,
        (first, plan): (u64, &LayerPlan),
        part: usize,
        address: u64,
        (loaded, until): (&StreamEvent, &StreamEvent),
    ) -> Result<()> {
        let stream = self.stream.handle();
        let chunks = self.chunks.address() + first * size_of::<HashedChunk>() as u64;
        let chunks = (chunks, plan.chunks().len() as u64);
        let hashes = self.hashes.address(part * self.stride);
        loaded.before(stream)?;
        // SAFETY: chunks of the layer's cell, which lies in an allocation of whole pages that is freed after this
        // stream has ended; reads into the cell wait for `until`.
        let launched = unsafe { self.hasher.launch(stream, chunks, address, hashes) };
        // The events are recorded even if the launch was refused: threads and streams that wait for
        // them would otherwise wait forever. The refusal itself is the error that the caller gets.
        loaded.record_in(&self.stream)?;
        until.record_in(&self.stream)?;
        launched
    }

    /// Waits until nothing is hashed any more.
    pub fn finish(&self) {
        // An error is ignored here for the same reason as for the stream of reads.
        let _ = self.stream.finish();
    }
}

impl VerificationRun {
    /// True if the verification has ended. The first call that finds it ended compares the hashes.
    pub fn is_done(&self) -> bool {
        if self.verdict.get().is_some() {
            return true;
        }
        let verdict = match self.verified.is_done() {
            Ok(false) => return false,
            Ok(true) => self.compare(),
            Err(error) => HashVerdict::Lost(error.to_string()),
        };
        if self.verdict.set(verdict).is_ok() {
            lock(&self.verifier.free).push(self.part);
        }
        true
    }

    /// Waits until the verification has ended, `limit` at most; returns true if it has.
    pub fn wait(&self, limit: Duration) -> bool {
        let begin = Instant::now();
        while !self.is_done() {
            if begin.elapsed() > limit {
                return false;
            }
            std::thread::sleep(NAP);
        }
        true
    }

    /// Returns the reason why the layer is not right, once it has ended.
    pub fn failure(&self) -> Option<Error> {
        match self.verdict.get()? {
            HashVerdict::Right => None,
            HashVerdict::Wrong(index, found) => {
                let chunk = self.chunks.get(*index)?.chunk;
                chunk.compare(*found).err()
            }
            HashVerdict::Lost(why) => Some(Error::device(
                format!("the layer was not verified: {why}"),
                "open the device again",
            )),
        }
    }

    fn compare(&self) -> HashVerdict {
        let first = self.part * self.verifier.stride;
        for (index, one) in self.chunks.iter().enumerate() {
            let found = self.verifier.hashes.get(first + index);
            if found != one.chunk.xxh3 {
                return HashVerdict::Wrong(index, found);
            }
        }
        HashVerdict::Right
    }
}

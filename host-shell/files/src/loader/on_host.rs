//! Layers in host memory, read by threads of the store. A buffer belongs to its read until that has ended, even if
//! the layer is dropped before: the drive may still write to it.

use super::chunk;
use super::plan::LayerPlan;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_store::{BackgroundOperation, Store, StoreTransfer};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Layers begin at a multiple of this number of bytes.
const PAGE: usize = 4096;

/// Memory of a cell. The read that fills it, or the layer that the caller uses, owns it meanwhile.
pub(super) struct CellBuffer {
    memory: Vec<u8>,
    begin: usize,
    bytes: usize,
}

impl CellBuffer {
    /// # Errors
    /// [`Error::Environment`] for more than there is.
    fn new(bytes: u64) -> Result<Self> {
        let whole = usize::try_from(bytes).ok();
        let with_room = whole.and_then(|whole| whole.checked_add(PAGE));
        let with_room = with_room.filter(|all| isize::try_from(*all).is_ok());
        let has = |all| Vec::<u8>::new().try_reserve_exact(all).is_ok();
        if !with_room.is_some_and(has) {
            return Err(Error::environment(
                format!("there is no memory for a layer of {bytes} bytes"),
                "use fewer slots, or let fewer layers stay",
            ));
        }
        // Zeroed by the system when it is touched.
        let memory = vec![0; with_room.unwrap_or(PAGE)];
        let begin = memory.as_ptr().align_offset(PAGE);
        Ok(Self {
            memory,
            begin,
            bytes: whole.unwrap_or(0),
        })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.begin..self.begin + self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.begin..self.begin + self.bytes]
    }
}

/// Allocates a cell for each of these sizes.
///
/// # Errors
/// Without memory.
pub(super) fn rooms(bytes: &[u64]) -> Result<Vec<CellOwner>> {
    let rooms = bytes.iter().map(|bytes| CellBuffer::new(*bytes));
    rooms.map(|room| Ok(CellOwner::Free(room?))).collect()
}

/// Owner of a cell's memory.
pub(super) enum CellOwner {
    /// The cell itself owns the memory.
    Free(CellBuffer),
    /// This read owns the memory until nothing uses the layer any more.
    Read(Arc<HostLoad>),
}

type Ended = (CellBuffer, Result<()>);

/// The read of a layer by a thread of the store.
pub(super) struct HostLoad {
    operation: BackgroundOperation<Ended>,
    bytes: u64,
    /// Outcome of the read, once a call has examined it.
    end: OnceLock<ReadEnd>,
    looking: Mutex<()>,
}

struct ReadEnd {
    buffer: Option<CellBuffer>,
    error: Option<Error>,
}

/// Starts to read a layer into the memory of a cell.
///
/// # Errors
/// An error if no thread can be started, and if an earlier read panicked and its memory cannot be replaced.
pub(super) fn start(
    store: &Store,
    plan: &LayerPlan,
    place: &mut CellOwner,
) -> Result<Arc<HostLoad>> {
    let mut buffer = place.take(plan.bytes())?;
    let pieces = plan.pieces().to_vec();
    let chunks = Arc::clone(&plan.chunks);
    let bytes = buffer.bytes as u64;
    let operation = store.in_background(move |store| {
        let mut transfers = Vec::with_capacity(pieces.len());
        let (mut rest, mut at) = (buffer.bytes_mut(), 0);
        for piece in &pieces {
            // Pieces are in the order of their offsets, and inside of the buffer.
            let (_, behind) = rest.split_at_mut(piece.at as usize - at);
            let (data, behind) = behind.split_at_mut(piece.bytes as usize);
            transfers.push(StoreTransfer::Read(piece.offset, data));
            (rest, at) = (behind, (piece.at + piece.bytes) as usize);
        }
        let results = store.transfer_all(&mut transfers);
        let read: Result<()> = results.into_iter().collect();
        let result = read.and_then(|()| chunk::verify(&chunks, buffer.bytes()));
        (buffer, result)
    })?;
    let load = Arc::new(HostLoad {
        operation,
        bytes,
        end: OnceLock::new(),
        looking: Mutex::default(),
    });
    *place = CellOwner::Read(Arc::clone(&load));
    Ok(load)
}

impl CellOwner {
    /// Returns the memory, which nothing else uses any more. Waits for a read that is in progress.
    fn take(&mut self, bytes: u64) -> Result<CellBuffer> {
        let empty = CellBuffer {
            memory: Vec::new(),
            begin: 0,
            bytes: 0,
        };
        let load = match std::mem::replace(self, Self::Free(empty)) {
            Self::Free(buffer) if buffer.bytes as u64 >= bytes => return Ok(buffer),
            Self::Free(_) => return CellBuffer::new(bytes),
            Self::Read(load) => load,
        };
        load.end();
        let size = load.bytes;
        let end = Arc::into_inner(load).and_then(|load| load.end.into_inner());
        match end.and_then(|end| end.buffer) {
            Some(buffer) => Ok(buffer),
            // The read panicked and dropped its buffer.
            None => CellBuffer::new(size),
        }
    }
}

impl HostLoad {
    /// Waits until the read has ended, `limit` at most; returns true if it has.
    pub fn wait(&self, limit: Duration) -> bool {
        self.operation.wait(limit)
    }

    /// Waits for the read; returns the reason why it failed, if it did.
    pub fn finish(&self) -> Option<&Error> {
        self.end().error.as_ref()
    }

    /// Returns its bytes, once it has ended well.
    pub fn bytes(&self) -> Option<&[u8]> {
        let end = self.end.get()?;
        match (&end.buffer, &end.error) {
            (Some(buffer), None) => Some(buffer.bytes()),
            _ => None,
        }
    }

    fn end(&self) -> &ReadEnd {
        let _one = lock(&self.looking);
        self.end.get_or_init(|| {
            while !self.operation.wait(Duration::from_secs(3600)) {}
            match self.operation.take() {
                Some(Ok((buffer, result))) => ReadEnd {
                    buffer: Some(buffer),
                    error: result.err(),
                },
                Some(Err(error)) => ReadEnd {
                    buffer: None,
                    error: Some(error),
                },
                None => ReadEnd {
                    buffer: None,
                    error: Some(Error::internal("the read of a layer ended twice")),
                },
            }
        })
    }
}

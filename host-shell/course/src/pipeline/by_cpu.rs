//! Products by threads of the CPU, and reads by another thread at the same time. The reader fills buffers
//! ahead, and stops at a limit so that a slow product does not fill the memory.

use super::data::{MatrixData, TemporaryFile};
use super::engine::{MatrixSource, PipelineEngine};
use super::trace::{PipelineTrace, SpanWork, WorkSpan};
use nvme_compute::matrix;
use nvme_host::{Error, Result};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A request to read a matrix into bytes, which are returned with it.
struct MatrixRequest {
    part: u32,
    bytes: Vec<u8>,
    done: mpsc::Sender<CompletedRead>,
}

struct CompletedRead {
    bytes: Vec<u8>,
    begin: Instant,
    end: Instant,
    read: Result<()>,
}

/// Reads matrices of `data` from `source`, by `readers` threads at a time.
pub(super) struct MatrixReads {
    pub data: Arc<MatrixData>,
    pub source: MatrixSource,
    pub file: Option<Arc<TemporaryFile>>,
    pub readers: usize,
}

impl MatrixReads {
    /// # Errors
    /// The errors of the store or of the file.
    pub fn part(&self, part: u32, bytes: &mut [u8]) -> Result<()> {
        let first = self.data.at(part);
        let share = bytes
            .len()
            .div_ceil(self.readers.max(1))
            .next_multiple_of(4096);
        let read = |at: u64, bytes: &mut [u8]| match (&self.file, self.source) {
            (Some(file), MatrixSource::File) => file.read(at, bytes),
            _ => self.data.store.read_at(at, bytes),
        };
        if bytes.len() <= share {
            return read(first, bytes);
        }
        std::thread::scope(|scope| {
            let shares = bytes.chunks_mut(share).enumerate();
            let threads: Vec<_> = shares
                .map(|(index, bytes)| {
                    let at = first + (index * share) as u64;
                    scope.spawn(move || read(at, bytes))
                })
                .collect();
            threads.into_iter().try_for_each(|thread| {
                let panicked = |_| Err(Error::internal("a thread that reads panicked"));
                thread.join().unwrap_or_else(panicked)
            })
        })
    }
}

#[derive(Default)]
struct ReadSlot {
    batch: u64,
    part: u32,
    bytes: Vec<u8>,
    /// The read that is in progress.
    reading: Option<mpsc::Receiver<CompletedRead>>,
    product: Option<Result<Vec<f32>>>,
}

pub(super) struct CpuEngine {
    data: Arc<MatrixData>,
    /// All matrices, if none is read.
    resident: Option<Vec<Vec<u8>>>,
    requests: Option<mpsc::Sender<MatrixRequest>>,
    reader: Option<JoinHandle<()>>,
    slots: Vec<ReadSlot>,
    x: Vec<f32>,
    /// The joined products.
    y: Vec<f32>,
    limit: Duration,
    begin: Instant,
    trace: PipelineTrace,
}

impl CpuEngine {
    /// # Errors
    /// Without threads.
    pub fn new(reads: MatrixReads, limit: Duration) -> Result<Self> {
        let data = Arc::clone(&reads.data);
        let shape = data.shape;
        let resident = (reads.source == MatrixSource::Resident)
            .then(|| (0..shape.parts).map(|part| data.part(part)).collect());
        let (requests, asked) = mpsc::channel::<MatrixRequest>();
        let serve = move || {
            for MatrixRequest {
                part,
                mut bytes,
                done,
            } in asked
            {
                let begin = Instant::now();
                let read = reads.part(part, &mut bytes);
                let end = Instant::now();
                // The receiver may have been dropped.
                let _ = done.send(CompletedRead {
                    bytes,
                    begin,
                    end,
                    read,
                });
            }
        };
        let reader = std::thread::Builder::new()
            .name("pipeline-reader".to_owned())
            .spawn(serve);
        let call = "starting a thread that reads";
        let slot = |_| ReadSlot {
            bytes: vec![0; shape.part_bytes() as usize],
            ..ReadSlot::default()
        };
        Ok(Self {
            x: data.x.clone(),
            y: vec![0.0; shape.product_rows() as usize * shape.vectors as usize],
            slots: (0..shape.buffers).map(slot).collect(),
            data,
            resident,
            requests: Some(requests),
            reader: Some(reader.map_err(|source| Error::System { call, source })?),
            limit,
            begin: Instant::now(),
            trace: PipelineTrace::default(),
        })
    }

    fn us(&self, at: Instant) -> f64 {
        at.duration_since(self.begin).as_secs_f64() * 1e6
    }

    fn wait(&mut self, slot: usize) -> Result<()> {
        let Some(reading) = self.slots[slot].reading.take() else {
            return Ok(());
        };
        let done = reading.recv_timeout(self.limit);
        let done = done.map_err(|_| late(self.limit))?;
        let span = WorkSpan {
            work: SpanWork::Read,
            batch: self.slots[slot].batch,
            slot: slot as u32,
            begin_us: self.us(done.begin),
            end_us: self.us(done.end),
        };
        self.trace.note(span);
        self.slots[slot].bytes = done.bytes;
        done.read
    }

    /// Computes the products of a slot's matrix: for each vector the products with all rows.
    fn products(&mut self, slot: usize) -> Result<Vec<f32>> {
        self.wait(slot)?;
        let shape = self.data.shape;
        let (begin, of) = (Instant::now(), &self.slots[slot]);
        let bytes = match &self.resident {
            Some(all) => &all[of.part as usize],
            None => &of.bytes,
        };
        let rows = shape.rows as usize;
        let mut y = vec![0.0; rows * shape.vectors as usize];
        let vectors = self.x.chunks_exact(shape.columns as usize);
        for (x, y) in vectors.zip(y.chunks_mut(rows)) {
            matrix::product(shape.stored, bytes, x, y);
        }
        let span = WorkSpan {
            work: SpanWork::Compute,
            batch: of.batch,
            slot: slot as u32,
            begin_us: self.us(begin),
            end_us: self.us(Instant::now()),
        };
        self.trace.note(span);
        if shape.joined {
            let (stride, first) = (shape.product_rows() as usize, of.part as usize * rows);
            for (vector, y) in y.chunks(rows).enumerate() {
                self.y[vector * stride + first..][..rows].copy_from_slice(y);
            }
        }
        Ok(y)
    }
}

pub(super) fn late(limit: Duration) -> Error {
    Error::Unfinished {
        cause: format!("a batch has not ended within {limit:?}"),
        remedy: "use smaller matrices, or a longer --limit".to_owned(),
    }
}

impl PipelineEngine for CpuEngine {
    fn is_ahead(&self) -> bool {
        false
    }

    fn set_vectors(&mut self, x: &[f32]) -> Result<()> {
        self.x = x.to_vec();
        Ok(())
    }

    fn read_vectors(&mut self) -> Result<()> {
        let mut bytes = vec![0; self.x.len() * 4];
        let at = self.data.shape.vectors_at();
        self.data.store.read_at(at, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0.iter();
        self.x = words.map(|word| f32::from_le_bytes(*word)).collect();
        Ok(())
    }

    fn read(&mut self, batch: u64, slot: u32, part: u32) -> Result<()> {
        let of = &mut self.slots[slot as usize];
        (of.batch, of.part, of.product) = (batch, part, None);
        if self.resident.is_some() {
            return Ok(());
        }
        let (done, reading) = mpsc::channel();
        let mut bytes = std::mem::take(&mut of.bytes);
        // A read that did not end in time has the bytes.
        bytes.resize(self.data.shape.part_bytes() as usize, 0);
        of.reading = Some(reading);
        let sent = self
            .requests
            .as_ref()
            .map(|requests| requests.send(MatrixRequest { part, bytes, done }));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(Error::internal("the thread that reads has ended")),
        }
    }

    fn multiply(&mut self, slot: u32) -> Result<()> {
        let product = self.products(slot as usize);
        self.slots[slot as usize].product = Some(product);
        Ok(())
    }

    fn take(&mut self, slot: u32) -> Result<Vec<f32>> {
        let product = self.slots[slot as usize].product.take();
        product.unwrap_or_else(|| Err(Error::internal("a batch that was not multiplied")))
    }

    fn feed_back(&mut self) -> Result<()> {
        let stride = self.data.shape.product_rows() as usize;
        let weight = vec![1.0; stride];
        for (x, y) in self.x.chunks_mut(stride).zip(self.y.chunks(stride)) {
            nvme_compute_kernel::reference::rms_norm(y, &weight, 0.0, x);
        }
        Ok(())
    }

    fn vectors(&mut self) -> Result<Vec<f32>> {
        Ok(self.x.clone())
    }

    fn trace(&mut self) -> PipelineTrace {
        std::mem::take(&mut self.trace)
    }
}

impl Drop for CpuEngine {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(reader) = self.reader.take() {
            // A drive's reads have deadlines; a file's last as long as the system takes for them, and so does the join.
            // If the thread panicked, the batch has already failed.
            let _ = reader.join();
        }
    }
}

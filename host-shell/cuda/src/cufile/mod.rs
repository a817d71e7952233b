//! cuFile: reads of files into GPU memory by NVIDIA's library, if the library is there and takes the file.
//!
//! The rule of docs/adr/0011: calls of cuFile are calls into CUDA, so only a thread of the caller makes them, and never
//! one that a kernel waits for.
//!
//! - [`GdsFile`]: a file that is registered; reads, writes, batches, reads in a stream.
//! - [`GdsBuffer`]: GPU memory that is registered.
//! - `library`, `code`: the functions, and the meaning of their result codes.
// UNSAFETY: calls into the library with addresses that the caller vouches for.
#![allow(unsafe_code)]

mod batch;
mod code;
mod library;

use super::driver::Gpu;
use super::stream::PATIENCE;
use batch::CufileBatch;
use code::{CufileCode, failed};
use library::{CufileDescr, CufileProperties, IoParams, Library, library};
use nvme_driver::error::{Error, Result};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most reads and writes of one batch.
pub const BATCH: usize = 128;
/// The most bytes of one call; the library counts in `ssize_t` and splits them itself.
const MOST_BYTES: u64 = 1 << 30;

/// Path of the bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GdsWay {
    /// cuFile moves data from the drive into GPU memory, by the nvidia-fs driver.
    Direct,
    /// cuFile moves data from the drive into GPU memory, by the kernel's peer-to-peer DMA.
    P2pDma,
    /// cuFile's threads move the data through host memory.
    Compat,
}

impl GdsWay {
    /// Returns the name in one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::P2pDma => "p2pdma",
            Self::Compat => "compat",
        }
    }

    /// Returns the path by the library's properties: nvidia-fs has a version if it is loaded, and a bit says whether
    /// NVMe is reached without host memory.
    fn of(properties: &CufileProperties) -> Self {
        const NVME: u32 = 1 << 6;
        match (properties.status & NVME != 0, properties.nvfs_major) {
            (false, _) => Self::Compat,
            (true, 0) => Self::P2pDma,
            (true, _) => Self::Direct,
        }
    }
}

/// A file that is registered with cuFile. Deregistered on drop.
pub struct GdsFile {
    gpu: Arc<Gpu>,
    library: Library,
    handle: usize,
    way: GdsWay,
    path: PathBuf,
    _file: File,
}

/// A read or write of a batch.
#[derive(Clone, Copy, Debug)]
pub struct GdsIo {
    /// True if the entry writes the file.
    pub is_write: bool,
    /// First byte in the file.
    pub offset: u64,
    /// Address on the GPU.
    pub address: u64,
    /// Length in bytes.
    pub bytes: usize,
}

impl GdsFile {
    /// Opens and registers the file at `path` for the GPU, also for writing if `write`.
    ///
    /// # Errors
    /// [`Error::Environment`] without libcufile and if it refuses the file; [`Error::File`] if the file cannot be
    /// opened.
    pub fn open(gpu: &Arc<Gpu>, path: &Path, write: bool) -> Result<Self> {
        let _guest = gpu.enter()?;
        let library = library()?;
        let open = |flags: i32| {
            let mut how = File::options();
            how.read(true).write(write).custom_flags(flags).open(path)
        };
        // Some file systems do not support direct IO; cuFile reads their files in compat mode.
        let file = open(libc::O_DIRECT).or_else(|_| open(0));
        let file = file.map_err(Error::file("open", path))?;
        let mut descr = CufileDescr {
            kind: 1,
            padding: 0,
            fd: file.as_raw_fd(),
            rest: 0,
            fs_ops: std::ptr::null(),
        };
        let mut handle = 0;
        // SAFETY: the call writes one handle; the descriptor stays open until it is deregistered.
        unsafe { (library.register_file)(&mut handle, &mut descr) }
            .check("cuFileHandleRegister")?;
        let mut properties = CufileProperties {
            nvfs_major: 0,
            nvfs_minor: 0,
            poll_threshold: 0,
            most_direct: 0,
            status: 0,
            control: 0,
            rest: [0; 64],
        };
        // SAFETY: the call writes the properties, for which there is more room than any version needs.
        let known = unsafe { (library.properties)(&mut properties) };
        let way = match known.code {
            0 => GdsWay::of(&properties),
            _ => GdsWay::Compat,
        };
        Ok(Self {
            gpu: Arc::clone(gpu),
            library,
            handle,
            way,
            path: path.to_owned(),
            _file: file,
        })
    }

    /// Returns the GPU that it was opened for.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the path of its bytes.
    pub fn way(&self) -> GdsWay {
        self.way
    }

    /// Reads `bytes` bytes from byte `offset` on to address `to` on the GPU, and waits. Comes after what the default
    /// stream did before.
    ///
    /// # Safety
    /// The bytes at `to` are valid for writes, and nothing else uses them meanwhile.
    ///
    /// # Errors
    /// [`Error::Environment`] with cuFile's error code; [`Error::File`] with the system's error, and if the file ends
    /// before the range.
    pub unsafe fn read(&self, offset: u64, bytes: u64, to: u64) -> Result<()> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.transfer(false, offset, bytes, to) }
    }

    /// Writes `bytes` bytes at address `from` on the GPU from byte `offset` on, as [`read`](Self::read).
    ///
    /// # Safety
    /// The bytes at `from` are valid for reads.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub unsafe fn write(&self, offset: u64, bytes: u64, from: u64) -> Result<()> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.transfer(true, offset, bytes, from) }
    }

    /// # Safety
    /// As [`read`](Self::read) and [`write`](Self::write).
    unsafe fn transfer(&self, is_write: bool, offset: u64, bytes: u64, address: u64) -> Result<()> {
        let _guest = self.gpu.enter()?;
        self.gpu.finish(0, PATIENCE)?;
        let (function, call) = match is_write {
            false => (self.library.read, "cuFileRead"),
            true => (self.library.write, "cuFileWrite"),
        };
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(MOST_BYTES);
            let at = (offset + done) as i64;
            // SAFETY: the caller's; the handle is registered.
            let moved = unsafe { function(self.handle, address, part as usize, at, done as i64) };
            match self.moved(call, is_write, moved)? {
                0 => return Err(self.ended()),
                more => done += more.min(part),
            }
        }
        Ok(())
    }

    /// Returns the number of bytes that a call transferred.
    fn moved(&self, call: &str, is_write: bool, answer: isize) -> Result<u64> {
        match answer {
            0.. => Ok(answer as u64),
            -1 => {
                let action = if is_write { "write" } else { "read" };
                Err(Error::file(action, &self.path)(io::Error::last_os_error()))
            }
            below => Err(failed(call, CufileCode(-below as i32), 0)),
        }
    }

    fn ended(&self) -> Error {
        Error::file("read", &self.path)(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the file is shorter than when it was opened",
        ))
    }

    /// Enqueues a read in `stream`, a `CUstream` (0 is the default one), and returns before it runs.
    ///
    /// # Safety
    /// The conditions of [`read`](Self::read) hold until the stream has passed the read.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub unsafe fn read_async(
        self: &Arc<Self>,
        offset: u64,
        bytes: usize,
        to: u64,
        stream: u64,
    ) -> Result<GdsPending> {
        let _guest = self.gpu.enter()?;
        let mut words = Box::new(StreamedRead {
            bytes,
            file_offset: offset as i64,
            memory_offset: 0,
            moved: 0,
        });
        // SAFETY: the caller's. The words stay valid until the stream has passed the read: `GdsPending` owns
        // them and leaks them if it is dropped before, since cuFile writes the result there.
        unsafe {
            (self.library.read_async)(
                self.handle,
                to,
                &raw mut words.bytes,
                &raw mut words.file_offset,
                &raw mut words.memory_offset,
                &raw mut words.moved,
                std::ptr::with_exposed_provenance_mut(stream as usize),
            )
        }
        .check("cuFileReadAsync")?;
        Ok(GdsPending {
            file: Arc::clone(self),
            words: Some(words),
            stream,
        })
    }

    /// Executes reads and writes, [`BATCH`] of them at a time, waits for all, and returns their outcomes in
    /// order. Short transfers are continued one by one. Runs after the work that the default stream had before.
    ///
    /// # Safety
    /// As [`read`](Self::read) and [`write`](Self::write), for each.
    ///
    /// # Errors
    /// An error if a batch cannot be submitted: the batches before it have been executed. [`Error::Unfinished`] if
    /// cuFile does not report the end of all entries, or took some entries of a batch before it refused the others:
    /// some may still be in progress, and the memory of all must stay valid.
    pub unsafe fn batch(&self, ios: &[GdsIo]) -> Result<Vec<Result<()>>> {
        let _guest = self.gpu.enter()?;
        self.gpu.finish(0, PATIENCE)?;
        let mut all = Vec::with_capacity(ios.len());
        for part in ios.chunks(BATCH) {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            all.extend(unsafe { self.one_batch(part) }?);
        }
        Ok(all)
    }

    /// # Safety
    /// As [`batch`](Self::batch).
    unsafe fn one_batch(&self, ios: &[GdsIo]) -> Result<Vec<Result<()>>> {
        let (count, mut id) = (ios.len() as u32, 0);
        // SAFETY: the call writes one handle.
        unsafe { (self.library.batch_set_up)(&mut id, count) }.check("cuFileBatchIOSetUp")?;
        let batch = CufileBatch::new(self.library, id);
        let params = |(cookie, io): (usize, &GdsIo)| IoParams {
            mode: 1,
            memory: io.address,
            file_offset: io.offset as i64,
            memory_offset: 0,
            bytes: io.bytes,
            handle: self.handle,
            opcode: u32::from(io.is_write),
            cookie,
        };
        let mut params: Vec<IoParams> = ios.iter().enumerate().map(params).collect();
        // SAFETY: `count` entries, which the library copies.
        unsafe { (self.library.batch_submit)(batch.id(), count, params.as_mut_ptr(), 0) }
            .check("cuFileBatchIOSubmit")
            .or_else(|error| batch.check_unused(ios.len(), error))?;
        let ended = batch.ends(ios.len())?;
        let whole = |(io, ended): (&GdsIo, Result<u64>)| -> Result<()> {
            let moved = ended?.min(io.bytes as u64);
            let (offset, rest) = (io.offset + moved, io.bytes as u64 - moved);
            // SAFETY: the caller's; the range is the remainder of an entry that ended short.
            unsafe { self.transfer(io.is_write, offset, rest, io.address + moved) }
        };
        Ok(ios.iter().zip(ended).map(whole).collect())
    }
}

impl Drop for GdsFile {
    fn drop(&mut self) {
        // SAFETY: it was registered in `open`, and used by nothing any more.
        unsafe { (self.library.deregister_file)(self.handle) };
    }
}

/// Parameters that cuFile reads, and the result that it writes, when the stream reaches the read.
struct StreamedRead {
    bytes: usize,
    file_offset: i64,
    memory_offset: i64,
    moved: isize,
}

/// A read in a stream.
#[must_use = "whether it succeeded is known at its end"]
pub struct GdsPending {
    file: Arc<GdsFile>,
    words: Option<Box<StreamedRead>>,
    stream: u64,
}

impl GdsPending {
    /// Waits for its stream. A read that ended short is an error.
    ///
    /// # Errors
    /// As [`GdsFile::read`].
    pub fn wait(mut self) -> Result<()> {
        let _guest = self.file.gpu.enter()?;
        self.file.gpu.finish(self.stream, PATIENCE)?;
        let Some(words) = self.words.take() else {
            return Ok(());
        };
        let moved = self.file.moved("cuFileReadAsync", false, words.moved)?;
        match moved < words.bytes as u64 {
            true if moved == 0 && words.bytes > 0 => Err(self.file.ended()),
            true => Err(Error::file("read", &self.file.path)(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{moved} of {} bytes were read", words.bytes),
            ))),
            false => Ok(()),
        }
    }
}

impl Drop for GdsPending {
    fn drop(&mut self) {
        // The stream may not have reached the read yet: leaked, so that cuFile never writes into freed memory.
        std::mem::forget(self.words.take());
    }
}

/// GPU memory that is registered with cuFile, which spares its bounce buffers. Deregistered on drop.
pub struct GdsBuffer {
    library: Library,
    gpu: Arc<Gpu>,
    address: u64,
}

impl GdsBuffer {
    /// Registers `bytes` bytes at `address`.
    ///
    /// # Safety
    /// They are GPU memory that stays allocated until this is dropped.
    ///
    /// # Errors
    /// [`Error::Environment`] without libcufile, and with its number.
    pub unsafe fn register(gpu: &Arc<Gpu>, address: u64, bytes: usize) -> Result<Self> {
        let _guest = gpu.enter()?;
        let library = library()?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { (library.register_buffer)(address, bytes, 0) }.check("cuFileBufRegister")?;
        Ok(Self {
            library,
            gpu: Arc::clone(gpu),
            address,
        })
    }
}

impl Drop for GdsBuffer {
    fn drop(&mut self) {
        if let Ok(_guest) = self.gpu.enter() {
            // SAFETY: it was registered above. A refusal means that the memory is not registered any more.
            let _ = unsafe { (self.library.deregister_buffer)(self.address) };
        }
    }
}

/// Returns the version of libcufile, and the error with its remedy if opening it fails. Opens the library for
/// this process, on GPU 0.
///
/// # Errors
/// Without the library.
pub fn probe() -> Result<(String, Result<()>)> {
    let file = Library::load()?.file();
    let opened = Gpu::open(0).and_then(|gpu| {
        let _guest = gpu.enter()?;
        library().map(drop)
    });
    Ok((file, opened))
}

/// True if an error of [`GdsFile`] is about cuFile, so that reading by host threads may succeed.
pub fn is_of_cufile(error: &Error) -> bool {
    matches!(error, Error::Environment { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_is_what_the_properties_say() {
        let properties = |nvfs_major, status| CufileProperties {
            nvfs_major,
            nvfs_minor: 0,
            poll_threshold: 0,
            most_direct: 0,
            status,
            control: 0,
            rest: [0; 64],
        };
        assert_eq!(GdsWay::of(&properties(2, 1 << 6)), GdsWay::Direct);
        assert_eq!(GdsWay::of(&properties(0, 1 << 6)), GdsWay::P2pDma);
        assert_eq!(GdsWay::of(&properties(2, 0)), GdsWay::Compat);
        assert_eq!(GdsWay::Compat.name(), "compat");
    }
}

//! Reads of a file into GPU memory by cuFile. They are an addition to the host threads that read files, and a read
//! that cuFile refuses is carried out by those, unless the user requires cuFile.
// UNSAFETY: reads go to addresses of GPU memory, for which the caller vouches.
#![allow(unsafe_code)]

use super::Store;
use nvme_cuda::{KernelArgument, is_of_cufile};
use nvme_driver::error::{Error, Result};

impl Store {
    /// Reads `bytes` bytes from byte `offset` on to address `to` of the store's GPU by cuFile, and waits; returns true
    /// if it did. Returns false without [`gds`](super::StoreOptions::gds), and with `Auto` if cuFile refuses: then
    /// [`read_on_gpu`](Self::read_on_gpu) reads it. Runs after the work that the default stream had before.
    ///
    /// # Safety
    /// The bytes at `to` are valid for writes, and nothing else uses them meanwhile.
    ///
    /// # Errors
    /// [`Error::Usage`] for a range past the end; [`Error::File`];
    /// [`Error::Environment`] where cuFile refuses and is required.
    pub unsafe fn read_by_cufile(&self, offset: u64, bytes: u64, to: u64) -> Result<bool> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.read_by_cufile_after(0, offset, bytes, to) }
    }

    /// Reads as [`read_by_cufile`](Self::read_by_cufile) does, after the work that is in `stream`, a `CUstream`. It does
    /// not wait for a stream that is being captured: `false` with `Auto`.
    ///
    /// # Safety
    /// As [`read_by_cufile`](Self::read_by_cufile).
    ///
    /// # Errors
    /// As [`read_by_cufile`](Self::read_by_cufile); [`Error::Usage`] for a stream that is being captured where cuFile is
    /// required.
    pub unsafe fn read_by_cufile_after(
        &self,
        stream: u64,
        offset: u64,
        bytes: u64,
        to: u64,
    ) -> Result<bool> {
        self.space.check(offset, bytes)?;
        let [member] = &self.space.members[..] else {
            return Ok(false);
        };
        let Some(gds) = &member.gds else {
            return Ok(false);
        };
        let gpu = gds.file.gpu();
        gpu.judge_list(stream, [KernelArgument::written("data", to, bytes, 1)])?;
        if gpu.is_captured(stream)? {
            return match gds.is_required {
                true => Err(Error::usage(
                    "a read by cuFile while its stream is being captured",
                    "read before the capture, or open the file with gds=auto",
                )),
                false => Ok(false),
            };
        }
        gpu.finish(stream, self.patience(bytes))?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        match unsafe { gds.file.read(offset, bytes, to) } {
            Ok(()) => Ok(true),
            Err(error) if !gds.is_required && is_of_cufile(&error) => {
                gds.note(&error);
                self.space.counters.set_path(&self.space.path());
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

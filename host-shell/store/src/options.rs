//! Options of opening a store, and the data path that results from them.

use nvme_driver::error::{Error, Result};
use std::time::Duration;

/// Options of opening a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// Allows writes to a real device: a function behind VFIO, a block device.
    pub allow_write: bool,
    /// Allows no writes at all. An image of the simulator is then shared with other readers.
    pub read_only: bool,
    /// The namespace of a controller.
    pub nsid: u32,
    /// Queue pairs, or rings of `io_uring`, that all calls share; a controller may grant fewer.
    pub queues: u32,
    /// Commands in flight of each.
    pub depth: u32,
    /// Deadline of a controller's command, after which it is aborted. Files have no such limit.
    pub timeout: Duration,
    /// Method of reading and writing files.
    pub file_io: FileIo,
    /// The GPU that rows are gathered to and scattered from; `None` for the host alone. It submits the commands
    /// of drives itself.
    #[cfg(feature = "cuda")]
    pub gpu: Option<GpuOptions>,
    /// Placement of doorbells, data and rings for the GPU; `None` for the highest tier up to 2 that works
    /// without a thread of this process.
    #[cfg(feature = "cuda")]
    pub tier: Option<nvme_cuda::QueueTier>,
    /// Queue pairs that are kept for kernels of the caller's: [`Store::kernel_queues`](super::Store::kernel_queues).
    #[cfg(feature = "cuda")]
    pub kernel_queues: u32,
    /// Use of cuFile for reading a file into GPU memory:
    /// [`Store::read_by_cufile`](super::Store::read_by_cufile).
    #[cfg(feature = "cuda")]
    pub gds: GdsUse,
}

/// Use of NVIDIA's cuFile for reading files into GPU memory.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GdsUse {
    /// cuFile is not loaded.
    #[default]
    Off,
    /// cuFile is used if it accepts the file; otherwise host threads read it.
    Auto,
    /// cuFile reads the file, or opening the store fails.
    Require,
}

/// Access of a GPU to a store.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuOptions {
    /// Number of the GPU in the driver's order.
    pub index: u32,
    /// Queues and slots of the GPU, besides those of the CPU.
    pub rows: nvme_cuda::RowsOptions,
}

/// Method of reading and writing files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FileIo {
    /// `io_uring` if the system allows it, else `pread` and `pwrite`.
    #[default]
    Auto,
    /// Files are read by `io_uring` only; opening fails without it.
    Uring,
    /// Files are read and written by `pread` and `pwrite`.
    Pread,
}

impl Default for StoreOptions {
    /// Returns the defaults: namespace 1, 8 queues of 64 commands, 5 s per command; real devices
    /// read-only.
    fn default() -> Self {
        Self {
            allow_write: false,
            read_only: false,
            nsid: 1,
            queues: 8,
            depth: 64,
            timeout: Duration::from_secs(5),
            file_io: FileIo::Auto,
            #[cfg(feature = "cuda")]
            gpu: None,
            #[cfg(feature = "cuda")]
            tier: None,
            #[cfg(feature = "cuda")]
            kernel_queues: 0,
            #[cfg(feature = "cuda")]
            gds: GdsUse::Off,
        }
    }
}

impl StoreOptions {
    /// The most queues, and the most commands of each.
    const MOST: u32 = 4095;
    /// The most entries of a queue of any controller. NVMe Base 2.0c, "Queue Size (QSIZE)": 0's based, 16 bits.
    #[cfg(feature = "cuda")]
    const MOST_ENTRIES: u32 = 1 << 16;

    /// # Errors
    /// [`Error::Usage`] for values that no store can be opened with.
    pub(crate) fn check(&self) -> Result<()> {
        for (name, value) in [("queues", self.queues), ("depth", self.depth)] {
            if !(1..=Self::MOST).contains(&value) {
                return Err(Error::usage(
                    format!("{name} is {value}, which is not 1 to {}", Self::MOST),
                    "use a number in this range",
                ));
            }
        }
        #[cfg(feature = "cuda")]
        if let Some(entries) = self.gpu.map(|of_gpu| of_gpu.rows.entries)
            && entries > Self::MOST_ENTRIES
        {
            return Err(Error::usage(
                format!(
                    "the queues of a GPU have {entries} entries, and those of a controller {} at most",
                    Self::MOST_ENTRIES
                ),
                "ask for fewer entries",
            ));
        }
        #[cfg(feature = "cuda")]
        if self.kernel_queues > 0 && self.gpu.is_none() {
            return Err(Error::usage(
                format!(
                    "kernel_queues is {}, and the store has no GPU",
                    self.kernel_queues
                ),
                "open it with a GPU, or without kernel_queues",
            ));
        }
        #[cfg(feature = "cuda")]
        if self.tier.is_some() && self.gpu.is_none() {
            return Err(Error::usage(
                "a tier was chosen, and the store has no GPU",
                "open it with a GPU, or without a tier",
            ));
        }
        #[cfg(feature = "cuda")]
        if self.gds == GdsUse::Require && self.gpu.is_none() {
            return Err(Error::usage(
                "gds is require, and the store has no GPU",
                "open it with a GPU, or with gds=off",
            ));
        }
        if self.allow_write && self.read_only {
            return Err(Error::usage(
                "allow_write and read_only exclude each other",
                "set one of them",
            ));
        }
        Ok(())
    }
}

/// Path of the data between a store and memory, with the reason for it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DataPath {
    /// Name of the device, as the user wrote it.
    pub device: String,
    /// Memory in which the device places the data: `host` or `gpu`.
    pub data: &'static str,
    /// The tier of a GPU; none without one.
    pub tier: Option<u32>,
    /// Mover of the data, in words.
    pub path: String,
    /// Reason why no faster path is used.
    pub why: String,
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn queues_of_a_gpu_have_no_more_entries_than_any_controller_has() {
        let with = |entries| {
            let mut gpu = GpuOptions::default();
            gpu.rows.entries = entries;
            let options = StoreOptions {
                gpu: Some(gpu),
                ..StoreOptions::default()
            };
            options.check()
        };
        assert!(with(1).is_ok() && with(1 << 16).is_ok());
        for entries in [(1 << 16) + 1, (1 << 31) + 1, u32::MAX] {
            assert!(matches!(with(entries), Err(Error::Usage { .. })));
        }
    }
}

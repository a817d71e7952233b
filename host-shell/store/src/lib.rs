//! Bytes on a device: any offset, any length, from any number of threads; and tables of rows in them.
//!
//! Here belongs what turns a range of bytes, or rows by their ids, into commands of a drive or reads of a file, on the
//! host or on a GPU. Names of tensors, file systems and layers of models are in the crates above.
//!
//! - [`Store`]: a drive, a file, or several of them in stripes, as one range of bytes.
//! - [`Table`]: rows of one size in a store; gather and scatter by ids.
//! - [`status`]: the outcome of a row, as a number.
//! - [`published_stores`]: the counts of stores of other processes.
#![deny(missing_docs)]

mod background;
mod batch;
#[cfg(feature = "cuda")]
mod bytes_on_gpu;
mod claim;
mod counters;
mod drive;
mod element;
mod engine;
mod extents;
mod file;
#[cfg(feature = "cuda")]
mod gds;
#[cfg(feature = "cuda")]
mod halves;
#[cfg(feature = "cuda")]
mod kernel_queues;
mod lane;
mod member;
#[cfg(feature = "cuda")]
mod on_gpu;
mod options;
mod parallel;
mod ranges;
mod room;
mod row_ids;
mod scatter;
mod space;
pub mod status;
mod table;
#[cfg(test)]
mod testing;
mod transfer;
mod wide;
#[cfg(feature = "cuda")]
mod with_gpu;

pub use background::BackgroundOperation;
pub use batch::StoreTransfer;
pub use claim::RangeClaim;
pub use counters::{
    CounterKind, LATENCY_RANGES, PublishedPath, PublishedStore, StoreStats, published_stores,
    readable_folders,
};
pub use element::RowElement;
pub use extents::TableRanges;
#[cfg(feature = "cuda")]
pub use halves::BegunGather;
pub use nvme_doctor::advice::PathAdvice;
pub use nvme_driver::widen::{
    FailedContent, RowConversion, RowScales, RowWidening, ScaleFactor, ScaleFormat, ScaleMemory,
};
pub use nvme_formats::{Format, WideFormat};
pub use options::{DataPath, FileIo, StoreOptions};
#[cfg(feature = "cuda")]
pub use options::{GdsUse, GpuOptions};
pub use row_ids::RowIds;
pub use scatter::DuplicateIds;
pub use table::{FailedRow, RowReport, Table};

use member::StoreMember;
use nvme_driver::device::{self, Device};
use nvme_driver::error::{Error, Result};
use nvme_driver::sysfs::SysfsHost;
use space::StoreSpace;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The stripe of `stripe:` without `?stripe=`.
const STRIPE_BYTES: u64 = 128 << 10;

/// Forms of names that a store can be opened by, for the remedy of an error.
const NAMES: &str = "write sim:PATH, vfio:BDF, vfio-user:SOCKET, file:PATH, a path, or \
                     stripe:DEVICE|DEVICE?stripe=128KiB, or joined:DEVICE|DEVICE";

/// A drive, a file or a stripe of them as one range of bytes, for blocking calls from any number of threads.
///
/// Offsets and lengths are of bytes and need no alignment. A range past the end is an error before anything is
/// sent. A read sees every write that had returned when the read began; of a write under way it may see some
/// blocks and not others. Writes of the same block wait for each other, and each changes only the bytes that it was
/// given. Written data are durable after [`flush`](Self::flush).
///
/// ```
/// use nvme_store::{Store, StoreOptions};
///
/// # fn main() -> nvme_driver::Result<()> {
/// # #[cfg(feature = "sim")] {
/// let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default())?;
/// store.write_at(1_000_001, b"hello")?;
/// store.flush()?;
/// let mut back = [0; 5];
/// store.read_at(1_000_001, &mut back)?;
/// assert_eq!(&back, b"hello");
/// // A range past the end is rejected.
/// assert!(store.read_at(store.len() - 4, &mut back).is_err());
/// # }
/// # Ok(())
/// # }
/// ```
pub struct Store {
    space: Arc<StoreSpace>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let devices = self.space.members.iter().map(|one| &one.path.device);
        f.debug_struct("Store")
            .field("devices", &devices.collect::<Vec<_>>())
            .field("len", &self.len())
            .finish()
    }
}

impl Store {
    /// Opens `sim:...`, `vfio:BDF`, `vfio-user:SOCKET`, `file:PATH`, `stripe:DEVICE|DEVICE|...?stripe=SIZE`, or
    /// `joined:DEVICE|DEVICE|...` ([`join`](Self::join)). A path with a slash, and the name of a file in the current
    /// folder, mean `file:`.
    ///
    /// A real device is opened for reading only unless [`allow_write`](StoreOptions::allow_write) is set. A
    /// drive has one store in a process: a second one of the same image or function is refused. Several stores
    /// on one file see each other's writes.
    ///
    /// # Errors
    /// [`Error::Usage`] for invalid names and options, and for a block device that is in use; the errors of
    /// [`open`](nvme_driver::open), of [`Controller::start`](nvme_driver::Controller::start), and of opening a file.
    pub fn open(device: &str, options: &StoreOptions) -> Result<Self> {
        options.check()?;
        if let Some(rest) = device.strip_prefix("stripe:") {
            return open_stripe(rest, options);
        }
        if let Some(rest) = device.strip_prefix("joined:") {
            return Self::join(open_all(rest, options)?);
        }
        if let Some(path) = path_of_file(device) {
            let member = file::open(path, options)?;
            return Ok(Self::of(member));
        }
        if !device.contains(':') {
            if let Some(error) = device::open::meant(&SysfsHost::here(), device) {
                return Err(error);
            }
            let cause = format!("'{device}' names no device, and there is no such file");
            return Err(Error::usage(cause, NAMES));
        }
        if options.file_io == FileIo::Uring {
            return Err(Error::usage(
                format!("io_uring is required for files, and {device} is a drive"),
                "open a file, or leave the way of files to the default",
            ));
        }
        let device = match options.read_only {
            true => device::open::open_reading(device)?,
            false => device::open::open(device)?,
        };
        Self::over(device, options)
    }

    /// Opens a store over a device that is open already.
    ///
    /// # Errors
    /// The errors of [`Controller::start`](nvme_driver::Controller::start); [`Error::Usage`] for a namespace that is
    /// not there.
    pub fn over(device: Arc<dyn Device>, options: &StoreOptions) -> Result<Self> {
        options.check()?;
        Ok(Self::of(drive::open(device, options)?))
    }

    fn of(member: StoreMember) -> Self {
        Self::with(StoreSpace::of(member))
    }

    fn with(space: StoreSpace) -> Self {
        space.begin_counting();
        let space = Arc::new(space);
        Self { space }
    }

    /// Joins several stores into one: `stripe_bytes` bytes of the first, then of the second, and so on. Each
    /// contributes the length of the shortest, rounded down to whole stripes.
    ///
    /// When a member fails, the calls that need it end with an error that names it; other calls are not
    /// affected.
    ///
    /// # Errors
    /// [`Error::Usage`] for no members, for a stripe that is no multiple of each member's block or longer than
    /// a member, for members that are one file, and for members that have tables or are stripes themselves.
    pub fn stripe(members: Vec<Self>, stripe_bytes: u64) -> Result<Self> {
        let all = Self::members_of(members)?;
        check_stripe(&all, stripe_bytes)?;
        check_distinct(&all)?;
        StoreSpace::striped(all, stripe_bytes).map(Self::with)
    }

    /// Joins several stores into one without stripes: a table may have tensors in the files of all of them. Each begins
    /// at a multiple of one size, the length of the longest rounded up to a power of two;
    /// [`member_offsets`](Self::member_offsets) returns the offsets. There are no bytes between the end of a member and
    /// the next one.
    ///
    /// # Errors
    /// [`Error::Usage`] for no members, for members that are one file where the store may be written, and for members
    /// that have tables or are several themselves.
    pub fn join(members: Vec<Self>) -> Result<Self> {
        let all = Self::members_of(members)?;
        if all.is_empty() {
            return Err(Error::usage("there are no members to join", NAMES));
        }
        if all.iter().all(|member| member.read_only.is_none()) {
            check_distinct(&all)?;
        }
        StoreSpace::joined(all).map(Self::with)
    }

    /// Returns the first byte of each member of a [joined](Self::join) store, and its length.
    pub fn member_offsets(&self) -> Vec<(u64, u64)> {
        let space = &self.space;
        let offset = |(index, len)| (index as u64 * space.stripe_bytes, len);
        match space.is_joined {
            true => space
                .members
                .iter()
                .map(|one| one.len)
                .enumerate()
                .map(offset)
                .collect(),
            false => vec![(0, space.len)],
        }
    }

    /// # Errors
    /// [`Error::Usage`] for members that have tables or are several themselves.
    fn members_of(members: Vec<Self>) -> Result<Vec<StoreMember>> {
        let mut all = Vec::new();
        for (index, member) in members.into_iter().enumerate() {
            let space = Arc::try_unwrap(member.space).map_err(|_| {
                Error::usage(
                    format!("member {index} has tables, whose writes the stripe would not see"),
                    "make tables of the stripe",
                )
            })?;
            let mut of_member = space.members;
            match (of_member.pop(), of_member.is_empty()) {
                (Some(member), true) => all.push(member),
                _ => {
                    return Err(Error::usage(
                        format!("member {index} is a stripe itself"),
                        "name all devices in one stripe",
                    ));
                }
            }
        }
        Ok(all)
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> u64 {
        self.space.len
    }

    /// True if the store has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True for one regular file, whose length is the length of its content. A drive is longer than its content.
    pub fn is_regular_file(&self) -> bool {
        matches!(&*self.space.members, [one] if one.is_regular_file)
    }

    /// Returns the unit that the device writes. Writes of whole blocks need no read before them. 1 for a file.
    pub fn block_bytes(&self) -> u32 {
        self.space.block_bytes
    }

    /// Returns the data path of the store, with the reason for it.
    pub fn path(&self) -> DataPath {
        self.space.path()
    }

    /// Returns for each member what moves its bytes now, the next better way, and what stands between. `nvme-gpu why`, C and
    /// Python say the same.
    pub fn explain(&self) -> Vec<PathAdvice> {
        let members = self.space.members.iter();
        members.map(StoreMember::explain).collect()
    }

    /// Returns the data path of each member.
    pub fn member_paths(&self) -> Vec<DataPath> {
        self.space.member_paths()
    }

    /// Returns the deadline of an operation over `bytes` bytes for which the caller names no limit: ten times
    /// the deadline of a command, plus 10 s, plus the time to move the bytes at 16 MiB/s.
    pub fn patience(&self, bytes: u64) -> Duration {
        let timeouts = self.space.members.iter().map(|member| member.timeout);
        let commands = timeouts.max().unwrap_or_default().saturating_mul(10);
        let moving = Duration::from_secs(bytes / (16 << 20));
        commands.saturating_add(Duration::from_secs(10) + moving)
    }

    /// Counts since the store was opened.
    pub fn stats(&self) -> StoreStats {
        self.space.stats()
    }

    /// Returns a number that changes with each write through the store that has ended, by the CPU or by the
    /// GPU, and with writes to its file by other programs, as exactly as the file's timestamps show them. Data
    /// read before the change may be stale. Writes of kernels of your own are not seen.
    pub fn write_mark(&self) -> u64 {
        self.space.write_mark()
    }

    /// Returns the controllers of the members that this process drives.
    pub fn controllers(&self) -> impl Iterator<Item = &Arc<nvme_driver::Controller>> {
        let members = self.space.members.iter();
        members.filter_map(|member| member.controller.as_ref())
    }

    /// Reads `data.len()` bytes from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Usage`] for a range past the end. After another error `data` may have changed in part.
    pub fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        transfer::read(&self.space, offset, data)
    }

    /// Writes `data` from byte `offset` on. Durable after [`flush`](Self::flush).
    ///
    /// Blocks that are written in part are read first.
    ///
    /// # Errors
    /// [`Error::Usage`] for a range past the end or a store for reading only; nothing was sent then. After
    /// another error some blocks may have been written; bytes outside the range have not changed.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        transfer::write(&self.space, offset, data, lane::LaneOperation::Write)
    }

    /// Does the same as [`write_at`](Self::write_at), with force unit access: durable when this returns.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn write_at_fua(&self, offset: u64, data: &[u8]) -> Result<()> {
        transfer::write(&self.space, offset, data, lane::LaneOperation::WriteFua)
    }

    /// Executes reads and writes with the commands of many of them in flight together, and returns their
    /// outcomes in order. They are not ordered among each other: none may write bytes that another one reads or
    /// writes.
    ///
    /// If one fails, the others are executed nevertheless; its errors are those of [`read_at`](Self::read_at) and
    /// [`write_at`](Self::write_at).
    pub fn transfer_all(&self, transfers: &mut [StoreTransfer<'_>]) -> Vec<Result<()>> {
        batch::run(&self.space, transfers)
    }

    /// Makes everything durable that was written before, on all members.
    ///
    /// # Errors
    /// The error of the first member that fails; the others are flushed all the same.
    pub fn flush(&self) -> Result<()> {
        transfer::flush(&self.space)
    }

    /// Runs `job` on a thread of the store, up to 16 of them at once, and returns at once. Jobs begin in the order of
    /// the calls; they end in any order.
    ///
    /// The job owns the objects that it uses: move the buffers, or their keep-alive, into it. A store that is dropped
    /// meanwhile executes the jobs that were started; its device is free when the last of them has ended.
    ///
    /// ```
    /// use nvme_store::{Store, StoreOptions};
    /// use std::time::Duration;
    ///
    /// # fn main() -> nvme_driver::Result<()> {
    /// # #[cfg(feature = "sim")] {
    /// let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default())?;
    /// let read = store.in_background(|store| {
    ///     let mut data = vec![0; 4096];
    ///     store.read_at(12_345, &mut data).map(|()| data)
    /// })?;
    /// while !read.wait(Duration::from_millis(100)) {
    ///     // Other work, signals, the caller's own deadline.
    /// }
    /// // The outer error is a panic of the job.
    /// let data = read.take().expect("ended, not taken")??;
    /// assert_eq!(data.len(), 4096);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::System`] when no thread can be started.
    pub fn in_background<T, J>(&self, job: J) -> Result<BackgroundOperation<T>>
    where
        T: Send + 'static,
        J: FnOnce(&Self) -> T + Send + 'static,
    {
        let space = Arc::clone(&self.space);
        self.space.background.start(Self { space }, job)
    }

    /// Returns the table of `rows` rows of `row_bytes` bytes from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Usage`] for rows of no bytes, and for a table that ends past the store.
    pub fn table(&self, offset: u64, rows: u64, row_bytes: u64) -> Result<Table> {
        Table::new(Arc::clone(&self.space), offset, rows, row_bytes)
    }

    /// Returns the rows of `row_bytes` bytes that lie in `ranges` of the store, one range after the other: the tensors of a
    /// model's lookup table in several files, each in the extents of its file. Rows begin at any byte, and may lie in
    /// several ranges. Copies the ranges to the memory of the store's GPU.
    ///
    /// # Errors
    /// [`Error::Usage`] for rows of no bytes, for ranges that are not whole rows together, that overlap or that end past the
    /// store; [`Error::Device`] without memory of the GPU.
    pub fn ranges(&self, ranges: &[Range<u64>], row_bytes: u64) -> Result<TableRanges> {
        TableRanges::new(&self.space, ranges, row_bytes)
    }

    /// Returns the table of rows in several `ranges` of this store. Its rows are read only.
    ///
    /// ```
    /// use nvme_store::{Store, StoreOptions};
    ///
    /// # fn main() -> nvme_driver::Result<()> {
    /// # #[cfg(feature = "sim")] {
    /// let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default())?;
    /// store.write_at(1000, &[7; 50])?;
    /// store.write_at(90_000, &[8; 100])?;
    /// // Rows of 75 bytes: the first one has 25 bytes in the second range.
    /// let ranges = store.ranges(&[1000..1050, 90_000..90_100], 75)?;
    /// let table = store.table_of(&ranges)?;
    /// let mut rows = [0; 150];
    /// table.gather((&[1i64, 0]).into(), &mut rows, None)?.check()?;
    /// assert_eq!((rows[0], rows[75], rows[124], rows[125]), (8, 7, 7, 8));
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Usage`] for ranges of another store.
    pub fn table_of(&self, ranges: &TableRanges) -> Result<Table> {
        ranges.check(&self.space)?;
        Ok(Table::of_ranges(Arc::clone(&self.space), ranges))
    }
}

/// Returns the path of a device that is a file, as [`Store::open`] takes its name: `file:PATH`, a text with a slash, or the
/// name of a file that is there.
pub fn path_of_file(device: &str) -> Option<&str> {
    let is_path = match device.find(['/', ':']) {
        Some(at) => device[at..].starts_with('/'),
        None => Path::new(device).is_file(),
    };
    match device.strip_prefix("file:") {
        Some(path) => Some(path),
        None => is_path.then_some(device),
    }
}

/// Opens a stripe; `text` is the part of the name after `stripe:`.
fn open_stripe(text: &str, options: &StoreOptions) -> Result<Store> {
    let (devices, stripe_bytes) = match text.rsplit_once("?stripe=") {
        Some((devices, size)) => {
            let size = nvme_units::parse_bytes(size);
            let size = size.map_err(|why| {
                Error::usage(
                    format!("the size after ?stripe= is not usable: {why}"),
                    NAMES,
                )
            })?;
            (devices, size)
        }
        None => (text, STRIPE_BYTES),
    };
    Store::stripe(open_all(devices, options)?, stripe_bytes)
}

fn open_all(devices: &str, options: &StoreOptions) -> Result<Vec<Store>> {
    let open = |device: &str| Store::open(device, options);
    devices.split('|').map(open).collect()
}

fn check_stripe(members: &[StoreMember], stripe_bytes: u64) -> Result<()> {
    if members.is_empty() {
        return Err(Error::usage("a stripe has no members", NAMES));
    }
    for (index, member) in members.iter().enumerate() {
        let block = u64::from(member.block_bytes);
        if stripe_bytes == 0 || !stripe_bytes.is_multiple_of(block) {
            return Err(Error::usage(
                format!("{stripe_bytes} bytes are no multiple of member {index}'s blocks"),
                format!("use a multiple of {block}"),
            ));
        }
        if member.len < stripe_bytes {
            return Err(Error::usage(
                format!(
                    "member {index} has {} bytes, less than one stripe",
                    member.len
                ),
                "use shorter stripes, or larger members",
            ));
        }
    }
    Ok(())
}

/// Refuses two members that are one file or block device, by whatever names: writes of one would change the bytes of
/// the other.
fn check_distinct(members: &[StoreMember]) -> Result<()> {
    let file = |member: &StoreMember| member.changes.as_ref()?.number();
    for (index, member) in members.iter().enumerate() {
        let Some(number) = file(member) else {
            continue;
        };
        let before = &members[..index];
        if let Some(first) = before.iter().position(|one| file(one) == Some(number)) {
            let names = (&members[first].path.device, &member.path.device);
            return Err(Error::usage(
                format!(
                    "members {first} and {index} are one file ({} and {})",
                    names.0, names.1
                ),
                "name each file once",
            ));
        }
    }
    Ok(())
}

#[cfg(all(test, feature = "sim"))]
mod tests;

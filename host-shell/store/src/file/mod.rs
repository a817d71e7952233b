//! A file or a block device as a member of a store: by `io_uring`, or by `pread` if that is refused.
//!
//! The block size of a file is one byte: the kernel reads and writes any range, so that nothing is read before a write,
//! and stores of several processes see each other's writes.

mod changes;
mod pread;
mod range_lock;
mod regular;
mod uring;

use super::lane::{LARGE_BYTES, LanePool, StoreLane};
use super::member::StoreMember;
use super::options::{DataPath, FileIo, StoreOptions};
pub(crate) use changes::FileChanges;
use nvme_driver::error::{Error, Result};
use nvme_driver::sysfs::{DeviceUsage, SysfsHost};
use pread::PreadLane;
pub(crate) use range_lock::RangeLock;
use regular::RegularFile;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use uring::UringLane;

/// Reads of rows are rounded to pages of the page cache.
const PAGE: u32 = 4096;

/// Opens the file or block device at `path`.
///
/// # Errors
/// [`Error::File`]; [`Error::Usage`] for a path that is neither a file nor a block device, and for a block device that
/// is in use.
pub(crate) fn open(path: &str, options: &StoreOptions) -> Result<StoreMember> {
    open_on(path, options, &SysfsHost::here())
}

fn open_on(path: &str, options: &StoreOptions, host: &SysfsHost) -> Result<StoreMember> {
    #[cfg(feature = "cuda")]
    if let Some(tier) = options.tier {
        return Err(Error::usage(
            format!(
                "tier {} does not exist for {path}, which host threads read",
                tier.number()
            ),
            "open it without a tier, or give a drive of its own to vfio-pci or the module nvme_gpu (`nvme-gpu bind`)",
        ));
    }
    let path = Path::new(path);
    let kind = std::fs::metadata(path).map_err(Error::file("open", path))?;
    let is_block = kind.file_type().is_block_device();
    if !is_block && !kind.is_file() {
        return Err(Error::usage(
            format!("{} is neither a file nor a block device", path.display()),
            "name a file, or a block device such as /dev/nvme0n1",
        ));
    }
    let mut unseen = String::new();
    if is_block {
        let is_written = options.allow_write && !options.read_only;
        unseen = check_unused(host, path, kind.rdev(), is_written)?;
    }
    let guarded = is_block && !options.allow_write;
    // Linux mounts no block device that is open exclusively, and opens none that is mounted.
    let flags = if is_block { libc::O_EXCL } else { 0 };
    let (file, read_only) = open_file(path, options, guarded, flags)?;
    let len = length(&file).map_err(Error::file("measure", path))?;
    let file = Arc::new(RegularFile {
        file,
        path: path.to_owned(),
    });
    let mut member = member(file, len, read_only, options)?;
    member.is_regular_file = !is_block;
    if !unseen.is_empty() {
        let more = format!("; whether something else uses it was judged without seeing {unseen}");
        member.path.why.push_str(&more);
    }
    Ok(member)
}

/// Opens a member over an open file or block device of `len` bytes.
fn member(
    file: Arc<RegularFile>,
    len: u64,
    read_only: Option<(String, &'static str)>,
    options: &StoreOptions,
) -> Result<StoreMember> {
    let (lanes, path) = lanes(&file, options)?;
    let changes = FileChanges::of(&file);
    #[cfg(feature = "cuda")]
    let gpu = super::with_gpu::gpu(options)?;
    #[cfg(feature = "cuda")]
    let path = super::with_gpu::path_by_host(gpu.as_ref(), path)?;
    #[cfg(feature = "cuda")]
    let (gds, path) = super::with_gpu::by_cufile(&file.path, options, gpu.as_ref(), path)?;
    Ok(StoreMember {
        #[cfg(feature = "cuda")]
        rows: None,
        #[cfg(feature = "cuda")]
        gpu: gpu.as_ref().map(nvme_cuda::HostRows::new),
        #[cfg(feature = "cuda")]
        kernels: None,
        #[cfg(feature = "cuda")]
        gds,
        pool: LanePool::new(lanes, options.depth),
        controller: None,
        changes: Some(changes),
        len,
        is_regular_file: true,
        block_bytes: 1,
        read_bytes: PAGE,
        most_bytes: LARGE_BYTES,
        boundary_bytes: 0,
        read_only,
        path,
        timeout: options.timeout,
    })
}

/// Opens the file for writing if that is allowed; else returns the reason why the store is for reading only.
fn open_file(
    path: &Path,
    options: &StoreOptions,
    guarded: bool,
    flags: i32,
) -> Result<(File, Option<(String, &'static str)>)> {
    let name = path.display();
    let mut how = OpenOptions::new();
    how.read(true);
    let (cause, remedy) = if options.read_only {
        let cause = format!("{name} was opened for reading only");
        (cause, "open it without read_only")
    } else if guarded {
        let cause = format!("{name} is a real device, which is opened for reading only");
        (cause, "open it with allow_write if its data may change")
    } else {
        match how.write(true).custom_flags(flags).open(path) {
            Ok(file) => return Ok((file, None)),
            Err(error) if is_denied(&error) && !options.allow_write => {
                let cause = format!("{name} cannot be written: {error}");
                (cause, "change the permissions, then open it again")
            }
            Err(error) => return Err(Error::file("open", path)(error)),
        }
    };
    let file = how
        .write(false)
        .custom_flags(0)
        .open(path)
        .map_err(Error::file("open", path))?;
    Ok((file, Some((cause, remedy))))
}

fn is_denied(error: &io::Error) -> bool {
    let denied = [
        io::ErrorKind::PermissionDenied,
        io::ErrorKind::ReadOnlyFilesystem,
        io::ErrorKind::ExecutableFileBusy,
    ];
    denied.contains(&error.kind())
}

/// Returns the size of a file or block device.
fn length(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

/// Checks that nothing uses a block device, and returns in words which uses could not be examined.
///
/// # Errors
/// [`Error::Usage`] for a block device that holds a mounted file system, swap, or a part of something; for one
/// that `is_written` also while a program has it open.
fn check_unused(host: &SysfsHost, path: &Path, number: u64, is_written: bool) -> Result<String> {
    let (major, minor) = (libc::major(number), libc::minor(number));
    let name = host.link_name(format!("sys/dev/block/{major}:{minor}"));
    let name = name.or_else(|| Some(path.file_name()?.to_str()?.to_owned()));
    let mut usage = name.map_or_else(DeviceUsage::default, |name| host.usage_of_disk(&name));
    if !is_written {
        usage.holders.retain(|holder| !holder.is_program());
    }
    // An ordinary user, to whom the device may belong, does not see the programs of other users. So uses that cannot be
    // seen do not refuse the device; the description of the data path names them.
    let unseen = usage.list_unseen();
    usage.unseen.clear();
    usage.refuse(&path.display().to_string(), "; or choose another device")?;
    Ok(unseen)
}

/// Returns the lanes of a file, and their description.
fn lanes(
    file: &Arc<RegularFile>,
    options: &StoreOptions,
) -> Result<(Vec<Box<dyn StoreLane>>, DataPath)> {
    let mut why = "a file has no queues that a GPU could drive: for that, give a free NVMe drive to vfio-pci \
                   (`nvme-gpu bind`) and open vfio:BDF; `nvme-gpu doctor` says what is missing"
        .to_owned();
    let path = |path: &str, why: String| DataPath {
        device: format!("file:{}", file.path.display()),
        data: "host",
        tier: None,
        path: path.to_owned(),
        why,
    };
    if options.file_io != FileIo::Pread {
        let lane = |_| UringLane::new(file, options.depth).map(|lane| Box::new(lane) as _);
        match (0..options.queues)
            .map(lane)
            .collect::<io::Result<Vec<_>>>()
        {
            Ok(lanes) => return Ok((lanes, path("io_uring", why))),
            Err(source) if options.file_io == FileIo::Uring => {
                let call = "io_uring_setup";
                return Err(Error::System { call, source });
            }
            Err(source) => why = format!("io_uring was refused ({source}); {why}"),
        }
    }
    let lane = |_| Box::new(PreadLane::new(file, options.depth)) as _;
    let lanes = (0..options.queues).map(lane).collect();
    Ok((lanes, path("pread", why)))
}

#[cfg(test)]
mod tests;

//! Transfers between a namespace and the memory of another PCI device, or a dma-buf, without a copy in between.
// UNSAFETY: an ioctl takes a raw pointer, and gives a descriptor that is ours.
#![allow(unsafe_code)]

use crate::exporter::Exporter;
use crate::{Outcome, pattern, said};
use nvme_host::core::CommandData;
use nvme_host::core::spec::{Iova, Lba, Nsid, Sqe, nvm};
use nvme_host::{Controller, Device, DmaBuffer, DmaPages, DriverQueue, Namespace};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

const NSID: Nsid = Nsid(1);
/// The host looks for this at the start of the peer's memory.
const MARK: &[u8] = b"from the disk";

fn open(path: &str) -> Result<File, String> {
    let file = File::options().read(true).write(true).open(path);
    file.map_err(|error| format!("{path}: {error}"))
}

/// Returns a dma-buf of `bytes` bytes of this machine's memory.
pub fn udmabuf(bytes: u64) -> Result<OwnedFd, String> {
    /// `struct udmabuf_create` and `UDMABUF_CREATE` of linux/udmabuf.h.
    #[repr(C)]
    struct Create {
        memfd: u32,
        flags: u32,
        offset: u64,
        size: u64,
    }
    const CREATE: libc::c_ulong = 0x4018_7542;
    let last = |call: &str| format!("{call}: {}", std::io::Error::last_os_error());
    // SAFETY: a name that ends with a zero byte.
    let memfd = unsafe {
        libc::memfd_create(
            c"udmabuf".as_ptr(),
            libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC,
        )
    };
    if memfd < 0 {
        return Err(last("memfd_create"));
    }
    // SAFETY: the call has just created the descriptor, which nothing else owns.
    let memory = unsafe { File::from_raw_fd(memfd) };
    memory.set_len(bytes).map_err(|error| error.to_string())?;
    // SAFETY: the call takes an integer.
    if unsafe { libc::fcntl(memfd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) } != 0 {
        return Err(last("F_ADD_SEALS"));
    }
    let mut create = Create {
        memfd: memfd as u32,
        flags: 1,
        offset: 0,
        size: bytes,
    };
    let device = open("/dev/udmabuf")?;
    // SAFETY: the kernel reads the structure of that request.
    match unsafe { libc::ioctl(device.as_raw_fd(), CREATE as _, &mut create) } {
        // SAFETY: the call has just created the descriptor, which nothing else owns.
        fd @ 0.. => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(last("UDMABUF_CREATE")),
    }
}

/// Returns the first `bytes` bytes of `resource`, mapped at `device`: a BAR in a sysfs file, or by VFIO's dma-buf,
/// "udmabuf", or a BAR by the exporter.
pub fn mapped(device: &Arc<dyn Device>, resource: &str, bytes: usize) -> Result<DmaBuffer, String> {
    if let Some(bar) = resource.strip_prefix("vfio:") {
        let pages = nvme_host::vfio::bar(bar, 0, bytes).map_err(said)?;
        return DmaBuffer::over(device, Arc::new(pages)).map_err(said);
    }
    let file = match resource {
        "udmabuf" => udmabuf(bytes as u64)?,
        _ => match resource.strip_prefix("exporter:") {
            Some(kind) => Exporter::open()?.export(kind)?,
            None => open(resource)?.into(),
        },
    };
    let pages = DmaPages::of_file(file, 0, bytes).map_err(said)?;
    DmaBuffer::over(device, Arc::new(pages)).map_err(said)
}

/// Runs between `controller` and the first `mib` mebibytes of `resource`.
pub fn run(controller: &Controller, resource: &str, mib: u64) -> Outcome {
    let mut bar = mapped(controller.device(), resource, (mib << 20) as usize)?;
    let iova = bar.iova();
    transfers(controller, &mut bar, iova, 0)
}

/// Checks that the first MiB of `resource` cannot be mapped, and that the error contains `part`.
pub fn refused(name: &str, resource: &str, part: &str) -> Outcome {
    let device = nvme_host::open(name).map_err(said)?;
    match mapped(&device, resource, 1 << 20) {
        Ok(_) => Err(format!("{resource} was mapped")),
        Err(cause) if cause.contains(part) => {
            println!("{cause}");
            Ok(())
        }
        Err(cause) => Err(format!("'{cause}' instead of: {part}")),
    }
}

/// Runs transfers between `controller`, for which the memory is at `iova`, and the bytes of `bar` from `first` on.
pub fn transfers(controller: &Controller, bar: &mut DmaBuffer, iova: Iova, first: u64) -> Outcome {
    let room = bar.len() as u64 - first;
    let mut namespace = controller.namespace(NSID).map_err(said)?;
    let mut queue = controller.create_queue_pair(16).map_err(said)?;
    let block = u64::from(namespace.block_bytes());
    let most = controller.max_transfer();
    for (turn, bytes) in [4096, 4096 + block, 65536, most].into_iter().enumerate() {
        let turn = turn as u64;
        let place = first + turn * (4 << 20) % (room - most);
        let blocks = (bytes / block) as u32;
        let expected = expected(turn, bytes);
        namespace.write(Lba(0), &expected).map_err(said)?;
        // Disk to peer: the processor reads the BAR to check the data.
        send(
            &mut queue,
            nvm::read(NSID, Lba(0), blocks),
            iova.offset(place),
            bytes,
        )?;
        let range = place as usize..(place + bytes) as usize;
        if bar.as_slice()[range.clone()] != expected[..] {
            return Err(format!("{bytes} bytes read into the peer differ"));
        }
        // Peer to disk: the data from the disk, and data that the processor wrote there.
        send(
            &mut queue,
            nvm::write(NSID, Lba(8192), blocks),
            iova.offset(place),
            bytes,
        )?;
        same(&mut namespace, Lba(8192), &expected)?;
        pattern::fill(100 + turn, 0, &mut bar.as_mut_slice()[range.clone()]);
        send(
            &mut queue,
            nvm::write(NSID, Lba(16384), blocks),
            iova.offset(place),
            bytes,
        )?;
        let put = bar.as_slice()[range].to_vec();
        same(&mut namespace, Lba(16384), &put)?;
        println!("{bytes} bytes at {place:#x} of the peer: both ways");
    }
    // What the host looks for in the file behind the peer's memory.
    let mark = expected(0, 4096);
    namespace.write(Lba(0), &mark).map_err(said)?;
    let blocks = (4096 / block) as u32;
    send(
        &mut queue,
        nvm::read(NSID, Lba(0), blocks),
        iova.offset(first),
        4096,
    )
}

fn expected(turn: u64, bytes: u64) -> Vec<u8> {
    let mut data = vec![0; bytes as usize];
    pattern::fill(turn, 0, &mut data);
    data[..MARK.len()].copy_from_slice(MARK);
    data
}

fn send(queue: &mut DriverQueue, sqe: Sqe, iova: Iova, len: u64) -> Outcome {
    let submitted = queue.submit_data(sqe, CommandData::Contiguous { iova, len }, None);
    submitted.map_err(|refused| refused.error.to_string())?;
    queue.ring();
    let done = queue.wait().map_err(said)?.ok_or("the command was lost")?;
    match done.is_success() {
        true => Ok(()),
        false => Err(said(queue.error_of(&done, "a transfer with the peer"))),
    }
}

fn same(namespace: &mut Namespace, lba: Lba, expected: &[u8]) -> Outcome {
    let mut found = vec![0; expected.len()];
    namespace.read(lba, &mut found).map_err(said)?;
    match found == expected {
        true => Ok(()),
        false => Err(format!("what the peer gave differs at LBA {lba}")),
    }
}

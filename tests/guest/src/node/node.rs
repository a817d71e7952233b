//! The node of the module nvme_gpu, by system calls alone: kmod/nvme_gpu_uapi.h.
// UNSAFETY: ioctl and mmap take raw pointers and numbers; what they name is memory of this process, which the kernel
// checks.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

pub const PAGE: usize = 4096;

/// Numbers of the calls, with the sizes of their structures.
pub const INFO: u64 = 0xC020_4EE0;
pub const MAP: u64 = 0xC030_4EE1;
pub const UNMAP: u64 = 0x4008_4EE2;
pub const RESET: u64 = 0x4EE3;
pub const EVENT: u64 = 0x4008_4EE4;

/// Bits of [`Info::flags`].
pub const STOPPED: u32 = 1 << 6;
pub const STRICT: u32 = 3;

/// Returns the errno of the last call, as a number that is never 0.
pub fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(-1)
}

/// The answer of INFO.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    pub bar0_bytes: usize,
    pub iommu: u32,
    pub flags: u32,
    pub mappings: u32,
}

/// An open node.
pub struct Node {
    file: File,
}

impl Node {
    /// Opens the node of the function, or returns the errno.
    pub fn open(address: &str) -> Result<Self, i32> {
        let path = format!("/dev/nvme-gpu-{address}");
        let opened = File::options().read(true).write(true).open(path);
        match opened {
            Ok(file) => Ok(Self { file }),
            Err(error) => Err(error.raw_os_error().unwrap_or(-1)),
        }
    }

    /// Opens it for a test that needs it.
    pub fn opened(address: &str) -> Result<Self, String> {
        Self::open(address).map_err(|errno| format!("open of {address}: errno {errno}"))
    }

    /// Opens the node once nobody else has it open, within 20 s.
    pub fn awaited(address: &str) -> Result<Self, String> {
        for _ in 0..2000 {
            match Self::open(address) {
                Err(libc::EBUSY | libc::ENOENT) => {}
                other => return other.map_err(|errno| format!("open of {address}: errno {errno}")),
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Err(format!("{address} stays in use"))
    }

    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Makes any call with any argument.
    pub fn call(&self, number: u64, argument: u64) -> Result<(), i32> {
        // SAFETY: the kernel checks the number and the address.
        match unsafe { libc::ioctl(self.fd(), number as _, argument) } {
            0.. => Ok(()),
            _ => Err(errno()),
        }
    }

    fn with<const N: usize>(&self, number: u64, argument: &mut [u64; N]) -> Result<(), i32> {
        let at = argument.as_mut_ptr().expose_provenance() as u64;
        self.call(number, at)
    }

    pub fn info(&self) -> Result<Info, i32> {
        let mut ask = [32u64, 0, 0, 0];
        self.with(INFO, &mut ask)?;
        Ok(Info {
            bar0_bytes: ask[1] as usize,
            iommu: ask[2] as u32,
            flags: (ask[2] >> 32) as u32,
            mappings: ask[3] as u32,
        })
    }

    /// Maps whole pages of this process; returns the handle and the first address.
    pub fn map(&self, address: u64, bytes: usize) -> Result<(u32, u64), i32> {
        self.ask(0, address, bytes, 0, 0)
    }

    /// Maps a dma-buf, likewise.
    pub fn map_buffer(&self, buffer: RawFd) -> Result<(u32, u64), i32> {
        self.ask(1, 0, 0, buffer, 0)
    }

    /// Makes a MAP of any kind with any flags; returns the handle and the first address.
    pub fn ask(
        &self,
        kind: u64,
        address: u64,
        bytes: usize,
        fd: RawFd,
        flags: u64,
    ) -> Result<(u32, u64), i32> {
        let mut list = [0u64; 3];
        let list_at = list.as_mut_ptr().expose_provenance() as u64;
        let (bytes, fd) = (bytes as u64, u64::from(fd as u32));
        let fd = fd | flags << 32;
        let mut ask = [48 | kind << 32, address, bytes, fd, 1 << 32, list_at];
        self.with(MAP, &mut ask)?;
        // SAFETY: the list lives; the read is volatile because the kernel wrote it behind the compiler's back.
        let iova = unsafe { (&raw const list).read_volatile() }[0];
        Ok((ask[4] as u32, iova))
    }

    pub fn unmap(&self, handle: u32) -> Result<(), i32> {
        self.with(UNMAP, &mut [8 | u64::from(handle) << 32])
    }

    pub fn reset(&self) -> Result<(), i32> {
        self.call(RESET, 0)
    }

    pub fn watch(&self, event: RawFd) -> Result<(), i32> {
        self.with(EVENT, &mut [8 | (event as u32 as u64) << 32])
    }

    /// Maps BAR 0 into this process, for the rest of the process's life.
    pub fn bar(&self) -> Result<*mut u8, i32> {
        let bytes = self.info()?.bar0_bytes;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        mapped(bytes, both, libc::MAP_SHARED, self.fd())
    }
}

/// Returns a new mapping at an address of the kernel's choice.
pub fn mapped(bytes: usize, prot: i32, flags: i32, fd: RawFd) -> Result<*mut u8, i32> {
    // SAFETY: a new mapping changes no memory of this process.
    let raw = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, fd, 0) };
    match raw == libc::MAP_FAILED {
        true => Err(errno()),
        false => Ok(raw.cast()),
    }
}

/// Maps memory of zeros that stays mapped.
pub fn arena(bytes: usize) -> Result<*mut u8, String> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    mapped(bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1)
        .map_err(|errno| format!("mmap of {bytes} bytes: errno {errno}"))
}

/// Returns a counter that does not block its reader.
pub fn eventfd() -> Result<File, String> {
    // SAFETY: the call takes numbers and returns a descriptor that this process owns.
    let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    match fd {
        // SAFETY: the call has just created the descriptor, which nothing else owns.
        0.. => Ok(unsafe { File::from_raw_fd(fd) }),
        _ => Err(format!("eventfd: errno {}", errno())),
    }
}

/// Returns whether the counter can be read within `seconds` seconds.
pub fn heard(event: &File, seconds: i32) -> bool {
    let mut poll = libc::pollfd {
        fd: event.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the call gets one structure, which lives.
    unsafe { libc::poll(&mut poll, 1, seconds * 1000) == 1 }
}

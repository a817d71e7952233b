//! GPU memory in this process by gdrcopy's kernel module gdrdrv, for VFIO: its type 1 IOMMU follows such a mapping (a
//! BAR by its page frames) to the GPU's BAR.
//!
//! The calls are copied from `src/gdrdrv/gdrdrv.h` and the mapping from `src/gdrapi.c` in github.com/NVIDIA/gdrcopy,
//! version 2.4. The code has run with a stand-in that maps another device's BAR; not with a GPU.
// UNSAFETY: ioctl takes raw pointers; each call here passes a structure that lives on its stack.
#![allow(unsafe_code)]

use crate::dma::DmaPages;
use crate::dma::pages::host_page;
use crate::error::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// The module's node.
pub const NODE: &str = "/dev/gdrdrv";
/// The version of the interface that this is.
const MAJOR: u32 = 2;
/// Pinning unit of the module: a page of GPU memory.
const PAGE: u64 = 64 << 10;

#[repr(C)]
#[derive(Default)]
struct GdrVersion {
    module: u32,
    library: u32,
}

#[repr(C)]
#[derive(Default)]
struct GdrPin {
    address: u64,
    bytes: u64,
    token: u64,
    space: u32,
    handle: u64,
}

/// Returns the request code of a call: `bytes` is the size of its structure, or of a pointer to the structure.
const fn number(call: u64, bytes: usize) -> libc::c_ulong {
    (3 << 30 | (bytes as u64) << 16 | 0xDA << 8 | call) as libc::c_ulong
}

const PIN: libc::c_ulong = number(1, size_of::<GdrPin>());
const VERSION: libc::c_ulong = number(255, size_of::<*mut GdrVersion>());

fn call<T>(node: &File, number: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: the kernel reads and writes the structure that belongs to the number, which is T.
    match unsafe { libc::ioctl(node.as_raw_fd(), number as _, std::ptr::from_mut(argument)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Opens the module's node at `path` and looks at its version, which is returned, major and minor.
///
/// # Errors
/// [`Error::Environment`], with the remedy, where there is no such module, or another one.
pub fn probe(path: &Path) -> Result<(File, (u32, u32))> {
    let name = path.display();
    let node = OpenOptions::new().read(true).write(true).open(path);
    let node = node.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::environment(
            format!("there is no {name}: gdrcopy's module gdrdrv is not loaded"),
            "install gdrcopy's kernel module, or bind the drive to the module nvme_gpu (docs/kmod.md)",
        ),
        io::ErrorKind::PermissionDenied => Error::environment(
            format!("no permission to open {name}"),
            "run this command as root",
        ),
        _ => Error::file("open", path)(error),
    })?;
    let mut version = GdrVersion::default();
    let other = |what: String| Error::environment(what, "install gdrcopy 2");
    call(&node, VERSION, &mut version)
        .map_err(|error| other(format!("{name} does not tell its version: {error}")))?;
    let found = (version.module >> 16, version.module & 0xFFFF);
    if found.0 != MAJOR {
        return Err(other(format!(
            "{name} is of version {}.{}, and this program knows {MAJOR}",
            found.0, found.1
        )));
    }
    Ok((node, found))
}

/// Returns `bytes` bytes of GPU memory from `address` on, as they are on the bus. Pinned until this is dropped.
///
/// # Errors
/// As [`probe`]; [`Error::Usage`] for what is no whole pages of the GPU; [`Error::System`] when the module refuses.
pub fn map(path: &Path, address: u64, bytes: usize) -> Result<DmaPages> {
    if bytes == 0 || !address.is_multiple_of(PAGE) || !(bytes as u64).is_multiple_of(PAGE) {
        return Err(Error::usage(
            format!("{bytes} bytes of GPU memory at {address:#x} are not whole pages of 64 KiB"),
            "allocate multiples of 2 MiB",
        ));
    }
    let (node, _) = probe(path)?;
    let mut pin = GdrPin {
        address,
        bytes: bytes as u64,
        ..GdrPin::default()
    };
    call(&node, PIN, &mut pin).map_err(|source| Error::System {
        call: "GDRDRV_IOC_PIN_BUFFER",
        source,
    })?;
    // The mapping holds the node open; its end, at the latest, unpins.
    // Handles are offsets in pages of the host.
    let shift = host_page().trailing_zeros();
    let offset = pin.handle.checked_shl(shift).unwrap_or(u64::MAX);
    DmaPages::of_file(node.into(), offset, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        // _IOWR(0xDA, 1, struct of 40 bytes), _IOWR(0xDA, 255, pointer)
        assert_eq!(PIN, 0xC028_DA01);
        assert_eq!(VERSION, 0xC008_DAFF);
        assert_eq!(std::mem::offset_of!(GdrPin, handle), 32);
    }

    #[test]
    fn what_is_no_gdrdrv_is_refused_with_a_remedy() {
        for (path, part) in [
            ("/nonexistent/gdrdrv", "is not loaded"),
            ("/dev/null", "does not tell its version"),
        ] {
            let error = map(Path::new(path), 1 << 40, 2 << 20).err().unwrap();
            assert!(error.to_string().contains(part), "{error}");
            assert!(error.remedy().contains("gdrcopy"), "{}", error.remedy());
        }
        for (address, bytes) in [(1 << 40, 0), (1 << 40, 4096), ((1 << 40) + 4096, 64 << 10)] {
            let error = map(Path::new("/dev/null"), address, bytes).err().unwrap();
            assert!(matches!(error, Error::Usage { .. }), "{error}");
        }
    }
}

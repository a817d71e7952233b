//! Calls of the module's node: the contents of kmod/nvme_gpu_uapi.h in Rust, one function for each call.
// UNSAFETY: ioctl takes raw pointers; each call here passes a structure that lives on its stack.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// The version of the interface that this is.
pub const ABI: u32 = 2;

/// IOMMU state of the function, as reported in [`KmodInfo::iommu`].
pub mod iommu {
    pub const NONE: u32 = 0;
    #[cfg(test)]
    pub const STRICT: u32 = 3;
}

/// Bits of [`KmodInfo::flags`].
pub mod flag {
    pub const WANTED: u32 = 1 << 3;
    pub const REVOKED: u32 = 1 << 4;
    #[cfg(test)]
    pub const STOPPED: u32 = 1 << 6;
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KmodInfo {
    pub size: u32,
    pub abi: u32,
    pub bar0_bytes: u64,
    pub iommu: u32,
    pub flags: u32,
    pub mappings: u32,
    pub reserved: u32,
}

/// Kinds of [`KmodMap`].
pub const MAP_USER: u32 = 0;
pub const MAP_DMABUF: u32 = 1;

/// Flag of [`KmodMap::flags`]: all of the memory must lie in another PCI function.
pub const REQUIRE_PEER: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KmodSegment {
    pub iova: u64,
    pub bytes: u64,
    pub place: u32,
    pub flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct KmodMap {
    pub size: u32,
    pub kind: u32,
    pub address: u64,
    pub bytes: u64,
    pub fd: i32,
    pub flags: u32,
    pub handle: u32,
    pub segments: u32,
    pub list: u64,
}

#[repr(C)]
struct KmodUnmap {
    size: u32,
    handle: u32,
}

#[repr(C)]
struct KmodEvent {
    size: u32,
    fd: i32,
}

const READ_WRITE: u64 = 3;
const WRITE: u64 = 1;

/// Returns the request code of a call that takes `bytes` bytes, as `_IOC` computes it.
const fn number(direction: u64, call: u64, bytes: usize) -> libc::c_ulong {
    (direction << 30 | (bytes as u64) << 16 | (b'N' as u64) << 8 | call) as libc::c_ulong
}

const INFO: libc::c_ulong = number(READ_WRITE, 0xE0, size_of::<KmodInfo>());
const MAP: libc::c_ulong = number(READ_WRITE, 0xE1, size_of::<KmodMap>());
const UNMAP: libc::c_ulong = number(WRITE, 0xE2, size_of::<KmodUnmap>());
const RESET: libc::c_ulong = number(0, 0xE3, 0);
const EVENT: libc::c_ulong = number(WRITE, 0xE4, size_of::<KmodEvent>());

fn call<T>(node: &File, number: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: the kernel reads and writes the structure that belongs to the number, which is T; the list that a
    // `KmodMap` names is as long as it says (`map`).
    match unsafe { libc::ioctl(node.as_raw_fd(), number as _, std::ptr::from_mut(argument)) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the properties of the function and its IOMMU, and the events since the node was opened.
pub fn info(node: &File) -> io::Result<KmodInfo> {
    let mut info = KmodInfo {
        size: size_of::<KmodInfo>() as u32,
        ..KmodInfo::default()
    };
    call(node, INFO, &mut info)?;
    Ok(info)
}

/// Maps the memory that `ask` names, and writes its segments to `list`; returns their number and the handle.
/// With `ENOSPC` there are more segments than fit; the error's `KmodMap` has their number.
pub fn map(
    node: &File,
    ask: KmodMap,
    list: &mut [KmodSegment],
) -> Result<KmodMap, (io::Error, KmodMap)> {
    let mut ask = KmodMap {
        size: size_of::<KmodMap>() as u32,
        segments: list.len() as u32,
        list: list.as_mut_ptr().expose_provenance() as u64,
        ..ask
    };
    match call(node, MAP, &mut ask) {
        Ok(()) => Ok(ask),
        Err(error) => Err((error, ask)),
    }
}

/// Takes a mapping back.
pub fn unmap(node: &File, handle: u32) -> io::Result<()> {
    let size = size_of::<KmodUnmap>() as u32;
    call(node, UNMAP, &mut KmodUnmap { size, handle })
}

/// Stops and resets the function.
pub fn reset(node: &File) -> io::Result<()> {
    call(node, RESET, &mut [0u8; 0])
}

/// Makes the module signal `event`, an eventfd, when something happens.
pub fn watch(node: &File, event: i32) -> io::Result<()> {
    let size = size_of::<KmodEvent>() as u32;
    call(node, EVENT, &mut KmodEvent { size, fd: event })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;
    use std::process::Command;

    /// The C compiler's view of kmod/nvme_gpu_uapi.h.
    #[test]
    fn structures_and_numbers_are_those_of_the_header() {
        let header = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kmod/nvme_gpu_uapi.h");
        if !std::path::Path::new(header).exists() {
            // The package alone, without the repository around it.
            return;
        }
        let checks = [
            ("NVME_GPU_KMOD_INFO", INFO as usize),
            ("NVME_GPU_KMOD_MAP", MAP as usize),
            ("NVME_GPU_KMOD_UNMAP", UNMAP as usize),
            ("NVME_GPU_KMOD_RESET", RESET as usize),
            ("NVME_GPU_KMOD_EVENT", EVENT as usize),
            ("NVME_GPU_KMOD_ABI", ABI as usize),
            ("NVME_GPU_IOMMU_NONE", iommu::NONE as usize),
            ("NVME_GPU_IOMMU_STRICT", iommu::STRICT as usize),
            ("NVME_GPU_INFO_WANTED", flag::WANTED as usize),
            ("NVME_GPU_INFO_REVOKED", flag::REVOKED as usize),
            ("NVME_GPU_INFO_STOPPED", flag::STOPPED as usize),
            ("NVME_GPU_MAP_USER", MAP_USER as usize),
            ("NVME_GPU_MAP_DMABUF", MAP_DMABUF as usize),
            ("NVME_GPU_MAP_REQUIRE_PEER", REQUIRE_PEER as usize),
            (
                "sizeof(struct nvme_gpu_kmod_segment)",
                size_of::<KmodSegment>(),
            ),
            (
                "offsetof(struct nvme_gpu_kmod_segment, place)",
                offset_of!(KmodSegment, place),
            ),
            (
                "offsetof(struct nvme_gpu_kmod_info, bar0_bytes)",
                offset_of!(KmodInfo, bar0_bytes),
            ),
            (
                "offsetof(struct nvme_gpu_kmod_info, flags)",
                offset_of!(KmodInfo, flags),
            ),
            (
                "offsetof(struct nvme_gpu_kmod_map, bytes)",
                offset_of!(KmodMap, bytes),
            ),
            (
                "offsetof(struct nvme_gpu_kmod_map, fd)",
                offset_of!(KmodMap, fd),
            ),
            (
                "offsetof(struct nvme_gpu_kmod_map, segments)",
                offset_of!(KmodMap, segments),
            ),
            (
                "offsetof(struct nvme_gpu_kmod_map, list)",
                offset_of!(KmodMap, list),
            ),
        ];
        let mut source = format!("#include <stddef.h>\n#include \"{header}\"\n");
        for (text, value) in checks {
            source +=
                &format!("_Static_assert((unsigned long)({text}) == {value}ul, \"{text}\");\n");
        }
        let folder = std::env::temp_dir().join(format!("nvme-gpu-uapi-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("check.c");
        std::fs::write(&file, source).unwrap();
        let compiled = Command::new("cc")
            .args(["-Wall", "-Werror", "-fsyntax-only"])
            .arg(&file)
            .output();
        let compiled = compiled.expect("a C compiler, as cc");
        let _ = std::fs::remove_dir_all(&folder);
        let said = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "{said}");
    }
}

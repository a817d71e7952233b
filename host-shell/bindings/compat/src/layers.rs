//! Layers of a model, one read each; with a depth of 2 and more those that come next are read ahead, once a pass over the
//! layers has shown their order.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::ahead::LoaderPasses;
use crate::device::{answer, check, kept, open, size, usage};
use nvme_gpu_capi::border::text;
use nvme_gpu_capi::opened::{STORES, StoreHandle, opened};
use nvme_gpu_capi::store::nvme_gpu_close;
use nvme_gpu_capi::transfer::nvme_gpu_pread;
use std::ffi::{c_char, c_int, c_void};

/// `gpunvme_layer_loader_t`.
#[repr(C)]
pub struct CompatLoader {
    store: *mut StoreHandle,
    max_layer_bytes: usize,
    /// NULL without reads ahead.
    ahead: *mut LoaderPasses,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_layer_loader_init(
    loader: *mut CompatLoader,
    bdf: *const c_char,
    max_layer_bytes: usize,
    depth: u32,
) -> c_int {
    answer(|| {
        if loader.is_null() {
            return Err(usage("loader is NULL", "give a pointer"));
        }
        // SAFETY: the caller keeps the conditions of the header.
        let device = kept(unsafe { text(bdf, "bdf") })?;
        let is_address = device.split(':').count() == 3
            && device
                .bytes()
                .all(|one| one.is_ascii_hexdigit() || matches!(one, b':' | b'.'));
        if depth == 0 {
            return Err(usage("depth is 0", "use 1 or more"));
        }
        let store = kept(open(&match is_address {
            true => format!("vfio:{device}"),
            false => device.to_owned(),
        }))?;
        let made = CompatLoader {
            store,
            max_layer_bytes,
            ahead: match depth {
                1 => std::ptr::null_mut(),
                _ => Box::into_raw(Box::new(LoaderPasses::new(depth as usize))),
            },
        };
        // SAFETY: the caller keeps the conditions of the header.
        unsafe { loader.write(made) };
        Ok(0)
    })
}

/// # Safety
/// `loader` is NULL or was initialized.
unsafe fn of<'a>(loader: *const CompatLoader) -> Result<&'a CompatLoader, i32> {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    let loader = unsafe { loader.as_ref() };
    loader.ok_or_else(|| usage("loader is NULL", "give one that was initialized"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_load_layer(
    loader: *mut CompatLoader,
    start_lba: u64,
    bytes: usize,
    dst: *mut c_void,
) -> c_int {
    answer(|| {
        // SAFETY: the caller keeps the conditions of the header.
        let loader = unsafe { of(loader) }?;
        if bytes > loader.max_layer_bytes {
            let cause = format!(
                "a layer of {bytes} bytes; {} were named",
                loader.max_layer_bytes
            );
            return Err(usage(
                cause,
                "name the longest layer when the loader is initialized",
            ));
        }
        let block = block_bytes(loader)?;
        let offset = start_lba.checked_mul(block.into());
        let offset = offset.ok_or_else(|| {
            usage(
                format!("LBA {start_lba} is past the end of every device"),
                "use one of the device",
            )
        })?;
        let opened = kept(opened(loader.store))?;
        // SAFETY: it was made in `init` and freed in `destroy`; one thread at a time uses a loader.
        if let Some(ahead) = unsafe { loader.ahead.as_ref() } {
            // SAFETY: the caller fulfils the contract in the header for `dst`.
            if kept(unsafe { ahead.load(&opened, offset, dst, bytes) })? {
                return Ok(0);
            }
        }
        // SAFETY: the caller keeps the conditions of the header.
        check(unsafe { nvme_gpu_pread(loader.store, dst, bytes, offset) })?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_layer_loader_load_layer(
    loader: *mut CompatLoader,
    start_lba: u64,
    bytes: usize,
    dst: *mut c_void,
) -> c_int {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe { gpunvme_load_layer(loader, start_lba, bytes, dst) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_load_layer_vram(
    loader: *mut CompatLoader,
    start_lba: u64,
    bytes: usize,
    dst: *mut c_void,
) -> c_int {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe { gpunvme_load_layer(loader, start_lba, bytes, dst) }
}

/// Returns the unit of LBAs: a file's is 512.
pub fn block_bytes(loader: &CompatLoader) -> Result<u32, i32> {
    let opened = kept(opened(loader.store))?;
    Ok(match opened.store.block_bytes() {
        1 => 512,
        bytes => bytes,
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_layer_loader_block_size(loader: *const CompatLoader) -> u32 {
    // SAFETY: the caller keeps the conditions of the header.
    let bytes = answer(|| block_bytes(unsafe { of(loader) }?).map(i64::from));
    u32::try_from(bytes).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_layer_loader_max_transfer(loader: *const CompatLoader) -> u64 {
    let bytes: isize = answer(|| {
        // SAFETY: the caller keeps the conditions of the header.
        let opened = kept(opened(unsafe { of(loader) }?.store))?;
        let most = opened
            .store
            .controllers()
            .map(|one| one.max_transfer())
            .min();
        size(most.unwrap_or(256 << 10))
    });
    u64::try_from(bytes).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_layer_loader_ns_blocks(loader: *const CompatLoader) -> u64 {
    let blocks: isize = answer(|| {
        // SAFETY: the caller keeps the conditions of the header.
        let loader = unsafe { of(loader) }?;
        let len = kept(opened(loader.store))?.store.len();
        size(len / u64::from(block_bytes(loader)?))
    });
    u64::try_from(blocks).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_layer_loader_destroy(loader: *mut CompatLoader) {
    // SAFETY: the caller keeps the conditions of the header.
    if let Some(loader) = unsafe { loader.as_mut() } {
        let ahead = std::mem::replace(&mut loader.ahead, std::ptr::null_mut());
        // A parent's reads end on threads that a child of `fork` does not have: it lets them be.
        if !ahead.is_null() && !STORES.is_inherited(loader.store) {
            // SAFETY: it was made in `init`, and freed once.
            drop(unsafe { Box::from_raw(ahead) });
        }
        // SAFETY: any handle may be closed.
        unsafe { nvme_gpu_close(loader.store) };
    }
}

//! Versions and features.
// UNSAFETY: functions of the C interface.
#![allow(unsafe_code)]

use crate::border::{Answer, Sized0, call, give};
use crate::status::{CallFailure, NVME_GPU_ERROR_VERSION, nvme_gpu_status};

/// The version of this header: (major << 16) | (minor << 8) | patch.
pub const NVME_GPU_VERSION: u32 = 0x0000_0100;

const _: () = assert!(NVME_GPU_VERSION == parse(env!("CARGO_PKG_VERSION")));

/// nvme_gpu_features(): simulated drives, `sim:`.
pub const NVME_GPU_HAS_SIM: u32 = 1;
/// nvme_gpu_features(): drives behind VFIO, `vfio:`.
pub const NVME_GPU_HAS_VFIO: u32 = 2;
/// nvme_gpu_features(): controllers of other processes, `vfio-user:`.
pub const NVME_GPU_HAS_VFIO_USER: u32 = 4;
/// nvme_gpu_features(): GPUs. libcuda.so.1 is looked up when a store is opened with one.
pub const NVME_GPU_HAS_CUDA: u32 = 8;

/// nvme_gpu_version(): set `size` to sizeof(nvme_gpu_versions) before the call. Numbers are as in NVME_GPU_VERSION.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct LibraryVersions {
    pub size: usize,
    /// Of the library that is loaded.
    pub library: u32,
    /// Of the GPU kernels inside; 0 without CUDA.
    pub ptx: u32,
}

// SAFETY: integers, the size first.
unsafe impl Sized0 for LibraryVersions {
    const NAME: &'static str = "nvme_gpu_versions";
}

const fn parse(text: &str) -> u32 {
    let bytes = text.as_bytes();
    let (mut number, mut part, mut at) = (0, 0, 0);
    while at < bytes.len() && bytes[at] != b'-' {
        match bytes[at] {
            b'.' => {
                number = (number | part) << 8;
                part = 0;
            }
            digit => part = part * 10 + (digit - b'0') as u32,
        }
        at += 1;
    }
    number | part
}

fn ptx() -> u32 {
    #[cfg(feature = "cuda")]
    return parse(nvme_host::cuda::PTX_VERSION);
    #[cfg(not(feature = "cuda"))]
    return 0;
}

/// True if a program compiled with `header` may use `library`: before 1.0 the minor version is that of the
/// interface.
fn fits(header: u32, library: u32) -> bool {
    let interface = |version: u32| match version >> 16 {
        0 => version >> 8,
        major => major << 8,
    };
    interface(header) == interface(library)
}

/// # Errors
/// [`NVME_GPU_ERROR_VERSION`].
pub fn check(header: u32) -> Answer<()> {
    let remedy = "compile with the header of the library that is loaded";
    let text = |one: u32| format!("{}.{}.{}", one >> 16, one >> 8 & 0xFF, one & 0xFF);
    let library = text(NVME_GPU_VERSION);
    if !fits(header, NVME_GPU_VERSION) {
        let cause = format!(
            "the program was compiled with nvme_gpu.h {}, the library is {library}",
            text(header)
        );
        return Err(CallFailure::new(NVME_GPU_ERROR_VERSION, cause, remedy));
    }
    let ptx = ptx();
    if ptx != 0 && ptx != NVME_GPU_VERSION {
        let cause = format!(
            "the GPU kernels inside are {}, the library is {library}",
            text(ptx)
        );
        return Err(CallFailure::new(
            NVME_GPU_ERROR_VERSION,
            cause,
            "build the library from one source tree",
        ));
    }
    Ok(())
}

/// Returns the versions of the library and of the GPU kernels in it. nvme_gpu_open() compares that of the
/// header, which NVME_GPU_OPTIONS_INIT puts into the options, and refuses another minor version (from 1.0 on:
/// major version) with NVME_GPU_ERROR_VERSION.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_version(versions: *mut LibraryVersions) -> nvme_gpu_status {
    call(|| {
        let known = LibraryVersions {
            size: 0,
            library: NVME_GPU_VERSION,
            ptx: ptx(),
        };
        // SAFETY: as the header says.
        unsafe { give(versions, &known) }
    })
}

/// Returns the features that this library was built with: NVME_GPU_HAS_... or-ed.
#[unsafe(no_mangle)]
pub extern "C" fn nvme_gpu_features() -> u32 {
    let features = [
        (cfg!(feature = "sim"), NVME_GPU_HAS_SIM),
        (cfg!(feature = "vfio"), NVME_GPU_HAS_VFIO),
        (cfg!(feature = "vfio-user"), NVME_GPU_HAS_VFIO_USER),
        (cfg!(feature = "cuda"), NVME_GPU_HAS_CUDA),
    ];
    let has = features.iter().filter(|(has, _)| *has);
    has.fold(0, |all, (_, bit)| all | bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_interface_is_refused() {
        assert!(check(NVME_GPU_VERSION).is_ok());
        assert!(check(NVME_GPU_VERSION + 1).is_ok());
        let failure = check(NVME_GPU_VERSION + 0x100).unwrap_err();
        assert_eq!(failure.status, NVME_GPU_ERROR_VERSION);
        assert!(failure.cause.contains("0.2.0"), "{}", failure.cause);
        assert!(fits(0x1_0203, 0x1_0000) && !fits(0x2_0000, 0x1_0000) && !fits(0x100, 0x1_0000));
        assert_eq!(parse("12.3.45-rc1"), 12 << 16 | 3 << 8 | 45);
    }
}

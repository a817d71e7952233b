//! The few calls of the CUDA driver API that a kernel test needs, each with its error in words.

use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, CString, c_void};
use std::ptr::null_mut;

/// The first GPU, with its primary context current on this thread.
pub struct Gpu {
    pub name: String,
}

pub struct Module(sys::CUmodule);

fn check(result: CUresult, call: &str) -> Result<(), String> {
    if result == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(format!("{call}: {result:?}"))
    }
}

impl Gpu {
    pub fn open() -> Result<Self, String> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(
                "the CUDA driver library (libcuda.so.1) is not here: an NVIDIA driver is needed"
                    .into(),
            );
        }
        let (mut device, mut context, mut name) = (0, null_mut(), [0; 128]);
        // SAFETY: plain calls with pointers to locals that outlive them.
        unsafe {
            check(sys::cuInit(0), "cuInit")?;
            check(sys::cuDeviceGet(&mut device, 0), "cuDeviceGet")?;
            check(
                sys::cuDevicePrimaryCtxRetain(&mut context, device),
                "cuDevicePrimaryCtxRetain",
            )?;
            check(sys::cuCtxSetCurrent(context), "cuCtxSetCurrent")?;
            check(
                sys::cuDeviceGetName(name.as_mut_ptr(), 128, device),
                "cuDeviceGetName",
            )?;
        }
        // SAFETY: the driver wrote a terminated string of at most 128 bytes.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }
            .to_string_lossy()
            .into_owned();
        Ok(Self { name })
    }

    /// Compiles PTX for this GPU.
    pub fn load(&self, ptx: &str) -> Result<Module, String> {
        let text = CString::new(ptx).map_err(|_| "the PTX has a zero byte")?;
        let mut log = vec![0u8; 8192];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        let mut module = null_mut();
        // SAFETY: the arrays have the two entries named and the log outlives the call.
        let result = unsafe {
            sys::cuModuleLoadDataEx(
                &mut module,
                text.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        check(result, "cuModuleLoadDataEx").map_err(|error| {
            let log = String::from_utf8_lossy(&log);
            format!("{error}: {}", log.trim_end_matches('\0').trim())
        })?;
        Ok(Module(module))
    }

    /// Registers host memory with the GPU; its device address must equal its host address.
    pub fn pin(&self, start: *mut u8, bytes: usize) -> Result<(), String> {
        let mut address = 0;
        // SAFETY: the caller's memory lives until the process ends.
        unsafe {
            check(
                sys::cuMemHostRegister_v2(start.cast(), bytes, sys::CU_MEMHOSTREGISTER_DEVICEMAP),
                "cuMemHostRegister",
            )?;
            check(
                sys::cuMemHostGetDevicePointer_v2(&mut address, start.cast(), 0),
                "cuMemHostGetDevicePointer",
            )?;
        }
        if address == start as u64 {
            Ok(())
        } else {
            Err("device and host addresses differ".into())
        }
    }

    /// Zeroed device memory for the life of the process.
    pub fn alloc(&self, bytes: usize) -> Result<u64, String> {
        let mut address = 0;
        // SAFETY: plain calls; the address is written before it is used.
        unsafe {
            check(sys::cuMemAlloc_v2(&mut address, bytes), "cuMemAlloc")?;
            check(sys::cuMemsetD8_v2(address, 0, bytes), "cuMemsetD8")?;
        }
        Ok(address)
    }

    /// Runs `name` with one thread and waits for it; the kernel bounds its own time.
    pub fn launch_one<A: Copy, B: Copy>(
        &self,
        module: &Module,
        name: &str,
        a: &A,
        b: &B,
        report: u64,
    ) -> Result<(), String> {
        let symbol = CString::new(name).map_err(|_| "a zero byte in a name")?;
        let mut function = null_mut();
        let mut parameters = [
            (a as *const A).cast_mut().cast::<c_void>(),
            (b as *const B).cast_mut().cast::<c_void>(),
            (&report as *const u64).cast_mut().cast::<c_void>(),
        ];
        // SAFETY: the kernel takes these three parameters by value; the pointers outlive the launch.
        unsafe {
            check(
                sys::cuModuleGetFunction(&mut function, module.0, symbol.as_ptr()),
                name,
            )?;
            check(
                sys::cuLaunchKernel(
                    function,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    0,
                    null_mut(),
                    parameters.as_mut_ptr(),
                    null_mut(),
                ),
                "cuLaunchKernel",
            )?;
            check(sys::cuCtxSynchronize(), "cuCtxSynchronize")
        }
    }

    pub fn read_words(&self, address: u64) -> Result<[u32; 4], String> {
        let mut words = [0u32; 4];
        // SAFETY: 16 bytes of an allocation of at least that, into a local of that size.
        unsafe {
            check(
                sys::cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), address, 16),
                "cuMemcpyDtoH",
            )?
        };
        Ok(words)
    }
}

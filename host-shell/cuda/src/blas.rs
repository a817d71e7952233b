//! cuBLAS, looked up at run time, as a baseline for matrix products in row-major order. Only measurements depend on it;
//! without the library they omit its line.
// UNSAFETY: loads a library and makes functions of its symbols.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::stream::Stream;
use nvme_driver::error::{Error, Result};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

/// The names that programs link, newest first, and where a toolkit has the library.
const NAMES: [&CStr; 4] = [
    c"libcublas.so.13",
    c"libcublas.so.12",
    c"/usr/local/cuda/lib64/libcublas.so",
    c"libcublas.so",
];
const NO_TRANSPOSE: c_int = 0;
/// f32 sums; products of f32 without TF32, as the handle's mode is the default one.
const COMPUTE_32F: c_int = 68;
const DEFAULT_ALGORITHM: c_int = -1;

/// Elements that cuBLAS multiplies, by `cudaDataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum BlasElement {
    /// f32.
    F32 = 0,
    /// f16.
    F16 = 2,
    /// bf16.
    Bf16 = 14,
}

/// `C = A B`, all matrices row after row without gaps.
#[derive(Clone, Copy, Debug)]
pub struct BlasProduct {
    /// Addresses of `a`, `b` and `c`.
    pub addresses: [u64; 3],
    /// Rows of the result, its columns, and terms of each sum.
    pub shape: [u32; 3],
    /// Element type of the factors.
    pub factors: BlasElement,
    /// Element type of the result.
    pub result: BlasElement,
}

type Gemm = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const f32,
    u64,
    c_int,
    c_int,
    u64,
    c_int,
    c_int,
    *const f32,
    u64,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// A handle of the library.
pub struct CublasHandle {
    gpu: Arc<Gpu>,
    handle: *mut c_void,
    gemm: Gemm,
    set_stream: unsafe extern "C" fn(*mut c_void, u64) -> c_int,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    version: i32,
}

impl CublasHandle {
    /// Loads the library and makes a handle.
    ///
    /// # Errors
    /// [`Error::Environment`] without the library, without one of its functions, or with the library's refusal.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let library = library()?;
        let _guest = gpu.enter()?;
        // SAFETY: the types are those of the functions in cublas_v2.h; the library is never unloaded.
        let (create, version, set_stream, gemm, destroy) = unsafe {
            type Create = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
            type Version = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
            type SetStream = unsafe extern "C" fn(*mut c_void, u64) -> c_int;
            type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
            (
                std::mem::transmute::<*mut c_void, Create>(symbol(library, c"cublasCreate_v2")?),
                std::mem::transmute::<*mut c_void, Version>(symbol(
                    library,
                    c"cublasGetVersion_v2",
                )?),
                std::mem::transmute::<*mut c_void, SetStream>(symbol(
                    library,
                    c"cublasSetStream_v2",
                )?),
                std::mem::transmute::<*mut c_void, Gemm>(symbol(library, c"cublasGemmEx")?),
                std::mem::transmute::<*mut c_void, Destroy>(symbol(library, c"cublasDestroy_v2")?),
            )
        };
        let mut blas = Self {
            gpu: Arc::clone(gpu),
            handle: null_mut(),
            gemm,
            set_stream,
            destroy,
            version: 0,
        };
        // SAFETY: the call writes one handle.
        check("cublasCreate", unsafe { create(&mut blas.handle) })?;
        // SAFETY: a handle of this library; the call writes one number.
        check("cublasGetVersion", unsafe {
            version(blas.handle, &mut blas.version)
        })?;
        Ok(blas)
    }

    /// Returns the version as the library reports it: 130000 is 13.0.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Enqueues a product in `stream`, and returns before it runs.
    ///
    /// # Safety
    /// The matrices are valid on the GPU until the stream is done, and nothing else writes them meanwhile.
    ///
    /// # Errors
    /// [`Error::Usage`] for more than 2^31 rows, columns or terms; [`Error::Environment`] with the library's answer.
    pub unsafe fn multiply(&self, product: &BlasProduct, stream: &Stream) -> Result<()> {
        let sizes = product.shape.map(c_int::try_from);
        let [Ok(m), Ok(n), Ok(k)] = sizes else {
            let what = format!("a product of {:?}", product.shape);
            return Err(Error::usage(what, "multiply parts of the matrices"));
        };
        let _guest = self.gpu.enter()?;
        // SAFETY: the handle is our own; a stream of the same GPU.
        check("cublasSetStream", unsafe {
            (self.set_stream)(self.handle, stream.handle())
        })?;
        let [a, b, c] = product.addresses;
        let (factors, result) = (product.factors as c_int, product.result as c_int);
        let (one, zero) = (1.0f32, 0.0f32);
        // The library expects columns one after the other, so that the row-major matrices count as transposed: the
        // result is b' a'. SAFETY: the handle is our own; the library reads the numbers before it returns; the caller
        // vouches for the matrices.
        check("cublasGemmEx", unsafe {
            (self.gemm)(
                self.handle,
                NO_TRANSPOSE,
                NO_TRANSPOSE,
                n,
                m,
                k,
                from_ref(&one),
                b,
                factors,
                n.max(1),
                a,
                factors,
                k.max(1),
                from_ref(&zero),
                c,
                result,
                n.max(1),
                COMPUTE_32F,
                DEFAULT_ALGORITHM,
            )
        })
    }
}

impl Drop for CublasHandle {
    fn drop(&mut self) {
        if let Ok(_guest) = self.gpu.enter()
            && !self.handle.is_null()
        {
            // SAFETY: it was made in `load`, destroyed once.
            let _ = unsafe { (self.destroy)(self.handle) };
        }
    }
}

fn library() -> Result<*mut c_void> {
    for name in NAMES {
        // SAFETY: this loads a library of the system and runs its initialisers, as linking it would.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !library.is_null() {
            return Ok(library);
        }
    }
    Err(Error::environment(
        "no cuBLAS: neither libcublas.so.13 nor libcublas.so.12 can be loaded",
        "install CUDA's cuBLAS, and name its folder in LD_LIBRARY_PATH",
    ))
}

fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: a library that is loaded, and a name that ends with a 0.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() {
        return Err(Error::environment(
            format!("cuBLAS has no {}", name.to_string_lossy()),
            "install the cuBLAS of CUDA 12 or 13",
        ));
    }
    Ok(found)
}

fn check(call: &str, status: c_int) -> Result<()> {
    match status {
        0 => Ok(()),
        status => Err(Error::environment(
            format!("{call}: cublasStatus_t {status}"),
            "see cublasStatus_t in cuBLAS's manual",
        )),
    }
}

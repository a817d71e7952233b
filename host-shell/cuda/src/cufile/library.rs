//! libcufile.so.0, looked up at run time: its functions, and its driver, which is opened once for the process.
// UNSAFETY: loads a library and makes functions of its symbols.
#![allow(unsafe_code)]

use super::code::{CufileCode, failed};
use nvme_driver::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// The name that programs link.
const NAME: &CStr = c"libcufile.so.0";

/// `CUfileError_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CuFileError {
    pub code: c_int,
    pub cuda: c_int,
}

/// `CUfileDescr_t`.
#[repr(C)]
pub struct CufileDescr {
    pub kind: c_uint,
    pub padding: u32,
    /// Half of a union with a pointer.
    pub fd: c_int,
    pub rest: u32,
    pub fs_ops: *const c_void,
}
const _: () = assert!(size_of::<CufileDescr>() == 24 && std::mem::offset_of!(CufileDescr, fd) == 8);

/// `CUfileIOParams_t`, in mode batch.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IoParams {
    pub mode: c_uint,
    pub memory: u64,
    pub file_offset: i64,
    pub memory_offset: i64,
    pub bytes: usize,
    pub handle: usize,
    pub opcode: c_uint,
    pub cookie: usize,
}
const _: () = assert!(size_of::<IoParams>() == 64);

/// `CUfileIOEvents_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct IoEvent {
    pub cookie: usize,
    pub status: c_uint,
    pub bytes: usize,
}
const _: () = assert!(size_of::<IoEvent>() == 24);

/// The head of `CUfileDrvProps_t`, and room for the rest.
#[repr(C)]
pub struct CufileProperties {
    pub nvfs_major: c_uint,
    pub nvfs_minor: c_uint,
    pub poll_threshold: usize,
    pub most_direct: usize,
    pub status: c_uint,
    pub control: c_uint,
    pub rest: [u64; 64],
}

type Io = unsafe extern "C" fn(usize, u64, usize, i64, i64) -> isize;
type IoAsync = unsafe extern "C" fn(
    usize,
    u64,
    *mut usize,
    *mut i64,
    *mut i64,
    *mut isize,
    *mut c_void,
) -> CuFileError;

macro_rules! library {
    ($($field:ident $symbol:literal $type:ty;)*) => {
        /// The functions.
        #[derive(Clone, Copy)]
        pub struct Library {
            $(pub $field: $type,)*
        }

        impl Library {
            /// # Errors
            /// [`Error::Environment`] without the library, or without one of its functions.
            pub fn load() -> Result<Self> {
                // SAFETY: this loads a library of the system and runs its initialisers, as linking it would.
                let library = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if library.is_null() {
                    // SAFETY: the call returns the last error of this thread as text.
                    let why = unsafe { said(libc::dlerror()) };
                    return Err(Error::environment(
                        format!("libcufile.so.0 cannot be loaded: {why}"),
                        "install nvidia-cufile (CUDA's GPUDirect Storage), or leave gds off",
                    ));
                }
                Ok(Self {
                    // SAFETY: the type is that of the function in cufile.h. The library is never unloaded, so
                    // the pointer stays valid; libcufile itself closes its driver when the process ends.
                    $($field: unsafe { std::mem::transmute::<*mut c_void, $type>(symbol(library, $symbol)?) },)*
                })
            }
        }
    };
}

library! {
    driver_open c"cuFileDriverOpen" unsafe extern "C" fn() -> CuFileError;
    properties c"cuFileDriverGetProperties" unsafe extern "C" fn(*mut CufileProperties) -> CuFileError;
    register_file c"cuFileHandleRegister" unsafe extern "C" fn(*mut usize, *mut CufileDescr) -> CuFileError;
    deregister_file c"cuFileHandleDeregister" unsafe extern "C" fn(usize);
    register_buffer c"cuFileBufRegister" unsafe extern "C" fn(u64, usize, c_int) -> CuFileError;
    deregister_buffer c"cuFileBufDeregister" unsafe extern "C" fn(u64) -> CuFileError;
    read c"cuFileRead" Io;
    write c"cuFileWrite" Io;
    read_async c"cuFileReadAsync" IoAsync;
    batch_set_up c"cuFileBatchIOSetUp" unsafe extern "C" fn(*mut usize, c_uint) -> CuFileError;
    batch_submit c"cuFileBatchIOSubmit" unsafe extern "C" fn(usize, c_uint, *mut IoParams, c_uint) -> CuFileError;
    batch_status c"cuFileBatchIOGetStatus"
        unsafe extern "C" fn(usize, c_uint, *mut c_uint, *mut IoEvent, *mut libc::timespec) -> CuFileError;
    batch_destroy c"cuFileBatchIODestroy" unsafe extern "C" fn(usize);
}

impl Library {
    /// Returns the file that it was loaded from.
    pub fn file(&self) -> String {
        let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        let function = self.driver_open as *const c_void;
        // SAFETY: the call fills the structure when it answers other than 0; the name is the loader's, and stays.
        unsafe {
            if libc::dladdr(function, found.as_mut_ptr()) == 0 {
                return NAME.to_string_lossy().into_owned();
            }
            said(found.assume_init().dli_fname)
        }
    }
}

/// # Safety
/// `text` is NULL or ends with a 0.
unsafe fn said(text: *const c_char) -> String {
    if text.is_null() {
        return "no reason is given".to_owned();
    }
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: a library that is loaded, and a name that ends with a 0.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() {
        return Err(Error::environment(
            format!("libcufile.so.0 has no {}", name.to_string_lossy()),
            "install a cuFile of CUDA 12.2 or later, or leave gds off",
        ));
    }
    Ok(found)
}

impl CuFileError {
    /// # Errors
    /// Meaning of the number.
    pub fn check(self, call: &str) -> Result<()> {
        match self.code {
            0 => Ok(()),
            code => Err(failed(call, CufileCode(code), self.cuda)),
        }
    }
}

/// Returns the library with its driver open. It stays open: libcufile closes it when the process ends.
///
/// # Errors
/// As at the first call.
pub fn library() -> Result<Library> {
    static OPEN: OnceLock<std::result::Result<Library, (String, String)>> = OnceLock::new();
    let open = || -> Result<Library> {
        let library = Library::load()?;
        // SAFETY: the call takes no pointers.
        let answer = unsafe { (library.driver_open)() };
        // Another user of the library in this process has opened it.
        if answer.code != CufileCode::DRIVER_ALREADY_OPEN.0 {
            answer.check("cuFileDriverOpen")?;
        }
        Ok(library)
    };
    let opened = OPEN.get_or_init(|| open().map_err(|error| (error.to_string(), error.remedy())));
    match opened {
        Ok(library) => Ok(*library),
        Err((cause, remedy)) => Err(Error::environment(cause.clone(), remedy.clone())),
    }
}

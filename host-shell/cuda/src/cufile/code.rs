//! Error numbers of cuFile: their meaning, and the remedies.

use nvme_driver::error::Error;

/// A `CUfileOpError`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CufileCode(pub i32);

impl CufileCode {
    pub const DRIVER_ALREADY_OPEN: Self = Self(5026);

    /// Returns the name in cufile.h without CU_FILE_, the meaning, and the remedy.
    fn describe(self) -> (&'static str, &'static str, &'static str) {
        let own_path = "leave gds off or at auto: host threads read the file then";
        match self.0 {
            5001 => (
                "DRIVER_NOT_INITIALIZED",
                "the nvidia-fs driver is not loaded",
                "`modprobe nvidia-fs`, or allow_compat_mode in /etc/cufile.json",
            ),
            5002..=5007 => (
                "DRIVER",
                "cuFile and its driver do not fit this machine or each other",
                "`gdscheck -p` says what is missing; install cuFile and driver of one version",
            ),
            5008 => (
                "IO_NOT_SUPPORTED",
                "the file system or its device has no direct path to the GPU",
                "use ext4 or XFS on a local NVMe drive, or leave gds at auto",
            ),
            5009 | 5029 => (
                "DEVICE_NOT_SUPPORTED",
                "the GPU or the drive cannot be used for it",
                "`gdscheck -p` lists what can; leave gds at auto",
            ),
            5010 | 5033 => (
                "NVFS_DRIVER_ERROR",
                "the nvidia-fs driver failed",
                "see `dmesg`; load the driver of the cuFile that is installed",
            ),
            5011..=5017 => (
                "CUDA_POINTER",
                "the memory is no GPU memory of this context, or too small",
                "give memory that was allocated on the GPU of the store",
            ),
            5018..=5020 => (
                "INVALID_FILE",
                "the kind of file, or how it was opened, cannot be used",
                "use a regular file or a block device",
            ),
            5022 => (
                "INVALID_VALUE",
                "an offset, a length or an address that it does not take",
                "use multiples of 4096, or leave gds at auto",
            ),
            5023 => (
                "MEMORY_ALREADY_REGISTERED",
                "the memory is registered already",
                "register memory once",
            ),
            5024 => (
                "MEMORY_NOT_REGISTERED",
                "the memory is not registered",
                "give the address that was registered",
            ),
            5025 => (
                "PERMISSION_DENIED",
                "the file may not be read or written",
                "change the permissions of the file",
            ),
            5027 => (
                "HANDLE_NOT_REGISTERED",
                "the file could not be registered: no file system or driver here takes it",
                own_path,
            ),
            5028 => (
                "HANDLE_ALREADY_REGISTERED",
                "the file is registered already",
                "register a file once",
            ),
            5030 => (
                "INTERNAL_ERROR",
                "it failed inside",
                "see cufile.log in the working directory; leave gds at auto",
            ),
            _ => ("ERROR", "it failed", own_path),
        }
    }
}

/// Returns the error of `call`; `cuda` is CUDA's error code, 0 for none.
pub fn failed(call: &str, code: CufileCode, cuda: i32) -> Error {
    let (name, what, remedy) = code.describe();
    let cuda = match cuda {
        0 => String::new(),
        cuda => format!(", CUDA error {cuda}"),
    };
    let text = format!("{call}: {what} ({name}, {}{cuda})", code.0);
    Error::environment(text, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_cause_and_a_remedy() {
        for code in 5000..5050 {
            let error = failed("cuFileRead", CufileCode(code), 0);
            assert!(error.to_string().contains(&code.to_string()), "{error}");
            assert!(!error.remedy().is_empty());
        }
        for (code, word) in [
            (5008, "no direct path"),
            (5022, "INVALID_VALUE"),
            (5027, "could not be registered"),
            (5030, "INTERNAL_ERROR"),
            (5011, "CUDA error 201"),
        ] {
            let error = failed("cuFileRead", CufileCode(code), 201);
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}

//! Whether a call is made in the process that made its object.

use crate::error::ExceptionParts;
use nvme_host::ProcessMark;

/// # Errors
/// In another process than `process`, which made `what`.
pub fn check(process: ProcessMark, what: &str) -> Result<(), ExceptionParts> {
    match process == ProcessMark::here() {
        true => Ok(()),
        false => Err(ExceptionParts::usage(
            format!("this {what} was made by another process, before a fork"),
            "make it in the process that uses it; let worker processes start by 'spawn'",
        )),
    }
}

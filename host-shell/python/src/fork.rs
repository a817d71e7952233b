//! Whether a call is made in the process that made its object.

use crate::error::Fault;

/// # Errors
/// In another process than `process`, which made `what`.
pub fn check(process: u32, what: &str) -> Result<(), Fault> {
    match process == std::process::id() {
        true => Ok(()),
        false => Err(Fault::usage(
            format!("this {what} was made by another process, before a fork"),
            "make it in the process that uses it; let worker processes start by 'spawn'",
        )),
    }
}

//! Checks that data to be written fit into the store before the first byte is changed.

use super::Store;
use nvme_driver::error::{Error, Result};

impl Store {
    /// Checks that `bytes` bytes from `offset` on lie in the store, before the first of them is written. `what` names
    /// the bytes in the error, with an article.
    ///
    /// # Errors
    /// [`Error::Usage`] if they do not.
    pub fn check_room(&self, what: &str, offset: u64, bytes: u64) -> Result<()> {
        let end = offset.checked_add(bytes);
        if end.is_some_and(|end| end <= self.len()) {
            return Ok(());
        }
        Err(Error::usage(
            format!(
                "{what} needs {bytes} bytes from byte {offset} on, and the device has {}",
                self.len()
            ),
            "use a larger device, or fewer bytes",
        ))
    }
}

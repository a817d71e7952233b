//! Get Log Page of any length, in commands that the controller takes.

use crate::controller::{ADMIN_BYTES, Controller};
use crate::error::{Error, Result};
use nvme_core::spec::admin::{self, LogOptions};
use nvme_core::spec::identify::lpa;
use nvme_core::spec::{Nsid, Status, log_page};
use std::ops::Range;

impl Controller {
    /// Sends Get Log Page, and returns the first `bytes` bytes (a multiple of 4) of page `lid`.
    pub fn log_page(&self, lid: u8, nsid: Nsid, bytes: usize) -> Result<Vec<u8>> {
        let name = log_page::name(lid).unwrap_or("vendor specific");
        let what = format!("Get Log Page ({name})");
        Ok(self
            .admin(
                &what,
                admin::get_log_page(lid, nsid, bytes as u32, 0),
                bytes,
            )?
            .1)
    }

    /// Reads bytes `range` of log page `lid` (both ends a multiple of 4), in as many commands as
    /// MDTS requires. `on_bytes` is called after each with the bytes read so far.
    ///
    /// A page that changes between two commands may be torn; where the controller retains asynchronous
    /// events, all commands but the last do, so that the page is released once it was read whole.
    ///
    /// A page may be shorter than the range, and controllers answer an offset behind its end with an error. The bytes
    /// read before are returned then, so that the result does not depend on the number of commands that MDTS makes
    /// necessary.
    ///
    /// # Errors
    /// [`Error::Usage`] for a range that no command can name; nothing is sent.
    pub fn log_page_range(
        &self,
        lid: u8,
        nsid: Nsid,
        range: Range<u64>,
        options: LogOptions,
        mut on_bytes: impl FnMut(u64),
    ) -> Result<Vec<u8>> {
        let whole = range.start.is_multiple_of(4) && range.end.is_multiple_of(4);
        if range.is_empty() || !whole {
            return Err(Error::usage(
                format!(
                    "{} bytes from offset {} of a log page are not a whole number of dwords",
                    range.end.saturating_sub(range.start),
                    range.start
                ),
                "use an offset and a length that are multiples of 4, and at least 4 bytes",
            ));
        }
        let most = self.max_transfer().min(ADMIN_BYTES) & !3;
        let extended = self.identify().lpa & lpa::EXTENDED_DATA != 0;
        // Without extended data the length has 12 bits, and there is no offset.
        if !extended && (range.start > 0 || range.end > most.min(4096 * 4)) {
            return Err(Error::usage(
                "the controller does not take an offset into a log page (LPA bit 2)",
                format!("ask for the first {} bytes at most", most.min(4096 * 4)),
            ));
        }
        if options.index_offset && range.end - range.start > most {
            return Err(Error::usage(
                "an index offset cannot be split into several commands",
                format!("ask for at most {most} bytes"),
            ));
        }
        let name = log_page::name(lid).unwrap_or("vendor specific");
        let what = format!("Get Log Page ({name})");
        let asked = options;
        let mut bytes = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let count = (range.end - at).min(most);
            let last = at + count == range.end;
            let options = LogOptions {
                rae: options.rae || !last,
                ..options
            };
            let sqe = admin::get_log_page(lid, nsid, count as u32, at);
            let part = match self.admin(&what, options.apply(sqe), count as usize) {
                Ok((_, part)) => part,
                Err(Error::Command { status, .. })
                    if at > range.start && status.is(Status::INVALID_FIELD) =>
                {
                    return self.release(&what, (lid, nsid, range.start), asked, bytes);
                }
                Err(error) => return Err(error),
            };
            bytes.extend(part);
            at += count;
            on_bytes(at - range.start);
        }
        Ok(bytes)
    }

    /// Reads the start of a log page again after its end was found, so that the controller clears the page's event. It
    /// does nothing if the caller asked to keep the event.
    fn release(
        &self,
        what: &str,
        (lid, nsid, start): (u8, Nsid, u64),
        options: LogOptions,
        bytes: Vec<u8>,
    ) -> Result<Vec<u8>> {
        if !options.rae {
            let sqe = admin::get_log_page(lid, nsid, 4, start);
            self.admin(what, options.apply(sqe), 4)?;
        }
        Ok(bytes)
    }
}

//! Features of a controller: Get Features and Set Features.

use super::Controller;
use super::passthru::room_of_feature;
use crate::error::{Error, Result};
use nvme_core::spec::admin::{self, Select};
use nvme_core::spec::identify::oncs;
use nvme_core::spec::{Nsid, feature};

impl Controller {
    /// Get Features: dword 0, and the data of the features that have some. What is not known to have none is given
    /// memory for it all the same: the controller decides what it moves. Zeroes at the end of data of unknown length
    /// are left out.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when Select is not the current value and ONCS has no bit for it.
    pub fn get_feature(
        &self,
        fid: u8,
        select: Select,
        nsid: Nsid,
        cdw11: u32,
    ) -> Result<(u32, Vec<u8>)> {
        if select != Select::Current && self.identify.oncs & oncs::SAVE_SELECT == 0 {
            return Err(Error::Unsupported {
                what: "Select in Get Features",
                bit: "bit 4 of ONCS",
            });
        }
        let sqe = admin::get_features(fid, select, nsid, cdw11);
        let room = room_of_feature(fid, self.max_transfer());
        let (dw0, mut data) = self.admin("Get Features", sqe, room)?;
        match feature::data_bytes(fid) {
            // Capabilities come in dword 0 alone, also for features with data.
            _ if select == Select::Capabilities => data.clear(),
            Some(bytes) => data.truncate(bytes),
            None => {
                let end = data.iter().rposition(|byte| *byte != 0);
                data.truncate(end.map_or(0, |last| last + 1));
            }
        }
        Ok((dw0, data))
    }

    /// Set Features by a value alone, not saved: dword 0. What is not known to have no data is given zeroes, so that a
    /// controller that expects some reads memory that there is.
    pub fn set_feature(&self, fid: u8, nsid: Nsid, value: u32) -> Result<u32> {
        let room = match feature::data_bytes(fid) {
            Some(0) => 0,
            _ => room_of_feature(fid, self.max_transfer()),
        };
        let sqe = admin::set_features(fid, nsid, value);
        Ok(self.admin("Set Features", sqe, room)?.0)
    }
}

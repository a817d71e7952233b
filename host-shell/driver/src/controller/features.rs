//! Features of a controller: Get Features and Set Features.

use super::Controller;
use super::passthru::{is_set_by_driver, room_of_feature};
use crate::error::{Error, Result};
use nvme_core::spec::admin::{self, FeatureSelect};
use nvme_core::spec::identify::oncs;
use nvme_core::spec::{Nsid, feature};

impl Controller {
    /// Sends Get Features, and returns dword 0 and the data of the features that have some. Unless
    /// the feature is known to have no data it is given a buffer, because the controller decides
    /// how much it transfers. Zeroes at the end of data of unknown length are left out.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when Select is not the current value and ONCS has no bit for it.
    pub fn get_feature(
        &self,
        fid: u8,
        select: FeatureSelect,
        nsid: Nsid,
        cdw11: u32,
    ) -> Result<(u32, Vec<u8>)> {
        if select != FeatureSelect::Current && self.identify.oncs & oncs::SAVE_SELECT == 0 {
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
            _ if select == FeatureSelect::Capabilities => data.clear(),
            Some(bytes) => data.truncate(bytes),
            None => {
                let end = data.iter().rposition(|byte| *byte != 0);
                data.truncate(end.map_or(0, |last| last + 1));
            }
        }
        Ok((dw0, data))
    }

    /// Sends Set Features with a value alone, not saved, and returns dword 0. Unless the feature is
    /// known to have no data, zeroes are passed as its data, so that a controller which expects
    /// some reads valid memory.
    ///
    /// # Errors
    /// [`Error::Usage`] for a feature that the driver sets itself.
    pub fn set_feature(&self, fid: u8, nsid: Nsid, value: u32) -> Result<u32> {
        if is_set_by_driver(fid) {
            return Err(Error::usage(
                format!("feature {fid:#04x} is set by the driver itself"),
                "choose another feature",
            ));
        }
        let room = match feature::data_bytes(fid) {
            Some(0) => 0,
            _ => room_of_feature(fid, self.max_transfer()),
        };
        let sqe = admin::set_features(fid, nsid, value);
        Ok(self.admin("Set Features", sqe, room)?.0)
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::controller::config::ControllerConfig;
    use nvme_core::spec::feature::fid;

    #[test]
    fn features_of_the_driver_are_not_set() {
        let device = crate::open("sim:mem?size=1MiB").unwrap();
        let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
        for own in [
            fid::NUMBER_OF_QUEUES,
            fid::HOST_MEMORY_BUFFER,
            fid::ASYNC_EVENT,
        ] {
            let error = controller.set_feature(own, Nsid::NONE, 0).unwrap_err();
            assert!(
                error.to_string().contains("by the driver itself"),
                "{error}"
            );
        }
        controller.set_feature(0x04, Nsid::NONE, 350).unwrap();
    }
}

//! Format NVM: erases namespaces and sets their block size.
//!
//! NVMe Base 2.0c, 5.14 (Format NVM command).

use crate::command::data::{DataDirection, store_status};
use crate::command::identify;
use crate::command::reply::CommandError;
use crate::device::ControllerState;
use crate::device::control::AdminState;
use crate::medium::namespace::{FORMATS, NamespaceImage};
use crate::medium::store::StoreError;
use core::sync::atomic::Ordering;
use nvme_spec::{Nsid, Sqe, Status};

/// Checks and executes Format NVM for one namespace or for all. NVMe Base 2.0c, 5.14.
pub(crate) fn format(
    device: &ControllerState,
    control: &AdminState,
    sqe: &Sqe,
) -> Result<(), CommandError> {
    let format = (sqe.cdw10 & 0xF | (sqe.cdw10 >> 12 & 3) << 4) as usize;
    let (extended, protection, erase) =
        (sqe.cdw10 >> 4 & 1, sqe.cdw10 >> 5 & 7, sqe.cdw10 >> 9 & 7);
    if format >= FORMATS.len() || protection != 0 {
        return Err(Status::INVALID_FORMAT.into());
    }
    // Every format erases the user data, so that both erase settings are fulfilled. After a
    // cryptographic erase the content of a block is undefined until it is written, and zeroes are a
    // valid choice.
    if erase > 2 {
        return Err(Status::INVALID_FIELD.into());
    }
    let all = sqe.nsid == Nsid::ALL.0;
    let chosen = |nsid: u32| all || nsid == sqe.nsid;
    let namespaces = || {
        (1..)
            .zip(device.namespaces.iter())
            .filter(|(nsid, _)| chosen(*nsid))
    };
    if namespaces().next().is_none() {
        return Err(Status::INVALID_NAMESPACE.into());
    }
    for (_, namespace) in namespaces() {
        // A namespace with metadata has only the format that it was created with, since its
        // metadata buffer has a fixed size.
        let other = namespace.metadata.is_some() && namespace.format() != format;
        let uneven = !namespace
            .store
            .bytes()
            .is_multiple_of(u64::from(FORMATS[format]));
        if namespace.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.into());
        }
        if other || uneven || extended != 0 {
            return Err(Status::INVALID_FORMAT.into());
        }
    }
    for (nsid, namespace) in namespaces() {
        make(
            device,
            control,
            (nsid, namespace),
            FORMATS[format].trailing_zeros(),
        )
        .map_err(|error| store_status(error, DataDirection::FromHost))?;
    }
    Ok(())
}

/// Erases a namespace, sets blocks of 2^`shift` bytes, and raises the event of a changed namespace.
pub(crate) fn make(
    device: &ControllerState,
    control: &AdminState,
    (nsid, namespace): (u32, &NamespaceImage),
    shift: u32,
) -> Result<(), StoreError> {
    let format = FORMATS.iter().position(|bytes| *bytes == 1 << shift);
    namespace.set_formatting(true);
    device.barrier();
    let result = namespace.reformat(format.unwrap_or(namespace.format()));
    identify::describe(device);
    namespace.set_formatting(false);
    result?;
    device
        .logs
        .lock()
        .namespace_changed(nsid, &control.features);
    device.attention.store(true, Ordering::Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{DATA, Driver, config};
    use nvme_auditor::Rule;
    use nvme_spec::{Lba, Nsid, Status, admin, nvm};

    #[test]
    fn format_erases_changes_the_block_size_and_tells() {
        let mut driver = Driver::with_queue(config());
        driver.breaks(&[Rule::LbaRange]);
        driver.fill(DATA, 3, 512);
        assert_eq!(
            driver.io(nvm::write(Nsid(1), Lba(2047), 1).with_prps(DATA, 0)),
            Ok(0)
        );
        let request = driver.push(0, admin::async_event_request());
        driver.ring(0);
        driver.step();
        let notices = admin::set_features(0x0B, Nsid::NONE, 1 << 8);
        assert_eq!(driver.admin(notices), Ok(0));
        let cid = driver.push(0, admin::format_nvm(Nsid(1), 1, 0));
        driver.ring(0);
        driver.step();
        assert_eq!(
            driver.pop(0).map(|cqe| (cqe.cid, cqe.status().code())),
            Some((cid, 0))
        );
        let event = driver.pop(0).expect("a notice");
        assert_eq!((event.cid, event.dw0), (request, 0x0004_0002));
        let read = nvm::read(Nsid(1), Lba(255), 1).with_prps(DATA, 0);
        assert_eq!(driver.io(read), Ok(0));
        assert_eq!(driver.bytes(DATA, 4096), [0; 4096]);
        let past = nvm::read(Nsid(1), Lba(256), 1).with_prps(DATA, 0);
        assert_eq!(driver.io(past), Err(Status::LBA_OUT_OF_RANGE));
        let list = admin::get_log_page(4, Nsid::ALL, 4096, 0).with_prps(DATA, 0);
        assert_eq!(driver.admin(list), Ok(0));
        assert_eq!(driver.bytes(DATA, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn impossible_formats_are_refused() {
        let mut driver = Driver::new(config());
        driver.breaks(&[Rule::NamespaceAbsent]);
        let mut protected = admin::format_nvm(Nsid(1), 0, 0);
        protected.cdw10 |= 1 << 5;
        let cases = [
            (admin::format_nvm(Nsid(1), 2, 0), Status::INVALID_FORMAT),
            (admin::format_nvm(Nsid(1), 63, 0), Status::INVALID_FORMAT),
            (protected, Status::INVALID_FORMAT),
            (admin::format_nvm(Nsid(1), 0, 3), Status::INVALID_FIELD),
            (admin::format_nvm(Nsid(2), 0, 0), Status::INVALID_NAMESPACE),
            (admin::format_nvm(Nsid(0), 0, 0), Status::INVALID_NAMESPACE),
        ];
        for (i, (sqe, status)) in cases.into_iter().enumerate() {
            assert_eq!(driver.admin(sqe), Err(status), "case {i}");
        }
        assert_eq!(driver.admin(admin::format_nvm(Nsid::ALL, 1, 1)), Ok(0));
    }
}

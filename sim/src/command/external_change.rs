//! The changes that another host, or a management tool, makes to the device while this host uses
//! it.
//!
//! A command whose fault is such a change is executed first. Its completion is posted after the
//! change was made and its event posted, so that a driver which reads its events before it submits
//! the next command knows of the change.

use crate::command::{format, identify, sanitize};
use crate::config::fault::ExternalChange;
use crate::device::ControllerState;
use crate::device::control::AdminState;
use core::sync::atomic::Ordering;
use nvme_spec::admin::{self, SanitizeAction, SanitizeFields};

/// The namespace that the changes apply to.
const NSID: u32 = 1;

/// Makes the waiting changes. The caller serves the admin queue, and holds no lock of another
/// queue.
pub(crate) fn apply(device: &ControllerState, control: &AdminState) {
    for change in device.external.take() {
        make(device, control, change);
    }
}

fn make(device: &ControllerState, control: &AdminState, change: ExternalChange) {
    let Some(namespace) = device.namespaces.first() else {
        return;
    };
    match change {
        ExternalChange::Format(bytes) => {
            // A store that fails here has failed before; the change has no command to report to.
            let _ = format::make(device, control, (NSID, namespace), bytes.trailing_zeros());
            return;
        }
        ExternalChange::Shrink(bytes) => {
            device.barrier();
            namespace.set_bytes(bytes.min(namespace.bytes()));
        }
        ExternalChange::Detach => {
            device.barrier();
            namespace.set_bytes(0);
        }
        ExternalChange::Protect => namespace.protect(),
        ExternalChange::Erase => {
            let fields = SanitizeFields::new(SanitizeAction::BlockErase);
            // A write-protected namespace makes sanitize fail, and then nothing is erased.
            let _ = sanitize::sanitize(device, &admin::sanitize(fields));
            return;
        }
        ExternalChange::Firmware(mdts) => {
            device.external.set_mdts(mdts);
            identify::describe(device);
            return device.logs.lock().firmware_activated(&control.features);
        }
        ExternalChange::Replace => return device.external.replace(),
        ExternalChange::Grant(pairs) => return device.external.set_most_pairs(pairs),
    }
    identify::describe(device);
    device
        .logs
        .lock()
        .namespace_changed(NSID, &control.features);
    device.attention.store(true, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use crate::config::fault::{ExternalChange, Fault, FaultCondition, FaultRule};
    use crate::testing::{DATA, Driver, config};
    use nvme_auditor::Rule;
    use nvme_spec::admin::cns;
    use nvme_spec::identify::IdentifyNamespace;
    use nvme_spec::{Lba, Nsid, Status, admin, nvm};
    use zerocopy::FromBytes;

    /// Returns a driver whose first I/O command meets `change`, with a request for events, which are asked for.
    fn met_by(change: ExternalChange) -> (Driver, u16) {
        let mut config = config();
        config.faults.rules.push(FaultRule {
            when: FaultCondition {
                nth: Some(1),
                ..FaultCondition::default()
            },
            what: Fault::External(change),
        });
        let mut driver = Driver::with_queue(config);
        assert_eq!(
            driver.admin(admin::set_features(0x0B, Nsid::NONE, 3 << 8)),
            Ok(0)
        );
        let request = driver.push(0, admin::async_event_request());
        driver.ring(0);
        driver.step();
        (driver, request)
    }

    fn namespace(driver: &mut Driver) -> IdentifyNamespace {
        let sqe = admin::identify(cns::NAMESPACE, Nsid(1)).with_prps(DATA, 0);
        driver.admin(sqe).unwrap();
        IdentifyNamespace::read_from_bytes(&driver.bytes(DATA, 4096)).unwrap()
    }

    #[test]
    fn the_command_is_executed_and_completes_after_the_event() {
        let (mut driver, request) = met_by(ExternalChange::Format(4096));
        driver.breaks(&[Rule::LbaRange]);
        let last = nvm::read(Nsid(1), Lba(2047), 1).with_prps(DATA, 0);
        let cid = driver.push(1, last);
        driver.ring(1);
        driver.step();
        assert!(driver.peek(1).is_none(), "the event comes first");
        driver.now_ns += 1;
        driver.step();
        driver.step();
        assert_eq!(driver.drain(1), [(cid, 0)], "by the old format");
        let event = driver.pop(0).expect("the event came first");
        assert_eq!((event.cid, event.dw0), (request, 0x0004_0002));
        assert_eq!(namespace(&mut driver).block_bytes(), Some(4096));
        assert_eq!(driver.io(last), Err(Status::LBA_OUT_OF_RANGE));
    }

    #[test]
    fn each_change_is_seen_in_identify_and_by_commands() {
        let read = nvm::read(Nsid(1), Lba(9), 1).with_prps(DATA, 0);
        let write = nvm::write(Nsid(1), Lba(9), 1).with_prps(DATA, 0);
        let after = |change: ExternalChange| {
            let (mut driver, _) = met_by(change);
            driver.breaks_anything();
            let cid = driver.push(1, nvm::flush(Nsid(1)));
            driver.ring(1);
            for _ in 0..3 {
                driver.step();
                driver.now_ns += 1;
            }
            assert_eq!(driver.drain(1), [(cid, 0)]);
            let _ = driver.drain(0);
            let identify = namespace(&mut driver);
            let code = |result: Result<u32, Status>| result.map_or_else(Status::code, |_| 0);
            (identify, code(driver.io(read)), code(driver.io(write)))
        };
        let (identify, read_code, _) = after(ExternalChange::Shrink(4096));
        assert_eq!(
            (identify.nsze, read_code),
            (8, Status::LBA_OUT_OF_RANGE.code())
        );
        let (identify, read_code, _) = after(ExternalChange::Detach);
        assert_eq!(
            (identify.nsze, read_code),
            (0, Status::INVALID_NAMESPACE.code())
        );
        let (identify, read_code, write_code) = after(ExternalChange::Protect);
        assert_eq!((identify.nsattr, read_code), (1, 0));
        assert_eq!(write_code, Status::NAMESPACE_WRITE_PROTECTED.code());
        let (before, ..) = after(ExternalChange::Firmware(1));
        let (replaced, ..) = after(ExternalChange::Replace);
        assert_ne!(before.nguid, replaced.nguid);
    }
}

//! Changes that another host makes to a device in use: the next call reports the change and sends nothing.

use nvme_driver::core::spec::Iova;
use nvme_driver::core::spec::admin::{self, Format, SanitizeAction, SanitizeFields};
use nvme_driver::core::spec::{Lba, Nsid, Status, nvm};
use nvme_driver::core::{ControllerIdentity, RegisterAccess};
use nvme_driver::passthru::CommandSet;
use nvme_driver::{
    Controller, ControllerConfig, Device, DmaPages, DoorbellMap, DriverQueue, Error, Namespace,
    QueueRefusal, RejectedSubmission,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const NS: Nsid = Nsid(1);

/// Returns a controller whose first write is followed by `change`.
fn controller(change: &str) -> Controller {
    let text = format!("sim:mem?size=16MiB&block=4096&queues=8&fault={change}@op=write,nth=1");
    let config = ControllerConfig {
        timeout: Duration::from_secs(30),
        ..ControllerConfig::default()
    };
    Controller::start(nvme_driver::open(&text).unwrap(), &config).unwrap()
}

fn opened(change: &str) -> (Controller, Namespace) {
    let controller = controller(change);
    let namespace = controller.namespace(NS).unwrap();
    (controller, namespace)
}

fn cause(error: Error) -> String {
    match error {
        Error::Changed { cause } => cause,
        other => panic!("{other}"),
    }
}

/// Sends the write that makes the simulator change the device. Its outcome is unknown, except for changes that no event
/// reports.
fn meet(change: &str, namespace: &mut Namespace) {
    match (change, namespace.write(Lba(3), &[7; 4096])) {
        ("protect" | "replace" | "grant:1", written) => written.unwrap(),
        ("erase", _) => {}
        (_, written) => drop(cause(written.unwrap_err())),
    }
}

fn submitted(controller: &Controller) -> u64 {
    let all = controller.statistics();
    all.iter().map(|(_, statistics)| statistics.submitted).sum()
}

/// Each change, and the error that the next read reports; empty if the read succeeds.
const CHANGES: [(&str, &str); 5] = [
    (
        "format:512",
        "namespace 1 was formatted (4096 -> 512 bytes a block)",
    ),
    (
        "shrink:8MiB",
        "namespace 1 has become smaller (4096 -> 2048 blocks)",
    ),
    ("detach", "namespace 1 was deleted or detached"),
    ("protect", ""),
    (
        "firmware:1",
        "the controller's largest transfer (MDTS) fell from 131072 bytes to 8192 bytes",
    ),
];

#[test]
fn the_next_call_says_what_changed_and_sends_nothing() {
    for (change, says) in CHANGES {
        let (controller, mut namespace) = opened(change);
        meet(change, &mut namespace);
        let before = submitted(&controller);
        let mut data = [0; 4096];
        let read = namespace.read(Lba(3), &mut data);
        if says.is_empty() {
            read.unwrap();
            assert_eq!(data, [7; 4096]);
        } else {
            let said = cause(read.unwrap_err());
            assert!(said.starts_with(says), "{change}: {said}");
        }
        let before = before + u64::from(says.is_empty());
        let said = cause(namespace.write(Lba(0), &data).unwrap_err());
        let says = if says.is_empty() {
            "namespace 1 has become write protected"
        } else {
            says
        };
        assert!(said.starts_with(says), "{change}: {said}");
        assert_eq!(submitted(&controller), before, "{change}: nothing was sent");
        let flushed = namespace.flush();
        assert_eq!(flushed.is_ok(), change == "protect", "{change}");
    }
}

/// No event reports the begin of a sanitize operation; the controller refuses commands meanwhile, and the driver
/// refuses them afterwards.
#[test]
fn data_that_were_sanitized_are_not_read_as_if_nothing_was() {
    let (controller, mut namespace) = opened("erase");
    meet("erase", &mut namespace);
    let mut data = [0; 4096];
    match namespace.read(Lba(3), &mut data).unwrap_err() {
        Error::Command { status, .. } => {
            assert!(status.is(Status::SANITIZE_IN_PROGRESS), "{status}")
        }
        other => drop(cause(other)),
    }
    let before = submitted(&controller);
    let said = cause(namespace.read(Lba(3), &mut data).unwrap_err());
    assert!(said.starts_with("the device was sanitized"), "{said}");
    assert_eq!(submitted(&controller), before);
}

#[test]
fn what_is_opened_anew_works() {
    for (change, block) in [
        ("format:512", 512),
        ("shrink:8MiB", 4096),
        ("firmware:1", 4096),
    ] {
        let (controller, mut old) = opened(change);
        meet(change, &mut old);
        let mut new = controller.namespace(NS).unwrap();
        if change == "firmware:1" {
            // Longer than a command of the new firmware moves.
            new.write(Lba(0), &[5; 128 << 10]).unwrap();
            let largest = controller.max_transfer();
            assert_eq!(largest, 8192);
        }
        assert_eq!(new.block_bytes(), block);
        let data = vec![9; block as usize];
        new.write(Lba(1), &data).unwrap();
        let mut back = vec![0; block as usize];
        new.read(Lba(1), &mut back).unwrap();
        assert_eq!(back, data, "{change}");
        // Each later call of the old handle reports the change, too.
        for _ in 0..3 {
            cause(old.read(Lba(0), &mut [0; 4096]).unwrap_err());
        }
    }
}

/// The queue submits without a blocking call or a pause between submissions.
#[test]
fn a_queue_is_refused_by_what_its_maker_was_told() {
    let controller = controller("format:512");
    let mut queue = controller.create_queue_pair(16).unwrap();
    let write = |queue: &mut DriverQueue| {
        let buffer = controller.alloc(4096).unwrap();
        queue.submit(nvm::write(NS, Lba(0), 1), Some(buffer))
    };
    write(&mut queue).unwrap();
    queue.ring();
    assert!(queue.wait().unwrap().unwrap().is_success());
    let refused = write(&mut queue).unwrap_err();
    let QueueRefusal::Changed(said) = &refused.error else {
        panic!("{}", refused.error);
    };
    assert!(said.contains("4096 -> 512"), "{said}");
    assert!(refused.buffer.is_some(), "the buffer comes back");
    assert_eq!(queue.in_flight(), 0);
    // A queue made now relies on the reported facts; one made after a new look at the namespace does not.
    let mut same = controller.create_queue_pair(16).unwrap();
    assert!(matches!(
        write(&mut same).unwrap_err().error,
        QueueRefusal::Changed(_)
    ));
    assert_eq!(controller.usable_namespace(NS).unwrap().block_bytes, 512);
    let mut new = controller.create_queue_pair(16).unwrap();
    let buffer = controller.alloc(512).unwrap();
    new.submit(nvm::write(NS, Lba(0), 1), Some(buffer)).unwrap();
    new.ring();
    assert!(new.wait().unwrap().unwrap().is_success());
}

/// If another thread has the admin queue when the event arrives, it may be about to handle it: submissions wait for
/// that thread.
#[test]
fn no_write_goes_out_after_the_event_while_another_thread_sends_admin_commands() {
    for _ in 0..8 {
        let controller = controller("format:512");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let busy = || {
                while !is_over.load(Ordering::Relaxed) {
                    controller.log_page(2, Nsid::ALL, 512).unwrap();
                }
            };
            scope.spawn(busy);
            let mut queue = controller.create_queue_pair(16).unwrap();
            let mut write = || {
                let buffer = controller.alloc(4096).unwrap();
                queue.submit(nvm::write(NS, Lba(0), 1), Some(buffer))?;
                queue.ring();
                assert!(queue.wait().unwrap().unwrap().is_success());
                Ok(())
            };
            let (first, second): (Result<(), RejectedSubmission>, _) = (write(), write());
            is_over.store(true, Ordering::Relaxed);
            first.unwrap();
            let refused = second.unwrap_err().error;
            assert!(matches!(refused, QueueRefusal::Changed(_)), "{refused}");
        });
    }
}

/// If one of two namespaces changes, the other one stays usable.
#[test]
fn another_namespace_is_not_affected() {
    let text = "sim:mem?size=16MiB&block=4096&ns=2&queues=8&fault=format:512@op=write,nth=1";
    let device = nvme_driver::open(text).unwrap();
    let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
    let mut one = controller.namespace(NS).unwrap();
    let mut two = controller.namespace(Nsid(2)).unwrap();
    two.write(Lba(0), &[1; 4096]).unwrap();
    two.write(Lba(1), &[2; 4096]).unwrap();
    cause(one.write(Lba(0), &[3; 4096]).unwrap_err());
    let mut back = [0; 8192];
    two.read(Lba(0), &mut back).unwrap();
    assert_eq!((back[0], back[4096]), (1, 2));
}

/// After a reset the driver finds changes that no event reports: another drive, another size, another format.
#[test]
fn a_namespace_that_differs_after_a_reset_is_not_used() {
    for (change, says) in [
        (
            "replace",
            "another controller answers: its serial number is SIM0REPLACED00000001",
        ),
        ("format:512", "namespace 1 was formatted"),
        ("shrink:8MiB", "namespace 1 has become smaller"),
        ("detach", "namespace 1 was deleted"),
        ("firmware:1", "the controller's largest transfer"),
    ] {
        let (controller, mut namespace) = opened(change);
        meet(change, &mut namespace);
        controller.reset().unwrap();
        let said = cause(namespace.write(Lba(3), &[8; 4096]).unwrap_err());
        assert!(said.starts_with(says), "{change}: {said}");
        assert_eq!(controller.resets(), 1);
        let again = controller.namespace(NS);
        assert_eq!(again.is_err(), change == "detach", "{change}");
    }
    // The same namespace after a reset works.
    let (controller, mut namespace) = opened("protect");
    namespace.write(Lba(3), &[7; 4096]).unwrap();
    controller.reset().unwrap();
    namespace.read(Lba(3), &mut [0; 4096]).unwrap();
}

/// The controller answers Identify of a namespace that it no longer has with Invalid Namespace, where others return
/// zeros.
#[test]
fn a_namespace_that_identify_refuses_was_deleted() {
    // Six Identify commands belong to bring-up and opening. The write's event has the 7th sent, for the controller, and
    // the 8th for the namespace.
    let faults = "fault=detach@op=write,nth=1&fault=status:0xb@op=identify,nth=8";
    let text = &format!("sim:mem?size=16MiB&block=4096&queues=8&{faults}");
    let controller = Controller::start(
        nvme_driver::open(text).unwrap(),
        &ControllerConfig::default(),
    )
    .unwrap();
    let mut namespace = controller.namespace(NS).unwrap();
    let said = cause(namespace.write(Lba(3), &[7; 4096]).unwrap_err());
    assert!(said.starts_with("namespace 1 was deleted"), "{said}");
}

/// A device whose doorbells lie twice as far apart (CAP.DSTRD) once the test sets the flag.
struct StridedDevice {
    device: Arc<dyn Device>,
    is_changed: Arc<AtomicBool>,
}

impl RegisterAccess for StridedDevice {
    fn identity(&self) -> &ControllerIdentity {
        self.device.registers().identity()
    }

    fn read32(&self, offset: u32) -> u32 {
        self.device.registers().read32(offset)
    }

    fn read64(&self, offset: u32) -> u64 {
        let value = self.device.registers().read64(offset);
        let is_other = offset == 0 && self.is_changed.load(Ordering::SeqCst);
        value ^ (u64::from(is_other) << 32)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.device.registers().write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        self.device.registers().write64(offset, value);
    }
}

impl Device for StridedDevice {
    fn name(&self) -> String {
        self.device.name()
    }

    fn describe(&self) -> String {
        self.device.describe()
    }

    fn registers(&self) -> &(dyn RegisterAccess + Sync) {
        self
    }

    fn doorbells(&self) -> DoorbellMap {
        self.device.doorbells()
    }

    fn map_dma(&self, pages: &Arc<DmaPages>) -> nvme_driver::Result<Iova> {
        self.device.map_dma(pages)
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> nvme_driver::Result<()> {
        self.device.unmap_dma(iova, bytes)
    }
}

/// A queue that the controller did not create again after a reset is unusable: its commands would only time out.
#[test]
fn a_reset_that_grants_fewer_queues_ends_the_controller() {
    let (controller, mut first) = opened("grant:1");
    let mut second = controller.namespace(NS).unwrap();
    meet("grant:1", &mut first);
    second.read(Lba(3), &mut [0; 4096]).unwrap();
    let error = controller.reset().unwrap_err().to_string();
    let says = "only 1 of 2 queues could be created again";
    assert!(error.contains(says), "{error}");
    let before = submitted(&controller);
    for namespace in [&mut first, &mut second] {
        let read = namespace.read(Lba(3), &mut [0; 4096]);
        assert!(matches!(read, Err(Error::Gone { .. })), "{read:?}");
    }
    assert_eq!(submitted(&controller), before);
    // With one queue the controller comes back, but grants no further queue.
    let (controller, mut only) = opened("grant:1");
    meet("grant:1", &mut only);
    controller.reset().unwrap();
    only.read(Lba(3), &mut [0; 4096]).unwrap();
    let refused = controller
        .namespace(NS)
        .err()
        .map(|error| error.to_string());
    let says = "all 1 queue pairs that the controller grants are in use";
    assert!(
        refused.as_ref().is_some_and(|text| text.contains(says)),
        "{refused:?}"
    );
}

/// Doorbells were mapped, and rings laid out, by the old capabilities.
#[test]
fn a_reset_that_finds_other_doorbells_ends_the_controller() {
    let is_changed = Arc::<AtomicBool>::default();
    let device = StridedDevice {
        device: nvme_driver::open("sim:mem?size=16MiB&block=4096&queues=8").unwrap(),
        is_changed: Arc::clone(&is_changed),
    };
    let controller = Controller::start(Arc::new(device), &ControllerConfig::default()).unwrap();
    let mut namespace = controller.namespace(NS).unwrap();
    controller.reset().unwrap();
    namespace.write(Lba(3), &[7; 4096]).unwrap();
    is_changed.store(true, Ordering::SeqCst);
    let error = controller.reset().unwrap_err().to_string();
    assert!(
        error.contains("doorbell stride 1 (before: 4096 and 0)"),
        "{error}"
    );
    let read = namespace.read(Lba(3), &mut [0; 4096]);
    assert!(matches!(read, Err(Error::Gone { .. })), "{read:?}");
}

/// No event reports a format to the host that sent it; the driver makes its handles compare the facts.
#[test]
fn a_format_by_this_process_is_known_to_its_handles() {
    let (controller, mut namespace) = opened("drop");
    let format = nvme_driver::core::spec::admin::Format::new(0, 0);
    controller
        .format(NS, format, Duration::from_secs(30), |_| ())
        .unwrap();
    let said = cause(namespace.read(Lba(0), &mut [0; 4096]).unwrap_err());
    assert!(said.contains("4096 -> 512"), "{said}");
}

/// Sends `sqe`, by passthru or as an admin command, and returns the errors of reads by the handles of namespaces 1 and
/// 2 afterwards.
fn after_own(sqe: nvme_driver::core::spec::Sqe, by_passthru: bool) -> [Option<String>; 2] {
    let text = "sim:mem?size=16MiB&block=4096&ns=2&queues=8";
    let device = nvme_driver::open(text).unwrap();
    let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
    let mut namespaces = [1, 2].map(|nsid| controller.namespace(Nsid(nsid)).unwrap());
    for namespace in &mut namespaces {
        namespace.write(Lba(0), &[7; 4096]).unwrap();
    }
    let sent = match by_passthru {
        true => controller.passthru(CommandSet::Admin, sqe, &[]).map(drop),
        false => controller.admin("a command", sqe, 0).map(drop),
    };
    let before = submitted(&controller);
    let mut data = [0; 4096];
    let said = namespaces
        .each_mut()
        .map(|namespace| namespace.read(Lba(0), &mut data).err().map(cause));
    let ok = said.iter().filter(|said| said.is_none()).count() as u64;
    assert_eq!(submitted(&controller) - before, ok, "{sent:?}");
    // A handle that is opened now relies on the present facts, once they can be read.
    if sent.is_ok() && sqe.opcode() != admin::opcode::SANITIZE {
        let mut new = controller.namespace(NS).unwrap();
        let mut data = vec![0; new.block_bytes() as usize];
        new.read(Lba(0), &mut data).unwrap();
    }
    said
}

/// No event reports commands of the host itself, and the facts may be unchanged after them.
#[test]
fn what_this_process_erases_is_refused_to_its_handles() {
    let device = nvme_driver::open("sim:mem?size=16MiB&block=4096").unwrap();
    let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
    let same = controller.identify_namespace(NS).unwrap().flbas & 0xF;
    drop(controller);
    let sanitize = SanitizeFields::new(SanitizeAction::BlockErase);
    for by_passthru in [false, true] {
        let [one, two] = after_own(Format::new(same, 0).command(NS), by_passthru);
        let words = "namespace 1 was formatted or deleted: its data are gone";
        assert_eq!((one.as_deref(), two), (Some(words), None));
        let [one, two] = after_own(Format::new(0, 0).command(NS), by_passthru);
        assert!(one.unwrap().contains("4096 -> 512") && two.is_none());
        let [one, two] = after_own(Format::new(same, 0).command(Nsid::ALL), by_passthru);
        assert!(one.is_some() && two.is_some());
        for said in after_own(admin::sanitize(sanitize), by_passthru) {
            assert!(said.unwrap().starts_with("the device was sanitized"));
        }
        // A command that the controller refuses erases nothing.
        let refused = Format::new(15, 0).command(NS);
        assert_eq!(after_own(refused, by_passthru), [None, None]);
        let feature = admin::set_features(0x04, Nsid::NONE, 350);
        assert_eq!(after_own(feature, by_passthru), [None, None]);
    }
}

/// Another drive answers without an event: after a command that may change what is stored, the driver reads the facts
/// again.
#[test]
fn what_a_command_of_this_process_may_have_changed_is_read_again() {
    for by_passthru in [false, true] {
        let (controller, mut namespace) = opened("replace");
        meet("replace", &mut namespace);
        let mut data = [0; 4096];
        namespace.read(Lba(3), &mut data).unwrap();
        let feature = admin::set_features(0x04, Nsid::NONE, 350);
        match by_passthru {
            true => drop(
                controller
                    .passthru(CommandSet::Admin, feature, &[])
                    .unwrap(),
            ),
            false => drop(controller.admin("Set Features", feature, 0).unwrap()),
        }
        let said = cause(namespace.read(Lba(3), &mut data).unwrap_err());
        assert!(said.starts_with("another controller answers"), "{said}");
    }
}

/// A device that goes while the facts are to be read again is gone, and not another one.
#[test]
fn an_error_of_the_look_is_that_error() {
    let text = "sim:mem?size=16MiB&block=4096&queues=8&fault=allones@op=format,nth=1";
    let device = nvme_driver::open(text).unwrap();
    let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
    controller.usable_namespace(NS).unwrap();
    let mut queue = controller.create_queue_pair(16).unwrap();
    let format = Format::new(0, 0).command(NS);
    let sent = controller.admin("Format NVM", format, 0);
    assert!(matches!(sent, Err(Error::Gone { .. })), "{sent:?}");
    let buffer = controller.alloc(4096).unwrap();
    let refused = queue.submit(nvm::read(NS, Lba(0), 1), Some(buffer));
    let error = refused.unwrap_err().error;
    assert!(matches!(error, QueueRefusal::Unread(_)), "{error}");
    let error = error.into_error(|error| panic!("{error}"));
    assert!(matches!(error, Error::Gone { .. }), "{error}");
}

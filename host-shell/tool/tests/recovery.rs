//! The library over a simulator that misbehaves: every command ends once, queues survive a reset.
#![cfg(feature = "sim")]

mod common;

use common::{Behind, Judge, Place, binary, embedded};
use nvme_host::core::spec::register::{Cap, Cc, offset};
use nvme_host::core::spec::{Iova, Lba, Nsid, admin, nvm};
use nvme_host::core::{AbortReason, CommandOutcome, ControllerIdentity, RegisterAccess};
use nvme_host::{
    Controller, ControllerConfig, Device, DmaPages, DoorbellMap, DriverQueue, Error,
    QueueCompletion,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const BLOCK: usize = 4096;
/// Longer than a server may have to wait on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(1);

in_each_place!(
    a_lost_command_costs_a_reset_and_nothing_else,
    commands_beside_a_failed_controller_may_be_sent_again,
    nonsense_in_the_completion_queue_is_survived,
    a_device_that_leaves_is_told_apart,
    a_host_memory_buffer_is_lent_and_given_again_after_a_reset,
    queues_come_back_when_dropped_and_run_out_with_a_clear_error,
    small_and_strange_controllers_work,
    namespaces_with_metadata_are_refused,
    dropping_a_queue_ends_what_is_in_flight_and_frees_the_queue,
);

/// A controller, and the server that it lies behind.
struct Rig {
    controller: Controller,
    behind: Option<Behind>,
    _judge: Option<Judge>,
}

impl Rig {
    fn shut_down(self) {
        self.controller.shut_down().unwrap();
        if let Some(behind) = self.behind {
            behind.server.stop();
        }
    }
}

fn start(place: Place, device: &str) -> Rig {
    let config = ControllerConfig {
        timeout: TIMEOUT,
        ..ControllerConfig::default()
    };
    let (behind, (device, judge)) = match place {
        Place::Embedded => {
            let (device, judge) = embedded(device);
            (None, (device, Some(judge)))
        }
        Place::Served => {
            let behind = Behind::start(binary(), device).unwrap();
            let device = nvme_host::open(&behind.server.device()).unwrap();
            (Some(behind), (device, None))
        }
    };
    Rig {
        controller: Controller::start(device, &config).unwrap(),
        behind,
        _judge: judge,
    }
}

/// Sends a read of block 0 and does not wait for its end.
fn send_a_read(controller: &Controller, queue: &mut DriverQueue) {
    let buffer = controller.alloc(BLOCK).unwrap();
    let read = nvm::read(Nsid(1), Lba(0), 1);
    queue.submit(read, Some(buffer)).unwrap();
    queue.ring();
}

/// Reads `count` single blocks and waits for the end of all of them.
fn read_blocks(
    controller: &Controller,
    queue: &mut DriverQueue,
    count: u64,
) -> Vec<QueueCompletion> {
    let mut sent = BTreeSet::new();
    for lba in 0..count {
        let buffer = controller.alloc(BLOCK).unwrap();
        sent.insert(
            queue
                .submit(nvm::read(Nsid(1), Lba(lba), 1), Some(buffer))
                .unwrap()
                .0,
        );
    }
    queue.ring();
    let mut ended = Vec::new();
    while let Some(done) = queue.wait().unwrap() {
        assert!(
            sent.remove(&done.cid.0),
            "command {} ended twice or was never sent",
            done.cid
        );
        assert!(done.buffer.is_some(), "the buffer comes back");
        ended.push(done);
    }
    assert!(sent.is_empty(), "commands {sent:?} never ended");
    ended
}

fn a_lost_command_costs_a_reset_and_nothing_else(place: Place) {
    let rig = start(place, "sim:mem?fault=drop@op=read,nth=3");
    let controller = &rig.controller;
    let mut other = controller.create_queue_pair(16).unwrap();
    let mut queue = controller.create_queue_pair(16).unwrap();
    let ended = read_blocks(controller, &mut queue, 8);
    let lost: Vec<_> = ended.iter().filter(|done| !done.is_success()).collect();
    assert_eq!(lost.len(), 1);
    assert!(lost[0].late);
    assert!(matches!(
        queue.error_of(lost[0], "Read"),
        Error::Timeout {
            timeout_ms: 1000,
            ..
        }
    ));
    assert_eq!(queue.statistics().expired, 1);
    assert!(controller.resets() <= 1);
    for queue in [&mut queue, &mut other] {
        let ended = read_blocks(controller, queue, 15);
        assert!(
            ended.iter().all(QueueCompletion::is_success),
            "both queues work afterwards"
        );
    }
    rig.shut_down();
}

fn commands_beside_a_failed_controller_may_be_sent_again(place: Place) {
    let rig = start(place, "sim:mem?fault=cfs@op=read,nth=4");
    let controller = &rig.controller;
    let mut queue = controller.create_queue_pair(16).unwrap();
    let ended = read_blocks(controller, &mut queue, 8);
    let aborted: Vec<_> = ended.iter().filter(|done| !done.is_success()).collect();
    assert!(!aborted.is_empty());
    for done in aborted {
        assert_eq!(
            done.outcome,
            CommandOutcome::Aborted(AbortReason::ControllerReset)
        );
        assert!(done.may_retry());
    }
    assert_eq!(controller.resets(), 1);
    assert!(
        read_blocks(controller, &mut queue, 8)
            .iter()
            .all(QueueCompletion::is_success)
    );
}

fn nonsense_in_the_completion_queue_is_survived(place: Place) {
    for fault in ["duplicate", "wrongcid:77", "badsqhd:999"] {
        let rig = start(place, &format!("sim:mem?fault={fault}@op=read,nth=2"));
        let controller = &rig.controller;
        let mut queue = controller.create_queue_pair(16).unwrap();
        read_blocks(controller, &mut queue, 8);
        let again = read_blocks(controller, &mut queue, 8);
        assert!(again.iter().all(QueueCompletion::is_success), "{fault}");
    }
}

fn a_device_that_leaves_is_told_apart(place: Place) {
    let rig = start(place, "sim:mem?fault=allones@op=read,nth=1");
    let controller = &rig.controller;
    let mut queue = controller.create_queue_pair(16).unwrap();
    send_a_read(controller, &mut queue);
    assert!(matches!(queue.wait(), Err(Error::Gone { .. })));
}

fn a_host_memory_buffer_is_lent_and_given_again_after_a_reset(place: Place) {
    let rig = start(place, "sim:mem?hmpre=256&hmmin=16&fault=cfs@op=read,nth=1");
    let controller = &rig.controller;
    assert!(controller.info().host_memory);
    let mut queue = controller.create_queue_pair(4).unwrap();
    read_blocks(controller, &mut queue, 1);
    assert_eq!(controller.resets(), 1);
    assert!(controller.info().host_memory);
    drop(queue);
    rig.shut_down();
}

fn queues_come_back_when_dropped_and_run_out_with_a_clear_error(place: Place) {
    let rig = start(place, "sim:mem?queues=2");
    let controller = &rig.controller;
    for _ in 0..3 {
        let queues: Vec<_> = (0..2)
            .map(|_| controller.create_queue_pair(8).unwrap())
            .collect();
        assert!(matches!(
            controller.create_queue_pair(8),
            Err(Error::Usage { .. })
        ));
        assert_eq!(queues[1].qid().0, 2);
    }
}

fn small_and_strange_controllers_work(place: Place) {
    for options in [
        "mqes=2",
        "mqes=3&dstrd=4",
        "mdts=1",
        "mpsmin=4&mpsmax=4",
        "block=512&mdts=0",
        "queues=1",
        "noiob=7",
    ] {
        let rig = start(place, &format!("sim:mem?size=1MiB&{options}"));
        let controller = &rig.controller;
        let mut namespace = controller.namespace(Nsid(1)).unwrap();
        let data: Vec<u8> = (0..1 << 20)
            .map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        namespace.write(Lba(0), &data).unwrap();
        let mut back = vec![0; data.len()];
        namespace.read(Lba(0), &mut back).unwrap();
        assert!(back == data, "{options}");
    }
}

fn namespaces_with_metadata_are_refused(place: Place) {
    let rig = start(place, "sim:mem?meta=8");
    let controller = &rig.controller;
    assert!(matches!(
        controller.namespace(Nsid(1)),
        Err(Error::Device { .. })
    ));
}

fn dropping_a_queue_ends_what_is_in_flight_and_frees_the_queue(place: Place) {
    let rig = start(place, "sim:mem?queues=1&fault=drop@op=read");
    let controller = &rig.controller;
    let mut queue = controller.create_queue_pair(16).unwrap();
    send_a_read(controller, &mut queue);
    drop(queue);
    let mut again = controller.create_queue_pair(16).unwrap();
    again.submit(nvm::flush(Nsid(1)), None).unwrap();
    again.ring();
    assert!(again.wait().unwrap().unwrap().is_success());
    assert_eq!(controller.resets(), 0, "deletion needs no reset");
    drop(again);
    rig.shut_down();
}

/// Once its namespace was formatted with another block size, the blocks of a handle lie at other bytes: it sends
/// nothing any more. A queue that was made later works, also after a reset.
#[test]
fn a_namespace_with_other_blocks_is_left_alone_by_older_handles() {
    for again in [false, true] {
        let rig = start(Place::Embedded, "sim:mem?fault=cfs@op=flush,nth=1");
        let controller = &rig.controller;
        let mut namespace = controller.namespace(Nsid(1)).unwrap();
        assert_eq!(namespace.block_bytes(), BLOCK as u32);
        let format = admin::format_nvm(Nsid(1), 0, 0);
        controller.admin("Format NVM", format, 0).unwrap();
        if again {
            namespace = controller.namespace(Nsid(1)).unwrap();
            assert_eq!(namespace.block_bytes(), 512);
        }
        let flushed = namespace.flush();
        if again {
            flushed.unwrap();
            namespace.write(Lba(3), &[7; 512]).unwrap();
            let mut back = [0; 512];
            namespace.read(Lba(3), &mut back).unwrap();
            assert_eq!(back, [7; 512]);
        } else {
            let gone = flushed.unwrap_err();
            let text = gone.to_string();
            assert!(
                text.contains("namespace 1 was formatted (4096 -> 512"),
                "{text}"
            );
            assert_eq!(gone.remedy(), "open it again");
            let error = namespace.write(Lba(3), &[7; BLOCK]).unwrap_err();
            assert!(matches!(error, Error::Changed { .. }), "{error}");
            let expired = namespace.queue().statistics().expired;
            assert_eq!(expired, 0, "it was told before the deadline");
        }
        assert_eq!(controller.resets(), u32::from(again));
    }
}

/// A controller whose capabilities become other ones, as new firmware's are.
struct Changing {
    device: Arc<dyn Device>,
    change: fn(&mut Cap),
    changed: AtomicBool,
}

impl RegisterAccess for Changing {
    fn identity(&self) -> &ControllerIdentity {
        self.device.registers().identity()
    }

    fn read32(&self, at: u32) -> u32 {
        self.device.registers().read32(at)
    }

    fn read64(&self, at: u32) -> u64 {
        let mut cap = Cap(self.device.registers().read64(at));
        assert_eq!(at, offset::CAP);
        if self.changed.load(Ordering::Relaxed) {
            (self.change)(&mut cap);
        }
        cap.0
    }

    fn write32(&self, at: u32, value: u32) {
        self.device.registers().write32(at, value);
    }

    fn write64(&self, at: u32, value: u64) {
        self.device.registers().write64(at, value);
    }
}

impl Device for Changing {
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

    fn map_dma(&self, pages: &Arc<DmaPages>) -> Result<Iova, Error> {
        self.device.map_dma(pages)
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<(), Error> {
        self.device.unmap_dma(iova, bytes)
    }
}

/// Rings, lists and doorbells of the first bring-up lie at addresses that such a controller would not use: it stays
/// disabled, and each caller gets the cause.
#[test]
fn a_controller_that_comes_back_with_another_shape_is_left_alone() {
    let larger: fn(&mut Cap) = |cap| {
        cap.set_mpsmin(1);
        cap.set_mpsmax(4);
    };
    let wider: fn(&mut Cap) = |cap| cap.set_dstrd(1);
    for (change, told) in [
        (larger, "pages of 8192 bytes"),
        (wider, "doorbell stride 1"),
    ] {
        let (device, _judge) = embedded("sim:mem?fault=drop@op=read,nth=1");
        let device = Arc::new(Changing {
            device,
            change,
            changed: AtomicBool::new(false),
        });
        let config = ControllerConfig {
            timeout: TIMEOUT,
            ..ControllerConfig::default()
        };
        let controller = Controller::start(Arc::clone(&device) as _, &config).unwrap();
        let mut queue = controller.create_queue_pair(16).unwrap();
        send_a_read(&controller, &mut queue);
        device.changed.store(true, Ordering::Relaxed);
        let gone = queue.wait().unwrap_err();
        assert!(matches!(gone, Error::Gone { .. }), "{gone}");
        for part in [told, "the controller reset failed", "open it anew"] {
            assert!(gone.to_string().contains(part), "{gone}");
        }
        let cc = Cc(device.read32(offset::CC));
        assert!(!cc.en(), "it is not enabled");
        let error = controller.create_queue_pair(16).map(drop).unwrap_err();
        assert!(error.to_string().contains(told), "{error}");
        // After it was opened again, with its present page size, it works.
        drop((queue, controller));
        device.changed.store(false, Ordering::Relaxed);
        let controller = Controller::start(device, &config).unwrap();
        let mut queue = controller.create_queue_pair(16).unwrap();
        let ended = read_blocks(&controller, &mut queue, 8);
        assert!(ended.iter().all(QueueCompletion::is_success));
    }
}

//! The library over a simulator that misbehaves: every command ends once, queues survive a reset.
#![cfg(feature = "sim")]

mod common;

use common::{Behind, Judge, Place, binary, embedded};
use nvme_host::core::spec::{Lba, Nsid, nvm};
use nvme_host::core::{AbortReason, Outcome};
use nvme_host::{Config, Controller, Done, Error, Queue};
use std::collections::BTreeSet;
use std::time::Duration;

const BLOCK: usize = 4096;
/// Longer than a busy machine keeps a server from running.
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
    let config = Config {
        timeout: TIMEOUT,
        ..Config::default()
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
fn send_a_read(controller: &Controller, queue: &mut Queue) {
    let buffer = controller.alloc(BLOCK).unwrap();
    let read = nvm::read(Nsid(1), Lba(0), 1);
    queue.submit(read, Some(buffer)).unwrap();
    queue.ring();
}

/// Reads `count` single blocks and waits for the end of all of them.
fn read_blocks(controller: &Controller, queue: &mut Queue, count: u64) -> Vec<Done> {
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
            ended.iter().all(Done::is_success),
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
        assert_eq!(done.outcome, Outcome::Aborted(AbortReason::ControllerReset));
        assert!(done.may_retry());
    }
    assert_eq!(controller.resets(), 1);
    assert!(
        read_blocks(controller, &mut queue, 8)
            .iter()
            .all(Done::is_success)
    );
}

fn nonsense_in_the_completion_queue_is_survived(place: Place) {
    for fault in ["duplicate", "wrongcid:77", "badsqhd:999"] {
        let rig = start(place, &format!("sim:mem?fault={fault}@op=read,nth=2"));
        let controller = &rig.controller;
        let mut queue = controller.create_queue_pair(16).unwrap();
        read_blocks(controller, &mut queue, 8);
        let again = read_blocks(controller, &mut queue, 8);
        assert!(again.iter().all(Done::is_success), "{fault}");
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

//! Notices of a controller besides the answers to commands: asynchronous events, long waits for CSTS.RDY, and
//! namespaces that cannot be used. The tests run over the simulator in this process.
#![cfg(feature = "sim")]

use nvme_driver::core::bringup::UnusableNamespace;
use nvme_driver::core::spec::log_page::{event_type, lid, smart_event};
use nvme_driver::core::spec::{Lba, Nsid, Status, nvm};
use nvme_driver::{
    Controller, ControllerConfig, ControllerNotice, DeviceEvent, Error, NoticeListener, PageError,
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
/// Longer than a thread may have to wait for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns the reported notices, and a configuration whose callback records them.
fn listening(timeout_ms: u64) -> (ControllerConfig, Arc<Mutex<Vec<ControllerNotice>>>) {
    let told: Arc<Mutex<Vec<ControllerNotice>>> = Arc::default();
    let sink = Arc::clone(&told);
    let config = ControllerConfig {
        timeout: Duration::from_millis(timeout_ms),
        notify: NoticeListener::new(move |notice| sink.lock().unwrap().push(notice.clone())),
        ..ControllerConfig::default()
    };
    (config, told)
}

/// Returns the next event, waited for.
fn next_event(controller: &Controller) -> DeviceEvent {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let Some(event) = controller.events().unwrap().pop() {
            return event;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("no event came")
}

fn is_temperature(event: &DeviceEvent) -> bool {
    let what = (
        event.event.event_type(),
        event.event.info(),
        event.event.log_page(),
    );
    what == (event_type::SMART, smart_event::TEMPERATURE, lid::SMART)
}

/// The controller asks for host memory in units of 4 KiB. One that needs more than this driver lends gets none, and the
/// user is notified.
#[test]
fn host_memory_that_is_too_little_is_not_lent_in_silence() {
    for (units, is_told) in [(32 << 10, true), (16 << 10, false)] {
        let device = format!("sim:mem?size=16MiB&hmpre={units}&hmmin={units}");
        let (config, told) = listening(20_000);
        let controller = Controller::start(nvme_driver::open(&device).unwrap(), &config).unwrap();
        assert_eq!(controller.info().host_memory, !is_told);
        let told = told.lock().unwrap();
        assert_eq!(told.len(), usize::from(is_told), "{told:?}");
        if let Some(notice) = told.first() {
            let text = notice.to_string();
            assert!(
                text.contains("128.0 MiB of host memory at least (HMMIN)"),
                "{text}"
            );
            assert!(text.contains("lends 64.0 MiB at most"), "{text}");
        }
    }
}

/// One more event arrives in each turn: its log page is read, and the request is posted again. The test also covers a
/// controller that takes a single request (AERL 0).
#[test]
fn each_event_is_reported_once_with_its_log_page() {
    for aers in ["", "&aers=1", "&aers=200"] {
        let (device, sim) = nvme_driver::sim::embed(&format!("mem?size=16MiB{aers}")).unwrap();
        let (config, told) = listening(5000);
        let controller = Controller::start(device, &config).unwrap();
        assert_eq!(controller.events().unwrap(), []);
        for round in 0..6u16 {
            sim.set_temperature(400 + round);
            let event = next_event(&controller);
            assert!(is_temperature(&event), "{event:?}");
            let text = event.to_string();
            assert!(text.contains(&format!("; {} C", 127 + round)), "{text}");
            sim.set_temperature(300);
            assert_eq!(controller.events().unwrap(), [], "once");
        }
        controller.shut_down().unwrap();
        let told = told.lock().unwrap();
        assert_eq!(told.len(), 6, "{told:?}");
        assert!(
            told.iter()
                .all(|one| matches!(one, ControllerNotice::Event(event) if is_temperature(event)))
        );
    }
}

/// Requests have no deadline: they cause no time-out, Abort or reset, and a reset posts them again.
#[test]
fn requests_outlast_time_outs_and_resets() {
    let (device, sim) =
        nvme_driver::sim::embed("mem?size=16MiB&fault=drop@op=read,nth=40").unwrap();
    let (config, _) = listening(1000);
    let controller = Controller::start(device, &config).unwrap();
    let mut queue = controller.create_queue_pair(8).unwrap();
    let mut read = |controller: &Controller| {
        let buffer = controller.alloc(BLOCK).unwrap();
        queue
            .submit(nvm::read(Nsid(1), Lba(0), 1), Some(buffer))
            .unwrap();
        queue.ring();
        queue.wait().unwrap().unwrap()
    };
    // The reads take three times as long as any command may take.
    let begin = Instant::now();
    for _ in 0..30 {
        assert!(read(&controller).is_success());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(begin.elapsed() > 2 * config.timeout);
    assert_eq!(controller.resets(), 0);
    sim.set_temperature(400);
    assert!(is_temperature(&next_event(&controller)));
    sim.set_temperature(300);

    let lost = (0..20)
        .map(|_| read(&controller))
        .filter(|done| !done.is_success())
        .count();
    assert_eq!((lost, controller.resets()), (1, 1));
    sim.set_temperature(400);
    assert!(is_temperature(&next_event(&controller)));
    controller.shut_down().unwrap();
}

/// A thread that only polls its queue hears of events, too.
#[test]
fn waiting_for_a_command_finds_events() {
    let (device, sim) = nvme_driver::sim::embed("mem?size=16MiB&fault=delay:2s@op=read").unwrap();
    let (config, told) = listening(60_000);
    let controller = Controller::start(device, &config).unwrap();
    let mut queue = controller.create_queue_pair(8).unwrap();
    let buffer = controller.alloc(BLOCK).unwrap();
    queue
        .submit(nvm::read(Nsid(1), Lba(0), 1), Some(buffer))
        .unwrap();
    queue.ring();
    sim.set_temperature(400);
    let done = queue.wait().unwrap().unwrap();
    assert!(done.is_success());
    assert_eq!(told.lock().unwrap().len(), 1);
    drop(queue);
    assert!(is_temperature(&controller.events().unwrap()[0]));
    controller.shut_down().unwrap();
}

/// An event that arrives during the last command is reported by the shutdown.
#[test]
fn the_last_events_come_with_the_shutdown() {
    let (device, sim) = nvme_driver::sim::embed("mem?size=16MiB").unwrap();
    let (config, told) = listening(5000);
    let controller = Controller::start(device, &config).unwrap();
    sim.set_temperature(400);
    std::thread::sleep(Duration::from_millis(200));
    controller.shut_down().unwrap();
    assert_eq!(told.lock().unwrap().len(), 1);
}

/// An event whose log page does not arrive is reported without it. The lost read costs no reset: no call waits for it.
#[test]
fn an_event_is_reported_although_its_log_page_cannot_be_read() {
    let refused = Err(PageError::Failed(Status::INVALID_FIELD));
    for (fault, page) in [
        ("status:0x2@op=get-log-page", refused),
        ("drop@op=get-log-page", Err(PageError::NotRead)),
    ] {
        let (device, sim) =
            nvme_driver::sim::embed(&format!("mem?size=16MiB&fault={fault}")).unwrap();
        let (config, _) = listening(300);
        let controller = Controller::start(device, &config).unwrap();
        sim.set_temperature(400);
        let event = next_event(&controller);
        assert!(is_temperature(&event));
        let is_expected = match (&event.page, &page) {
            // The controller sets DNR or not.
            (Err(PageError::Failed(got)), Err(PageError::Failed(expected))) => {
                got.code() == expected.code()
            }
            (got, expected) => got == expected,
        };
        assert!(is_expected, "{:?}", event.page);
        assert_eq!(controller.resets(), 0);
        controller.shut_down().unwrap();
    }
}

/// A controller masks the events of a type until the log page of the last one was read.
#[test]
fn events_come_again_after_a_log_page_that_could_not_be_read() {
    for fault in ["status:0x2", "drop", "delay:400ms"] {
        let text = format!("mem?size=16MiB&fault={fault}@op=get-log-page,nth=1");
        let (device, sim) = nvme_driver::sim::embed(&text).unwrap();
        let (config, told) = listening(200);
        let controller = Controller::start(device, &config).unwrap();
        sim.set_temperature(400);
        assert!(next_event(&controller).page.is_err());
        let begin = Instant::now();
        let next = (0..).map(|round| {
            assert!(begin.elapsed() < PATIENCE, "{fault}: no event came");
            sim.set_temperature(300 + 100 * (round % 2));
            std::thread::sleep(Duration::from_millis(10));
            controller.events().unwrap().pop()
        });
        assert!(next.flatten().next().unwrap().page.is_ok(), "{fault}");
        sim.set_temperature(300);
        controller.shut_down().unwrap();
        let told = told.lock().unwrap();
        let events = told
            .iter()
            .filter(|one| matches!(one, ControllerNotice::Event(_)));
        assert!(events.count() >= 2, "{fault}: {told:?}");
    }
}

/// A controller that refuses Asynchronous Event Requests is not asked again and again.
#[test]
fn a_controller_that_takes_no_requests_works() {
    for fault in [
        "status:0x1@qid=0,op=0xc",
        "status:0x105@qid=0,op=0xc,every=2",
    ] {
        let (device, sim) =
            nvme_driver::sim::embed(&format!("mem?size=16MiB&fault={fault}")).unwrap();
        let (config, told) = listening(5000);
        let controller = Controller::start(device, &config).unwrap();
        sim.set_temperature(400);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(300) {
            controller.events().unwrap();
        }
        let (admin, failed) = (sim.queue_stats(0), told.lock().unwrap().len());
        assert!(admin.commands < 40, "{admin:?}");
        assert_eq!(failed, usize::from(fault.contains("every")));
        controller.shut_down().unwrap();
    }
}

/// The notice appears while the reset waits, and again afterwards: "no answer in 100 ms; the reset then took 2 s".
#[test]
fn a_reset_that_takes_long_says_so_while_it_waits_and_afterwards() {
    let text = "mem?size=16MiB&ready=1s&fault=drop@op=read,nth=2";
    let (device, _) = nvme_driver::sim::embed(text).unwrap();
    let (config, told) = listening(100);
    let controller = Controller::start(device, &config).unwrap();
    let wait = |cause: Option<&str>, ready| ControllerNotice::Waiting {
        cause: cause.map(str::to_owned),
        ready,
        at_most: Duration::from_secs(3),
    };
    assert_eq!(*told.lock().unwrap(), [wait(None, true)], "bring-up");
    told.lock().unwrap().clear();

    let mut queue = controller.create_queue_pair(8).unwrap();
    let mut lost = None;
    for _ in 0..3 {
        let buffer = controller.alloc(BLOCK).unwrap();
        queue
            .submit(nvm::read(Nsid(1), Lba(0), 1), Some(buffer))
            .unwrap();
        queue.ring();
        let done = queue.wait().unwrap().unwrap();
        if !done.is_success() {
            lost = Some(done);
        }
    }
    let lost = lost.expect("one was dropped");
    let cause = format!(
        "command {} of queue {} got no answer in 100 ms",
        lost.cid,
        queue.qid()
    );
    let expected = [wait(Some(&cause), false), wait(Some(&cause), true)];
    assert_eq!(*told.lock().unwrap(), expected);
    let error = queue.error_of(&lost, "Read");
    assert!(matches!(error, Error::Timeout { .. }));
    let text = error.to_string();
    assert!(text.contains("within 100 ms"), "{text}");
    assert!(
        text.contains("the controller was reset, which took 2."),
        "{text}"
    );
    assert!(
        text.contains("(CAP.TO allows 3.0 s for each change of CSTS.RDY)"),
        "{text}"
    );
    drop(queue);
    controller.shut_down().unwrap();
}

/// Identify refuses one namespace, as a controller does for one of another command set: the other namespaces work.
#[test]
fn a_namespace_that_cannot_be_identified_leaves_the_others_usable() {
    // Identify is sent for the controller, the list and three namespaces, then by the shell for the controller.
    let refuse = |nth: u32| format!("mem?size=48MiB&ns=3&fault=status:0x2c@op=identify,nth={nth}");
    let (device, _) = nvme_driver::sim::embed(&refuse(4)).unwrap();
    let (config, _) = listening(5000);
    let controller = Controller::start(device, &config).unwrap();
    let found: Vec<_> = controller
        .info()
        .namespaces
        .iter()
        .map(|one| one.unusable())
        .collect();
    let [None, Some(UnusableNamespace::Identify(status)), None] = found[..] else {
        panic!("{found:?}")
    };
    assert_eq!(status.code(), 0x2C);
    for nsid in [1, 3] {
        let mut namespace = controller.namespace(Nsid(nsid)).unwrap();
        let mut data = vec![1; namespace.block_bytes() as usize];
        namespace.read(Lba(0), &mut data).unwrap();
        assert!(data.iter().all(|byte| *byte == 0));
    }
    controller.shut_down().unwrap();

    // The seventh asks for the command set.
    let (device, _) = nvme_driver::sim::embed(&refuse(8)).unwrap();
    let controller = Controller::start(device, &config).unwrap();
    let Err(error) = controller.namespace(Nsid(2)) else {
        panic!("it was refused")
    };
    let text = error.to_string();
    assert!(
        text.starts_with("namespace 2 cannot be used: Identify Namespace ended with "),
        "{text}"
    );
    assert!(error.remedy().contains("list-ns"), "{}", error.remedy());
    controller.namespace(Nsid(1)).unwrap();
    controller.shut_down().unwrap();
}

/// CSTS.CFS at the end: the controller is reset, and the caller learns that it was not shut down in order.
#[test]
fn a_controller_that_failed_is_not_given_for_shut_down_in_order() {
    let (device, sim) = nvme_driver::sim::embed("mem?size=16MiB").unwrap();
    let controller = Controller::start(device, &listening(5000).0).unwrap();
    sim.fail();
    let error = controller.shut_down().unwrap_err();
    assert!(error.to_string().contains("CSTS.CFS"), "{error}");
    assert!(error.remedy().contains("may be lost"), "{}", error.remedy());
}

/// Status codes of success are a success whatever the hints beside them say: at bring-up, of data, of log pages.
#[test]
fn a_success_with_hints_is_a_success() {
    for hints in ["0x2000", "0x4000", "0x1800"] {
        let faults = format!("fault=status:{hints}&fault=status:{hints}@qid=0");
        let (device, sim) = nvme_driver::sim::embed(&format!("mem?size=16MiB&{faults}")).unwrap();
        let (config, _) = listening(5000);
        let controller = Controller::start(device, &config).unwrap();
        let mut namespace = controller.namespace(Nsid(1)).unwrap();
        namespace.write(Lba(3), &[7; BLOCK]).unwrap();
        let mut out = [0; BLOCK];
        namespace.read(Lba(3), &mut out).unwrap();
        assert!(out == [7; BLOCK], "{hints}");
        sim.set_temperature(400);
        let event = next_event(&controller);
        assert!(event.page.is_ok(), "{hints}: {event}");
        let all = controller.statistics();
        assert!(all.iter().all(|(_, one)| one.errors == 0), "{hints}");
    }
}

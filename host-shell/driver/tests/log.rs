//! Events of the driver, as a program receives them. In a process of its own, because the log is of the process.
#![cfg(feature = "sim")]

use nvme_driver::core::spec::{Lba, Nsid, nvm};
use nvme_driver::log::{LogLevel, set_log};
use nvme_driver::{Controller, ControllerConfig};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Loses a read, so that the controller is recovered.
fn lose_a_read() {
    let device = nvme_driver::open("sim:mem?size=16MiB&fault=drop@op=read,nth=1").unwrap();
    let config = ControllerConfig {
        timeout: Duration::from_millis(200),
        ..ControllerConfig::default()
    };
    let controller = Controller::start(device, &config).unwrap();
    let mut queue = controller.create_queue_pair(16).unwrap();
    let buffer = controller.alloc(4096).unwrap();
    let read = nvm::read(Nsid(1), Lba(0), 1);
    queue.submit(read, Some(buffer)).unwrap();
    queue.ring();
    assert!(!queue.wait().unwrap().unwrap().is_success());
    let recoveries = controller.recoveries();
    assert_eq!(recoveries.load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[test]
fn bring_ups_and_recoveries_are_reported_from_the_level_on_that_was_asked_for() {
    let lines: Arc<Mutex<Vec<(LogLevel, String)>>> = Arc::default();
    let listen = |level| {
        let to = Arc::clone(&lines);
        let sink = move |level, text: &str| to.lock().unwrap().push((level, text.to_owned()));
        set_log(Some((level, Box::new(sink)))).unwrap();
    };
    lose_a_read();
    listen(LogLevel::Info);
    lose_a_read();
    let seen = std::mem::take(&mut *lines.lock().unwrap());
    let (level, text) = &seen[0];
    assert_eq!(*level, LogLevel::Info);
    assert!(
        text.starts_with("the controller is up (device=sim:mem"),
        "{text}"
    );
    let warned = |(level, _): &&(LogLevel, String)| *level == LogLevel::Warning;
    let (_, text) = seen.iter().find(warned).unwrap();
    assert!(text.starts_with("the controller is reset: "), "{text}");
    listen(LogLevel::Warning);
    lose_a_read();
    let seen = std::mem::take(&mut *lines.lock().unwrap());
    assert!(!seen.is_empty() && seen.iter().all(|(level, _)| *level <= LogLevel::Warning));
    set_log(None).unwrap();
    lose_a_read();
    assert!(lines.lock().unwrap().is_empty());

    // The third Set Features, after those of the bring-up.
    listen(LogLevel::Warning);
    let device = "sim:mem?size=16MiB&fault=status:0x2@qid=0,op=0x9,nth=3";
    let device = nvme_driver::open(device).unwrap();
    let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
    assert_eq!(controller.events().unwrap(), []);
    let seen = std::mem::take(&mut *lines.lock().unwrap());
    assert_eq!(seen.len(), 1, "{seen:?}");
    let (_, text) = &seen[0];
    assert!(
        text.contains("refuses the configuration of its events (Invalid Field"),
        "{text}"
    );
    set_log(None).unwrap();
}

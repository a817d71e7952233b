//! Ends of the library that few programs meet: a device that came back and is of no use, and the longest time-out.
#![cfg(feature = "sim")]

use nvme_host::bench::{self, AccessPattern, BenchJob, GoOn, RunLimit};
use nvme_host::core::spec::{Lba, Nsid};
use nvme_host::{Controller, ControllerConfig, Error};
use std::cell::RefCell;
use std::time::Duration;

/// The longest time that there is says: wait for ever.
#[test]
fn a_time_out_that_never_comes_is_one() {
    for timeout in [
        Duration::MAX,
        Duration::from_nanos(u64::MAX),
        Duration::from_secs(18_446_744_074),
    ] {
        let config = ControllerConfig {
            timeout,
            ..ControllerConfig::default()
        };
        let (device, _) = nvme_host::sim::embed("mem?size=1MiB").unwrap();
        let controller = Controller::start(device, &config).unwrap();
        let mut namespace = controller.namespace(Nsid(1)).unwrap();
        let mut block = vec![0; namespace.block_bytes() as usize];
        namespace.write(Lba(0), &block).unwrap();
        controller.reset().unwrap();
        namespace.read(Lba(0), &mut block).unwrap();
        assert_eq!(controller.resets(), 1, "{timeout:?}");
    }
}

#[test]
fn a_device_that_came_back_and_cannot_be_used_is_let_go_of() {
    let start = |text: &str| {
        let (device, _) = nvme_host::sim::embed(text).unwrap();
        Controller::start(device, &ControllerConfig::default())
    };
    let came_back = RefCell::new(None);
    let open = || {
        let controller = start("mem?size=8MiB")?;
        *came_back.borrow_mut() = Some(controller.device().clone());
        Ok(controller)
    };
    let go_on = GoOn {
        patience: Duration::from_secs(20),
        open: &open,
    };
    let job = BenchJob {
        nsid: Nsid(1),
        pattern: AccessPattern::Sequential,
        read_percent: 100,
        bytes: 4096,
        queues: 1,
        depth: 4,
        limit: RunLimit::Bytes(8 << 20),
        ramp: None,
        span_blocks: 0,
        seed: 1,
        verify: false,
    };
    let left = start("mem?size=16MiB&fault=allones@nth=200").unwrap();
    let error = bench::run(left, &job, Some(&go_on), |_| ())
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
    assert!(error.to_string().contains("has become smaller"), "{error}");
    let device = came_back.take().expect("it was opened again");
    assert!(device.gone().is_some(), "it is let go of");
}

//! `bench` over a device that left: what it opens in its place and cannot use, it lets go of.
#![cfg(feature = "sim")]

use nvme_host::bench::{self, GoOn, Job, Limit, Pattern};
use nvme_host::core::spec::Nsid;
use nvme_host::{Config, Controller, Error};
use std::cell::RefCell;
use std::time::Duration;

#[test]
fn a_device_that_came_back_and_cannot_be_used_is_let_go_of() {
    let start = |text: &str| {
        let (device, _) = nvme_host::sim::embed(text).unwrap();
        Controller::start(device, &Config::default())
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
    let job = Job {
        nsid: Nsid(1),
        pattern: Pattern::Sequential,
        read_percent: 100,
        bytes: 4096,
        queues: 1,
        depth: 4,
        limit: Limit::Bytes(8 << 20),
        ramp: None,
        span_blocks: 0,
        seed: 1,
        verify: false,
    };
    let left = start("mem?size=16MiB&fault=allones@nth=200").unwrap();
    let error = bench::run(left, &job, Some(&go_on), |_| ())
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, Error::Usage { .. }), "{error}");
    assert!(error.to_string().contains("another size"), "{error}");
    let device = came_back.take().expect("it was opened again");
    assert!(device.gone().is_some(), "it is let go of");
}

//! Queues whose rings and data lie in the memory of another PCI device: only PRP lists and the admin queue are in this
//! machine's memory.

use crate::{Outcome, config, peer, queues, said, trouble};
use nvme_host::core::spec::Nsid;
use nvme_host::{Controller, ControllerConfig, Device, RingLocation};
use std::sync::Arc;

/// Bytes of the BAR.
const BYTES: usize = 16 << 20;
/// Number of the memory's first bytes that hold rings; data follow.
const RINGS: usize = 8 << 20;

/// Queues of every size, transfers around every boundary, and a place that is too small.
pub fn run(name: &str, resource: &str) -> Outcome {
    let device = nvme_host::open(name).map_err(said)?;
    let rings = rings_in(&device, resource, RINGS)?;
    let config = ControllerConfig {
        queue_pairs: 64,
        rings,
        ..config()
    };
    let controller = Controller::start(Arc::clone(&device), &config).map_err(said)?;
    queues::run(&controller, Nsid(1))?;
    let mut bar = peer::mapped(&device, resource, BYTES)?;
    let iova = bar.iova();
    peer::transfers(&controller, &mut bar, iova, RINGS as u64)?;
    if controller.resets() != 0 {
        return Err(format!("{} controller resets", controller.resets()));
    }
    controller.shut_down().map_err(said)?;
    drop(bar);
    too_few_bytes(&device, resource)
}

/// Resets of the function under a full queue whose rings lie there.
pub fn reset(name: &str, resource: &str) -> Outcome {
    let device = nvme_host::open(name).map_err(said)?;
    let rings = rings_in(&device, resource, RINGS)?;
    let controller = trouble::start_on(device, trouble::RESET_TIMEOUT, rings)?;
    trouble::reset_under_load(&controller)?;
    controller.shut_down().map_err(said)
}

fn rings_in(
    device: &Arc<dyn Device>,
    resource: &str,
    bytes: usize,
) -> Result<RingLocation, String> {
    let mut bar = peer::mapped(device, resource, BYTES)?;
    bar.resize(bytes);
    Ok(RingLocation::Peer(Arc::new(
        bar.into_rings().map_err(said)?,
    )))
}

/// The memory has room for one pair of rings: the next pair is refused with the reason, and the first one still works.
fn too_few_bytes(device: &Arc<dyn Device>, resource: &str) -> Outcome {
    let config = ControllerConfig {
        rings: rings_in(device, resource, 8192)?,
        ..config()
    };
    let controller = Controller::start(Arc::clone(device), &config).map_err(said)?;
    let first = controller.create_queue_pair(16).map_err(said)?;
    match controller.create_queue_pair(16) {
        Ok(_) => return Err("two pairs of rings in 8 KiB".to_owned()),
        Err(error) if error.to_string().contains("memory for rings") => println!("{error}"),
        Err(error) => return Err(format!("not the reason: {error}")),
    }
    drop(first);
    controller.create_queue_pair(16).map_err(said)?;
    controller.shut_down().map_err(said)
}

//! A device that is lost while it is used: every call ends in an error that says why, and nothing hangs.

use super::{Outcome, require};
use crate::{config, patient, said};
use nvme_host::core::spec::register::{ALL_ONES, offset};
use nvme_host::{Controller, Device, Error};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit within which a loss must be reported.
const LIMIT: Duration = Duration::from_secs(30);

pub fn run(device: &Arc<dyn Device>, lose: Option<&dyn Fn() -> Outcome>) -> Outcome {
    let pages = Arc::new(device.alloc_dma(4096).map_err(said)?);
    let iova = device.map_dma(&pages).map_err(said)?;
    match lose {
        Some(lose) => lose()?,
        None => device.leave(),
    }
    let cause = wait_for_loss(device)?;
    println!("contract: lost: {cause}");
    let registers = device.registers();
    require(
        registers.read32(offset::CSTS) == ALL_ONES,
        "CSTS is not all ones",
    )?;
    require(
        registers.read64(offset::CAP) == u64::MAX,
        "CAP is not all ones",
    )?;
    registers.write32(offset::CC, 1);
    registers.write64(offset::ASQ, 0x1000);
    require(
        registers.read32(offset::CC) == ALL_ONES,
        "CC is not all ones",
    )?;
    gone("disable", device.disable())?;
    gone("reset", device.reset())?;
    // Some transports can allocate memory of this process without the device.
    if let Ok(pages) = device.alloc_dma(4096) {
        gone("map_dma", device.map_dma(&Arc::new(pages)).map(drop))?;
    }
    let started = Controller::start(Arc::clone(device), &config());
    gone("a controller", started.map(drop))?;
    let unmapped = device.unmap_dma(iova, pages.len());
    unmapped.map_err(|error| format!("unmap_dma: {}", said(error)))?;
    require(
        Arc::strong_count(&pages) == 1,
        "the device keeps unmapped memory",
    )?;
    device.leave();
    require(
        device.gone().as_deref() == Some(&cause),
        "another cause than before",
    )?;
    require(
        !device.name().is_empty() && !device.describe().is_empty(),
        "no name any more",
    )?;
    println!("contract: loss");
    Ok(())
}

fn wait_for_loss(device: &Arc<dyn Device>) -> Result<String, String> {
    let (begin, limit) = (Instant::now(), patient(LIMIT));
    loop {
        // A transport may notice the loss only when it is used.
        device.registers().read32(offset::CSTS);
        match device.gone() {
            Some(cause) if cause.is_empty() => return Err("gone without a cause".to_owned()),
            Some(cause) => return Ok(cause),
            None if begin.elapsed() > limit => return Err(format!("not gone after {limit:?}")),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn gone(what: &str, ended: nvme_host::Result<()>) -> Outcome {
    match ended {
        Err(Error::Gone { cause }) if !cause.is_empty() => Ok(()),
        other => Err(format!("{what} of a device that is gone: {other:?}")),
    }
}

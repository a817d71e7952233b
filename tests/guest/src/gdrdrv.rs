//! GPU memory by gdrcopy's module gdrdrv, for a controller behind VFIO. In the guest the module is a stand-in
//! (tests/guest/exporter), and the memory a BAR.

use crate::{Outcome, config, peer, said};
use nvme_host::{Controller, Device, Error, PeerMemory};
use std::sync::Arc;

/// Bytes of the BAR.
const BYTES: usize = 16 << 20;

fn memory(address: u64, bytes: usize) -> PeerMemory {
    let unused = || Error::environment("VFIO asked for another way", "report this");
    PeerMemory {
        address,
        bytes,
        in_host: false,
        dma_buf: Box::new(move || Err(unused())),
        copier: Box::new(move |_, _| Err(unused())),
    }
}

fn refused(device: &Arc<dyn Device>, memory: PeerMemory, part: &str) -> Outcome {
    match device.map_peer(memory) {
        Ok(iova) => Err(format!("mapped at {iova} instead of: {part}")),
        Err(error) if error.to_string().contains(part) && !error.remedy().is_empty() => {
            println!("{error}");
            Ok(())
        }
        Err(error) => Err(format!("'{error}' instead of: {part}")),
    }
}

/// Data to and from such memory; `resource` shows the processor the same BAR.
pub fn run(name: &str, resource: &str) -> Outcome {
    let device = nvme_host::open(name).map_err(said)?;
    if !device.reaches_peers() {
        return Err("gdrdrv is not seen".to_owned());
    }
    refused(&device, memory(4096, BYTES), "not whole pages")?;
    refused(&device, memory(1 << 40, 2 * BYTES), "GDRDRV_IOC_PIN_BUFFER")?;
    let iova = device.map_peer(memory(1 << 40, BYTES)).map_err(said)?;
    let mut view = peer::mapped(&device, resource, BYTES)?;
    let controller = Controller::start(Arc::clone(&device), &config()).map_err(said)?;
    peer::transfers(&controller, &mut view, iova, 0)?;
    controller.shut_down().map_err(said)?;
    device.unmap_dma(iova, BYTES).map_err(said)?;
    println!("{BYTES} bytes by gdrdrv, mapped and unmapped");
    Ok(())
}

/// Checks that the error contains `part` if gdrdrv cannot be used.
pub fn without(name: &str, part: &str) -> Outcome {
    let device = nvme_host::open(name).map_err(said)?;
    refused(&device, memory(1 << 40, BYTES), part)
}

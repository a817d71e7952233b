//! Memory: allocated, mapped, unmapped, and reached by the controller.

use super::{Outcome, refusal, require};
use crate::{patient, pattern, said};
use nvme_host::core::CommandData;
use nvme_host::core::spec::register::{Cc, Csts, offset};
use nvme_host::core::spec::{Iova, Lba, Nsid, Sqe, nvm};
use nvme_host::{Controller, ControllerConfig, Device, DmaBuffer, DmaPages, Error, PeerMemory};
use nvme_units::SplitMix;
use std::sync::Arc;
use std::time::Duration;

const NSID: Nsid = Nsid(1);
/// Bytes of memory that checks move.
const BYTES: usize = 64 << 10;
/// Mappings at one time.
const MANY: usize = 100;

/// Allocations are zeroed whole pages, with at least as many bytes as were asked for.
pub fn allocations(device: &Arc<dyn Device>) -> Outcome {
    for bytes in [1, 4096, BYTES, (1 << 20) + 1, 5 << 20] {
        let pages = device.alloc_dma(bytes).map_err(said)?;
        require(
            pages.len() >= bytes,
            &format!("{} of {bytes} bytes", pages.len()),
        )?;
        require(pages.start().addr().is_multiple_of(4096), "not at a page")?;
        // Memory that was used before is zeroed, too.
        for _ in 0..2 {
            let mut buffer = DmaBuffer::new(device, bytes).map_err(said)?;
            let is_zero = buffer.as_slice().iter().all(|byte| *byte == 0);
            require(is_zero, &format!("{bytes} bytes are not zeroed"))?;
            require(buffer.iova().0.is_multiple_of(4096), "mapped at no page")?;
            buffer.as_mut_slice().fill(0xA5);
        }
    }
    Ok(())
}

/// Mappings at one time do not overlap; the device keeps their memory and releases all of it.
pub fn mappings(device: &Arc<dyn Device>) -> Outcome {
    let mut dice = SplitMix::new(11);
    for _ in 0..3 {
        let mut taken: Vec<(Iova, Arc<DmaPages>)> = Vec::new();
        for number in 0..MANY {
            let pages = Arc::new(device.alloc_dma(1 + number * 2000).map_err(said)?);
            let iova = device.map_dma(&pages).map_err(said)?;
            require(
                Arc::strong_count(&pages) > 1,
                "the device keeps no share of mapped memory",
            )?;
            taken.push((iova, pages));
        }
        apart(&taken)?;
        while !taken.is_empty() {
            let (iova, pages) = taken.swap_remove(dice.below(taken.len() as u64) as usize);
            device.unmap_dma(iova, pages.len()).map_err(said)?;
            require(
                Arc::strong_count(&pages) == 1,
                "the device keeps unmapped memory",
            )?;
        }
    }
    Ok(())
}

fn apart(taken: &[(Iova, Arc<DmaPages>)]) -> Outcome {
    let mut ranges: Vec<_> = taken
        .iter()
        .map(|(at, pages)| (at.0, pages.len() as u64))
        .collect();
    ranges.sort_unstable();
    let mut pairs = ranges.iter().zip(ranges.iter().skip(1));
    match pairs.find(|((at, bytes), (next, _))| at + bytes > *next) {
        None => Ok(()),
        Some(overlap) => Err(format!("mappings overlap: {overlap:x?}")),
    }
}

/// Allocates, maps and unmaps from four threads at once.
pub fn threads(device: &Arc<dyn Device>) -> Outcome {
    let work = || -> Outcome {
        for number in 0..MANY {
            let mut buffer = DmaBuffer::new(device, 4096 + number).map_err(said)?;
            buffer.as_mut_slice().fill(number as u8);
            let is_ours = buffer.as_slice().iter().all(|byte| *byte == number as u8);
            require(is_ours, "two threads have the same memory")?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let all = [(); 4].map(|()| scope.spawn(work));
        all.into_iter()
            .try_for_each(|one| one.join().unwrap_or_else(|_| Err("a panic".to_owned())))
    })
}

/// Memory that is not mapped cannot be unmapped, nor a part of a mapping, nor the same mapping twice; other mappings
/// are not changed.
pub fn unknown(device: &Arc<dyn Device>) -> Outcome {
    let pages = Arc::new(device.alloc_dma(2 * BYTES).map_err(said)?);
    let iova = device.map_dma(&pages).map_err(said)?;
    let wrong = [
        ("nowhere", iova.offset(1 << 40), pages.len()),
        ("a part", iova, pages.len() / 2),
        ("the end", iova.offset(BYTES as u64), pages.len() - BYTES),
        ("too much", iova, 2 * pages.len()),
    ];
    for (what, at, bytes) in wrong {
        require(
            device.unmap_dma(at, bytes).is_err(),
            &format!("{what} was unmapped"),
        )?;
    }
    device.unmap_dma(iova, pages.len()).map_err(said)?;
    require(
        device.unmap_dma(iova, pages.len()).is_err(),
        "unmapped twice",
    )?;
    require(
        Arc::strong_count(&pages) == 1,
        "the device keeps unmapped memory",
    )
}

/// Returns a controller on `device`, the first namespace of which has bytes with the pattern of `seed`.
fn prepared(device: &Arc<dyn Device>, seed: u64) -> Result<Controller, String> {
    let config = ControllerConfig {
        timeout: patient(Duration::from_secs(2)),
        ..ControllerConfig::default()
    };
    let controller = Controller::start(Arc::clone(device), &config).map_err(said)?;
    let mut data = vec![0; BYTES];
    pattern::fill(seed, 0, &mut data);
    let mut namespace = controller.namespace(NSID).map_err(said)?;
    namespace.write(Lba(0), &data).map_err(said)?;
    Ok(controller)
}

/// Has the controller read the first `bytes` bytes of the namespace to `iova`. The inner error is the controller's.
fn fetch(controller: &Controller, iova: Iova, bytes: usize) -> Result<Outcome, String> {
    let block = controller.namespace(NSID).map_err(said)?.block_bytes();
    let read: Sqe = nvm::read(NSID, Lba(0), bytes as u32 / block);
    let mut queue = controller.create_queue_pair(4).map_err(said)?;
    let len = bytes as u64;
    let submitted = queue.submit_data(read, CommandData::Contiguous { iova, len }, None);
    submitted.map_err(|rejected| rejected.error.to_string())?;
    queue.ring();
    match queue.wait() {
        Ok(None) => Err("a command was lost".to_owned()),
        Ok(Some(done)) if done.is_success() => Ok(Ok(())),
        Ok(Some(done)) => Ok(Err(said(queue.error_of(&done, "Read")))),
        Err(error) => Ok(Err(said(error))),
    }
}

/// The controller can access the first and the last page of a mapping, and nothing beside it.
pub fn reach(device: &Arc<dyn Device>) -> Outcome {
    let controller = prepared(device, 21)?;
    let mut buffers = DmaBuffer::several(device, BYTES, 3).map_err(said)?;
    buffers.push(DmaBuffer::new(device, (4 << 20) + BYTES).map_err(said)?);
    for buffer in &mut buffers {
        buffer.as_mut_slice().fill(0x3C);
    }
    let last = buffers[3].len() - BYTES;
    fetch(&controller, buffers[1].iova(), BYTES)??;
    fetch(&controller, buffers[3].iova().offset(last as u64), BYTES)??;
    let is_right = |bytes: &[u8]| pattern::difference(21, 0, bytes).is_none();
    let is_untouched = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0x3C);
    require(is_right(buffers[1].as_slice()), "what was read differs")?;
    require(
        is_right(&buffers[3].as_slice()[last..]),
        "what was read at the end differs",
    )?;
    let beside = [
        buffers[0].as_slice(),
        buffers[2].as_slice(),
        &buffers[3].as_slice()[..last],
    ];
    require(
        beside.into_iter().all(is_untouched),
        "memory beside was overwritten",
    )?;
    require(controller.resets() == 0, "the controller was reset")?;
    controller.shut_down().map_err(said)
}

/// After a reset the controller is disabled, and the mappings still exist.
pub fn reset(device: &Arc<dyn Device>) -> Outcome {
    let buffer = DmaBuffer::new(device, BYTES).map_err(said)?;
    prepared(device, 22)?.shut_down().map_err(said)?;
    for _ in 0..2 {
        device.reset().map_err(said)?;
        let registers = device.registers();
        require(
            !Cc(registers.read32(offset::CC)).en(),
            "CC.EN after a reset",
        )?;
        require(
            !Csts(registers.read32(offset::CSTS)).rdy(),
            "CSTS.RDY after a reset",
        )?;
    }
    let controller = prepared(device, 23)?;
    fetch(&controller, buffer.iova(), BYTES)??;
    let is_right = pattern::difference(23, 0, buffer.as_slice()).is_none();
    require(
        is_right,
        "memory that was mapped before the reset is not reached",
    )?;
    // A reset of a controller in use ends its commands, and it works again.
    device.reset().map_err(said)?;
    let _ = fetch(&controller, buffer.iova(), BYTES);
    fetch(&controller, buffer.iova(), BYTES)??;
    require(
        controller.resets() > 0,
        "a reset that the controller did not notice",
    )?;
    controller.shut_down().map_err(said)
}

/// A controller that gets an unmapped address changes none of that memory.
pub fn unmapped(device: &Arc<dyn Device>) -> Outcome {
    let controller = prepared(device, 24)?;
    let pages = Arc::new(device.alloc_dma(BYTES).map_err(said)?);
    let mut before = DmaBuffer::over(device, Arc::clone(&pages)).map_err(said)?;
    before.as_mut_slice().fill(0x3C);
    let iova = before.iova();
    drop(before);
    // A controller need not know that its writes were stopped: QEMU's answers with success.
    match fetch(&controller, iova, BYTES)? {
        Ok(()) => println!("a read to memory that was unmapped: success"),
        Err(cause) => println!("a read to memory that was unmapped: {cause}"),
    }
    let after = DmaBuffer::over(device, pages).map_err(said)?;
    let is_untouched = after.as_slice().iter().all(|byte| *byte == 0x3C);
    require(is_untouched, "it was overwritten")?;
    drop(after);
    prepared_again(&controller)?;
    controller.shut_down().map_err(said)
}

fn prepared_again(controller: &Controller) -> Outcome {
    let buffer = DmaBuffer::new(controller.device(), BYTES).map_err(said)?;
    fetch(controller, buffer.iova(), BYTES)??;
    let is_right = pattern::difference(24, 0, buffer.as_slice()).is_none();
    require(is_right, "a read after it differs")
}

/// Memory of a peer that cannot be exported is refused: because the transport cannot map it, or with the exporter's
/// reason.
pub fn peer(device: &Arc<dyn Device>) -> Outcome {
    const REASON: &str = "this memory is not to be had";
    let refused = || Error::environment(REASON, "use other memory");
    let memory = PeerMemory {
        address: 1 << 40,
        bytes: BYTES,
        in_host: false,
        dma_buf: Box::new(move || Err(refused())),
        copier: Box::new(move |_, _| Err(refused())),
    };
    match (device.map_peer(memory), device.reaches_peers()) {
        (Ok(iova), _) => Err(format!("mapped at {iova:?}")),
        (Err(error), true) => require(error.to_string().contains(REASON), &error.to_string()),
        (Err(error), false) => refusal("memory of a peer", &error),
    }
}

//! Queues of every size, wrapped many times, and as many at once as the controller grants.

use crate::{Outcome, pattern, said};
use nvme_host::core::spec::{Lba, Nsid, nvm};
use nvme_host::{Controller, DmaBuffer, DriverQueue};
use std::collections::BTreeMap;

/// Number of commands for each entry of a queue, so that it wraps this often.
const ROUNDS: u32 = 40;
/// Largest number of commands for one size, so that the largest queue does not take minutes.
const MOST: u32 = 20_000;

/// Runs against namespace `nsid`.
pub fn run(controller: &Controller, nsid: Nsid) -> Outcome {
    let block = controller.namespace(nsid).map_err(said)?.block_bytes();
    let largest = controller.info().capabilities.max_entries;
    let mut sizes = vec![
        2,
        3,
        4,
        5,
        63,
        64,
        65,
        256,
        largest.saturating_sub(1),
        largest,
    ];
    sizes.retain(|size| (2..=largest).contains(size));
    sizes.sort_unstable();
    sizes.dedup();
    for &size in &sizes {
        let mut queue = controller.create_queue_pair(size).map_err(said)?;
        if queue.depth() != (size - 1).min(4095) {
            return Err(format!("{size} entries hold {} commands", queue.depth()));
        }
        let commands = (size * ROUNDS).min(MOST).max(2 * size);
        fill_and_check(controller, &mut queue, nsid, block, commands)
            .map_err(|cause| format!("queue of {size} entries: {cause}"))?;
        let statistics = queue.statistics();
        if statistics.peak != queue.depth() {
            return Err(format!(
                "a queue of {size} entries was never full: {statistics:?}"
            ));
        }
    }
    let together = all_at_once(controller, nsid, block)?;
    println!("queues of {sizes:?} entries, then {together} queues at once");
    Ok(())
}

/// Creates as many queues as there are, each with commands in flight at the same time.
fn all_at_once(controller: &Controller, nsid: Nsid, block: u32) -> Result<usize, String> {
    let granted = controller.info().queue_pairs.min(64);
    let mut queues = Vec::new();
    for _ in 0..granted {
        queues.push(controller.create_queue_pair(4).map_err(said)?);
    }
    if controller.create_queue_pair(4).is_ok() && controller.info().queue_pairs <= 64 {
        return Err(format!("more than the {granted} granted queues exist"));
    }
    for (number, queue) in queues.iter_mut().enumerate() {
        let mut buffer = controller.alloc(block as usize).map_err(said)?;
        pattern::fill(number as u64, 0, buffer.as_mut_slice());
        let write = nvm::write(nsid, Lba(number as u64), 1);
        let submitted = queue.submit(write, Some(buffer));
        submitted.map_err(|refused| refused.error.to_string())?;
        queue.ring();
    }
    for queue in &mut queues {
        let done = queue.wait().map_err(said)?.ok_or("a write was lost")?;
        if !done.is_success() {
            return Err(said(queue.error_of(&done, "Write")));
        }
    }
    // Each block is read back through another queue than the one that wrote it.
    let count = queues.len();
    for (number, queue) in queues.iter_mut().enumerate() {
        let lba = (number + 1) % count;
        let buffer = controller.alloc(block as usize).map_err(said)?;
        let submitted = queue.submit(nvm::read(nsid, Lba(lba as u64), 1), Some(buffer));
        submitted.map_err(|refused| refused.error.to_string())?;
        queue.ring();
        let done = queue.wait().map_err(said)?.ok_or("a read was lost")?;
        let buffer = done.buffer.as_ref().ok_or("no buffer came back")?;
        if !done.is_success() || pattern::difference(lba as u64, 0, buffer.as_slice()).is_some() {
            return Err(format!("queue {}: block {lba} differs", queue.qid()));
        }
    }
    Ok(count)
}

/// Keeps the queue full of writes, then of reads of the same blocks, and compares every one.
fn fill_and_check(
    controller: &Controller,
    queue: &mut DriverQueue,
    nsid: Nsid,
    block: u32,
    commands: u32,
) -> Outcome {
    let depth = queue.depth();
    let mut free =
        DmaBuffer::several(controller.device(), block as usize, depth as usize).map_err(said)?;
    // Another pattern for each size, so that a block that was not written is not taken for one that was.
    let seed = |lba: u64| lba ^ u64::from(depth) << 32;
    let blocks = u64::from(depth).max(64);
    for write in [true, false] {
        let mut pending = BTreeMap::new();
        let mut next = 0;
        let mut ended = 0;
        while ended < commands {
            while next < commands && !free.is_empty() {
                let lba = u64::from(next) % blocks;
                let Some(mut buffer) = free.pop() else { break };
                if write {
                    pattern::fill(seed(lba), 0, buffer.as_mut_slice());
                } else {
                    buffer.as_mut_slice().fill(0);
                }
                let sqe = match write {
                    true => nvm::write(nsid, Lba(lba), 1),
                    false => nvm::read(nsid, Lba(lba), 1),
                };
                let submitted = queue.submit(sqe, Some(buffer));
                let cid = submitted.map_err(|refused| refused.error.to_string())?;
                pending.insert(cid.0, lba);
                next += 1;
            }
            queue.ring();
            let done = queue.wait().map_err(said)?.ok_or("a command was lost")?;
            let lba = pending
                .remove(&done.cid.0)
                .ok_or("an unknown command ended")?;
            if !done.is_success() {
                return Err(said(queue.error_of(&done, "the command")));
            }
            let buffer = done.buffer.ok_or("no buffer came back")?;
            if !write && pattern::difference(seed(lba), 0, buffer.as_slice()).is_some() {
                return Err(format!("block {lba} differs"));
            }
            free.push(buffer);
            ended += 1;
        }
    }
    Ok(())
}

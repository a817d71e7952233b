//! Commands that a controller must refuse: each returns the status that the specification requires.

use crate::{Outcome, pattern, said};
use nvme_host::core::spec::{Lba, Nsid, Sqe, Status, nvm};
use nvme_host::{Controller, Error};

/// Runs against namespace `nsid`.
pub fn run(controller: &Controller, nsid: Nsid) -> Outcome {
    let mut namespace = controller.namespace(nsid).map_err(said)?;
    let block = namespace.block_bytes() as usize;
    let end = Lba(namespace.blocks());
    let mut data = vec![0; 8 * block];
    pattern::fill(3, 0, &mut data);
    // Above the blocks that a test may have made faulty.
    namespace.write(Lba(9000), &data).map_err(said)?;
    drop(namespace);
    let beyond = nvm::read(nsid, end, 8);
    let across = nvm::write(nsid, Lba(end.0 - 4), 8);
    let differs = nvm::compare(nsid, Lba(9001), 7);
    let nowhere = nvm::read(Nsid(0xFFFF_0000), Lba(0), 8);
    let nonsense = Sqe::new(0x7F, nsid);
    for (what, sqe, expected) in [
        ("read beyond the end", beyond, Status::LBA_OUT_OF_RANGE),
        ("write across the end", across, Status::LBA_OUT_OF_RANGE),
        ("compare with other data", differs, Status::COMPARE_FAILURE),
        ("no such namespace", nowhere, Status::INVALID_NAMESPACE),
        ("no such opcode", nonsense, Status::INVALID_OPCODE),
    ] {
        refused(controller, what, sqe, block, expected)?;
    }
    Ok(())
}

fn refused(
    controller: &Controller,
    what: &str,
    sqe: Sqe,
    block: usize,
    expected: Status,
) -> Outcome {
    let mut queue = controller.create_queue_pair(4).map_err(said)?;
    let blocks = if sqe.opcode() == nvm::opcode::COMPARE {
        7
    } else {
        8
    };
    let mut buffer = controller.alloc(blocks * block).map_err(said)?;
    pattern::fill(3, 0, buffer.as_mut_slice());
    let submitted = queue.submit(sqe, Some(buffer));
    submitted.map_err(|refused| refused.error.to_string())?;
    queue.ring();
    let done = queue.wait().map_err(said)?.ok_or("the command was lost")?;
    if done.is_success() {
        return Err(format!("{what}: success"));
    }
    let error = queue.error_of(&done, what);
    println!("{error}");
    match error {
        Error::Command { status, .. } if status.code() == expected.code() => Ok(()),
        other => Err(format!("{what}: {other} instead of {expected}")),
    }
}

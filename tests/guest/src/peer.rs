//! Transfers between a namespace and the memory of another PCI device, without a copy in between.

use crate::{Outcome, pattern, said};
use nvme_host::core::Data;
use nvme_host::core::spec::{Iova, Lba, Nsid, Sqe, nvm};
use nvme_host::{Controller, DmaBuffer, Namespace, Pages, Queue};
use std::sync::Arc;

const NSID: Nsid = Nsid(1);
/// The host looks for this at the start of the peer's memory.
const MARK: &[u8] = b"from the disk";

/// Runs between `controller` and the first `mib` mebibytes of the BAR in the sysfs file `resource`.
pub fn run(controller: &Controller, resource: &str, mib: u64) -> Outcome {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(resource)
        .map_err(|error| format!("{resource}: {error}"))?;
    let pages = Pages::of_file(file.into(), 0, (mib << 20) as usize).map_err(said)?;
    let mut bar = DmaBuffer::over(controller.device(), Arc::new(pages)).map_err(said)?;
    let mut namespace = controller.namespace(NSID).map_err(said)?;
    let mut queue = controller.create_queue_pair(16).map_err(said)?;
    let block = u64::from(namespace.block_bytes());
    let most = controller.max_transfer();
    for (turn, bytes) in [4096, 4096 + block, 65536, most].into_iter().enumerate() {
        let turn = turn as u64;
        let place = turn * (4 << 20) % ((mib << 20) - most);
        let blocks = (bytes / block) as u32;
        let expected = expected(turn, bytes);
        namespace.write(Lba(0), &expected).map_err(said)?;
        // Disk to peer: the processor's own view of the BAR says what arrived.
        send(
            &mut queue,
            nvm::read(NSID, Lba(0), blocks),
            at(&bar, place),
            bytes,
        )?;
        let range = place as usize..(place + bytes) as usize;
        if bar.as_slice()[range.clone()] != expected[..] {
            return Err(format!("{bytes} bytes read into the peer differ"));
        }
        // Peer to disk, what came from the disk and what the processor put there.
        send(
            &mut queue,
            nvm::write(NSID, Lba(8192), blocks),
            at(&bar, place),
            bytes,
        )?;
        same(&mut namespace, Lba(8192), &expected)?;
        pattern::fill(100 + turn, 0, &mut bar.as_mut_slice()[range.clone()]);
        send(
            &mut queue,
            nvm::write(NSID, Lba(16384), blocks),
            at(&bar, place),
            bytes,
        )?;
        let put = bar.as_slice()[range].to_vec();
        same(&mut namespace, Lba(16384), &put)?;
        println!("{bytes} bytes at {place:#x} of the peer: both ways");
    }
    // What the host looks for in the file behind the peer's memory.
    let mark = expected(0, 4096);
    namespace.write(Lba(0), &mark).map_err(said)?;
    let blocks = (4096 / block) as u32;
    send(
        &mut queue,
        nvm::read(NSID, Lba(0), blocks),
        at(&bar, 0),
        4096,
    )
}

fn expected(turn: u64, bytes: u64) -> Vec<u8> {
    let mut data = vec![0; bytes as usize];
    pattern::fill(turn, 0, &mut data);
    data[..MARK.len()].copy_from_slice(MARK);
    data
}

fn at(bar: &DmaBuffer, place: u64) -> Iova {
    bar.iova().offset(place)
}

fn send(queue: &mut Queue, sqe: Sqe, iova: Iova, len: u64) -> Outcome {
    let submitted = queue.submit_data(sqe, Data::Contiguous { iova, len }, None);
    submitted.map_err(|refused| refused.error.to_string())?;
    queue.ring();
    let done = queue.wait().map_err(said)?.ok_or("the command was lost")?;
    match done.is_success() {
        true => Ok(()),
        false => Err(said(queue.error_of(&done, "a transfer with the peer"))),
    }
}

fn same(namespace: &mut Namespace, lba: Lba, expected: &[u8]) -> Outcome {
    let mut found = vec![0; expected.len()];
    namespace.read(lba, &mut found).map_err(said)?;
    match found == expected {
        true => Ok(()),
        false => Err(format!("what the peer gave differs at LBA {lba}")),
    }
}

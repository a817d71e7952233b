//! One command at a time, of every size and offset where a data pointer changes its form.

use crate::{Outcome, pattern, said};
use nvme_host::core::Data;
use nvme_host::core::sgl::Segment;
use nvme_host::core::spec::{Lba, Nsid, Sqe, nvm};
use nvme_host::{Controller, DmaBuffer, Queue};

const PAGE: u64 = 4096;
/// Entries of a PRP list page: the data that one list page describes, in pages.
const LIST: u64 = 512;
/// Offsets into the first page of a buffer: dword aligned, around 0, a block and the page's end.
const OFFSETS: [u64; 9] = [0, 4, 8, 508, 512, 2048, 3584, 4088, 4092];
/// The pattern is another one in each transfer, so that old data is never mistaken for new.
const SEEDS: u64 = 1000;

/// How the data pointer is made.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Prp,
    /// An SGL of pieces of this many bytes.
    Sgl(u32),
}

/// Runs the table against namespace `nsid`.
pub fn run(controller: &Controller, nsid: Nsid) -> Outcome {
    let block = u64::from(controller.namespace(nsid).map_err(said)?.block_bytes());
    let most = controller.max_transfer();
    let mut queue = controller.create_queue_pair(16).map_err(said)?;
    let mut forms = vec![Form::Prp];
    if controller.identify().sgls & 3 != 0 {
        // Pieces that divide a block, a page and more, and one that ends nowhere in particular.
        forms.extend([512, 4096, 20480, 1004].map(Form::Sgl));
    }
    let lengths = lengths(block, most);
    let mut moved = 0u64;
    let mut commands = 0u64;
    for form in &forms {
        for &length in &lengths {
            for (turn, &offset) in OFFSETS.iter().enumerate() {
                // Reads land at another offset than the one the write came from.
                let other = OFFSETS[(turn + 4) % OFFSETS.len()];
                let seed = SEEDS + commands;
                one(
                    controller,
                    &mut queue,
                    nsid,
                    *form,
                    (offset, other),
                    length,
                    block,
                    seed,
                )
                .map_err(|cause| {
                    format!("{form:?}, {length} bytes, offsets {offset} and {other}: {cause}")
                })?;
                commands += 2;
                moved += 2 * length;
            }
        }
    }
    too_long(controller, &mut queue, nsid, block)?;
    println!(
        "{commands} transfers of {} lengths up to {most} bytes, {} MiB, {} forms",
        lengths.len(),
        moved >> 20,
        forms.len()
    );
    Ok(())
}

/// Lengths around one block, pages, a list page, and the longest transfer.
fn lengths(block: u64, most: u64) -> Vec<u64> {
    let mut lengths = Vec::new();
    for pages in [
        0,
        1,
        2,
        3,
        8,
        LIST - 1,
        LIST,
        LIST + 1,
        2 * LIST - 1,
        2 * LIST,
    ] {
        for blocks in [-1i64, 0, 1] {
            lengths.push((pages * PAGE) as i64 + blocks * block as i64);
        }
    }
    lengths.extend([most as i64, most as i64 - block as i64]);
    let mut fit: Vec<u64> = lengths
        .into_iter()
        .filter(|length| (block as i64..=most as i64).contains(length))
        .map(|length| length as u64)
        .filter(|length| length.is_multiple_of(block))
        .collect();
    fit.sort_unstable();
    fit.dedup();
    fit
}

/// Writes `length` bytes and reads them back.
#[allow(clippy::too_many_arguments)]
fn one(
    controller: &Controller,
    queue: &mut Queue,
    nsid: Nsid,
    form: Form,
    offsets: (u64, u64),
    length: u64,
    block: u64,
    seed: u64,
) -> Outcome {
    let blocks = (length / block) as u32;
    let lba = Lba(seed % 64);
    let mut out = at_offset(controller, offsets.0, length)?;
    pattern::fill(seed, 0, out.as_mut_slice());
    done(queue, form, nvm::write(nsid, lba, blocks), out)?;
    let back = at_offset(controller, offsets.1, length)?;
    let back = done(queue, form, nvm::read(nsid, lba, blocks), back)?;
    match pattern::difference(seed, 0, back.as_slice()) {
        None => Ok(()),
        Some(at) => Err(format!("byte {at} differs")),
    }
}

/// A buffer of `length` bytes that starts `offset` bytes into a page.
fn at_offset(controller: &Controller, offset: u64, length: u64) -> Result<DmaBuffer, String> {
    // The second of two buffers starts as far into its page as the first is longer than whole pages.
    let stride = length.next_multiple_of(PAGE) + offset;
    let mut pair = DmaBuffer::several(controller.device(), stride as usize, 2).map_err(said)?;
    let mut buffer = pair.pop().ok_or("no buffer")?;
    buffer.resize(length as usize);
    if buffer.iova().0 % PAGE != offset % PAGE {
        return Err(format!("the buffer is at {:#x}", buffer.iova().0));
    }
    Ok(buffer)
}

/// Sends one command and waits for its success; gives its buffer back.
fn done(queue: &mut Queue, form: Form, sqe: Sqe, buffer: DmaBuffer) -> Result<DmaBuffer, String> {
    let submitted = match form {
        Form::Prp => queue.submit(sqe, Some(buffer)),
        Form::Sgl(piece) => {
            let segments = segments(&buffer, piece);
            queue.submit_data(sqe, Data::Sgl(&segments), Some(buffer))
        }
    };
    submitted.map_err(|refused| refused.error.to_string())?;
    queue.ring();
    let done = queue.wait().map_err(said)?.ok_or("the command was lost")?;
    if !done.is_success() {
        return Err(said(queue.error_of(&done, "the command")));
    }
    done.buffer.ok_or_else(|| "no buffer came back".to_string())
}

fn segments(buffer: &DmaBuffer, piece: u32) -> Vec<Segment> {
    let total = buffer.len() as u64;
    // No more descriptors than the queue has room for: long transfers get longer pieces.
    let piece = u64::from(piece).max((total / 200).next_multiple_of(4));
    let mut segments = Vec::new();
    let mut at = 0;
    while at < total {
        let len = piece.min(total - at);
        segments.push(Segment::Data {
            iova: buffer.iova().offset(at),
            len: len as u32,
        });
        at += len;
    }
    segments
}

/// A transfer above MDTS is the controller's to refuse, and the queue works afterwards.
fn too_long(controller: &Controller, queue: &mut Queue, nsid: Nsid, block: u64) -> Outcome {
    let Some(mdts) = controller.info().max_transfer else {
        return Ok(());
    };
    if mdts + block > controller.max_transfer() * 2 || (mdts + block) / block > 65_536 {
        return Ok(());
    }
    let buffer = at_offset(controller, 0, mdts + block)?;
    let blocks = ((mdts + block) / block) as u32;
    let sqe = nvm::read(nsid, Lba(0), blocks);
    match queue.submit(sqe, Some(buffer)) {
        // Our own list memory ends at the longest transfer that was asked for.
        Err(_) => Ok(()),
        Ok(_) => {
            queue.ring();
            let done = queue.wait().map_err(said)?.ok_or("the command was lost")?;
            if done.is_success() {
                return Err(format!("{} bytes above MDTS were accepted", block));
            }
            one(controller, queue, nsid, Form::Prp, (0, 0), block, block, 1)
        }
    }
}

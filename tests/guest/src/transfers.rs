//! One command at a time, of every size and offset at which a data pointer changes its form.

use crate::{Outcome, pattern, said};
use nvme_host::core::CommandData;
use nvme_host::core::sgl::SglSegment;
use nvme_host::core::spec::{Iova, Lba, Nsid, Sqe, nvm};
use nvme_host::{Controller, DmaBuffer, DriverQueue};

const PAGE: u64 = 4096;
/// Entries of a PRP list page: the data that one list page describes, in pages.
const LIST: u64 = 512;
/// Offsets into the first page of a buffer: dword aligned, around 0, a block and the page's end.
const OFFSETS: [u64; 9] = [0, 4, 8, 508, 512, 2048, 3584, 4088, 4092];
/// Bytes beside a read.
const GUARD: u8 = 0xA5;
/// Length from which on only a third of the offsets is tested.
const LONG: u64 = 256 << 10;
/// The pattern is another one in each transfer, so that old data is never mistaken for new.
const SEEDS: u64 = 1000;

/// The form of the data pointer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Prp,
    /// An SGL of pieces of this many bytes.
    Sgl(u32),
}

/// The objects that transfers use: a queue, a namespace, and memory for the longest transfer.
struct Bench {
    queue: DriverQueue,
    nsid: Nsid,
    block: u64,
    /// Largest number of descriptors for which the queue has room: its lists are made for PRPs, which are half as long.
    most_segments: u64,
    memory: Option<DmaBuffer>,
}

/// Runs the table against namespace `nsid`.
pub fn run(controller: &Controller, nsid: Nsid) -> Outcome {
    let block = u64::from(controller.namespace(nsid).map_err(said)?.block_bytes());
    let most = controller.max_transfer();
    // One region is used for everything: this test is not about mapping.
    let memory = controller.alloc((most + 2 * PAGE) as usize).map_err(said)?;
    let mut bench = Bench {
        queue: controller.create_queue_pair(16).map_err(said)?,
        nsid,
        block,
        most_segments: (most / PAGE / 2).clamp(1, 600),
        memory: Some(memory),
    };
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
            let step = if length < LONG { 1 } else { 3 };
            for (turn, &offset) in OFFSETS.iter().enumerate().step_by(step) {
                // Reads land at another offset than the one the write came from.
                let other = OFFSETS[(turn + 4) % OFFSETS.len()];
                let seed = SEEDS + commands;
                bench
                    .round_trip(*form, length, (offset, other), seed)
                    .map_err(|cause| {
                        format!("{form:?}, {length} bytes, offsets {offset} and {other}: {cause}")
                    })?;
                commands += 2;
                moved += 2 * length;
            }
        }
    }
    if let Some(mdts) = controller.info().max_transfer {
        bench.too_long(mdts)?;
    }
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

impl Bench {
    /// Writes `length` bytes from one offset and reads them back to another.
    fn round_trip(&mut self, form: Form, length: u64, offsets: (u64, u64), seed: u64) -> Outcome {
        let blocks = (length / self.block) as u32;
        let lba = Lba(seed % 64);
        let (from, to) = (offsets.0 as usize, offsets.1 as usize);
        let memory = self.memory.as_mut().ok_or("the memory is in flight")?;
        pattern::fill(
            seed,
            0,
            &mut memory.as_mut_slice()[from..from + length as usize],
        );
        self.send(form, nvm::write(self.nsid, lba, blocks), offsets.0, length)?;
        let memory = self.memory.as_mut().ok_or("the memory is in flight")?;
        // The remaining bytes of the write's buffer lie elsewhere; beside the read nothing may change.
        let end = to + length as usize;
        memory.as_mut_slice()[..to].fill(GUARD);
        memory.as_mut_slice()[end..end + PAGE as usize].fill(GUARD);
        self.send(form, nvm::read(self.nsid, lba, blocks), offsets.1, length)?;
        let memory = self.memory.as_ref().ok_or("the memory is in flight")?;
        if let Some(at) = pattern::difference(seed, 0, &memory.as_slice()[to..end]) {
            return Err(format!("byte {at} differs"));
        }
        let beside = [
            &memory.as_slice()[..to],
            &memory.as_slice()[end..end + PAGE as usize],
        ];
        if beside.concat().iter().any(|byte| *byte != GUARD) {
            return Err("bytes beside the transfer were overwritten".to_string());
        }
        Ok(())
    }

    /// Sends one command for `length` bytes at `offset` of the memory, and waits for its success.
    fn send(&mut self, form: Form, sqe: Sqe, offset: u64, length: u64) -> Outcome {
        let memory = self.memory.take().ok_or("the memory is in flight")?;
        let iova = memory.iova().offset(offset);
        let segments = match form {
            Form::Prp => Vec::new(),
            Form::Sgl(piece) => segments(iova, length, piece, self.most_segments),
        };
        let data = match form {
            Form::Prp => CommandData::Contiguous { iova, len: length },
            Form::Sgl(_) => CommandData::Sgl(&segments),
        };
        match self.queue.submit_data(sqe, data, Some(memory)) {
            Ok(_) => self.queue.ring(),
            Err(refused) => {
                self.memory = refused.buffer;
                return Err(refused.error.to_string());
            }
        }
        let done = self.queue.wait().map_err(said)?;
        let mut done = done.ok_or("the command was lost")?;
        self.memory = done.buffer.take();
        match done.is_success() {
            true => Ok(()),
            false => Err(said(self.queue.error_of(&done, "the command"))),
        }
    }

    /// A transfer above MDTS is refused, by the controller or by us, and the queue works afterwards.
    fn too_long(&mut self, mdts: u64) -> Outcome {
        let length = mdts + self.block;
        let room = self.memory.as_ref().map_or(0, |memory| memory.len() as u64);
        if length > room || length / self.block > 65_536 {
            return Ok(());
        }
        let read = nvm::read(self.nsid, Lba(0), (length / self.block) as u32);
        if self.send(Form::Prp, read, 0, length).is_ok() {
            return Err(format!("{length} bytes were accepted, MDTS is {mdts}"));
        }
        self.round_trip(Form::Prp, self.block, (0, 8), 1)
    }
}

fn segments(iova: Iova, total: u64, piece: u32, most: u64) -> Vec<SglSegment> {
    let piece = u64::from(piece).max(total.div_ceil(most).next_multiple_of(4));
    let mut segments = Vec::new();
    let mut at = 0;
    while at < total {
        let len = piece.min(total - at);
        segments.push(SglSegment::Data {
            iova: iova.offset(at),
            len: len as u32,
        });
        at += len;
    }
    segments
}

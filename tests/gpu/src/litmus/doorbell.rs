//! One queue, 128 warps, the core's own locks: doorbells never move backwards, and the entries that they announce are
//! visible.
// UNSAFETY: launches kernels over raw addresses; rings and doorbells are memory that the GPU shares.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::limits::{finish_within, limit};
use crate::report::{Options, Report};
use nvme_core::ControllerIdentity;
use nvme_core::handoff::QueueWords;
use nvme_core::mem::{CqCell, SqCell};
use nvme_core::queue_state::{QueueState, words as state_words};
use nvme_core::spec::{Cqe, Qid, nvm};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::work::{self, LaunchArguments};
use nvme_host::cuda::null::{NullController, NullShape};
use nvme_host::cuda::{DeviceMemory, Kernel, RegisteredMemory};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use zerocopy::IntoBytes;

const WARPS: u32 = 128;
const TIMEOUT_NS: u64 = 5_000_000_000;
/// Shortest limit of a run.
const LONGEST: Duration = Duration::from_secs(120);

/// Tests all lanes of each warp, and one lane: then every warp rings for itself.
pub fn all(report: &mut Report, bench: &Bench) {
    for (lanes, entries, slots) in [(32, 16_384, 4095), (32, 512, 127), (1, 1024, 255)] {
        let name = format!("litmus/doorbell-lock/{WARPS}-warps/{lanes}-lanes/{slots}-slots");
        report.test(&name, |options| {
            let ran = run(bench, lanes, entries, slots, options);
            ran.map_err(|error| error.to_string())?
        });
    }
}

/// A doorbell as its reader follows it: modulo the ring, forward by at most the number of commands that may be in
/// flight.
struct Follow {
    mask: u32,
    most: u32,
    at: u32,
}

impl Follow {
    /// Returns how far the doorbell moved to show `value`; `None` if it moved backwards, or too far.
    fn moved(&mut self, value: u32) -> Option<u32> {
        let by = value.wrapping_sub(self.at) & self.mask;
        self.at = value;
        (value <= self.mask && by <= self.most).then_some(by)
    }
}

/// State that the two CPU threads share.
#[derive(Default)]
struct Watched {
    /// Position up to which the doorbell was seen to ring.
    seen: AtomicU64,
    looks: AtomicU64,
    moves: AtomicU64,
    over: AtomicBool,
}

/// Only reads the doorbell; returns how often it moved backwards.
fn watch(doorbell: &AtomicU32, follow: &mut Follow, watched: &Watched) -> u64 {
    let (mut position, mut back) = (0u64, 0);
    let (mut looks, mut moves) = (0, 0);
    // Relaxed: nothing is read after it.
    while !watched.over.load(Ordering::Relaxed) {
        looks += 1;
        // Acquire: pairs with the fence before the doorbell.
        let value = doorbell.load(Order::Acquire, Scope::Sys);
        match follow.moved(value) {
            Some(0) => idle(looks),
            Some(by) => {
                position += u64::from(by);
                moves += 1;
                // Release: the entries, for the thread that serves.
                watched.seen.store(position, Ordering::Release);
            }
            None => back += 1,
        }
    }
    watched.looks.store(looks, Ordering::Relaxed);
    watched.moves.store(moves, Ordering::Relaxed);
    back
}

/// Yields after some looks that found nothing, because another thread may need the processor.
fn idle(looks: u64) {
    match looks % 512 {
        0 => std::thread::yield_now(),
        _ => std::hint::spin_loop(),
    }
}

/// A queue on its controller's side.
struct Controller<'a> {
    sq: &'a [SqCell],
    cq: &'a [CqCell],
    head_doorbell: &'a AtomicU32,
    slots: u32,
}

impl Controller<'_> {
    /// Completes what was rung for. The number of commands, or what is wrong.
    fn serve(&self, watched: &Watched) -> Result<u64, String> {
        let entries = self.sq.len() as u64;
        let mask = entries as u32 - 1;
        let mut head = Follow {
            mask,
            // Given back by quarters of the ring, and what was drained beyond that.
            most: entries as u32 / 4 + self.slots,
            at: 0,
        };
        let (mut done, mut given_back, mut looks) = (0u64, 0u64, 0);
        // The CID of each slot's last command: a new one differs in its generation.
        let mut last = vec![None; self.slots as usize];
        loop {
            // Acquire: pairs with the release of what was seen.
            let seen = watched.seen.load(Ordering::Acquire);
            let by = head.moved(self.head_doorbell.load(Order::Acquire, Scope::Sys));
            given_back += u64::from(by.ok_or("the head doorbell went back")?);
            if given_back > done {
                return Err(format!("{given_back} entries given back of {done} posted"));
            }
            if seen == done {
                if watched.over.load(Ordering::Relaxed) {
                    return Ok(done);
                }
                looks += 1;
                idle(looks);
                continue;
            }
            while done < seen && done - given_back < entries {
                let index = (done % entries) as usize;
                let sqe = self.sq[index].load();
                let cid = sqe.cid();
                let slot = usize::from(cid.0 & 0xFFF);
                if sqe.opcode() != nvm::opcode::FLUSH || slot >= last.len() {
                    return Err(format!("entry {done} was not written: {sqe:?}"));
                }
                if last[slot].replace(cid) == Some(cid) {
                    return Err(format!("entry {done} is that of a lap before: {sqe:?}"));
                }
                self.cq[index].post(Cqe {
                    dw0: 0,
                    dw1: 0,
                    sqhd: (done + 1) as u16 & mask as u16,
                    sqid: 1,
                    cid: cid.0,
                    phase_status: u16::from(done & entries == 0),
                });
                done += 1;
            }
        }
    }
}

fn run(
    bench: &Bench,
    lanes: u32,
    entries: u32,
    slots: u32,
    options: &Options,
) -> nvme_host::Result<Result<String, String>> {
    let null = NullController::new(NullShape {
        queues: 1,
        entries,
        dstrd: 4,
        data_bytes: 4096,
    })?;
    let registered = RegisteredMemory::pages(&bench.gpu, null.pages())?;
    let state: Vec<AtomicU32> = (0..state_words(entries))
        .map(|_| AtomicU32::new(0))
        .collect();
    if let Some(view) = QueueState::new(&state, Qid(1), entries, slots) {
        view.init(&ControllerIdentity::new(), 0);
    }
    let word = |word: &AtomicU32| word.load(Order::Relaxed, Scope::Sys);
    let bytes: Vec<u8> = state.iter().flat_map(|w| word(w).to_le_bytes()).collect();
    let states = DeviceMemory::new(&bench.gpu, bytes.len())?;
    states.upload(0, &bytes)?;
    let host = null.words(0);
    let words = QueueWords {
        sq: registered.translate(host.sq)?,
        cq: registered.translate(host.cq)?,
        sq_doorbell: registered.translate(host.sq_doorbell)?,
        cq_doorbell: registered.translate(host.cq_doorbell)?,
        lists: registered.translate(host.sq)?,
        state: states.address(),
        slots,
        ..host
    };
    let device_words = DeviceMemory::new(&bench.gpu, size_of::<QueueWords>())?;
    device_words.upload(0, words.as_bytes())?;
    let cells = DeviceMemory::new(&bench.gpu, WARPS as usize * 32 * 8)?;
    let report = DeviceMemory::new(&bench.gpu, size_of::<work::LaunchReport>())?;
    let launch = LaunchArguments {
        queues: device_words.address(),
        cells: cells.address(),
        report: report.address(),
        data_iova: null.data(),
        data_bytes: u64::MAX / 2,
        commands: options.litmus,
        units: 1 << 20,
        timeout_ns: TIMEOUT_NS * bench.patience,
        queue_count: 1,
        cell_count: WARPS * 32,
        nsid: 1,
        opcode: u32::from(nvm::opcode::FLUSH),
        blocks: 1,
        block_shift: 9,
        lanes,
        ..LaunchArguments::default()
    };
    let at = |address: u64| std::ptr::with_exposed_provenance::<u8>(address as usize);
    let len = entries as usize;
    // SAFETY: the null controller's rings, zeroed and aligned, inside pages that live to the end of this
    // function; the GPU and these atomics alone touch them.
    let (sq, cq) = unsafe {
        (
            std::slice::from_raw_parts(at(host.sq).cast::<SqCell>(), len),
            std::slice::from_raw_parts(at(host.cq).cast::<CqCell>(), len),
        )
    };
    // SAFETY: as above, for the doorbells.
    let (tail, head) = unsafe {
        (
            &*at(host.sq_doorbell).cast::<AtomicU32>(),
            &*at(host.cq_doorbell).cast::<AtomicU32>(),
        )
    };
    let watched = Watched::default();
    let controller = Controller {
        sq,
        cq,
        head_doorbell: head,
        slots,
    };
    let mut follow = Follow {
        mask: entries - 1,
        most: slots,
        at: 0,
    };
    // SAFETY: every address is memory that lives to the end of this function; when the kernel does not
    // end in time, the program does.
    unsafe {
        bench
            .kernels
            .launch(&bench.stream, Kernel::Shared, WARPS, 32, &launch)?;
    }
    let (back, served) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(tail, &mut follow, &watched));
        let server = scope.spawn(|| controller.serve(&watched));
        finish_within(&bench.stream, limit().max(LONGEST));
        watched.over.store(true, Ordering::Relaxed);
        (watcher.join(), server.join())
    });
    let mut bytes = [0; size_of::<work::LaunchReport>()];
    report.download(0, &mut bytes)?;
    // SAFETY: the slice has as many bytes as the struct, all of whose fields are integers.
    let counts: work::LaunchReport = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
    let (Ok(back), Ok(served)) = (back, served) else {
        return Ok(Err("a thread of the CPU panicked".to_owned()));
    };
    let looks = watched.looks.load(Ordering::Relaxed);
    Ok(match served {
        _ if back > 0 => Err(format!("the tail doorbell went back {back} times")),
        Err(why) => Err(why),
        Ok(served) if served != options.litmus || counts.completed != served => {
            Err(format!("{served} commands served: {counts:?}"))
        }
        Ok(served) => Ok(format!(
            "{served} commands, {looks} looks at the doorbell, {} moves, 0 backwards",
            watched.moves.load(Ordering::Relaxed)
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doorbell_that_goes_back_is_found_also_over_the_wrap() {
        let mut follow = Follow {
            mask: 15,
            most: 7,
            at: 0,
        };
        let moved: Vec<_> = [3, 3, 10, 1, 0, 8, 16]
            .into_iter()
            .map(|value| follow.moved(value))
            .collect();
        assert_eq!(
            moved,
            [Some(3), Some(0), Some(7), Some(7), None, None, None],
            "back by one, forward by eight, outside the ring"
        );
    }
}

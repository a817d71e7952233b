//! The kernel: each thread reads blocks of the namespace and counts their bytes by value.
// UNSAFETY: the kernel's argument holds addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::Args;
use nvme_core::group::ExecContext;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::{CommandData, CommandOutcome, CommandToken, MemberCommand, SharedQueue};
use nvme_gpu_kernel::{GpuThread, arch};

/// One thread's work.
struct Reader<'a> {
    args: &'a Args,
    queue: SharedQueue<'a>,
    thread: u64,
}

// Inlined, so that the argument and the tokens stay in registers.
impl Reader<'_> {
    /// Returns the number of this thread's buffer `which`, 0 or 1.
    #[inline(always)]
    fn buffer(&self, which: u64) -> u64 {
        2 * self.thread + which
    }

    /// Starts reading `unit` into buffer `which`.
    #[inline(always)]
    fn start(&self, unit: u64, which: u64) -> Option<CommandToken> {
        let Args {
            lba, nsid, blocks, ..
        } = *self.args;
        let len = u64::from(self.args.unit_bytes);
        let iova = Iova(self.args.buffers_iova + self.buffer(which) * len);
        let read = nvm::read(Nsid(nsid), Lba(lba + unit * u64::from(blocks)), blocks);
        let data = CommandData::Contiguous { iova, len };
        let command = MemberCommand::new(read, data, self.buffer(which) as u32);
        let deadline_ns = GpuThread.now_ns() + self.args.timeout_ns;
        self.queue.submit(&GpuThread, command, deadline_ns).ok()
    }

    /// Waits for a read; returns true if it succeeded.
    #[inline(always)]
    fn finish(&self, token: Option<CommandToken>) -> bool {
        let deadline_ns = GpuThread.now_ns() + self.args.timeout_ns;
        let Some(token) = token else {
            return false;
        };
        let end = self.queue.wait(&GpuThread, token, deadline_ns);
        matches!(end, Ok((CommandOutcome::Completed(status), _)) if status.is_success())
    }

    #[inline(always)]
    fn count(&self, which: u64) {
        let bytes = u64::from(self.args.unit_bytes);
        let start = self.args.buffers + self.buffer(which) * bytes;
        for at in (start..start + bytes).step_by(4) {
            // SAFETY: inside this thread's buffer; the command that wrote it has ended. Volatile, so that the
            // compiler does not use a load of the read-only path, which may return stale bytes.
            let mut word = unsafe { (at as usize as *const u32).read_volatile() };
            for _ in 0..4 {
                let byte = word as usize & 0xFF;
                // SAFETY: one of the 256 counters for which the host vouches; the addition is atomic.
                unsafe { arch::add((self.args.bins as usize as *mut u64).add(byte), 1) };
                word >>= 8;
            }
        }
    }
}

/// Counts the bytes of `args.units` units into `args.bins`. Any grid of whole warps.
///
/// # Safety
/// Every address in `args` is valid as [`Args`] documents, and only such kernels share the queues.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn histogram(args: Args) {
    // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
    unsafe { run(&args) };
}

/// Runs one thread of the kernel `histogram`; on the host, one lane of a test.
///
/// # Safety
/// Every address in `args` is valid as [`Args`] documents, and only such kernels share the queues.
#[inline(always)]
pub unsafe fn run(args: &Args) {
    let thread = u64::from(arch::block() * arch::block_threads() + arch::thread());
    let threads = u64::from(arch::blocks() * arch::block_threads());
    let index = (thread / 32) as u32 % args.queues.queue_count.max(1);
    // SAFETY: the host vouches for the queues and for two cells for each thread.
    let Some(queue) = (unsafe { args.queues.shared(index) }) else {
        return;
    };
    let reader = Reader {
        args,
        queue,
        thread,
    };
    let (mut unit, mut which, mut counts) = (thread, 0, false);
    let mut token = None;
    loop {
        // The next read is in flight while the block before it is counted.
        let more = unit < args.units;
        let next = match more {
            true => reader.start(unit, which),
            false => None,
        };
        if counts {
            if reader.finish(token.take()) {
                reader.count(which ^ 1);
            } else {
                // SAFETY: a counter for which the host vouches; the addition is atomic.
                unsafe { arch::add(args.failed as usize as *mut u64, 1) };
            }
        }
        if !more {
            break;
        }
        (token, counts) = (next, true);
        which ^= 1;
        unit += threads;
    }
}

//! The kernels of the product, and the assignment of reading and multiplying to the blocks of a launch.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::multiply::{multiply, store};
use super::read::read;
use super::{
    BlockRole, GemmParameters, GemmStreamed, GemmTile, STRIP_ROWS, TILE_ROWS, TILE_TOKENS,
};
use core::ops::Range;
use nvme_core::group::{ExecContext, ThreadGroup};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::rows::{code, worst};
use nvme_gpu_kernel::strips::{LaunchStrips, StripReady, words};
use nvme_gpu_kernel::{GpuThread, WholeBlock, arch, entry, leave_block};

entry! {
    /// Multiplies with a matrix on a drive. A block reads or multiplies, as the order in which blocks start
    /// decides.
    ///
    /// # Safety
    /// All memory that [`GemmStreamed`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_gemm_streamed(gemm: GemmStreamed) {
        let block = WholeBlock::here();
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let ticket = unsafe { take(&block, gemm.gemm.roles()) };
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe {
            match gemm.role(ticket) {
                BlockRole::Reads => read(&gemm, &block),
                BlockRole::Multiplies if gemm.gemm.is_f16 != 0 => use_strips::<true>(&gemm, &block),
                BlockRole::Multiplies => use_strips::<false>(&gemm, &block),
            }
        }
    }
}

entry! {
    /// Computes the same product for a matrix in GPU memory.
    ///
    /// # Safety
    /// All memory that [`GemmParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_gemm(gemm: GemmParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe {
            match gemm.is_f16 {
                0 => use_all::<false>(&gemm),
                _ => use_all::<true>(&gemm),
            }
        }
    }
}

entry! {
    /// Zeroes the words of a launch.
    ///
    /// # Safety
    /// As [`nvme_gemm`].
    pub unsafe fn nvme_gemm_clear(gemm: GemmParameters) {
        let step = u64::from(arch::blocks() * arch::block_threads());
        let mut at = u64::from(arch::block() * arch::block_threads() + arch::thread());
        while at < gemm.work_words() {
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            unsafe { *(gemm.words as usize as *mut u32).add(at as usize) = 0 };
            at += step;
        }
    }
}

/// The words of a launch, and the failures that the calling thread counted.
pub struct LaunchWords<'g> {
    gemm: &'g GemmParameters,
    pub strips: LaunchStrips<'g>,
    pub failed: u64,
    pub worst: u64,
}

impl<'g> LaunchWords<'g> {
    #[inline(always)]
    pub fn new(gemm: &'g GemmParameters, strips: LaunchStrips<'g>) -> Self {
        Self {
            gemm,
            strips,
            failed: 0,
            worst: 0,
        }
    }

    /// Marks rows as not read. A row counts once, for the first thread that marks it.
    #[inline(always)]
    pub fn fail(&mut self, rows: Range<u32>, why: i32) {
        let mut row = rows.start;
        while row < rows.end {
            // SAFETY: the host vouches for a word for each row, used through atomics alone; `row` is below
            // the number of rows.
            let word = unsafe { &*(self.gemm.code(row) as usize as *const AtomicU32) };
            if word.swap(why as u32, Order::Relaxed, Scope::Gpu) == 0 {
                self.failed += 1;
                let this = worst(row.into(), None, why);
                self.worst = if this > self.worst { this } else { self.worst };
            }
            row += 1;
        }
    }
}

/// Returns the strips of a launch.
#[inline(always)]
pub fn strips<'g>(gemm: &GemmParameters) -> Option<LaunchStrips<'g>> {
    let first = gemm.strip_words() as usize as *const AtomicU32;
    // SAFETY: the host vouches for the words of all strips, for as long as the launch runs, used through
    // atomics alone.
    let all = unsafe { core::slice::from_raw_parts(first, words(gemm.strips())) };
    LaunchStrips::new(all, gemm.strips(), super::STAGES)
}

/// Waits until a strip or a stage is ready; returns [`code::OK`], or the reason why it never will be.
///
/// When the wait exceeds the patience, it aborts for all blocks, so that no block waits for one that is
/// stuck.
#[inline(always)]
pub fn wait(strips: &LaunchStrips<'_>, patience_ns: u64, ready: impl Fn() -> StripReady) -> i32 {
    let deadline_ns = arch::now_ns().saturating_add(patience_ns);
    let mut turn = 0;
    loop {
        match ready() {
            StripReady::Now => return code::OK,
            StripReady::Never(why) => return why as i32,
            StripReady::NotYet if arch::now_ns() >= deadline_ns => {
                strips.give_up(code::TIMED_OUT as u32);
            }
            StripReady::NotYet => GpuThread.pause(turn),
        }
        turn += 1;
    }
}

/// Takes the next number of a counter, the same for all threads of the block.
///
/// # Safety
/// The counter's word is allocated.
#[inline(always)]
unsafe fn take(block: &WholeBlock, counter: u64) -> u32 {
    let mut ticket = 0;
    if block.leads() {
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        ticket = unsafe { count(counter) };
    }
    block.broadcast(ticket)
}

/// Adds one to a counter and returns its previous value.
///
/// # Safety
/// The counter's word is allocated.
#[inline(always)]
pub unsafe fn count(counter: u64) -> u32 {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let counter = unsafe { &*(counter as usize as *const AtomicU32) };
    counter.fetch_add(1, Order::Relaxed, Scope::Gpu)
}

/// Computes tiles until all are taken.
///
/// # Safety
/// All memory that [`GemmStreamed`] names is allocated and stays so while the kernel runs.
#[inline(always)]
unsafe fn use_strips<const IS_F16: bool>(streamed: &GemmStreamed, block: &WholeBlock) {
    let gemm = &streamed.gemm;
    let Some(strips) = strips(gemm) else { return };
    let mut words = LaunchWords::new(gemm, strips);
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    while let Some(tile) = gemm.tile(unsafe { take(block, gemm.tiles()) }) {
        let mut why = code::OK;
        if block.leads() {
            let parts = streamed.parts_of(tile.strip);
            let ready = || words.strips.may_use(tile.strip, parts);
            why = wait(&words.strips, streamed.patience_ns, ready);
        }
        // A barrier in `broadcast`: all threads read the strip after the leader has seen it complete.
        let why = block.broadcast(why as u32) as i32;
        if why != code::OK {
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            unsafe { give_up(gemm, tile, why, &mut words) };
            continue;
        }
        let in_strip = tile.row % STRIP_ROWS;
        let w = streamed.stage(tile.strip) + u64::from(in_strip) * u64::from(gemm.columns) * 2;
        let rows = gemm.strip_rows(tile.strip) - in_strip;
        // SAFETY: the host vouches for the addresses, and the strip is complete in its stage until `end_use`.
        unsafe { multiply::<IS_F16>(gemm, tile, (w, rows)) };
        if block.leads() {
            words.strips.end_use(tile.strip);
        }
    }
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe { leave_block(&streamed.rows, words.failed, words.worst) };
}

/// Stores NaN in a tile whose strip was not read. Every thread of the block calls it.
///
/// # Safety
/// All memory that [`GemmParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
unsafe fn give_up(gemm: &GemmParameters, tile: GemmTile, why: i32, words: &mut LaunchWords<'_>) {
    let (row, first) = (tile.row + arch::thread() % 128 * 2, arch::thread() / 128);
    let mut token = first;
    while token < TILE_TOKENS {
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe { store(gemm, tile.token + token, row, f32::NAN, f32::NAN) };
        token += 2;
    }
    let row = tile.row + arch::thread() % TILE_ROWS;
    if row < gemm.rows {
        words.fail(row..row + 1, why);
    }
}

/// Computes tiles of a matrix in GPU memory until all are taken.
///
/// # Safety
/// All memory that [`GemmParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
unsafe fn use_all<const IS_F16: bool>(gemm: &GemmParameters) {
    let block = WholeBlock::here();
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    while let Some(tile) = gemm.tile(unsafe { take(&block, gemm.tiles()) }) {
        let w = gemm.w + u64::from(tile.row) * u64::from(gemm.columns) * 2;
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe { multiply::<IS_F16>(gemm, tile, (w, gemm.rows - tile.row)) };
    }
}

//! Instructions of sm_90a: barriers in shared memory that count bytes, copies of tiles by the tensor memory
//! accelerator (TMA), and products of a warpgroup (`wgmma`) with operands in shared memory.

pub use super::descriptor::describe;

use super::BlockShared;
use core::arch::asm;
use nvme_gpu_kernel::arch;

/// Limit of a wait in nanoseconds, far above the time of any tile.
const LIMIT_NS: u64 = 10_000_000_000;

/// A barrier in 8 bytes of shared memory. Its phase ends when all expected arrivals and bytes have come.
///
/// The order of calls: one thread calls `init` and [`fence_barriers`], and the block meets; a producer calls
/// `arrive_and_expect` and starts copies that count their bytes here; consumers `wait` for the phase's
/// parity, which alternates between 0 and 1.
#[derive(Clone, Copy)]
pub struct SharedBarrier(BlockShared);

impl SharedBarrier {
    /// Returns the barrier at `at`, a multiple of 8.
    #[inline(always)]
    pub fn at(at: BlockShared) -> Self {
        Self(at)
    }

    /// Initialises it, by one thread; the others see it after [`fence_barriers`] and a barrier of the block.
    #[inline(always)]
    pub fn init(self, arrivals: u32) {
        // SAFETY: 8 bytes for which the caller of `BlockShared::dynamic` vouched, and which nothing else uses.
        unsafe {
            asm!("mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) self.0.address(), in(reg32) arrivals,
                options(nostack));
        }
    }

    /// Counts one arrival.
    #[inline(always)]
    pub fn arrive(self) {
        // SAFETY: the barrier was initialised before the block's barrier.
        unsafe {
            asm!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(reg32) self.0.address(), options(nostack))
        };
    }

    /// Counts one arrival, and adds `bytes` to the bytes to wait for.
    #[inline(always)]
    pub fn arrive_and_expect(self, bytes: u32) {
        // SAFETY: the barrier was initialised before the block's barrier.
        unsafe {
            asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(reg32) self.0.address(),
                in(reg32) bytes, options(nostack));
        }
    }

    /// Waits until the phase of this parity has ended; the first one has parity 0. A wait of [`LIMIT_NS`]
    /// traps, which ends the launch with an error instead of hanging the GPU.
    #[inline(always)]
    pub fn wait(self, parity: u32) {
        if self.has_ended(parity) {
            return;
        }
        let begin = arch::now_ns();
        while !self.has_ended(parity) {
            if arch::now_ns() - begin > LIMIT_NS {
                // SAFETY: ends the launch; nothing runs after it.
                unsafe { core::arch::nvptx::trap() };
            }
        }
    }

    #[inline(always)]
    fn has_ended(self, parity: u32) -> bool {
        let ended: u32;
        // SAFETY: the barrier was initialised before the block's barrier.
        unsafe {
            asm!("{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{at}], {parity};",
                "selp.u32 {ended}, 1, 0, p; }}", at = in(reg32) self.0.address(), parity = in(reg32) parity,
                ended = out(reg32) ended, options(nostack));
        }
        ended != 0
    }
}

/// Makes barriers that this thread initialised visible to the units that copy.
#[inline(always)]
pub fn fence_barriers() {
    // SAFETY: orders memory; accesses none.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) };
}

/// Makes this thread's writes to shared memory visible to asynchronous copies and products.
#[inline(always)]
pub fn fence_async() {
    // SAFETY: orders memory; accesses none.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) };
}

/// The address of a `CUtensorMap`: in a kernel's parameter, whose address inline PTX takes by name.
///
/// The host encodes the map, which holds address, sizes and swizzle of a matrix, and passes it as a kernel
/// parameter, because TMA reads it from there.
#[derive(Clone, Copy)]
pub struct TensorMap(u64);

impl TensorMap {
    /// Returns the map at a generic address.
    ///
    /// # Safety
    /// The host has encoded a map there, at a multiple of 64, which stays until the launch has ended.
    #[inline(always)]
    pub unsafe fn at(address: u64) -> Self {
        Self(address)
    }

    /// Prefetches the map into the cache.
    #[inline(always)]
    pub fn prefetch(self) {
        // SAFETY: a hint; changes no memory.
        unsafe { asm!("prefetch.tensormap [{}];", in(reg64) self.0, options(nostack)) };
    }

    /// Starts to copy the box whose first element is `x` of row `y` to `to`, zeros for elements outside; the
    /// barrier counts its bytes. One thread calls it.
    #[inline(always)]
    pub fn load(self, to: BlockShared, x: u32, y: u32, barrier: SharedBarrier) {
        // SAFETY: the caller of `at` vouched for the map, that of `BlockShared::dynamic` for the shared memory.
        unsafe {
            asm!("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}}}],",
                "[{}];", in(reg32) to.address(), in(reg64) self.0, in(reg32) x, in(reg32) y,
                in(reg32) barrier.0.address(), options(nostack));
        }
    }

    /// Starts to copy a box from shared memory, as far as it is inside. One thread calls it, after the
    /// writers have called [`fence_async`].
    #[inline(always)]
    pub fn store(self, from: BlockShared, x: u32, y: u32) {
        // SAFETY: as in `load`.
        unsafe {
            asm!("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{}, {{{}, {}}}], [{}];",
                in(reg64) self.0, in(reg32) x, in(reg32) y, in(reg32) from.address(), options(nostack));
        }
    }
}

/// Commits the calling thread's stores, and waits until the shared memory of all of them may be overwritten.
#[inline(always)]
pub fn commit_stores_and_wait() {
    // SAFETY: concerns this thread's stores only.
    unsafe {
        asm!(
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;",
            options(nostack)
        )
    };
}

/// Releases registers of the warpgroup, down to `N` a thread. Every warp of the warpgroup calls it.
#[inline(always)]
pub fn fewer_registers<const N: u32>() {
    // SAFETY: the assembler limits the code after it to `N` registers.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {};", const N, options(nostack)) };
}

/// Waits until the warpgroup gets `N` registers a thread. Every warp of the warpgroup calls it.
#[inline(always)]
pub fn more_registers<const N: u32>() {
    // SAFETY: as above.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {};", const N, options(nostack)) };
}

/// Orders earlier writes to accumulators before the first product. Every thread of the warpgroup calls it.
#[inline(always)]
pub fn wgmma_fence() {
    // SAFETY: orders registers and memory; the whole warpgroup calls it together.
    unsafe { asm!("wgmma.fence.sync.aligned;", options(nostack)) };
}

/// Commits a group of products.
#[inline(always)]
pub fn wgmma_commit() {
    // SAFETY: concerns this warpgroup's products only.
    unsafe { asm!("wgmma.commit_group.sync.aligned;", options(nostack)) };
}

/// Waits for all groups of products but the last `LEFT`.
#[inline(always)]
pub fn wgmma_wait<const LEFT: u32>() {
    // SAFETY: concerns this warpgroup's products only.
    unsafe { asm!("wgmma.wait_group.sync.aligned {};", const LEFT, options(nostack)) };
}

/// Defines a product by its number format; `$i` and `$last` are the indices of all sums.
macro_rules! wgmma_256 {
    ($(#[$doc:meta])* $name:ident, $form:literal, $($i:literal)* | $last:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name<const B_BY_K: u32>(sums: &mut [[f32; 4]; 32], a: u64, b: u64) {
            // SAFETY: the descriptors name shared memory of the block; the whole warpgroup calls it together.
            unsafe {
                asm!(concat!("wgmma.mma_async.sync.aligned.m64n256k16.f32.", $form, ".", $form, " {{",
                        $("{", $i, "}, ",)* "{", $last, "}}},"),
                    "{a}, {b}, 1, 1, 1, 0, {by_k};",
                    $(inout(reg32) sums[$i / 4][$i % 4],)* inout(reg32) sums[$last / 4][$last % 4],
                    a = in(reg64) a, b = in(reg64) b, by_k = const B_BY_K,
                    options(nostack));
            }
        }
    };
    ($(#[$doc:meta])* $name:ident, $form:literal) => {
        wgmma_256!($(#[$doc])* $name, $form,
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
            37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
            70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101
            102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 | 127);
    };
}

wgmma_256!(
    /// Adds the product of 64 x 16 and 16 x 256 bf16; `B_BY_K` is 1 if the rows of `b` run along `k`.
    /// Every thread of the warpgroup calls it; the sums are there after [`wgmma_wait`]. Those of warp `w` are
    /// rows `16 w` and on, in the order of [`mma`](super::mma): sum `4 j` and on of columns `8 j` and on.
    wgmma_bf16, "bf16"
);
wgmma_256!(
    /// As [`wgmma_bf16`] with f16.
    wgmma_f16, "f16"
);

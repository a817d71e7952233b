//! The kernels that move rows: the lanes of a launch run the kernels' own source in the host thread of the stream.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::idle;
use crate::kernels::now_ns;
use nvme_gpu_kernel::distinct::{DistinctLaunch, DistinctStripes};
use nvme_gpu_kernel::entries;
use nvme_gpu_kernel::extents::MappedLaunch;
use nvme_gpu_kernel::lanes::{HostGrid, RunningLaunch};
use nvme_gpu_kernel::rows::{
    Batched, BatchedScatter, BatchedStripes, CachedBatched, CachedGather, CheckLaunch,
    FollowLaunch, GatherLaunch, HalvedGather, ListedLaunch, RangesLaunch, SCATTER_ROWS,
    ScatterLaunch, StripedGather, WidenLaunch,
};
use nvme_gpu_kernel::wide_batch::WidenedLaunch;
use std::rc::Rc;

/// The symbols, in the order in which the driver numbers them.
pub const NAMES: [&std::ffi::CStr; 37] = [
    c"nvme_gather",
    c"nvme_copy_rows",
    c"nvme_check_rows",
    c"nvme_gather_cached",
    c"nvme_widen_rows",
    c"nvme_gather_striped",
    c"nvme_read_ranges",
    c"nvme_scatter",
    c"nvme_read_listed",
    c"nvme_follow_rows",
    c"nvme_end_launch",
    c"nvme_gather_batched",
    c"nvme_begin_batched",
    c"nvme_finish_batched",
    c"nvme_gather_mapped",
    c"nvme_gather_batched_mapped",
    c"nvme_begin_batched_mapped",
    c"nvme_finish_batched_mapped",
    c"nvme_gather_striped_mapped",
    c"nvme_claim_rows",
    c"nvme_list_rows",
    c"nvme_gather_listed",
    c"nvme_repeat_rows",
    c"nvme_claim_rows_mapped",
    c"nvme_gather_listed_mapped",
    c"nvme_gather_batched_wide",
    c"nvme_finish_batched_wide",
    c"nvme_gather_batched_wide_mapped",
    c"nvme_finish_batched_wide_mapped",
    c"nvme_gather_batched_cached",
    c"nvme_scatter_batched",
    c"nvme_gather_batched_striped",
    c"nvme_gather_batched_striped_mapped",
    c"nvme_gather_listed_striped",
    c"nvme_gather_listed_striped_mapped",
    c"nvme_gather_cached_mapped",
    c"nvme_gather_batched_cached_mapped",
];

/// Blocks that run at a time.
const AT_ONCE: u32 = 2;

/// Blocks, threads of a block, and bytes of its dynamic shared memory.
pub type LaunchShape = (u32, u32, u32);

/// Returns a launch of `kernel` on the clock `now_ns`.
pub fn launch(
    (blocks, threads, shared_bytes): LaunchShape,
    now_ns: impl Fn() -> u64 + 'static,
    kernel: impl Fn() + 'static,
) -> RunningLaunch {
    let grid = HostGrid {
        blocks,
        threads,
        at_once: AT_ONCE,
        clock: Rc::new(now_ns),
    };
    RunningLaunch::new(grid, kernel).with_shared(shared_bytes)
}

/// Returns how many lanes of a launch run at a time.
pub fn lanes_of((blocks, threads, _): LaunchShape) -> u32 {
    blocks.min(AT_ONCE) * threads
}

/// Runs `kernel` in each lane of a launch.
pub fn run(shape: LaunchShape, kernel: impl Fn() + 'static) {
    run_with(shape, kernel, now_ns);
}

/// The same on the clock `now_ns`.
pub fn run_with(
    shape: LaunchShape,
    kernel: impl Fn() + 'static,
    now_ns: impl Fn() -> u64 + 'static,
) {
    launch(shape, now_ns, kernel).run(idle::of_lanes(lanes_of(shape)));
}

/// A function that launches an entry point with its parameter.
macro_rules! launches {
    ($($name:ident $entry:ident $of:ty;)+) => {
        $(
            /// A launch of so many blocks and threads.
            pub fn $name(parameter: $of, blocks: u32, threads: u32) {
                // SAFETY: the host vouches for the addresses in the parameter.
                run((blocks, threads, 0), move || unsafe { entries::$entry(parameter) });
            }
        )+
    };
}

launches! {
    gather nvme_gather GatherLaunch;
    gather_batched nvme_gather_batched Batched;
    begin_batched nvme_begin_batched HalvedGather;
    finish_batched nvme_finish_batched HalvedGather;
    gather_cached nvme_gather_cached CachedGather;
    gather_batched_cached nvme_gather_batched_cached CachedBatched;
    gather_cached_mapped nvme_gather_cached_mapped MappedLaunch<CachedGather>;
    gather_batched_cached_mapped nvme_gather_batched_cached_mapped MappedLaunch<CachedBatched>;
    gather_mapped nvme_gather_mapped MappedLaunch<GatherLaunch>;
    gather_batched_mapped nvme_gather_batched_mapped MappedLaunch<Batched>;
    begin_batched_mapped nvme_begin_batched_mapped MappedLaunch<HalvedGather>;
    finish_batched_mapped nvme_finish_batched_mapped MappedLaunch<HalvedGather>;
    gather_striped_mapped nvme_gather_striped_mapped MappedLaunch<StripedGather>;
    gather_striped nvme_gather_striped StripedGather;
    gather_batched_striped nvme_gather_batched_striped BatchedStripes;
    gather_batched_striped_mapped nvme_gather_batched_striped_mapped MappedLaunch<BatchedStripes>;
    read_ranges nvme_read_ranges RangesLaunch;
    read_listed nvme_read_listed ListedLaunch;
    follow nvme_follow_rows FollowLaunch;
    widen nvme_widen_rows WidenLaunch;
    copy nvme_copy_rows GatherLaunch;
    end nvme_end_launch GatherLaunch;
    check nvme_check_rows CheckLaunch;
    write nvme_scatter ScatterLaunch;
    write_batched nvme_scatter_batched BatchedScatter;
    claim nvme_claim_rows DistinctLaunch;
    list nvme_list_rows DistinctLaunch;
    gather_listed nvme_gather_listed DistinctLaunch;
    gather_listed_striped nvme_gather_listed_striped DistinctStripes;
    gather_listed_striped_mapped nvme_gather_listed_striped_mapped MappedLaunch<DistinctStripes>;
    repeat nvme_repeat_rows DistinctLaunch;
    claim_mapped nvme_claim_rows_mapped MappedLaunch<DistinctLaunch>;
    gather_listed_mapped nvme_gather_listed_mapped MappedLaunch<DistinctLaunch>;
    gather_batched_wide nvme_gather_batched_wide WidenedLaunch<Batched>;
    finish_batched_wide nvme_finish_batched_wide WidenedLaunch<HalvedGather>;
    gather_batched_wide_mapped nvme_gather_batched_wide_mapped MappedLaunch<WidenedLaunch<Batched>>;
    finish_batched_wide_mapped nvme_finish_batched_wide_mapped MappedLaunch<WidenedLaunch<HalvedGather>>;
}

/// A launch that writes rows.
pub fn scatter(scatter: ScatterLaunch, blocks: u32, threads: u32) {
    assert_writable(&scatter.gather);
    write(scatter, blocks, threads);
}

/// The same by queues that blocks own.
pub fn scatter_batched(scatter: BatchedScatter, blocks: u32, threads: u32) {
    assert_writable(&scatter.batched.gather);
    write_batched(scatter, blocks, threads);
}

/// Asserts what the kernels that write rows rely on.
fn assert_writable(rows: &GatherLaunch) {
    assert!(rows.ids == 0 || rows.count <= SCATTER_ROWS);
    assert_eq!(u64::from(rows.row_bytes) % (1 << rows.block_shift), 0);
}

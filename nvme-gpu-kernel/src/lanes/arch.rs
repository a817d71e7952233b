//! The counterpart of the GPU's `arch` for lanes on this host thread: each function implements its instruction
//! by the PTX manual. If the manual leaves a result undefined, or requires an alignment that an address
//! does not have, the lane panics.
// UNSAFETY: loads and stores at addresses that the caller vouches for.
#![allow(unsafe_code)]

use crate::lanes::{CollectiveCall, JointStep, ShuffleSource, call, here};
use nvme_core::sync::{AtomicU64, Order, Scope};
use std::panic::Location;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

/// Mask of all lanes of a warp.
pub const FULL: u32 = u32::MAX;

/// Returns the index of the thread in its block.
#[inline]
pub fn thread() -> u32 {
    here().thread
}

/// Returns the number of threads of a block.
#[inline]
pub fn block_threads() -> u32 {
    here().block_threads
}

/// Returns the index of the block in the grid.
#[inline]
pub fn block() -> u32 {
    here().block
}

/// Returns the number of blocks of the grid.
#[inline]
pub fn blocks() -> u32 {
    here().blocks
}

/// Returns the number of the grid, which differs between launches.
pub fn grid() -> u64 {
    here().grid
}

/// Returns the index of the lane in its warp.
#[inline]
pub fn lane() -> u32 {
    here().thread % 32
}

/// Returns the mask of the lanes below this one.
#[inline]
pub fn lanes_below() -> u32 {
    (1 << lane()) - 1
}

/// Returns the value; an optimisation barrier on a GPU, nothing here.
pub fn opaque(value: u32) -> u32 {
    value
}

/// Returns lanes of the warp that run this call together: those that wait at it when no other lane of the
/// warp can run.
#[track_caller]
pub fn active() -> u32 {
    let site = Location::caller();
    call(CollectiveCall::Beside {
        site: (site.file(), site.line()),
        key: 0,
    }) as u32
}

/// Returns the lanes that run `A` together with this one and pass the same `key`.
#[track_caller]
pub fn beside<A>(key: u64) -> u32 {
    let site = (std::any::type_name::<A>(), 0);
    call(CollectiveCall::Beside { site, key }) as u32
}

/// Returns the lanes of `mask` whose `value` equals this lane's. Every lane of `mask` calls it.
#[track_caller]
pub fn same(mask: u32, value: u64) -> u32 {
    call(CollectiveCall::Same { mask, value }) as u32
}

/// Returns the lanes of `mask` with `mine`. Every lane of `mask` calls it.
#[track_caller]
pub fn ballot(mask: u32, mine: bool) -> u32 {
    call(CollectiveCall::Ballot { mask, mine }) as u32
}

/// Returns the value of lane `from`. Every lane of `mask`, including `from`, calls it.
#[track_caller]
pub fn shuffle(mask: u32, value: u32, from: u32) -> u32 {
    call(CollectiveCall::Shuffle {
        how: ShuffleSource::Index,
        mask,
        value: value.into(),
        from: from % 32,
    }) as u32
}

/// Returns the 64-bit value of lane `from`. Every lane of the warp calls it.
#[track_caller]
pub fn shuffle64(value: u64, from: u32) -> u64 {
    call(CollectiveCall::Shuffle {
        how: ShuffleSource::Index64,
        mask: FULL,
        value,
        from: from % 32,
    })
}

/// Returns the values of all lanes. Every lane of the warp calls it.
#[track_caller]
pub fn exchange(value: u64) -> [u64; 32] {
    call(CollectiveCall::Exchange { value });
    here().exchanged.get()
}

/// Runs `step` once with the values of all lanes, while all of them wait: the counterpart of an instruction by which a warp
/// computes together. Every lane of the warp calls it with the same `step`.
#[track_caller]
pub fn joint(value: u64, step: fn(&[u64; 32])) {
    let step = JointStep(step);
    call(CollectiveCall::Joint { value, step });
}

/// Returns the value of lane `from` (0 to 7) of this lane's tile of eight. Every lane of the warp calls it.
#[track_caller]
pub fn shuffle_tile(value: u32, from: u32) -> u32 {
    shuffle(FULL, value, lane() & !7 | from & 7)
}

/// Returns the value of the lane whose index differs in the bits of `bits`. Every lane of `mask` calls it.
#[track_caller]
pub fn butterfly(mask: u32, value: u32, bits: u32) -> u32 {
    call(CollectiveCall::Shuffle {
        how: ShuffleSource::Butterfly,
        mask,
        value: value.into(),
        from: lane() ^ (bits % 32),
    }) as u32
}

/// Returns the address of `bytes` bytes of shared memory that the threads of the block know by `name`: the
/// counterpart of a `.shared` array of a kernel.
pub fn shared(name: &'static str, bytes: u32) -> u64 {
    here().shared.array(name, bytes)
}

/// Returns the address of the block's dynamic shared memory, a multiple of 16, and its length.
pub fn dynamic_shared() -> (u64, u32) {
    here().shared.dynamic()
}

/// Returns the block's state of a unit that acts after the call, as one that copies; made when it is first asked for.
///
/// A lane drops it before its next collective, since a lane that is discarded there would never drop it.
pub fn unit_of_block<T: Default + 'static>() -> Rc<T> {
    here().shared.units.of()
}

/// Returns the lane's state of such a unit, as [`unit_of_block`] does.
pub fn unit_of_lane<T: Default + 'static>() -> Rc<T> {
    here().units.of()
}

/// Starts a copy of `bytes` bytes, followed by `zeros` zeros.
///
/// # Safety
/// Both ranges are valid until the copy was committed and waited for; nothing writes to the source, nothing accesses the
/// target meanwhile.
pub unsafe fn start_copy(to: u64, from: u64, (bytes, zeros): (u32, u32)) {
    let is_early = lane() % 2 == 1;
    here().copies.start(is_early, (to, from), (bytes, zeros));
}

/// Commits the thread's current group of copies.
pub fn commit_copies() {
    here().copies.commit();
}

/// Waits until all of the thread's groups of copies but the last `left` have completed.
pub fn wait_for_copies(left: u32) {
    here().copies.wait(left as usize);
}

/// Waits for the lanes of `mask`; orders memory among them.
#[track_caller]
pub fn sync_warp(mask: u32) {
    call(CollectiveCall::SyncWarp { mask });
}

/// Waits for the block's threads; orders memory among them.
#[track_caller]
pub fn sync_block() {
    call(CollectiveCall::SyncBlock);
}

/// Lock held while a counter changes: the lanes of one launch share a thread, but other launches run in
/// others.
static COUNTING: Mutex<()> = Mutex::new(());

/// Changes a counter under the lock and returns its previous value.
///
/// # Safety
/// `counter` is valid and 8-byte aligned memory that nothing else writes meanwhile, except as an atomic.
unsafe fn count(counter: *mut u64, change: impl FnOnce(u64) -> u64) -> u64 {
    let _one = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the caller vouches for the counter; AtomicU64 has the layout of u64.
    let counter = unsafe { &*counter.cast::<AtomicU64>() };
    let was = counter.load(Order::Relaxed, Scope::Gpu);
    counter.store(change(was), Order::Relaxed, Scope::Gpu);
    was
}

/// Adds to a counter, ordered with the thread's accesses before and after it; returns the previous value.
///
/// # Safety
/// As [`add`].
pub unsafe fn add_ordered(to: *mut u64, value: u64) -> u64 {
    // SAFETY: the caller vouches for the counter; the lock orders the accesses.
    unsafe { count(to, |was| was.wrapping_add(value)) }
}

/// Stores to a counter, ordered as [`add_ordered`] is; returns the previous value.
///
/// # Safety
/// As [`add`].
pub unsafe fn swap(to: *mut u64, value: u64) -> u64 {
    // SAFETY: as above.
    unsafe { count(to, |_| value) }
}

/// Adds to a counter.
///
/// # Safety
/// `counter` is valid and 8-byte aligned memory that is only written through this and [`raise`], or as an
/// atomic.
pub unsafe fn add(to: *mut u64, value: u64) {
    // SAFETY: the caller vouches for the counter.
    unsafe { count(to, |was| was.wrapping_add(value)) };
}

/// Raises a counter to `value`.
///
/// # Safety
/// As [`add`].
pub unsafe fn raise(to: *mut u64, value: u64) {
    // SAFETY: the caller vouches for the counter.
    unsafe { count(to, |was| was.max(value)) };
}

/// Records the location of the lane's parameter, for [`word_of_ranges`].
pub fn parameter<T>(parameter: &T) {
    here().parameter.set(core::ptr::from_ref(parameter).addr());
}

/// Loads the `u64` at byte `at` of the [`parameter`].
///
/// # Safety
/// `at` is a multiple of 8 inside the parameter, which is still alive.
pub unsafe fn word_of_ranges(at: u32) -> u64 {
    let parameter = here().parameter.get();
    assert_ne!(parameter, 0, "the kernel has noted its parameter");
    // SAFETY: the caller vouches for the offset; the parameter was recorded, as asserted above.
    unsafe { load_u64(parameter as u64 + u64::from(at)) }
}

/// Returns a pointer to `address`, which must be a multiple of `T`'s size.
#[inline]
fn at<T>(address: u64) -> *mut T {
    let bytes = size_of::<T>() as u64;
    assert!(
        address.is_multiple_of(bytes) && address != 0,
        "a lane accesses {bytes} bytes at {address:#x}, a misaligned address"
    );
    core::ptr::with_exposed_provenance_mut(address as usize)
}

/// Copies 16 bytes.
///
/// # Safety
/// Both addresses are valid and multiples of 16.
pub unsafe fn copy_16(to: u64, from: u64) {
    // SAFETY: the caller vouches for both addresses.
    unsafe { at::<u128>(to).write_volatile(at::<u128>(from).read_volatile()) };
}

/// Copies 16 bytes from each address of `from` whose bit of `there` is set to the address of `to` with the same index.
/// All loads come before the first store, as on the GPU.
///
/// # Safety
/// As for [`copy_16`], for each pair of addresses whose bit is set.
pub unsafe fn copy_pieces(to: [u64; 8], from: [u64; 8], there: u32) {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe { copy_each::<u128>(to, from, there) };
}

/// Copies units of 16, 8 or 4 bytes as [`copy_pieces`] does; `SHIFT` is log2 of their bytes.
///
/// # Safety
/// Both addresses of each pair whose bit is set are valid and multiples of a unit.
pub unsafe fn copy_units<const SHIFT: u32>(to: [u64; 8], from: [u64; 8], there: u32) {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe {
        match SHIFT {
            4 => copy_each::<u128>(to, from, there),
            3 => copy_each::<u64>(to, from, there),
            _ => copy_each::<u32>(to, from, there),
        }
    }
}

/// # Safety
/// As [`copy_units`], of units of the size of `T`.
unsafe fn copy_each<T: Copy + Default>(to: [u64; 8], from: [u64; 8], there: u32) {
    let is_there = |bit: &usize| there >> bit & 1 == 1;
    let mut taken = [T::default(); 8];
    for bit in (0..8).filter(is_there) {
        // SAFETY: the caller vouches for addresses whose bit is set.
        taken[bit] = unsafe { at::<T>(from[bit]).read_volatile() };
    }
    for bit in (0..8).filter(is_there) {
        // SAFETY: the caller vouches for addresses whose bit is set.
        unsafe { at::<T>(to[bit]).write_volatile(taken[bit]) };
    }
}

/// Loads 16 bytes.
///
/// # Safety
/// The address is valid and a multiple of 16.
pub unsafe fn load_pair(from: u64) -> (u64, u64) {
    // SAFETY: the caller vouches for the address.
    let both = unsafe { at::<u128>(from).read_volatile() };
    (both as u64, (both >> 64) as u64)
}

/// Copies 4 bytes.
///
/// # Safety
/// Both addresses are valid and multiples of 4.
pub unsafe fn copy_4(to: u64, from: u64) {
    // SAFETY: the caller vouches for both addresses.
    unsafe { store_u32(to, load_u32(from)) };
}

/// Copies a byte.
///
/// # Safety
/// Both addresses are valid.
pub unsafe fn copy_1(to: u64, from: u64) {
    // SAFETY: the caller vouches for both addresses.
    unsafe { store_u8(to, load_u8(from)) };
}

macro_rules! accesses {
    ($($load:ident $store:ident $of:ty;)+) => {
        $(
            /// Loads a value.
            ///
            /// # Safety
            /// The address is valid and a multiple of the value's size.
            #[inline]
            pub unsafe fn $load(from: u64) -> $of {
                // SAFETY: the caller vouches for the address; `at` checks its alignment.
                unsafe { at::<$of>(from).read_volatile() }
            }

            /// Stores a value.
            ///
            /// # Safety
            /// The address is valid and a multiple of the value's size.
            #[inline]
            pub unsafe fn $store(to: u64, value: $of) {
                // SAFETY: the caller vouches for the address; `at` checks its alignment.
                unsafe { at::<$of>(to).write_volatile(value) };
            }
        )+
    };
}

accesses! {
    load_u8 store_u8 u8;
    load_u16 store_u16 u16;
    load_u32 store_u32 u32;
    load_u64 store_u64 u64;
}

/// Loads 8 bytes.
///
/// # Safety
/// As [`load_u64`].
pub unsafe fn load_word(from: u64) -> u64 {
    // SAFETY: the caller vouches for the address.
    unsafe { load_u64(from) }
}

/// Loads ten words of 8 bytes.
///
/// # Safety
/// Every one of the ten words is valid as [`load_u64`] asks.
pub unsafe fn load_ten(from: u64) -> [u64; 10] {
    // SAFETY: the caller vouches for the addresses.
    std::array::from_fn(|at| unsafe { load_u64(from + at as u64 * 8) })
}

/// Returns the time of the launch's clock, in nanoseconds.
#[inline]
pub fn now_ns() -> u64 {
    here().now_ns()
}

/// Lets other lanes run for `ns` nanoseconds of the launch's clock.
#[track_caller]
pub fn sleep_ns(ns: u32) {
    call(CollectiveCall::Sleep { ns });
}

/// Ends the kernel with an error: the lane panics.
pub fn trap() -> ! {
    panic!("a kernel traps");
}

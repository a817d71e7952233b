//! One function for each operation of the core that touches shared memory, so that `cargo xtask ptx` can
//! compare its PTX with the table in nvme-gpu-kernel/ptx/tables.md.
// UNSAFETY: unmangled names and raw arguments; nothing calls these functions.
#![allow(unsafe_code)]

use nvme_core::mem::{CqRing, DmaWords, DoorbellRegister, SqRing};
use nvme_core::spec::{Iova, Sqe};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope, fence};

/// Entries of the rings and words of the lists in these functions.
const LEN: u32 = 64;

fn sq<'a>(start: *mut u8) -> SqRing<'a> {
    // SAFETY: never called; only its PTX is read.
    unsafe { SqRing::from_raw(start, LEN, Iova(0)) }
}

fn cq<'a>(start: *mut u8) -> CqRing<'a> {
    // SAFETY: never called; only its PTX is read.
    unsafe { CqRing::from_raw(start, LEN, Iova(0)) }
}

fn list<'a>(start: *mut u8) -> DmaWords<'a> {
    // SAFETY: never called; only its PTX is read.
    unsafe { DmaWords::from_raw(start, LEN as usize, Iova(0)) }
}

fn bell<'a>(register: *mut u32) -> DoorbellRegister<'a> {
    // SAFETY: never called; only its PTX is read.
    unsafe { DoorbellRegister::from_raw(register) }
}

macro_rules! probes {
    ($($name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)? = $body:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $kind),*) $(-> $result)? {
                $body
            }
        )*
    };
}

probes! {
    probe_sq_write(ring: *mut u8, index: u32, word: u64) = {
        sq(ring).write(index, Sqe::from_words([word; 8]))
    };
    probe_doorbell(register: *mut u32, value: u32) = bell(register).ring(value);
    probe_cq_read(ring: *mut u8, index: u32, phase: bool) -> u64 = {
        cq(ring).read(index, phase).map_or(0, |cqe| cqe.to_words()[0])
    };
    probe_list_set(words: *mut u8, index: usize, value: u64) = list(words).set(index, value);
    probe_sq_write_word(ring: *mut u8, index: u32, value: u64) = {
        sq(ring).write_word(index, 3, value)
    };
    probe_doorbell_fenced(register: *mut u32, value: u32) = bell(register).ring_fenced(value);
    probe_cq_upper(ring: *mut u8, index: u32) -> u64 = cq(ring).upper(index, Order::Relaxed);
    probe_cq_upper_acquire(ring: *mut u8, index: u32) -> u64 = {
        cq(ring).upper(index, Order::Acquire)
    };
    probe_cq_lower(ring: *mut u8, index: u32) -> u64 = cq(ring).lower(index);
    probe_load_relaxed_gpu(word: &AtomicU32) -> u32 = word.load(Order::Relaxed, Scope::Gpu);
    probe_load_acquire_gpu(word: &AtomicU64) -> u64 = word.load(Order::Acquire, Scope::Gpu);
    probe_load_relaxed_cta(word: &AtomicU32) -> u32 = word.load(Order::Relaxed, Scope::Cta);
    probe_store_relaxed_gpu(word: &AtomicU32, value: u32) = {
        word.store(value, Order::Relaxed, Scope::Gpu)
    };
    probe_store_relaxed_cta(word: &AtomicU32, value: u32) = {
        word.store(value, Order::Relaxed, Scope::Cta)
    };
    probe_add_relaxed_gpu(word: &AtomicU32, value: u32) -> u32 = {
        word.fetch_add(value, Order::Relaxed, Scope::Gpu)
    };
    probe_add_release_gpu(word: &AtomicU32, value: u32) -> u32 = {
        word.fetch_add(value, Order::Release, Scope::Gpu)
    };
    probe_add_acquire_gpu(word: &AtomicU32, value: u32) -> u32 = {
        word.fetch_add(value, Order::Acquire, Scope::Gpu)
    };
    probe_and_acquire_gpu(word: &AtomicU32, value: u32) -> u32 = {
        word.fetch_and(value, Order::Acquire, Scope::Gpu)
    };
    probe_or_release_gpu(word: &AtomicU32, value: u32) -> u32 = {
        word.fetch_or(value, Order::Release, Scope::Gpu)
    };
    probe_swap_release_gpu(word: &AtomicU32, value: u32) -> u32 = {
        word.swap(value, Order::Release, Scope::Gpu)
    };
    probe_cas_release_gpu(word: &AtomicU32, current: u32, new: u32) -> u32 = {
        word.compare_exchange(current, new, Order::Release, Scope::Gpu)
    };
    probe_fence_release_gpu() = fence(Order::Release, Scope::Gpu);
    probe_fence_acq_rel_gpu() = fence(Order::AcqRel, Scope::Gpu);
    probe_fence_acq_rel_sys() = fence(Order::AcqRel, Scope::Sys);
}

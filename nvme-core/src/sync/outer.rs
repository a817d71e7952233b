//! Fences for devices on aarch64: a controller on PCIe may lie outside the inner-shareable domain, to which the fences
//! of `core` are limited (`dmb ish`), so these name the outer-shareable one, which contains it.
// UNSAFETY: the instruction has no stable intrinsic.
#![allow(unsafe_code)]

use super::Order;
use core::arch::asm;

/// Orders accesses for processors and devices.
#[inline]
pub(super) fn fence(order: Order) {
    match order {
        Order::Relaxed => {}
        // SAFETY: a barrier reads and writes no register and no memory. Without `nomem` the compiler keeps accesses on
        // their side of it, too; otherwise a doorbell could pass the entry that it announces.
        Order::Acquire => unsafe { asm!("dmb oshld", options(nostack, preserves_flags)) },
        // SAFETY: as above. `oshst` would let a load pass the store that follows, which a release forbids.
        Order::Release | Order::AcqRel => unsafe {
            asm!("dmb osh", options(nostack, preserves_flags))
        },
    }
}

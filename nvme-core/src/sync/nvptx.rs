//! GPU back end: every operation is one PTX instruction with its order and scope written out.
// UNSAFETY: inline PTX is the only way to name scopes and to keep the order of an operation; see
// docs/memory-model.md of the project.
#![allow(unsafe_code)]

use super::{Order, Scope};
use core::arch::asm;
use core::cell::UnsafeCell;

macro_rules! by_scope {
    ($scope:expr, $before:literal, $kind:literal, $after:literal, $($operand:tt)*) => {
        match $scope {
            // SAFETY: the pointer comes from a live `&self` of the operand's width and alignment;
            // the instruction reads or writes that one word. Nothing but atomics touches these
            // words while they are shared.
            Scope::Cta => unsafe { asm!(concat!($before, ".cta", $kind, $after), $($operand)*) },
            // SAFETY: as for the block's scope.
            Scope::Gpu => unsafe { asm!(concat!($before, ".gpu", $kind, $after), $($operand)*) },
            // SAFETY: as for the block's scope.
            Scope::Sys => unsafe { asm!(concat!($before, ".sys", $kind, $after), $($operand)*) },
        }
    };
}

macro_rules! read_modify_write {
    ($order:expr, $scope:expr, $kind:literal, $operands:literal, $($operand:tt)*) => {
        match $order {
            Order::Relaxed => by_scope!($scope, "atom.relaxed", $kind, $operands, $($operand)*),
            Order::Acquire => by_scope!($scope, "atom.acquire", $kind, $operands, $($operand)*),
            Order::Release => by_scope!($scope, "atom.release", $kind, $operands, $($operand)*),
            Order::AcqRel => by_scope!($scope, "atom.acq_rel", $kind, $operands, $($operand)*),
        }
    };
}

macro_rules! atomic {
    ($name:ident, $value:ty, $class:ident, $suffix:literal) => {
        /// GPU back end of the host type.
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name(UnsafeCell<$value>);

        // SAFETY: every access is one single-copy-atomic PTX instruction, so threads never see a torn value,
        // and no reference to the inner value is ever made.
        unsafe impl Sync for $name {}

        impl $name {
            /// Makes an atomic that holds `value`.
            pub const fn new(value: $value) -> Self {
                Self(UnsafeCell::new(value))
            }

            /// Loads the value; `Release` is taken as `Relaxed`.
            #[inline(always)]
            pub fn load(&self, order: Order, scope: Scope) -> $value {
                let value: $value;
                let at = self.0.get();
                match order {
                    Order::Acquire | Order::AcqRel => by_scope!(scope, "ld.acquire", $suffix, " {v}, [{p}];",
                        v = out($class) value, p = in(reg64) at, options(nostack)),
                    Order::Relaxed | Order::Release => by_scope!(scope, "ld.relaxed", $suffix, " {v}, [{p}];",
                        v = out($class) value, p = in(reg64) at, options(nostack)),
                }
                value
            }

            /// Stores `value`; `Acquire` is taken as `Relaxed`.
            #[inline(always)]
            pub fn store(&self, value: $value, order: Order, scope: Scope) {
                let at = self.0.get();
                match order {
                    Order::Release | Order::AcqRel => by_scope!(scope, "st.release", $suffix, " [{p}], {v};",
                        v = in($class) value, p = in(reg64) at, options(nostack)),
                    Order::Relaxed | Order::Acquire => by_scope!(scope, "st.relaxed", $suffix, " [{p}], {v};",
                        v = in($class) value, p = in(reg64) at, options(nostack)),
                }
            }

            /// Stores `value` to a device register: `.mmio` keeps the store single and of this width.
            #[inline(always)]
            pub fn store_mmio(&self, value: $value) {
                // SAFETY: the pointer comes from a live `&self`. Doorbells are mapped device memory or plain
                // memory, both in the global window, which `.global` requires.
                unsafe {
                    asm!(concat!("st.mmio.relaxed.sys.global", $suffix, " [{p}], {v};"),
                        v = in($class) value, p = in(reg64) self.0.get(), options(nostack));
                }
            }
        }
    };
}

atomic!(AtomicU32, u32, reg32, ".u32");
atomic!(AtomicU64, u64, reg64, ".u64");

impl AtomicU64 {
    /// Loads the value of a word that no thread stores to meanwhile, relaxed; loom checks that none does.
    #[inline(always)]
    pub fn load_settled(&self, scope: Scope) -> u64 {
        self.load(Order::Relaxed, scope)
    }
}

impl AtomicU64 {
    /// Stores `value` if `when` is true; relaxed, for the threads of one GPU. No branch.
    #[inline(always)]
    pub fn store_if(&self, when: bool, value: u64) {
        // SAFETY: the pointer comes from a live `&self` of the operand's width and alignment; a
        // false predicate skips the store. The address is valid also then, since it comes from the
        // same reference.
        unsafe {
            asm!("{{ .reg .pred p; setp.ne.u32 p, {c}, 0; @p st.relaxed.gpu.u64 [{p}], {v}; }}",
                c = in(reg32) u32::from(when), p = in(reg64) self.0.get(), v = in(reg64) value, options(nostack));
        }
    }
}

impl AtomicU32 {
    /// Does [`fetch_and`](Self::fetch_and) if `when` is true, else returns 0; relaxed, for the threads of one
    /// GPU. No branch.
    #[inline(always)]
    pub fn fetch_and_if(&self, when: bool, value: u32) -> u32 {
        let was: u32;
        // SAFETY: as in `store_if`.
        unsafe {
            asm!("{{ .reg .pred p; setp.ne.u32 p, {c}, 0; mov.u32 {was}, 0; @p atom.relaxed.gpu.and.b32 {was}, [{p}], {v}; }}",
                was = out(reg32) was, c = in(reg32) u32::from(when), p = in(reg64) self.0.get(),
                v = in(reg32) value, options(nostack));
        }
        was
    }

    /// Sets the bits of `value` if `when` is true; relaxed, for the threads of one GPU. No branch.
    #[inline(always)]
    pub fn set_bits_if(&self, when: bool, value: u32) {
        // SAFETY: as in `store_if`.
        unsafe {
            asm!("{{ .reg .pred p; setp.ne.u32 p, {c}, 0; @p red.relaxed.gpu.or.b32 [{p}], {v}; }}",
                c = in(reg32) u32::from(when), p = in(reg64) self.0.get(), v = in(reg32) value, options(nostack));
        }
    }
}

impl AtomicU32 {
    /// Adds `value`, wrapping; returns the previous value.
    #[inline(always)]
    pub fn fetch_add(&self, value: u32, order: Order, scope: Scope) -> u32 {
        let was: u32;
        read_modify_write!(order, scope, ".add.u32", " {was}, [{p}], {v};",
            was = out(reg32) was, p = in(reg64) self.0.get(), v = in(reg32) value, options(nostack));
        was
    }

    /// Sets the bits of `value`; returns the previous value.
    #[inline(always)]
    pub fn fetch_or(&self, value: u32, order: Order, scope: Scope) -> u32 {
        let was: u32;
        read_modify_write!(order, scope, ".or.b32", " {was}, [{p}], {v};",
            was = out(reg32) was, p = in(reg64) self.0.get(), v = in(reg32) value, options(nostack));
        was
    }

    /// Keeps only the bits of `value`; returns the previous value.
    #[inline(always)]
    pub fn fetch_and(&self, value: u32, order: Order, scope: Scope) -> u32 {
        let was: u32;
        read_modify_write!(order, scope, ".and.b32", " {was}, [{p}], {v};",
            was = out(reg32) was, p = in(reg64) self.0.get(), v = in(reg32) value, options(nostack));
        was
    }

    /// Stores `value`; returns the previous value.
    #[inline(always)]
    pub fn swap(&self, value: u32, order: Order, scope: Scope) -> u32 {
        let was: u32;
        read_modify_write!(order, scope, ".exch.b32", " {was}, [{p}], {v};",
            was = out(reg32) was, p = in(reg64) self.0.get(), v = in(reg32) value, options(nostack));
        was
    }

    /// Stores `new` if the value is `current`; returns the previous value. `order` applies when it stored.
    #[inline(always)]
    pub fn compare_exchange(&self, current: u32, new: u32, order: Order, scope: Scope) -> u32 {
        let was: u32;
        read_modify_write!(order, scope, ".cas.b32", " {was}, [{p}], {c}, {n};",
            was = out(reg32) was, p = in(reg64) self.0.get(), c = in(reg32) current,
            n = in(reg32) new, options(nostack));
        was
    }
}

/// Issues `fence.acq_rel` at the given scope for every order but `Relaxed`, for which it does nothing.
#[inline(always)]
pub fn fence(order: Order, scope: Scope) {
    if order != Order::Relaxed {
        by_scope!(scope, "fence.acq_rel", "", ";", options(nostack));
    }
}

/// Issues `fence.sc` at the given scope.
#[inline(always)]
pub fn fence_seq_cst(scope: Scope) {
    by_scope!(scope, "fence.sc", "", ";", options(nostack));
}

/// Optimisation barrier: returns `value` without letting the compiler know that it is the same, so that
/// derived values are computed again instead of kept in registers, which a GPU has fewer of than
/// instructions.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let same: u32;
    // SAFETY: copies a register into another one; touches no memory.
    unsafe { asm!("mov.u32 {}, {};", out(reg32) same, in(reg32) value, options(nomem, nostack)) };
    same
}

/// Does nothing: a GPU's loads take long enough.
#[inline(always)]
pub fn spin() {}

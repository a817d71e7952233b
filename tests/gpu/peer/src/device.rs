//! The differences between a GPU and a host thread: lanes, the clock, and accesses to memory by address.
//!
//! Every access is relaxed and of system scope, except where its name says more. A host thread is a warp of one lane.
// UNSAFETY: inline PTX, and accesses by addresses that the host vouches for or that were checked against windows.
#![allow(unsafe_code)]

#[cfg(target_arch = "nvptx64")]
mod gpu {
    use core::arch::asm;
    use nvme_gpu_kernel::arch::{self, FULL};

    pub use arch::{lane, now_ns};

    /// Lanes of a warp.
    pub const LANES: u32 = 32;

    macro_rules! load {
        ($name:ident, $value:ty, $class:ident, $instruction:literal) => {
            #[inline(always)]
            pub fn $name(at: u64) -> $value {
                let value: $value;
                // SAFETY: see the top of the file.
                unsafe {
                    asm!(concat!($instruction, " {}, [{}];"), out($class) value, in(reg64) at, options(nostack))
                };
                value
            }
        };
    }

    macro_rules! store {
        ($name:ident, $value:ty, $class:ident, $instruction:literal) => {
            #[inline(always)]
            pub fn $name(at: u64, value: $value) {
                // SAFETY: see the top of the file.
                unsafe {
                    asm!(concat!($instruction, " [{}], {};"), in(reg64) at, in($class) value, options(nostack))
                };
            }
        };
    }

    load!(load32, u32, reg32, "ld.relaxed.sys.global.u32");
    load!(load32_acquire, u32, reg32, "ld.acquire.sys.global.u32");
    load!(load64, u64, reg64, "ld.relaxed.sys.global.u64");
    store!(store32, u32, reg32, "st.relaxed.sys.global.u32");
    store!(store64, u64, reg64, "st.relaxed.sys.global.u64");

    /// Adds to a word of this GPU's memory; returns its old value.
    #[inline(always)]
    pub fn add32(at: u64, value: u32) -> u32 {
        let was: u32;
        // SAFETY: see the top of the file.
        unsafe {
            asm!("atom.relaxed.gpu.global.add.u32 {}, [{}], {};",
                out(reg32) was, in(reg64) at, in(reg32) value, options(nostack))
        };
        was
    }

    /// Orders all earlier stores and loads before all later ones, for every processor.
    #[inline(always)]
    pub fn fence() {
        // SAFETY: the instruction touches no memory by itself.
        unsafe { asm!("fence.acq_rel.sys;", options(nostack)) };
    }

    #[inline(always)]
    pub fn sync_warp() {
        arch::sync_warp(FULL);
    }

    #[inline(always)]
    pub fn ballot(mine: bool) -> u32 {
        arch::ballot(FULL, mine)
    }

    #[inline(always)]
    pub fn shuffle32(value: u32, from: u32) -> u32 {
        arch::shuffle(FULL, value, from)
    }

    /// A warp that found nothing to do looks again at once.
    #[inline(always)]
    pub fn idle() {}

    /// Eight predicates p0 to p7 out of the bits of a word, eight loads and eight stores of 16 bytes.
    macro_rules! eight {
        ($f0:literal, $f1:literal, $f2:literal, $f3:literal, $f4:literal, $f5:literal, $f6:literal, $f7:literal,
         $t0:literal, $t1:literal, $t2:literal, $t3:literal, $t4:literal, $t5:literal, $t6:literal, $t7:literal,
         $($operand:tt)*) => {
            asm!(
                "{{ .reg .b64 a<8>, b<8>; .reg .pred p<8>; .reg .b32 m;",
                "and.b32 m, {there}, 1; setp.ne.u32 p0, m, 0;",
                "and.b32 m, {there}, 2; setp.ne.u32 p1, m, 0;",
                "and.b32 m, {there}, 4; setp.ne.u32 p2, m, 0;",
                "and.b32 m, {there}, 8; setp.ne.u32 p3, m, 0;",
                "and.b32 m, {there}, 16; setp.ne.u32 p4, m, 0;",
                "and.b32 m, {there}, 32; setp.ne.u32 p5, m, 0;",
                "and.b32 m, {there}, 64; setp.ne.u32 p6, m, 0;",
                "and.b32 m, {there}, 128; setp.ne.u32 p7, m, 0;",
                concat!("@p0 ld.relaxed.sys.global.v2.b64 {{a0, b0}}, [", $f0, "];"),
                concat!("@p1 ld.relaxed.sys.global.v2.b64 {{a1, b1}}, [", $f1, "];"),
                concat!("@p2 ld.relaxed.sys.global.v2.b64 {{a2, b2}}, [", $f2, "];"),
                concat!("@p3 ld.relaxed.sys.global.v2.b64 {{a3, b3}}, [", $f3, "];"),
                concat!("@p4 ld.relaxed.sys.global.v2.b64 {{a4, b4}}, [", $f4, "];"),
                concat!("@p5 ld.relaxed.sys.global.v2.b64 {{a5, b5}}, [", $f5, "];"),
                concat!("@p6 ld.relaxed.sys.global.v2.b64 {{a6, b6}}, [", $f6, "];"),
                concat!("@p7 ld.relaxed.sys.global.v2.b64 {{a7, b7}}, [", $f7, "];"),
                concat!("@p0 st.relaxed.sys.global.v2.b64 [", $t0, "], {{a0, b0}};"),
                concat!("@p1 st.relaxed.sys.global.v2.b64 [", $t1, "], {{a1, b1}};"),
                concat!("@p2 st.relaxed.sys.global.v2.b64 [", $t2, "], {{a2, b2}};"),
                concat!("@p3 st.relaxed.sys.global.v2.b64 [", $t3, "], {{a3, b3}};"),
                concat!("@p4 st.relaxed.sys.global.v2.b64 [", $t4, "], {{a4, b4}};"),
                concat!("@p5 st.relaxed.sys.global.v2.b64 [", $t5, "], {{a5, b5}};"),
                concat!("@p6 st.relaxed.sys.global.v2.b64 [", $t6, "], {{a6, b6}};"),
                concat!("@p7 st.relaxed.sys.global.v2.b64 [", $t7, "], {{a7, b7}};"),
                "}}",
                $($operand)*,
                options(nostack))
        };
    }

    /// Copies 512 bytes from each address of `from` whose bit of `there` is set to that of `to`: all are loaded before
    /// the first is stored.
    #[inline(always)]
    pub fn copy_512(to: [u64; 8], from: [u64; 8], there: u32) {
        let at = u64::from(lane()) * 16;
        // SAFETY: see the top of the file.
        unsafe {
            eight!("{f0}", "{f1}", "{f2}", "{f3}", "{f4}", "{f5}", "{f6}", "{f7}",
                "{t0}", "{t1}", "{t2}", "{t3}", "{t4}", "{t5}", "{t6}", "{t7}",
                there = in(reg32) there,
                t0 = in(reg64) to[0] + at, f0 = in(reg64) from[0] + at,
                t1 = in(reg64) to[1] + at, f1 = in(reg64) from[1] + at,
                t2 = in(reg64) to[2] + at, f2 = in(reg64) from[2] + at,
                t3 = in(reg64) to[3] + at, f3 = in(reg64) from[3] + at,
                t4 = in(reg64) to[4] + at, f4 = in(reg64) from[4] + at,
                t5 = in(reg64) to[5] + at, f5 = in(reg64) from[5] + at,
                t6 = in(reg64) to[6] + at, f6 = in(reg64) from[6] + at,
                t7 = in(reg64) to[7] + at, f7 = in(reg64) from[7] + at)
        }
    }

    /// Copies up to 4,096 bytes, a multiple of 512.
    #[inline(always)]
    pub fn copy_page(to: u64, from: u64, bytes: u32) {
        let at = u64::from(lane()) * 16;
        let there = (1u32 << (bytes / 512)) - 1;
        // SAFETY: see the top of the file.
        unsafe {
            eight!("{f}", "{f}+512", "{f}+1024", "{f}+1536", "{f}+2048", "{f}+2560", "{f}+3072", "{f}+3584",
                "{t}", "{t}+512", "{t}+1024", "{t}+1536", "{t}+2048", "{t}+2560", "{t}+3072", "{t}+3584",
                there = in(reg32) there, t = in(reg64) to + at, f = in(reg64) from + at)
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod host {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence as host_fence};
    use std::time::Instant;

    /// Lanes of a warp.
    pub const LANES: u32 = 1;

    static START: LazyLock<Instant> = LazyLock::new(Instant::now);

    fn word32<'a>(at: u64) -> &'a AtomicU32 {
        // SAFETY: see the top of the file.
        unsafe { &*std::ptr::with_exposed_provenance::<AtomicU32>(at as usize) }
    }

    fn word64<'a>(at: u64) -> &'a AtomicU64 {
        // SAFETY: see the top of the file.
        unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(at as usize) }
    }

    pub fn lane() -> u32 {
        0
    }

    pub fn now_ns() -> u64 {
        START.elapsed().as_nanos() as u64
    }

    pub fn load32(at: u64) -> u32 {
        word32(at).load(Ordering::Relaxed)
    }

    /// Acquire: pairs with the fence before a doorbell, and with `fence` of another warp.
    pub fn load32_acquire(at: u64) -> u32 {
        word32(at).load(Ordering::Acquire)
    }

    pub fn load64(at: u64) -> u64 {
        word64(at).load(Ordering::Relaxed)
    }

    pub fn store32(at: u64, value: u32) {
        word32(at).store(value, Ordering::Relaxed);
    }

    pub fn store64(at: u64, value: u64) {
        word64(at).store(value, Ordering::Relaxed);
    }

    pub fn add32(at: u64, value: u32) -> u32 {
        word32(at).fetch_add(value, Ordering::Relaxed)
    }

    pub fn fence() {
        host_fence(Ordering::AcqRel);
    }

    pub fn sync_warp() {}

    pub fn ballot(mine: bool) -> u32 {
        u32::from(mine)
    }

    pub fn shuffle32(value: u32, _from: u32) -> u32 {
        value
    }

    /// Sleeps: a thread that only yields, of which there is one for each warp, waits for its share of a busy processor.
    pub fn idle() {
        std::thread::sleep(std::time::Duration::from_micros(20));
    }

    pub fn copy_page(to: u64, from: u64, bytes: u32) {
        for at in (0..u64::from(bytes)).step_by(8) {
            store64(to + at, load64(from + at));
        }
    }

    pub fn copy_512(to: [u64; 8], from: [u64; 8], there: u32) {
        for piece in (0..8).filter(|piece| there >> piece & 1 != 0) {
            for at in (0..512).step_by(8) {
                store64(to[piece] + at, load64(from[piece] + at));
            }
        }
    }
}

#[cfg(target_arch = "nvptx64")]
pub use gpu::*;
#[cfg(not(target_arch = "nvptx64"))]
pub use host::*;

/// Returns the value of lane `from`.
#[inline(always)]
pub fn shuffle64(value: u64, from: u32) -> u64 {
    let (low, high) = (value as u32, (value >> 32) as u32);
    u64::from(shuffle32(low, from)) | u64::from(shuffle32(high, from)) << 32
}

/// Returns the lanes below this one.
#[inline(always)]
pub fn below() -> u32 {
    (1 << lane()) - 1
}

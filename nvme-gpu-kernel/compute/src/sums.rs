//! Sums of products of elements in their stored formats: a lane has one element of each unit, or a quarter of
//! every eighth unit.

use crate::arch::{FloatArray, Window};
use crate::eight::EightElements;
use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::arch;

/// Multiplies the lane's elements of `units` units, from byte `byte` of the window on, with those of the
/// vector, which are `x` from `first` on.
#[inline(always)]
pub fn sum_of_units(
    stored: StoredFormat,
    window: Window,
    byte: u32,
    units: u32,
    (x, first): (FloatArray, u64),
) -> f32 {
    let (half, word) = (|at| window.half(at), |at| window.word(at));
    let of = |stored: StoredFormat, unit: u32, quarter| {
        let (_, bytes) = stored.block();
        EightElements::of(stored, (byte + unit * bytes, quarter), half, word)
    };
    let of_mxfp4 = |unit, quarter| EightElements::of_mxfp4((byte + unit * 17, quarter), half, word);
    match stored {
        StoredFormat::Q4_0 => {
            return quarters_of(units, (x, first), |a, b| of(StoredFormat::Q4_0, a, b));
        }
        StoredFormat::Q4_1 => {
            return quarters_of(units, (x, first), |a, b| of(StoredFormat::Q4_1, a, b));
        }
        StoredFormat::Q8_0 => {
            return quarters_of(units, (x, first), |a, b| of(StoredFormat::Q8_0, a, b));
        }
        StoredFormat::Mxfp4 => return quarters_of(units, (x, first), of_mxfp4),
        _ => {}
    }
    let first = first + u64::from(arch::lane());
    let x = |unit: u32| x.load(first + u64::from(unit * UNIT));
    // The format is the same for all units, so there is one loop for each, without a branch inside.
    match stored {
        StoredFormat::F32 => sum_of(StoredFormat::F32, window, byte, units, x),
        StoredFormat::F16 => sum_of(StoredFormat::F16, window, byte, units, x),
        StoredFormat::Bf16 => sum_of(StoredFormat::Bf16, window, byte, units, x),
        StoredFormat::Q4K => sum_of(StoredFormat::Q4K, window, byte, units, x),
        _ => sum_of(StoredFormat::Q6K, window, byte, units, x),
    }
}

/// Sums over units, four in one step, so that their loads overlap.
#[inline(always)]
fn sum_of(
    stored: StoredFormat,
    window: Window,
    byte: u32,
    units: u32,
    x: impl Fn(u32) -> f32,
) -> f32 {
    let lane = arch::lane();
    let half = |k: u32| window.half(byte + 2 * k);
    let product = |unit: u32, x: f32| stored.element(unit, lane, half) * x;
    let (mut a, mut b, mut c, mut d) = (0.0, 0.0, 0.0, 0.0);
    let mut unit = 0;
    while unit + 4 <= units {
        let (x0, x1, x2, x3) = (x(unit), x(unit + 1), x(unit + 2), x(unit + 3));
        a += product(unit, x0);
        b += product(unit + 1, x1);
        c += product(unit + 2, x2);
        d += product(unit + 3, x3);
        unit += 4;
    }
    while unit < units {
        a += product(unit, x(unit));
        unit += 1;
    }
    a + b + (c + d)
}

/// Sums over quarters of units: four lanes have a unit, the warp eight in one step, and the loads of sixteen
/// overlap. `eight` decodes a quarter of a unit.
#[inline(always)]
fn quarters_of(
    units: u32,
    (x, first): (FloatArray, u64),
    eight: impl Fn(u32, u32) -> EightElements,
) -> f32 {
    let (quarter, mut unit) = (arch::lane() % 4, arch::lane() / 4);
    let product = |unit: u32| {
        let first = first + u64::from(unit * UNIT + quarter * 8);
        eight(unit, quarter).dot([x.four(first), x.four(first + 4)])
    };
    let (mut a, mut b) = (0.0, 0.0);
    while unit + 8 < units {
        a += product(unit);
        b += product(unit + 8);
        unit += 16;
    }
    if unit < units {
        a += product(unit);
    }
    a + b
}

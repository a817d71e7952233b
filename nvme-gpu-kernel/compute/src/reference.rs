//! Reference of each kernel on the CPU, for one vector.

use crate::{index_of, ranked};
use nvme_formats::{StoredFormat, UNIT};

/// Elements of a unit.
type Numbers = [f32; UNIT as usize];

/// Returns the product of a row of a matrix, in its stored format, with a vector of as many elements.
pub fn dot(stored: StoredFormat, row: &[u8], x: &[f32]) -> f32 {
    let half = half_of(row);
    let mut sums: Numbers = [0.0; UNIT as usize];
    for (unit, x) in x.as_chunks::<{ UNIT as usize }>().0.iter().enumerate() {
        let numbers = numbers(stored, unit as u32, half);
        for ((sum, number), x) in sums.iter_mut().zip(numbers).zip(x) {
            *sum += number * x;
        }
    }
    sums.iter().sum()
}

/// Converts a row to numbers.
pub fn unpack(stored: StoredFormat, row: &[u8], y: &mut [f32]) {
    let half = half_of(row);
    for (unit, y) in y
        .as_chunks_mut::<{ UNIT as usize }>()
        .0
        .iter_mut()
        .enumerate()
    {
        *y = numbers(stored, unit as u32, half);
    }
}

#[inline(always)]
fn numbers(stored: StoredFormat, unit: u32, half: impl Fn(u32) -> u16) -> Numbers {
    let mut numbers = [0.0; UNIT as usize];
    stored.each(unit, half, |i, value| numbers[i as usize] = value);
    numbers
}

/// Returns a function of the 16-bit words of a row; 0 past its end.
fn half_of(row: &[u8]) -> impl Fn(u32) -> u16 + Copy {
    let words = row.as_chunks::<2>().0;
    |k: u32| {
        words
            .get(k as usize)
            .map_or(0, |word| u16::from_le_bytes(*word))
    }
}

/// Computes [`RmsNorm`](crate::RmsNorm): NaN where the sum of the squares is too large.
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) {
    let sum: f32 = x.iter().map(|x| x * x).sum();
    let factor = match sum < f32::INFINITY {
        true => 1.0 / (sum / x.len() as f32 + epsilon).sqrt(),
        false => f32::NAN,
    };
    for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
        *y = x * factor * weight;
    }
}

/// Rotates a head by the cosines and sines of its position, neighbouring elements as pairs.
pub fn turn(head: &mut [f32], angles: &[f32]) {
    let (pairs, angles) = (head.as_chunks_mut::<2>().0, angles.as_chunks::<2>().0);
    for ([a, b], [cos, sin]) in pairs.iter_mut().zip(angles) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

/// Rotates a head as [`turn`] does, the elements of its first half and of its second half as pairs.
pub fn turn_halves(head: &mut [f32], angles: &[f32]) {
    let (first, second) = head.split_at_mut(head.len() / 2);
    let pairs = first.iter_mut().zip(second);
    for ((a, b), [cos, sin]) in pairs.zip(angles.as_chunks::<2>().0) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

/// Returns cosine and sine of each pair of each of `positions` positions, for [`turn`] and
/// [`RopeParameters::angles`](crate::RopeParameters::angles).
pub fn angles(positions: u32, head_elements: u32, base: f64) -> Vec<f32> {
    angles_of(positions, &frequencies(head_elements, base), 1.0)
}

/// Returns the angle of each pair from one position to the next.
pub fn frequencies(head_elements: u32, base: f64) -> Vec<f64> {
    let of = |pair: u32| base.powf(-2.0 * f64::from(pair) / f64::from(head_elements));
    (0..head_elements / 2).map(of).collect()
}

/// Returns the angles of pairs with these frequencies, as [`angles`] does, the cosines and sines times `magnitude`.
pub fn angles_of(positions: u32, frequencies: &[f64], magnitude: f64) -> Vec<f32> {
    let of = |position: u32, frequency: f64| {
        let angle = f64::from(position) * frequency;
        [angle.cos() * magnitude, angle.sin() * magnitude].map(|number| number as f32)
    };
    (0..positions)
        .flat_map(|position| frequencies.iter().flat_map(move |one| of(position, *one)))
        .collect()
}

/// Computes attention of one head of a query over the keys and values of its kind, `stride` elements apart
/// for each position, and over a `sink`.
pub fn attend(
    query: &[f32],
    (keys, values): (&[f32], &[f32]),
    stride: usize,
    scale: f32,
    sink: Option<f32>,
    y: &mut [f32],
) {
    let products: Vec<f32> = keys
        .chunks(stride)
        .map(|key| query.iter().zip(key).map(|(a, b)| a * scale * b).sum())
        .collect();
    let first = sink.unwrap_or(f32::NEG_INFINITY);
    let largest = products.iter().copied().fold(first, f32::max);
    let mut total = sink.map_or(0.0, |sink| (sink - largest).exp());
    y.fill(0.0);
    for (product, value) in products.iter().zip(values.chunks(stride)) {
        let weight = (product - largest).exp();
        total += weight;
        for (y, value) in y.iter_mut().zip(value) {
            *y += weight * value;
        }
    }
    y.iter_mut().for_each(|y| *y /= total);
}

/// Computes [`SiluMul`](crate::SiluMul) into `x`.
pub fn silu_mul(x: &mut [f32], factor: &[f32]) {
    for (x, factor) in x.iter_mut().zip(factor) {
        *x = *x / (1.0 + (-*x).exp()) * factor;
    }
}

/// Computes [`ArgmaxParameters`](crate::ArgmaxParameters).
pub fn argmax(x: &[f32]) -> u32 {
    let ranks = x
        .iter()
        .zip(0..)
        .map(|(value, index)| ranked(*value, index));
    index_of(ranks.max().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_the_numbers() {
        for stored in StoredFormat::ALL {
            let row: Vec<u8> = (0..stored.row_bytes(512).unwrap())
                .map(|at| (at * 37 % 61) as u8)
                .collect();
            let mut numbers = [0.0; 512];
            unpack(stored, &row, &mut numbers);
            let x: Vec<f32> = (0..512u16).map(|at| f32::from(at % 7) - 3.0).collect();
            let pairs = numbers.iter().zip(&x);
            let expected: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let size: f64 = numbers.iter().map(|a| f64::from(a.abs()) * 3.0).sum();
            let found = f64::from(dot(stored, &row, &x));
            assert!((found - expected).abs() <= 1e-5 * size, "{stored:?}");
        }
    }

    #[test]
    fn a_norm_has_the_mean_square_one() {
        let x = [3.0, -4.0, 0.0, 5.0];
        let mut y = [0.0; 4];
        rms_norm(&x, &[1.0, 1.0, 1.0, 2.0], 0.0, &mut y);
        let factor = 1.0 / (50.0f32 / 4.0).sqrt();
        for (y, x) in y.iter().zip([3.0, -4.0, 0.0, 10.0]) {
            assert!((y - x * factor).abs() < 1e-6);
        }
        rms_norm(&[3e19; 4], &[1.0; 4], 0.0, &mut y);
        assert!(y.iter().all(|y| y.is_nan()), "the squares overflow");
    }

    #[test]
    fn a_turn_keeps_lengths_and_adds_angles() {
        let angles = angles(8, 4, 10_000.0);
        let of = |position: usize| &angles[position * 4..][..4];
        let mut twice = [1.0, 2.0, 3.0, 4.0];
        turn(&mut twice, of(2));
        turn(&mut twice, of(3));
        let mut once = [1.0, 2.0, 3.0, 4.0];
        turn(&mut once, of(5));
        for (twice, once) in twice.iter().zip(once) {
            assert!((twice - once).abs() < 1e-5);
        }
        assert!((once[0].hypot(once[1]) - 5f32.sqrt()).abs() < 1e-5);
        assert_eq!(&angles[..4], [1.0, 0.0, 1.0, 0.0]);
        let mut halves = [1.0, 3.0, 2.0, 4.0];
        turn_halves(&mut halves, of(5));
        assert_eq!([halves[0], halves[2], halves[1], halves[3]], once);
    }

    #[test]
    fn attention_weighs_values_by_the_products() {
        let (keys, values) = ([1.0, 0.0, 0.0, 1.0], [10.0, 20.0, 30.0, 40.0]);
        let mut y = [0.0; 2];
        attend(&[0.0, 0.0], (&keys, &values), 2, 1.0, None, &mut y);
        assert_eq!(y, [20.0, 30.0]);
        // e^2 to 1.
        attend(&[4.0, 0.0], (&keys, &values), 2, 0.5, None, &mut y);
        let share = 1.0 / (1.0 + 2f32.exp());
        assert!((y[0] - (10.0 + 20.0 * share)).abs() < 1e-4);
        // A sink takes its share, and adds no value.
        attend(&[0.0, 0.0], (&keys, &values), 2, 1.0, Some(0.0), &mut y);
        assert!((y[0] - 40.0 / 3.0).abs() < 1e-4 && (y[1] - 20.0).abs() < 1e-4);
    }

    #[test]
    fn the_first_of_the_largest_numbers_is_taken() {
        assert_eq!(argmax(&[-1.0, -0.5, -0.5, f32::NAN]), 1);
        assert_eq!(argmax(&[f32::NEG_INFINITY]), 0);
        assert_eq!(argmax(&[]), 0);
    }

    #[test]
    fn the_activation_is_x_times_its_logistic() {
        let mut x = [0.0, 1.0, -20.0];
        silu_mul(&mut x, &[5.0, 2.0, 1.0]);
        assert_eq!(x[0], 0.0);
        assert!((x[1] - 2.0 * 0.731_058_6).abs() < 1e-6);
        assert!(x[2].abs() < 1e-6);
    }
}

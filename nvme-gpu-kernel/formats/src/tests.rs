use super::*;

#[test]
fn every_half_survives_the_way_there_and_back() {
    for half in 0..=u16::MAX {
        let wide = f32_of_f16(half);
        if wide.is_nan() {
            assert_eq!(f16_of_f32(wide) & 0x7E00, 0x7E00);
        } else {
            assert_eq!(f16_of_f32(wide), half, "{half:#06x}");
        }
    }
}

#[test]
fn halves_are_rounded_to_the_nearest_and_ties_to_even() {
    for (value, half) in [
        (1.0, 0x3C00),
        (-2.0, 0xC000),
        (65504.0, 0x7BFF),
        (65519.9, 0x7BFF),
        (65520.0, 0x7C00),
        (f32::INFINITY, 0x7C00),
        (f32::NEG_INFINITY, 0xFC00),
        (1.0 + 1.0 / 2048.0, 0x3C00),
        (1.0 + 3.0 / 2048.0, 0x3C02),
        (5.960_464_5e-8, 0x0001),
        (2.980_232_2e-8, 0x0000),
        (2.980_232_6e-8, 0x0001),
        (6.103_515_6e-5, 0x0400),
        (6.100_5e-5, 0x03FF),
        (-0.0, 0x8000),
    ] {
        assert_eq!(f16_of_f32(value), half, "{value}");
    }
    assert_eq!(f32_of_f16(0x0001), 5.960_464_5e-8);
    assert_eq!(f32_of_f16(0x7C00), f32::INFINITY);
}

#[test]
fn bf16_is_rounded_to_the_nearest_and_ties_to_even() {
    for (bits, expected) in [
        (0x3F80_0000, 0x3F80),
        (0x3F80_8000, 0x3F80),
        (0x3F81_8000, 0x3F82),
        (0x3F80_8001, 0x3F81),
        (0x7F7F_FFFF, 0x7F80),
        (0x7F80_0001, 0x7FC0),
        (0xFF80_0000, 0xFF80),
    ] {
        assert_eq!(bf16_of_f32(f32::from_bits(bits)), expected, "{bits:#x}");
    }
}

/// Returns the value by the definition of a format: exponent and fraction of given widths and bias.
fn by_definition(byte: u8, exponent_bits: u32, fraction_bits: u32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(byte >> fraction_bits) & ((1 << exponent_bits) - 1);
    let fraction =
        f64::from(u32::from(byte) & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
    sign * match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    }
}

#[test]
fn every_f8_is_what_its_definition_says() {
    for byte in 0..=u8::MAX {
        let wide = f32_of_f8_e4m3(byte);
        match byte & 0x7F {
            0x7F => assert!(wide.is_nan()),
            _ => assert_eq!(f64::from(wide), by_definition(byte, 4, 3), "{byte:#x}"),
        }
        let wide = f32_of_f8_e5m2(byte);
        match byte & 0x7F {
            0x7C => assert_eq!(wide.abs(), f32::INFINITY),
            0x7D..=0x7F => assert!(wide.is_nan()),
            _ => assert_eq!(f64::from(wide), by_definition(byte, 5, 2), "{byte:#x}"),
        }
    }
    assert_eq!(f32_of_f8_e4m3(0x7E), 448.0);
    assert_eq!(f32_of_f8_e5m2(0x7B), 57344.0);
    assert_eq!(f32_of_f8_e4m3(0x80).to_bits(), 0x8000_0000);
}

#[test]
fn blocks_have_scale_least_value_and_numbers_in_their_places() {
    // 0.25, then -16 to 15.
    let mut q8 = vec![0x00, 0x34];
    q8.extend((0..32).map(|number| (number - 16i8) as u8));
    let all: Vec<f32> = (0..32)
        .map(|index| value(Format::Q8_0, index, |at| q8[at as usize]))
        .collect();
    assert!((0..32).all(|index| all[index] == (index as f32 - 16.0) / 4.0));
    // Number k and number k + 16 share byte k.
    let nibbles: Vec<u8> = (0..16).map(|byte| byte | (15 - byte) << 4).collect();
    let numbers: Vec<f32> = (0..16)
        .chain((0..16).rev())
        .map(|number| number as f32)
        .collect();
    let q4_0 = [&[0x00, 0x38][..], &nibbles].concat();
    // 2.0 and -1.0.
    let q4_1 = [&[0x00, 0x40, 0x00, 0xBC][..], &nibbles].concat();
    for index in 0..32 {
        let number = numbers[index as usize];
        assert_eq!(
            value(Format::Q4_0, index, |at| q4_0[at as usize]),
            0.5 * (number - 8.0)
        );
        assert_eq!(
            value(Format::Q4_1, index, |at| q4_1[at as usize]),
            2.0 * number - 1.0
        );
    }
    // The second block of two.
    let two = [q4_1.clone(), q4_1].concat();
    assert_eq!(
        value(Format::Q4_1, 33, |at| two[at as usize]),
        2.0 * numbers[1] - 1.0
    );
}

#[test]
fn whole_blocks_are_widened_and_nothing_else() {
    let from: Vec<u8> = (0..68).collect();
    let mut out = vec![0xFF; 256];
    assert!(widen(Format::Q8_0, WideFormat::F32, &from, &mut out));
    let last = f32::from_le_bytes(out[252..].try_into().unwrap());
    assert_eq!(last, value(Format::Q8_0, 63, |at| from[at as usize]));
    let mut halves = vec![0; 128];
    assert!(widen(Format::Q8_0, WideFormat::F16, &from, &mut halves));
    let first = u16::from_le_bytes([halves[0], halves[1]]);
    assert_eq!(
        first,
        f16_of_f32(value(Format::Q8_0, 0, |at| from[at as usize]))
    );
    let before = out.clone();
    assert!(!widen(Format::Q8_0, WideFormat::F32, &from[1..], &mut out));
    assert!(!widen(Format::Q8_0, WideFormat::F32, &from, &mut out[4..]));
    assert_eq!(out, before);
    assert!(widen(Format::F16, WideFormat::F32, &[], &mut []));
}

#[test]
fn numbers_of_formats_are_their_own() {
    for format in Format::ALL {
        assert_eq!(Format::of_number(format as u32), Some(format));
        assert_eq!(
            format.elements(u64::from(format.block_bytes())),
            Some(u64::from(format.block_elements()))
        );
    }
    assert_eq!((Format::of_number(0), Format::of_number(18)), (None, None));
    for wide in [WideFormat::F16, WideFormat::F32] {
        assert_eq!(WideFormat::of_number(wide as u32), Some(wide));
    }
    assert_eq!(WideFormat::of_number(0), None);
}

#[test]
fn every_nan_comes_out_as_the_same_one() {
    for bits in [0x7F80_0001u32, 0xFF80_0001, 0xFFC0_0000, 0x7FFF_FFFF] {
        assert_eq!(WideFormat::F32.bits_of(f32::from_bits(bits)), 0x7FC0_0000);
        assert_eq!(WideFormat::F16.bits_of(f32::from_bits(bits)), 0x7E00);
    }
    assert_eq!(WideFormat::F16.bits_of(f32::NEG_INFINITY), 0xFC00);
}

/// Bytes in which nothing repeats; binary16 at `halves` of each block are finite.
fn blocks(format: BlockFormat, count: u32, halves: &[usize]) -> Vec<u8> {
    let bytes = format.block_bytes();
    let all = (0..count * bytes).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8);
    let mut all: Vec<u8> = all.collect();
    for block in all.chunks_exact_mut(bytes as usize) {
        halves.iter().for_each(|half| block[half + 1] &= 0xBF);
    }
    all
}

/// The expected values are FNV-1a over the bits that `gguf.quants.dequantize` of the package gguf 0.19.0 returns for
/// the same blocks.
#[test]
fn larger_blocks_are_what_gguf_makes_of_them() {
    for (format, halves, first, expected) in [
        (
            BlockFormat::Q4K,
            &[0, 2][..],
            -500.498_3,
            0xAAFB_6AB4_4241_E8C1,
        ),
        (BlockFormat::Q6K, &[208], -0.0, 0xCC73_32BB_44FC_7ED6),
        (
            BlockFormat::Mxfp4,
            &[],
            -8.816_208e-39,
            0xD1AA_12E5_F38F_87AB,
        ),
    ] {
        let from = blocks(format, 300, halves);
        let mut out = vec![f32::NAN; 300 * format.block_elements() as usize];
        assert!(format.unpack(&from, &mut out));
        assert_eq!(out[0], first, "{format:?}");
        let bytes = out.iter().flat_map(|value| value.to_le_bytes());
        let hash = bytes.fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
        assert_eq!(hash, expected, "{format:?}");
    }
}

#[test]
fn whole_larger_blocks_are_unpacked_and_nothing_else() {
    for format in BlockFormat::ALL {
        let (bytes, elements) = (
            format.block_bytes() as usize,
            format.block_elements() as usize,
        );
        let mut out = vec![7.0; 2 * elements];
        let before = out.clone();
        assert!(!format.unpack(&vec![1; 2 * bytes - 1], &mut out));
        assert!(!format.unpack(&vec![1; bytes], &mut out));
        assert!(!format.unpack(&[], &mut out));
        assert_eq!(out, before);
        assert!(format.unpack(&vec![0; 2 * bytes], &mut out));
        assert!(out.iter().all(|value| *value == 0.0));
        assert!(format.unpack(&[], &mut []));
    }
}

#[test]
fn there_is_a_row_of_every_format_that_comes_out_as_zero_bits() {
    for format in Format::ALL {
        let stored: Vec<u8> = (0..format.block_bytes() * 3)
            .map(|at| format.zero_byte(at))
            .collect();
        let elements = format.elements(stored.len() as u64).unwrap() as usize;
        for wide in [WideFormat::F16, WideFormat::F32] {
            let mut out = vec![0xA5; elements * wide.bytes() as usize];
            assert!(widen(format, wide, &stored, &mut out));
            assert!(out.iter().all(|byte| *byte == 0), "{format:?} {wide:?}");
        }
    }
}

/// Returns the FNV-1a hash of the bits of all elements.
fn hash_of(format: Format, stored: &[u8]) -> u64 {
    let elements = format.elements(stored.len() as u64).unwrap();
    let bits = (0..elements as u32)
        .map(|index| value(format, index, |byte| stored[byte as usize]))
        .flat_map(f32::to_le_bytes);
    bits.fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    })
}

/// The hashes are those of `gguf.quants.dequantize` of the package gguf 0.19.0, of the same bytes.
#[test]
fn blocks_have_the_bits_that_ggufs_package_gives_them() {
    for (format, wanted) in [
        (Format::Q2K, 0x758f_f0d9_ed68_aff9),
        (Format::Q3K, 0xf5fd_3bf5_ecfd_8bc8),
        (Format::Q4K, 0x8b10_dc6c_961a_599a),
        (Format::Q5K, 0xf2e8_4743_34ab_5a91),
        (Format::Q6K, 0xc7b7_2279_a149_4a75),
        (Format::Iq4Nl, 0x3ddb_380b_3c86_707f),
        (Format::Iq4Xs, 0xee28_4974_0b7f_7327),
        (Format::Mxfp4, 0x21b1_00a1_52f1_1c1e),
        (Format::Q8_0, 0x2900_057b_8a7e_73e3),
        (Format::Q4_0, 0x51ff_2337_ab80_8cc0),
        (Format::Q4_1, 0x8c76_5a99_7b28_a344),
    ] {
        // Upper bytes of binary16 scales, which stay finite.
        let scales: &[usize] = match format {
            Format::Q2K => &[81, 83],
            Format::Q3K => &[109],
            Format::Q4K | Format::Q5K | Format::Q4_1 => &[1, 3],
            Format::Q6K => &[209],
            Format::Mxfp4 => &[],
            _ => &[1],
        };
        let mut state = 7u32;
        let mut stored: Vec<u8> = (0..64 * format.block_bytes())
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .collect();
        for block in stored.chunks_exact_mut(format.block_bytes() as usize) {
            for at in scales {
                block[*at] &= 0xBF;
            }
        }
        assert_eq!(hash_of(format, &stored), wanted, "{format:?}");
    }
}

#[test]
fn bfloat16_is_rounded_and_has_one_nan() {
    assert_eq!(WideFormat::of_number(3), Some(WideFormat::Bf16));
    for (value, bits) in [
        (1.0, 0x3F80),
        (-0.0, 0x8000),
        (1.003_906_3, 0x3F80),
        (1.011_718_8, 0x3F82),
    ] {
        assert_eq!(WideFormat::Bf16.bits_of(value), bits, "{value}");
    }
    assert_eq!(WideFormat::Bf16.bits_of(-f32::NAN), 0x7FC0);
}

#[test]
fn every_f4_is_what_its_definition_says() {
    for bits in 0..16u8 {
        let wanted = by_definition_of(bits);
        assert_eq!(f64::from(f32_of_e2m1(bits)), wanted, "{bits}");
        assert_eq!(f32_of_e2m1(bits).is_sign_negative(), bits >= 8);
    }
    // The first element of a byte is in its lower half.
    let at = |_| 0x52;
    let first = value(Format::F4E2M1, 2, at);
    assert_eq!((first, value(Format::F4E2M1, 3, at)), (1.0, 3.0));
}

fn by_definition_of(bits: u8) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 1 & 3), f64::from(bits & 1) / 2.0);
    let magnitude = match exponent {
        0 => fraction,
        _ => (1.0 + fraction) * 2f64.powi(exponent - 1),
    };
    if bits >= 8 { -magnitude } else { magnitude }
}

#[test]
fn rows_with_their_scales_behind_them_are_scaled_in_groups_of_32() {
    let mut row: Vec<u8> = (0..=255).collect();
    row.extend(120..128);
    let row = [row.clone(), row].concat();
    let at = |byte: u32| row[byte as usize];
    for index in 0..512 {
        let scale = f32_of_e8m0(120 + (index % 256 / 32) as u8);
        let wanted = f32_of_f8_e4m3(index as u8) * scale;
        let have = value(Format::F8Scaled, index, at);
        assert!(
            have == wanted || have.is_nan() && wanted.is_nan(),
            "{index}"
        );
    }
}

#[test]
fn scales_apart_are_those_of_their_row_and_other_lengths_are_refused() {
    let stored: Vec<u8> = (0..64).map(|byte| byte + 40).collect();
    let layout = ScaleLayout {
        format: ScaleFormat::E8M0 as u32,
        shift: 5,
        factor: 1f32.to_bits(),
        divides: 0,
    };
    let mut out = [0; 256];
    let wide = WideFormat::F32;
    assert!(widen_scaled(
        Format::F8E4M3,
        wide,
        &stored,
        (layout, &[126, 129]),
        &mut out
    ));
    for (index, four) in out.as_chunks::<4>().0.iter().enumerate() {
        let scale = if index < 32 { 0.5 } else { 4.0 };
        let wanted = f32_of_f8_e4m3(stored[index]) * scale;
        assert_eq!(f32::from_le_bytes(*four), wanted);
    }
    for scales in [&[126][..], &[126, 129, 1], &[]] {
        assert!(!widen_scaled(
            Format::F8E4M3,
            wide,
            &stored,
            (layout, scales),
            &mut out
        ));
    }
}

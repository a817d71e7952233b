//! Kernels by lanes on the host, each over a small job: their results are those of plain code.
// UNSAFETY: kernels get the addresses of arrays that outlive their launch.
#![allow(unsafe_code)]

mod linear;
mod matmul;

use crate::choose::ChoosePages;
use crate::experts::cache::{ExpertCache, words};
use crate::experts::reference::{probabilities, route};
use crate::experts::{
    ActivateParameters, AdmitParameters, ChosenExpert, ExpertActivation, ExpertLocations,
    JoinParameters, MATRICES, NO_SLOT, ReplacementPolicy, RouteParameters, SettleParameters,
};
use crate::{
    AddBias, ArgmaxParameters, AttentionParameters, BLOCK_THREADS, GemvParameters, RopeParameters,
    entries, reference,
};
use nvme_core::sync::AtomicU32;
use nvme_formats::StoredFormat;
use nvme_gpu_kernel::lanes::{HostGrid, RunningLaunch};
use nvme_gpu_kernel::rows::{ListHead, RangeTarget};
use std::cell::Cell;
use std::rc::Rc;

/// Runs `kernel` in each lane of `blocks` blocks.
fn launch<T: Copy + 'static>(blocks: u32, shared_bytes: u32, kernel: unsafe fn(T), job: T) {
    launch_of((blocks, BLOCK_THREADS, shared_bytes), kernel, job);
}

/// Runs `kernel` in each lane of a launch of blocks, threads of each and bytes of its shared memory.
fn launch_of<T: Copy + 'static>(
    (blocks, threads, shared_bytes): (u32, u32, u32),
    kernel: unsafe fn(T),
    job: T,
) {
    let now_ns = Cell::new(0);
    let grid = HostGrid {
        blocks,
        threads,
        at_once: 2,
        // It goes on with each look, so that a wait that never ends reaches its limit.
        clock: Rc::new(move || now_ns.replace(now_ns.get() + 10_000)),
    };
    // SAFETY: the tests give jobs over arrays of theirs.
    let launch = RunningLaunch::new(grid, move || unsafe { kernel(job) });
    launch.with_shared(shared_bytes).run(|| {});
}

fn address<T>(all: &[T]) -> u64 {
    all.as_ptr().expose_provenance() as u64
}

fn address_mut<T>(all: &mut [T]) -> u64 {
    all.as_mut_ptr().expose_provenance() as u64
}

/// Numbers below `below` that look random.
fn dice(seed: u64) -> impl FnMut(u32) -> u32 {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        ((state >> 33) % u64::from(below)) as u32
    }
}

/// Numbers between -1 and 1.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut throw = dice(seed);
    (0..count)
        .map(|_| throw(2001) as f32 / 1000.0 - 1.0)
        .collect()
}

#[track_caller]
fn near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let size = expected.iter().fold(1e-3f32, |size, y| size.max(y.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let apart = (found - expected).abs();
        assert!(apart <= 1e-5 * size, "{at}: {found}, not {expected}");
    }
}

#[test]
fn pages_are_chosen_by_rank_and_of_equal_ones_the_first() {
    const MOST: u32 = 150;
    for (seed, span) in [(1, 3), (2, 70_000), (3, u32::MAX)] {
        let mut throw = dice(seed);
        let counts = [MOST, 40, 12, 0, 77];
        let pages: Vec<u32> = (0..5 * MOST).map(|page| page * 7 + 1).collect();
        let mut ranks: Vec<u32> = (0..5 * MOST).map(|_| throw(span)).collect();
        let (mut chosen, mut chosen_counts) = (vec![0; 5 * 12], vec![0; 5]);
        let choice = ChoosePages {
            pages: address(&pages),
            counts: address(&counts),
            ranks: address_mut(&mut ranks),
            chosen: address_mut(&mut chosen),
            chosen_counts: address_mut(&mut chosen_counts),
            page_count: 10_000,
            sequences: 5,
            heads: 1,
            kv_heads: 1,
            sequence_stride: MOST,
            most_pages: MOST,
            keep: 12,
            first: 1,
            last: 2,
            ..ChoosePages::default()
        };
        launch(1, 0, entries::nvme_choose_pages, choice);
        for (row, count) in counts.into_iter().enumerate() {
            let first = row * MOST as usize;
            let mut places: Vec<u32> = (0..count).collect();
            let rank = |place: &u32| match choice.is_kept(*place, count) {
                true => u64::MAX,
                false => ranks[first + *place as usize].into(),
            };
            places.sort_by_key(|place| std::cmp::Reverse(rank(place)));
            places.truncate(12);
            places.sort_unstable();
            let expected: Vec<u32> = places
                .iter()
                .map(|place| pages[first + *place as usize])
                .collect();
            let found = &chosen[row * 12..][..chosen_counts[row] as usize];
            assert_eq!(found, expected, "head {row} of ranks below {span}");
        }
    }
}

#[test]
fn the_largest_logits_are_routed_and_of_equal_ones_the_first() {
    const EXPERTS: usize = 70;
    for (over_all, has_shares) in [(false, false), (false, true), (true, true)] {
        let mut throw = dice(5);
        // Few different values: many are equal.
        let logits: Vec<f32> = (0..3 * EXPERTS).map(|_| throw(9) as f32 / 4.0).collect();
        let mut chosen = vec![ChosenExpert::default(); 3 * 40];
        let mut shares = vec![0.0f32; 3 * EXPERTS];
        let job = RouteParameters {
            logits: address(&logits),
            chosen: address_mut(&mut chosen),
            probabilities: match has_shares {
                true => address_mut(&mut shares),
                false => 0,
            },
            tokens: 3,
            experts: EXPERTS as u32,
            choices: 40,
            over_all: over_all.into(),
        };
        launch(2, 0, entries::nvme_moe_route, job);
        for (chosen, logits) in chosen.chunks(40).zip(logits.chunks(EXPERTS)) {
            let expected = route(logits, 40, over_all);
            let experts = |all: &[ChosenExpert]| -> Vec<(u32, u32)> {
                all.iter().map(|one| (one.expert, one.slot)).collect()
            };
            let weights =
                |all: &[ChosenExpert]| -> Vec<f32> { all.iter().map(|one| one.weight).collect() };
            assert_eq!(experts(chosen), experts(&expected));
            near(&weights(chosen), &weights(&expected));
        }
        for (shares, logits) in shares.chunks(EXPERTS).zip(logits.chunks(EXPERTS)) {
            match has_shares {
                true => near(shares, &probabilities(logits)),
                false => assert_eq!(shares, [0.0; EXPERTS]),
            }
        }
    }
}

#[test]
fn pinned_experts_stay_and_others_get_slots_of_their_own() {
    const PINNED: [(u32, u32); 2] = [(0, 4), (1, 9)];
    for policy in ReplacementPolicy::ALL {
        let memory: Vec<AtomicU32> = (0..words(6, 10)).map(|_| AtomicU32::new(0)).collect();
        let cache = ExpertCache::new(&memory, 6, 2, policy).unwrap();
        for (slot, expert) in PINNED {
            cache.pin(slot, expert);
        }
        let places = ExpertLocations {
            first: [0, 1 << 20, 2 << 20],
            bytes: [4096; MATRICES],
        };
        let mut list = vec![0u64; (size_of::<ListHead>() + 12 * size_of::<RangeTarget>()) / 8];
        let mut throw = dice(policy as u64);
        for step in 0..200 {
            let mut chosen = [0; 4].map(|_| ChosenExpert {
                expert: throw(10),
                slot: NO_SLOT,
                ..ChosenExpert::default()
            });
            let job = AdmitParameters {
                words: address(&memory),
                chosen: address_mut(&mut chosen),
                list: address_mut(&mut list),
                places: address(std::slice::from_ref(&places)),
                data: 1 << 30,
                slot_bytes: places.slot_bytes(),
                slots: 6,
                pinned: 2,
                experts: 10,
                layers: 1,
                layer: 0,
                policy: policy as u32,
                pairs: 4,
                piece_shift: 12,
            };
            launch(1, 0, entries::nvme_moe_admit, job);
            for one in chosen {
                let held = cache.holds(one.slot);
                assert_eq!(held, Some(one.expert), "step {step} of {policy:?}");
            }
            for (slot, expert) in PINNED {
                assert_eq!(cache.holds(slot), Some(expert), "step {step} of {policy:?}");
            }
        }
    }
}

/// One failed read of any piece of a range, the first, the last, and those that a thread looks at later.
#[test]
fn slots_with_a_failed_read_are_marked_and_no_other() {
    const PIECES: u64 = 700;
    for failed in [
        None,
        Some(0),
        Some(1),
        Some(350),
        Some(699),
        Some(700),
        Some(2099),
    ] {
        let memory: Vec<AtomicU32> = (0..words(3, 4)).map(|_| AtomicU32::new(0)).collect();
        let cache = ExpertCache::new(&memory, 3, 0, ReplacementPolicy::Lru).unwrap();
        (0..3).for_each(|slot| cache.pin(slot, slot));
        let bytes = PIECES * 512;
        let mut list = vec![3, 3 * PIECES];
        for slot in 0..3 {
            list.extend([0, bytes, (1 << 30) + slot * bytes, slot * PIECES]);
        }
        const _: () = assert!(size_of::<ListHead>() == 16 && size_of::<RangeTarget>() == 32);
        let mut status = vec![0i32; 3 * PIECES as usize];
        if let Some(failed) = failed {
            status[failed] = 9;
        }
        let job = SettleParameters {
            admit: AdmitParameters {
                words: address(&memory),
                list: address(&list),
                data: 1 << 30,
                slot_bytes: bytes,
                slots: 3,
                experts: 4,
                layers: 1,
                piece_shift: 9,
                ..AdmitParameters::default()
            },
            status: address(&status),
            most_pieces: 3 * PIECES,
        };
        launch(2, 0, entries::nvme_moe_settle, job);
        for slot in 0..3 {
            let is_failed = failed.is_some_and(|failed| failed as u64 / PIECES == slot.into());
            assert_eq!(
                cache.is_bad(slot),
                is_failed,
                "slot {slot}, piece {failed:?}"
            );
        }
    }
}

#[test]
fn results_of_experts_are_joined_by_their_own_weights() {
    let (x, before) = (numbers(4 * 3 * 300, 1), numbers(4 * 300, 2));
    let chosen: Vec<ChosenExpert> = numbers(12, 3)
        .into_iter()
        .zip(0..)
        .map(|(weight, at)| ChosenExpert {
            weight,
            expert: at % 5,
            ..ChosenExpert::default()
        })
        .collect();
    let bias = numbers(5 * 300, 4);
    for (adds, has_bias) in [(0, false), (1, false), (1, true)] {
        let mut y = before.clone();
        let job = JoinParameters {
            chosen: address(&chosen),
            x: address(&x),
            y: address_mut(&mut y),
            bias: if has_bias { address(&bias) } else { 0 },
            tokens: 4,
            choices: 3,
            elements: 300,
            adds,
        };
        launch(2, 0, entries::nvme_moe_join, job);
        let expected: Vec<f32> = (0..4 * 300)
            .map(|at| {
                let (token, element) = (at / 300, at % 300);
                let pairs = token * 3..token * 3 + 3;
                let of_expert = |pair: usize| match has_bias {
                    true => bias[chosen[pair].expert as usize * 300 + element],
                    false => 0.0,
                };
                let terms = pairs
                    .map(|pair| chosen[pair].weight * (x[pair * 300 + element] + of_expert(pair)));
                terms.sum::<f32>() + before[at] * adds as f32
            })
            .collect();
        near(&y, &expected);
    }
}

#[test]
fn gates_are_activated_with_the_biases_of_their_experts() {
    let (gate, up) = (numbers(6 * 70, 1), numbers(6 * 70, 2));
    let (gate_bias, up_bias) = (numbers(4 * 70, 3), numbers(4 * 70, 4));
    let chosen = [0, 3, 3, 1, 0, 2].map(|expert| ChosenExpert {
        expert,
        ..ChosenExpert::default()
    });
    for activation in [
        ExpertActivation::SwiGlu,
        ExpertActivation::ClampedSwiGlu { limit: 0.3 },
        ExpertActivation::GptOss {
            limit: 0.4,
            alpha: 1.702,
        },
    ] {
        for (has_gate, has_up) in [(false, false), (true, true), (false, true)] {
            let (mut found, mut expected) = (gate.clone(), gate.clone());
            // The expert of the last pair is not loaded.
            found[5 * 70..].fill(f32::NAN);
            let (number, limit, alpha) = activation.numbers();
            let job = ActivateParameters {
                chosen: address(&chosen),
                gate: address_mut(&mut found),
                up: address(&up),
                gate_bias: if has_gate { address(&gate_bias) } else { 0 },
                up_bias: if has_up { address(&up_bias) } else { 0 },
                elements: 70,
                pairs: 6,
                activation: number,
                limit,
                alpha,
                reserved: 0,
            };
            launch(1, 0, entries::nvme_moe_activate, job);
            for (at, gate) in expected.iter_mut().enumerate() {
                let of_expert = chosen[at / 70].expert as usize * 70 + at % 70;
                let bias = |has, bias: &[f32]| if has { bias[of_expert] } else { 0.0 };
                let up = up[at] + bias(has_up, &up_bias);
                *gate = activation.value(*gate + bias(has_gate, &gate_bias), up);
            }
            near(&found[..5 * 70], &expected[..5 * 70]);
            assert!(found[5 * 70..].iter().all(|gate| gate.is_nan()));
        }
    }
}

#[test]
fn a_bias_is_added_to_every_vector() {
    let (bias, before) = (numbers(70, 1), numbers(3 * 70, 2));
    let mut y = before.clone();
    let job = AddBias {
        bias: address(&bias),
        y: address_mut(&mut y),
        elements: 70,
        tokens: 3,
    };
    launch(1, 0, entries::nvme_add_bias, job);
    let expected = before.iter().zip(bias.iter().cycle());
    near(&y, &expected.map(|(y, bias)| y + bias).collect::<Vec<_>>());
}

#[test]
fn heads_are_turned_and_attended_to_as_on_the_cpu() {
    for halves in [false, true] {
        for (sinks, window) in [(false, 0), (true, 0), (true, 2), (false, 1), (true, 9)] {
            turned_and_attended(halves, sinks, window);
        }
    }
}

/// Compares both kernels with the CPU; a window of 0 positions is none.
fn turned_and_attended(halves: bool, has_sinks: bool, window: u32) {
    const ELEMENTS: usize = 96;
    let (heads, kv_heads, position, tokens) = (6, 2, 3u32, 2usize);
    let angles = reference::angles(position + 2, ELEMENTS as u32, 10_000.0);
    let queries = numbers(tokens * heads * ELEMENTS, 1);
    let (keys, values) = (
        numbers(tokens * kv_heads * ELEMENTS, 2),
        numbers(tokens * kv_heads * ELEMENTS, 3),
    );
    let stride = kv_heads * ELEMENTS;
    let cached = (position as usize + tokens) * stride;
    let (mut key_cache, mut value_cache) = (numbers(cached, 4), numbers(cached, 5));
    let (mut expected_keys, mut expected_values) = (key_cache.clone(), value_cache.clone());
    let mut turned = queries.clone();
    let rope = RopeParameters {
        queries: address_mut(&mut turned),
        keys: address(&keys),
        values: address(&values),
        key_cache: address_mut(&mut key_cache),
        value_cache: address_mut(&mut value_cache),
        angles: address(&angles),
        position,
        tokens: tokens as u32,
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        head_elements: ELEMENTS as u32,
        halves: halves.into(),
    };
    launch(2, 0, entries::nvme_rope, rope);
    let first = position as usize * stride;
    expected_keys[first..].copy_from_slice(&keys);
    expected_values[first..].copy_from_slice(&values);
    let mut expected = queries;
    for token in 0..tokens {
        let at = (position as usize + token) * ELEMENTS;
        let angles = &angles[at..at + ELEMENTS];
        let of_token = &mut expected[token * heads * ELEMENTS..][..heads * ELEMENTS];
        let of_keys = &mut expected_keys[first + token * stride..][..stride];
        for head in of_token
            .chunks_mut(ELEMENTS)
            .chain(of_keys.chunks_mut(ELEMENTS))
        {
            match halves {
                true => reference::turn_halves(head, angles),
                false => reference::turn(head, angles),
            }
        }
    }
    near(&turned, &expected);
    near(&key_cache, &expected_keys);
    near(&value_cache, &expected_values);

    let sinks = numbers(heads, 6);
    let mut y = vec![0.0f32; turned.len()];
    let attention = AttentionParameters {
        queries: address(&turned),
        key_cache: address(&key_cache),
        value_cache: address(&value_cache),
        y: address_mut(&mut y),
        position,
        tokens: tokens as u32,
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        head_elements: ELEMENTS as u32,
        scale: 0.2,
        sinks: if has_sinks { address(&sinks) } else { 0 },
        window,
        reserved: 0,
    };
    launch(1, 0, entries::nvme_attention, attention);
    let mut attended = vec![0.0f32; y.len()];
    for (at, y) in attended.chunks_mut(ELEMENTS).enumerate() {
        let (token, head) = (at / heads, at % heads);
        let seen = position as usize + token + 1;
        let oldest = match window {
            0 => 0,
            window => seen.saturating_sub(window as usize),
        };
        let from = oldest * stride + head * kv_heads / heads * ELEMENTS;
        let until = seen * stride;
        let (keys, values) = (&key_cache[from..until], &value_cache[from..until]);
        let query = &turned[at * ELEMENTS..][..ELEMENTS];
        let sink = has_sinks.then(|| sinks[head]);
        reference::attend(query, (keys, values), stride, 0.2, sink, y);
    }
    near(&y, &attended);
}

#[test]
fn the_first_of_the_largest_numbers_is_taken_each_time() {
    let mut x = numbers(1500, 7);
    let (mut best, mut index) = ([0u64], [-1i64]);
    for largest in [700, 40, 1499, 257] {
        x[largest..].iter_mut().step_by(300).for_each(|x| *x = 9.0);
        let job = ArgmaxParameters {
            x: address(&x),
            best: address_mut(&mut best),
            index: address_mut(&mut index),
            elements: x.len() as u64,
        };
        launch(3, 0, entries::nvme_argmax, job);
        launch(1, 0, entries::nvme_take_token, job);
        assert_eq!((index[0], best[0]), (largest as i64, 0));
        x[largest..].iter_mut().step_by(300).for_each(|x| *x = -2.0);
    }
}

/// The rows of a matrix, and its products with two vectors, by each kernel that can compute them.
#[test]
fn products_are_those_of_the_cpu_in_every_format() {
    for (stored, columns, rows) in [
        (StoredFormat::F32, 4608, 19),
        (StoredFormat::F16, 800, 19),
        (StoredFormat::Bf16, 32, 37),
        (StoredFormat::Q8_0, 2560, 35),
        (StoredFormat::Q4_0, 672, 35),
        (StoredFormat::Q4_1, 96, 35),
        (StoredFormat::Q6K, 512, 11),
        (StoredFormat::Mxfp4, 960, 35),
        (StoredFormat::Mxfp4, 64, 17),
    ] {
        let row_bytes = stored.row_bytes(columns).unwrap() as usize;
        let mut throw = dice(columns.into());
        // Exponents of halves, floats and scales near 1, whatever the format.
        let words: Vec<u16> = (0..(row_bytes * rows).div_ceil(2) + 64)
            .map(|_| throw(1 << 10) as u16 | 0x3800)
            .collect();
        let x = numbers(2 * columns as usize, 11);
        let skip = words.as_ptr().align_offset(16);
        let mut words = words;
        if stored == StoredFormat::Mxfp4 {
            // Scales of 2^-7: the first byte and byte 17 of a pair of blocks.
            for pair in words[skip..].chunks_exact_mut(17) {
                (pair[0], pair[8]) = (pair[0] & 0xFF00 | 120, pair[8] & 0xFF | 120 << 8);
            }
        }
        let words = &words[..];
        let begin = address(&words[skip..]);
        let matrix = &words[skip..][..row_bytes * rows / 2];
        let bytes: Vec<u8> = matrix.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut y = vec![1.0f32; 2 * rows];
        let gemv = GemvParameters {
            weights: begin,
            x: address(&x),
            y: address_mut(&mut y),
            row_bytes: row_bytes as u64,
            rows: rows as u32,
            columns,
            stride: rows as u32,
            tokens: 2,
            stored: stored as u32,
            adds: 1,
        };
        let expected: Vec<f32> = x
            .chunks(columns as usize)
            .flat_map(|x| {
                let rows = bytes.chunks(row_bytes);
                rows.map(|row| 1.0 + reference::dot(stored, row, x))
                    .collect::<Vec<_>>()
            })
            .collect();
        launch(2, 0, entries::nvme_gemv, gemv);
        near(&y, &expected);
        if gemv.is_wide() {
            y.fill(1.0);
            launch(2, 0, entries::nvme_gemv_wide, gemv);
            near(&y, &expected);
        }
        if gemv.is_quantised() {
            y.fill(1.0);
            let shared = GemvParameters::QUANTISED_SHARED;
            launch(2, shared, entries::nvme_gemv_quantised, gemv);
            near(&y, &expected);
        }
    }
}

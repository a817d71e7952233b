//! Measures how far sparse attention is from attention over all pages, on the CPU.
//!
//! ```sh
//! cargo run --release -p nvme-models --example sparse_attention
//! ```
//!
//! Keys and values that look random, and 8 pages of 256 in which two tokens have keys close to the queries. The keys of a
//! page are alike (they share three quarters of their variance), or have nothing in common, which is the hard case: the
//! extremes of a page are then about the same everywhere. For each number of pages: the length of the error over the length
//! of the whole result, as a mean over seeds, where pages are chosen by bounds, and where the last ones are taken. One line
//! of Markdown each.

#[path = "../../compute/examples/arguments/mod.rs"]
mod arguments;

use nvme_host::{Result, Store, StoreOptions};
use nvme_models::{KvShape, KvStore, PageLimits};
use std::sync::Arc;

const SHAPE: KvShape = KvShape {
    kv_heads: 1,
    head_elements: 64,
    page_tokens: 16,
    is_bf16: true,
};
const PAGES: u32 = 256;
const RELEVANT: u32 = 8;
const GROUP: usize = 4;
const SEEDS: u64 = 16;

fn main() -> std::process::ExitCode {
    arguments::end(|_| run())
}

/// Numbers of about the normal distribution.
fn normal(state: &mut u64) -> f32 {
    let mut one = || {
        *state = state
            .wrapping_mul(0x5851_F42D_4C95_7F2D)
            .wrapping_add(0x1405_7B7E_F767_814F);
        (*state >> 40) as f32 / (1u64 << 24) as f32
    };
    // The sum of 12 even ones has the variance 1.
    (0..12).map(|_| one()).sum::<f32>() - 6.0
}

/// Queries that are alike, and the bytes of all pages, whose keys share `shared` of their variance.
fn synthetic(seed: u64, shared: f32) -> (Vec<Vec<f32>>, Vec<u8>) {
    let state = &mut seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let elements = SHAPE.head_elements as usize;
    let common: Vec<f32> = (0..elements).map(|_| normal(state)).collect();
    let query = |state: &mut u64| common.iter().map(|c| c + 0.3 * normal(state)).collect();
    let queries = (0..GROUP).map(|_| query(state)).collect();
    let mut bytes = Vec::new();
    for page in 0..PAGES {
        let is_relevant = page % (PAGES / RELEVANT) == seed as u32 % (PAGES / RELEVANT);
        let means: Vec<f32> = (0..elements).map(|_| normal(state)).collect();
        for token in 0..2 * SHAPE.page_tokens {
            let is_close = is_relevant && (token == 3 || token == 11);
            let is_key = token < SHAPE.page_tokens;
            for (common, mean) in common.iter().zip(&means) {
                let noise = normal(state);
                let value = match (is_close, is_key) {
                    (true, _) => common + 0.3 * noise,
                    (_, true) => shared.sqrt() * mean + (1.0 - shared).sqrt() * noise,
                    _ => noise,
                };
                bytes.extend(SHAPE.stored(value).to_le_bytes());
            }
        }
    }
    (queries, bytes)
}

fn run() -> Result<()> {
    println!(
        "| pages of {PAGES} | by bounds, keys alike | last ones | by bounds, keys independent | last ones |"
    );
    println!("| --- | --- | --- | --- | --- |");
    for pages in [4, 8, 16, 32, 64, 128, 256] {
        print!("| {pages} ");
        for shared in [0.75, 0.0] {
            let (mut by_bounds, mut by_place) = (0.0, 0.0);
            for seed in 1..=SEEDS {
                let (bound, place) = errors(pages, seed, shared)?;
                by_bounds += bound / SEEDS as f64;
                by_place += place / SEEDS as f64;
            }
            print!("| {by_bounds:.3} | {by_place:.3} ");
        }
        println!("|");
    }
    Ok(())
}

/// Returns the errors with `pages` pages, chosen in both ways.
fn errors(pages: u32, seed: u64, shared: f32) -> Result<(f64, f64)> {
    let (queries, bytes) = synthetic(seed, shared);
    let store = Store::open("sim:mem?size=16MiB&block=512", &StoreOptions::default())?;
    let kv = KvStore::new(&Arc::new(store), 0, PAGES.into(), SHAPE)?;
    kv.store().write_at(0, &bytes)?;
    let summaries = kv.summaries(0, PAGES.into())?;
    let all: Vec<u32> = (0..PAGES).collect();
    let scale = 1.0 / (SHAPE.head_elements as f32).sqrt();
    let attend = |ids: &[u32]| -> Result<Vec<f32>> {
        let results = kv.attend(&queries, ids, 0, (&[], 0), scale)?;
        Ok(results.concat())
    };
    let full = attend(&all)?;
    let error = |found: Vec<f32>| {
        let length = |numbers: &mut dyn Iterator<Item = f32>| {
            numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
        };
        let differences = &mut found.iter().zip(&full).map(|(a, b)| a - b);
        length(differences) / length(&mut full.iter().copied())
    };
    let borrowed: Vec<&[f32]> = queries.iter().map(Vec::as_slice).collect();
    let keep = PageLimits {
        pages,
        first: 0,
        last: 0,
    };
    let chosen = kv.choose(&borrowed, &all, 0, &summaries, keep)?;
    Ok((
        error(attend(&chosen)?),
        error(attend(&all[(PAGES - pages) as usize..])?),
    ))
}

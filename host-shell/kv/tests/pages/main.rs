//! A page store on disks that lose power, and whose reads and writes go wrong.

mod areas;
mod crash;
mod disk;
mod drive;
mod journal;
mod lookups;
mod plans;
mod scenarios;

use nvme_kv::{AreaRequest, ModelFingerprint, PageKey, PageStore};

/// Bytes of a page in these tests: one block and a part of another.
const PAGE: usize = 5000;

fn fingerprint() -> ModelFingerprint {
    ModelFingerprint {
        model: "llama-3-8b".into(),
        revision: "5f0b02c".into(),
        dtype: "bf16".into(),
        layout: "blocks,2,tokens,heads,dim".into(),
        block_tokens: 16,
        parallel_rank: "tp 0 of 1".into(),
        group: 0,
        hash_algorithm: "sha256_cbor".into(),
        seed: "0".into(),
    }
}

fn request(bytes: u64) -> AreaRequest {
    AreaRequest {
        offset: 0,
        bytes,
        page_bytes: PAGE as u32,
        fingerprint: fingerprint(),
    }
}

/// Bytes of an area with room for `pages` pages.
fn bytes_for(pages: u64) -> u64 {
    // Two superblocks, two checkpoints of two blocks, two logs of 16 blocks.
    (2 + 2 * 2 + 2 * 16 + pages * 3) * 4096
}

/// The payload of version `version` of the page `number`; lengths differ.
fn payload(number: u64, version: u64) -> Vec<u8> {
    let length = PAGE - (number as usize * 37 + version as usize) % 4500;
    let seed =
        number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ version.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    (0..length as u64)
        .map(|at| ((seed.wrapping_add(at)).wrapping_mul(0xA24B_AED4_963E_E407) >> 56) as u8)
        .collect()
}

fn key<M: nvme_kv::BlockMedium>(store: &PageStore<M>, number: u64) -> PageKey {
    store.key(&number.to_le_bytes(), 0)
}

/// Loads a page; its bytes.
fn load<M: nvme_kv::BlockMedium>(store: &PageStore<M>, number: u64) -> nvme_kv::Result<Vec<u8>> {
    let mut page = vec![0xEE; PAGE];
    let loaded = store.load(key(store, number), &mut page);
    match loaded {
        Ok(length) => {
            page.truncate(length);
            Ok(page)
        }
        Err(error) => {
            assert!(
                page.iter().all(|byte| *byte == 0),
                "no bytes but zeros: {error}"
            );
            Err(error)
        }
    }
}

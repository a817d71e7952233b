//! Loom models: memory operations of queues in the interleavings that each model's bound allows. `cargo xtask loom`
//! runs them and prints the bounds.
#![cfg(loom)]

mod abort;
mod batch_queue;
mod collective_queue;
mod collective_slots;
mod doorbell;
mod drain_lock;
mod gate;
mod page_index;
mod phase_tag;
mod round_trip;
mod row_cache;
mod shared;
mod shared_lanes;
mod shared_stages;
mod statement_order;
mod strips;
mod tiles;
mod trace_ring;

/// The index of `nvme-kv`, from its sources: the crates below it are not built under loom.
#[expect(dead_code, reason = "models use a part of it")]
#[path = "../../../host-shell/kv/src/index.rs"]
mod index;
#[expect(dead_code, reason = "models use a part of it")]
#[path = "../../../host-shell/kv/src/key.rs"]
mod key;
#[path = "../../../host-shell/kv/src/record.rs"]
mod record;
#[expect(dead_code, reason = "models use a part of it")]
#[path = "../../../host-shell/kv/src/shared_index.rs"]
mod shared_index;

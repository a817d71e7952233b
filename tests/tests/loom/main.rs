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

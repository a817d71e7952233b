//! Queues of every kind over simulated and hand-written controllers.
#![cfg(not(loom))]

mod batch_queue;
mod collective;
mod collective_faults;
mod dead_kernels;
mod edges;
mod lanes;
mod overrun;
mod queue_pair;
mod rings;
mod shared_cells;
mod shared_queue;
mod shared_queue_faults;
mod sixteen_at_once;
mod together;
mod transfers;

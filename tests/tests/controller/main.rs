//! The life of a controller: configuration, bring-up, shutdown, and the proofs that end commands.
#![cfg(not(loom))]

mod bound_proofs;
mod bringup;
mod bringup_answers;
mod bringup_states;
mod configurations;
mod proofs;
mod shutdown;

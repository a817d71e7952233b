//! Rules for sources and documents of this project.
#![cfg(not(loom))]

mod codes;
mod cycles;
mod documents;
mod layering;

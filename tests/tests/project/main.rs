//! Rules for sources and documents of this project.
#![cfg(not(loom))]

mod documents;
mod layering;

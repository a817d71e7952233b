//! Tests that boot another kernel: Linux in QEMU (`guest`), and the kernel module that it loads (`kmod`).
//!
//! Code that fetches kernels, builds images, starts QEMU and reads its logs belongs here. What runs inside a guest is
//! in `tests/guest`, as scripts and as another crate.

pub mod guest;
pub mod kmod;

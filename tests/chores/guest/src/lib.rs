//! Tests that boot another kernel: Linux in QEMU (`guest`), and the kernel module that it loads (`kmod`).

pub mod guest;
pub mod kmod;

//! Tests that need a kernel of their own: Linux in QEMU (`guest`), and the kernel module that it loads (`kmod`).

pub mod guest;
pub mod kmod;

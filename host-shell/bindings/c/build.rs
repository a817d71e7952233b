//! Name and loading of the shared library.

/// Raised when a program that was linked before would not work any more.
const ABI: u32 = 1;

fn main() {
    // Not `rustc-cdylib-link-arg`, which cargo passes on to libraries over this one. Programs ignore both.
    // Threads of a store run code of the library: it is never unloaded.
    println!("cargo::rustc-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-link-arg=-Wl,-soname,libnvme_gpu.so.{ABI}");
    println!("cargo::rerun-if-changed=build.rs");
}

//! Name and loading of the shared library.

fn main() {
    // Threads of a store run code of the library: it is never unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvme_gpu_compat.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}

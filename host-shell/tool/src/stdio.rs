//! Finds the standard descriptors that were closed when the process began.
//!
//! The standard library opens /dev/null in place of closed descriptors before `main`, so that output would be lost
//! without an error.

// UNSAFETY: a function that the C runtime calls before `main`, and fcntl(2) on descriptors that may be closed.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, Ordering};

/// A bit for each of the descriptors 0, 1 and 2 that was closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);

#[used]
#[cfg(target_os = "linux")]
// SAFETY: the section holds pointers to functions of this type, which run once, before any thread starts;
// the function calls nothing but fcntl(2).
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

#[cfg(target_os = "linux")]
extern "C" fn look() {
    for fd in 0..3 {
        // SAFETY: F_GETFD takes no pointer, and a closed descriptor is an error.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
            CLOSED.fetch_or(1 << fd, Ordering::Relaxed);
        }
    }
}

/// True if descriptor `fd`, 0 to 2, was closed when the process began.
pub fn was_closed(fd: u8) -> bool {
    // The reference makes the linker keep the function.
    #[cfg(target_os = "linux")]
    std::hint::black_box(&LOOK);
    CLOSED.load(Ordering::Relaxed) & (1 << fd) != 0
}

//! A mark of the process that owns a resource.
// UNSAFETY: has a function called in each child of `fork`.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Number of forks between this process and the first one that asked.
static FORKS: AtomicU32 = AtomicU32::new(0);
static COUNTS: AtomicBool = AtomicBool::new(false);

/// Identity of a process, different from those of its ancestors and descendants, even where the system has
/// reused a process number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMark(u64);

impl ProcessMark {
    /// Returns the calling process.
    pub fn here() -> Self {
        if !COUNTS.load(Ordering::Relaxed) {
            // Two threads that arrive here together register the handler twice; each fork then counts twice, which
            // still changes the count. Without memory only the process number distinguishes processes. SAFETY: the
            // handler increments a word, which a child of a multi-threaded process may do.
            unsafe { libc::pthread_atfork(None, None, Some(count)) };
            COUNTS.store(true, Ordering::Relaxed);
        }
        Self::of(std::process::id(), FORKS.load(Ordering::Relaxed))
    }

    fn of(process: u32, forks: u32) -> Self {
        Self(u64::from(process) << 32 | u64::from(forks))
    }

    /// Returns the mark as one word, never 0.
    pub fn word(self) -> u64 {
        self.0
    }
}

extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_differs_from_its_parent_by_more_than_its_number() {
        let here = ProcessMark::here();
        assert_eq!(here, ProcessMark::here());
        let forks = here.word() as u32;
        // SAFETY: the child calls only functions that are allowed after a fork of a multi-threaded process, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_counted = ProcessMark::here().word() as u32 != forks;
            // SAFETY: this ends the child without its parent's exit handlers.
            unsafe { libc::_exit(i32::from(is_counted)) };
        }
        let mut status = 0;
        // SAFETY: the call waits for that child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 1);
        assert_eq!(ProcessMark::here(), here);
        let recycled = ProcessMark::of(std::process::id(), forks + 1);
        assert_ne!(recycled, here);
    }
}

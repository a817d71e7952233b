//! The one system call that std has no function for.

/// Gives the space of a range of `file` back; `false` when the file system cannot.
pub(crate) fn punch_hole(file: &std::fs::File, offset: u64, len: u64) -> bool {
    use std::os::fd::AsRawFd;
    let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(len)) else {
        return false;
    };
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no pointers are passed, and the descriptor is open.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) == 0 }
}

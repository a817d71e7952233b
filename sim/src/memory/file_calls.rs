//! System calls on files that std has no function for: releasing the space of a range, and locks of
//! an open file description.

/// Releases the space of a range of `file`. False if the file system cannot.
pub(crate) fn punch_hole(file: &std::fs::File, offset: u64, len: u64) -> bool {
    use std::os::fd::AsRawFd;
    let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(len)) else {
        return false;
    };
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no pointers are passed, and the descriptor is open.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) == 0 }
}

/// Locks the whole of `file` for as long as its open file description lives (an OFD lock):
/// exclusively, or shared with other readers.
///
/// # Errors
/// The errors of the operating system: EAGAIN if another open file description has a conflicting
/// lock.
pub(crate) fn lock(file: &std::fs::File, exclusive: bool) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let kind = if exclusive {
        libc::F_WRLCK
    } else {
        libc::F_RDLCK
    };
    // From byte 0 to the end of the file, wherever that is. OFD locks require l_pid = 0.
    let whole = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the kernel reads one `flock`, which outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) };
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

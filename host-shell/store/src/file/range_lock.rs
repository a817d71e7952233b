//! A lock of a range of a file, by which processes that do not know each other find that their ranges overlap.
// UNSAFETY: fcntl takes a raw pointer, here to a structure of this module.
#![allow(unsafe_code)]

use nvme_driver::ProcessMark;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::AsRawFd;

/// A shared lock (`F_OFD_SETLK`) of a range, until it is dropped: the open file is this lock's alone, so that no other
/// close ends it.
pub(crate) struct RangeLock {
    file: File,
    range: Range<u64>,
    process: ProcessMark,
}

impl RangeLock {
    /// Locks `range` of `file`. None where the system has no such locks.
    ///
    /// # Errors
    /// The range that another opening of the file has locked, if it overlaps `range` and is another one; and any that is
    /// locked exclusively, as a simulator does with its image.
    pub fn take(file: &File, range: Range<u64>) -> Result<Option<Self>, Range<u64>> {
        if range.is_empty() {
            // A length of 0 would lock all that follows.
            return Ok(None);
        }
        let again = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let Some(file) = again.ok() else {
            return Ok(None);
        };
        let taken = call(&file, libc::F_OFD_SETLK, libc::F_RDLCK, &range);
        // Lock first, then look: of two processes that ask at the same time, each then sees the other's lock.
        let found = call(&file, libc::F_OFD_GETLK, libc::F_WRLCK, &range).ok();
        let is_free = |found: &libc::flock| found.l_type == libc::F_UNLCK as libc::c_short;
        let other = found.filter(|found| !is_free(found));
        let other = other.map(|found| held(&found));
        let lock = Self {
            file,
            range,
            process: ProcessMark::here(),
        };
        match (taken.map_err(|error| error.kind()), other) {
            (Ok(_), Some(other)) if other != lock.range => Err(other),
            (Ok(_), _) => Ok(Some(lock)),
            (Err(ErrorKind::WouldBlock | ErrorKind::PermissionDenied), Some(other)) => Err(other),
            (Err(_), _) => Ok(None),
        }
    }
}

impl Drop for RangeLock {
    fn drop(&mut self) {
        // A forked child keeps the open file, so that closing it here would leave the lock until the child ends. A child
        // must not unlock for its parent.
        if self.process == ProcessMark::here() {
            let _ = call(&self.file, libc::F_OFD_SETLK, libc::F_UNLCK, &self.range);
        }
    }
}

/// Returns the range of a lock that the system describes; a length of 0 reaches to the end of any file.
fn held(found: &libc::flock) -> Range<u64> {
    let begin = found.l_start as u64;
    match found.l_len {
        0 => begin..u64::MAX,
        bytes => begin..begin.saturating_add(bytes as u64),
    }
}

/// Makes a call about a lock of `range`, and returns what the system has written.
fn call(
    file: &File,
    command: libc::c_int,
    kind: libc::c_int,
    range: &Range<u64>,
) -> io::Result<libc::flock> {
    let too_far = |_| io::Error::from(ErrorKind::InvalidInput);
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: range.start.try_into().map_err(too_far)?,
        l_len: (range.end - range.start).try_into().map_err(too_far)?,
        l_pid: 0,
    };
    // SAFETY: the kernel reads and writes a structure of this type, which is a local variable.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(lock),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Openings of one process are told apart as those of two are.
    #[test]
    fn a_lock_is_refused_where_another_one_overlaps_it_in_part() {
        let path = std::env::temp_dir().join(format!("nvme-range-lock-{}", std::process::id()));
        let file = File::create_new(&path).unwrap();
        let take = |range: Range<u64>| RangeLock::take(&file, range);
        let Some(first) = take(100..200).unwrap() else {
            // The file system has no such locks.
            std::fs::remove_file(&path).unwrap();
            return;
        };
        for range in [0..101, 199..300, 150..160, 0..300, 100..201] {
            assert_eq!(take(range).err(), Some(100..200));
        }
        let same = take(100..200).unwrap();
        let apart = [take(0..100).unwrap(), take(200..300).unwrap()];
        assert!(same.is_some() && apart.iter().all(Option::is_some));
        drop((first, apart));
        assert_eq!(take(150..300).err(), Some(100..200));
        drop(same);
        assert!(take(150..300).unwrap().is_some());
        // Ranges that no file has are not locked, nor is one without bytes.
        assert!(take(0..u64::MAX).unwrap().is_none() && take(400..400).unwrap().is_none());
        assert!(take(500..600).unwrap().is_some());
        std::fs::remove_file(&path).unwrap();
    }
}

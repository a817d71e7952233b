//! Memory of another process, mapped by file descriptor.
//!
//! The peer may truncate its file at any time, and the next access would end this process with
//! SIGBUS. A signal handler therefore replaces a mapping that has lost its file by anonymous
//! memory: the access then reads zeroes, and [`GuestMemory::is_lost`] tells the server to end the
//! connection.

use super::span::MemorySpan;
use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::param::page_size;
use std::boxed::Box;
use std::io::{Error as IoError, Result as IoResult};
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Limit of the mappings that exist at the same time.
pub(crate) const MAX_MAPPINGS: usize = 16_384;

/// A mapping in the table of the signal handler; unused while `start` is 0. Its fields are atomics
/// because the handler may interrupt any thread, which may hold any lock.
struct MappingEntry {
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

/// A static, because no argument of ours reaches a signal handler.
static MAPPINGS: [MappingEntry; MAX_MAPPINGS] = [const {
    MappingEntry {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];
/// Number of mappings that have lost their file so far.
static LOSSES: AtomicUsize = AtomicUsize::new(0);
/// The action of SIGBUS before ours. Set before the first mapping is entered, since the handler
/// reads it.
static PREVIOUS: OnceLock<Box<libc::sigaction>> = OnceLock::new();

/// A mapped part of a peer's file.
pub(crate) struct GuestMemory {
    /// Start of the mapping, in whole pages.
    start: *mut u8,
    len: usize,
    /// Offset of the part in the mapping.
    lead: usize,
    /// Length of the part in bytes.
    bytes: usize,
    entry: &'static MappingEntry,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for GuestMemory {}
// SAFETY: a shared reference gives out the address only; accesses go through `MemorySpan`.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    /// Maps `len` bytes from `offset` on of a regular file (a memfd, a huge page file). The
    /// descriptor may be closed afterwards.
    ///
    /// # Errors
    /// EINVAL for a range outside the file and for a file that is not regular, ENOSPC for too many
    /// mappings, and the errors of mmap.
    pub fn map(fd: BorrowedFd<'_>, offset: u64, len: u64, writable: bool) -> IoResult<Self> {
        let invalid = || IoError::from_raw_os_error(libc::EINVAL);
        let stat = fstat(fd)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let end = offset
            .checked_add(len)
            .filter(|_| len != 0)
            .ok_or_else(invalid)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || end > size {
            return Err(invalid());
        }
        let page = page_bytes(fd)?;
        let lead = (offset % page as u64) as usize;
        let bytes = usize::try_from(len)
            .ok()
            .and_then(|len| len.checked_add(lead));
        let bytes = bytes
            .and_then(|bytes| bytes.checked_next_multiple_of(page))
            .ok_or_else(invalid)?;
        install();
        let access = match writable {
            true => ProtFlags::READ | ProtFlags::WRITE,
            false => ProtFlags::READ,
        };
        // SAFETY: the address is null and the flags lack MAP_FIXED, so the kernel chooses a range
        // that nothing of this process uses: no existing memory is replaced.
        let start = unsafe {
            let at = offset - lead as u64;
            mmap(null_mut(), bytes, access, MapFlags::SHARED, fd, at)?
        };
        let Some(entry) = enter(start.addr(), bytes) else {
            // SAFETY: the mapping that was just made, not shared yet.
            let _ = unsafe { munmap(start, bytes) };
            return Err(IoError::from_raw_os_error(libc::ENOSPC));
        };
        Ok(Self {
            start: start.cast(),
            len: bytes,
            lead,
            bytes: len as usize,
            entry,
        })
    }

    /// Returns the first byte of the part.
    pub fn ptr(&self) -> *mut u8 {
        self.start.wrapping_add(self.lead)
    }

    /// Returns the bytes of the part. They can be read, and written if the mapping is writable.
    pub fn span(&self) -> MemorySpan<'_> {
        // SAFETY: `len` bytes from the lead on are mapped as long as `self` lives.
        unsafe { MemorySpan::from_raw(self.ptr(), self.bytes) }
    }

    /// Returns the number of mappings of this process that have lost their file so far. While it
    /// stays the same, no mapping needs a check.
    pub fn losses() -> usize {
        LOSSES.load(Ordering::Relaxed)
    }

    /// True if the peer has truncated the file under the mapping.
    pub fn is_lost(&self) -> bool {
        self.entry.lost.load(Ordering::Relaxed)
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // The length first: the handler must not find this entry for an address range that the
        // kernel may give to another mapping after the munmap. The start last, since it makes the
        // entry free.
        self.entry.len.store(0, Ordering::Relaxed);
        // SAFETY: the mapping is our own. `self` is being dropped, so every span that borrowed it
        // is gone, and the table entry above no longer covers it for the signal handler.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
        self.entry.lost.store(false, Ordering::Relaxed);
        self.entry.start.store(0, Ordering::Release); // Release: pairs with the claim in `enter`.
    }
}

/// Returns the page size of the file's mappings: huge pages are mapped and unmapped whole.
fn page_bytes(fd: BorrowedFd<'_>) -> IoResult<usize> {
    const HUGETLBFS_MAGIC: i64 = 0x9584_58F6;
    let system = fstatfs(fd)?;
    if system.f_type as i64 != HUGETLBFS_MAGIC {
        return Ok(page_size());
    }
    let bytes = usize::try_from(system.f_bsize).unwrap_or(0);
    let valid = bytes.is_power_of_two() && bytes >= page_size();
    valid
        .then_some(bytes)
        .ok_or_else(|| IoError::from_raw_os_error(libc::EINVAL))
}

/// Takes a free entry of the table.
fn enter(start: usize, len: usize) -> Option<&'static MappingEntry> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let first = NEXT.fetch_add(1, Ordering::Relaxed);
    (0..MAX_MAPPINGS).find_map(|i| {
        let entry = &MAPPINGS[(first + i) % MAX_MAPPINGS];
        // Acquire: pairs with the Release in drop, which makes the entry free last. Its length of 0
        // and its cleared `lost` are then visible here, before this thread sets new values.
        let claim = entry
            .start
            .compare_exchange(0, start, Ordering::Acquire, Ordering::Relaxed);
        claim.ok()?;
        entry.len.store(len, Ordering::Relaxed);
        Some(entry)
    })
}

/// Installs the signal handler, once for the process.
fn install() {
    PREVIOUS.get_or_init(|| {
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            on_sigbus;
        // SAFETY: sigaction is plain data for which zeroes are valid, and both structures outlive
        // the calls. The handler only uses atomics and mmap, which are safe in a signal handler
        // whatever it has interrupted.
        unsafe {
            let mut previous: libc::sigaction = std::mem::zeroed();
            let mut ours: libc::sigaction = std::mem::zeroed();
            ours.sa_sigaction = handler as usize;
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            libc::sigemptyset(&mut ours.sa_mask);
            libc::sigaction(libc::SIGBUS, &ours, &mut previous);
            Box::new(previous)
        }
    });
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo_t to a handler with SA_SIGINFO.
    let at = unsafe { (*info).si_addr() }.addr();
    for entry in &MAPPINGS {
        let start = entry.start.load(Ordering::Relaxed);
        let len = entry.len.load(Ordering::Relaxed);
        if start == 0 || at.wrapping_sub(start) >= len {
            continue;
        }
        entry.lost.store(true, Ordering::Relaxed);
        LOSSES.fetch_add(1, Ordering::Relaxed);
        // SAFETY: replaces a mapping of ours, which stays in the table until it is unmapped, by
        // memory of the same size; mmap is a plain system call here.
        let put = unsafe {
            let errno = *libc::__errno_location();
            let put = libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            );
            *libc::__errno_location() = errno;
            put
        };
        if put != libc::MAP_FAILED {
            return;
        }
    }
    forward(signal, info, context);
}

/// Passes the signal to the action that was installed before ours.
fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let handler = PREVIOUS
        .get()
        .map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: the default action; the access that faulted is repeated and ends the process.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    // SAFETY: the address is that of a handler that sigaction accepted before ours. One that was
    // installed without SA_SIGINFO takes one argument and ignores the other two registers.
    let handler: Handler = unsafe { std::mem::transmute(handler) };
    handler(signal, info, context);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn a_file_cut_short_under_its_mapping_reads_as_zero_and_is_noticed() {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 16 << 10).unwrap();
        let memory = GuestMemory::map(file.as_fd(), 4096, 8192, true).unwrap();
        let other = GuestMemory::map(file.as_fd(), 0, 4096, true).unwrap();
        // SAFETY: the mappings are 8192 and 4096 bytes, and live to the end of the test.
        let (word, kept) = unsafe {
            let at = memory.ptr().cast::<AtomicU64>();
            (&*at, &*other.ptr().cast::<AtomicU64>())
        };
        word.store(7, Ordering::Relaxed);
        kept.store(8, Ordering::Relaxed);
        assert!(!memory.is_lost());
        ftruncate(&file, 4096).unwrap();
        assert_eq!(word.load(Ordering::Relaxed), 0);
        word.store(9, Ordering::Relaxed);
        assert!(memory.is_lost() && !other.is_lost());
        assert_eq!(kept.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn huge_pages_are_mapped_whole_where_there_are_any() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = memfd_create("huge", flags).unwrap();
        ftruncate(&file, 4 << 20).unwrap();
        assert_eq!(page_bytes(file.as_fd()).unwrap(), 2 << 20);
        // Without huge pages in the pool the mapping is refused; with them a part can be reached.
        match GuestMemory::map(file.as_fd(), (2 << 20) + 4096, 64 << 10, true) {
            Ok(memory) => {
                assert_eq!((memory.len, memory.lead), (2 << 20, 4096));
                memory.span().write(&[7; 8]);
                assert_eq!(memory.span().words::<1>(0), Some([0x0707_0707_0707_0707]));
            }
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOMEM)),
        }
    }

    #[test]
    fn ranges_that_the_file_does_not_have_are_refused() {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 8192).unwrap();
        let map = |offset, len| {
            let mapped = GuestMemory::map(file.as_fd(), offset, len, true);
            mapped.err().and_then(|error| error.raw_os_error())
        };
        assert_eq!(map(0, 8192), None);
        assert_eq!(map(4100, 92), None);
        for (offset, len) in [(0, 0), (0, 8193), (8192, 1), (u64::MAX, 2), (1, u64::MAX)] {
            assert_eq!(map(offset, len), Some(libc::EINVAL), "{offset} {len}");
        }
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(GuestMemory::map(reader.as_fd(), 0, 4096, true).is_err());
    }
}

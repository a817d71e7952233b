//! Files of this machine. If the temporary folder lies on an ext4 and this process may set the flag, the kernel's
//! answers are checked, too; tests/guest/scripts/linux-extents.sh does so on a file system of its own.

use super::*;
use rustix::fs::{FallocateFlags, fallocate, ioctl_setflags};
use std::os::unix::fs::FileExt;

/// A file of this test. It loses the immutable flag before it is removed.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    fn new(name: &str) -> Self {
        let name = format!("nvme-gpu-mounted-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = File::create_new(&path).unwrap();
        Self { path, file }
    }

    /// Sets or clears the flag; returns whether it could be done.
    fn set_immutable(&self, is_immutable: bool) -> bool {
        let flags = ioctl_getflags(&self.file).map(|flags| match is_immutable {
            true => flags | IFlags::IMMUTABLE,
            false => flags - IFlags::IMMUTABLE,
        });
        flags.is_ok_and(|flags| ioctl_setflags(&self.file, flags).is_ok())
    }

    /// Makes the file immutable and opens it on an ext4; `None` if this machine does not allow that.
    fn mounted(&self) -> Option<Result<MountedFile>> {
        if !self.set_immutable(true) {
            eprintln!("skipped: no file can be made immutable here");
            return None;
        }
        match MountedFile::open(&self.path) {
            Err(Error::Usage { cause, .. }) if cause.contains("no ext4") => {
                eprintln!("skipped: {cause}");
                None
            }
            found => Some(found),
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        self.set_immutable(false);
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn files_that_may_change_are_refused() {
    let temporary = Temporary::new("plain");
    temporary.file.write_all_at(&[1; 5000], 0).unwrap();
    match MountedFile::open(&temporary.path) {
        Err(Error::Usage { cause, remedy }) => {
            let is_known = cause.contains("no ext4") || cause.contains("not immutable");
            assert!(is_known && !remedy.is_empty(), "{cause}");
        }
        other => panic!("{other:?}"),
    }
    let none = MountedFile::open(temporary.path.with_extension("none")).unwrap_err();
    assert_eq!(none.code(), "file");
    for no_file in ["/", "/dev/null"] {
        let refused = MountedFile::open(no_file).unwrap_err();
        assert!(
            refused.to_string().contains("not a regular file"),
            "{refused}"
        );
    }
    let elsewhere = MountedFile::open("/proc/self/status").unwrap_err();
    assert!(elsewhere.to_string().contains("no ext4"), "{elsewhere}");
}

#[test]
fn a_kernel_that_lacks_a_call_is_named() {
    let error = |errno| unanswered("X")(io::Error::from_raw_os_error(errno));
    let lacking = error(libc::ENOTTY);
    assert_eq!(lacking.code(), "environment");
    assert!(lacking.to_string().contains('X') && lacking.remedy().contains("6.0"));
    assert_eq!(error(libc::EIO).code(), "system");
}

#[test]
fn an_immutable_file_has_its_extents_until_the_flag_goes() {
    let temporary = Temporary::new("holes");
    // A hole lies between.
    for at in [0, 1 << 20] {
        temporary.file.write_all_at(&[7; 70_001], at).unwrap();
    }
    let Some(file) = temporary.mounted() else {
        return;
    };
    let file = file.unwrap();
    let identity = file.identity();
    assert_eq!(identity.bytes, (1 << 20) + 70_001);
    assert!(identity.inode > 0 && identity.uuid != [0; 16] && identity.changed.0 > 0);
    for (begin, end) in [(0, 70_001u64), (1 << 20, (1 << 20) + 70_001)] {
        let inside = file.extents().iter().filter(|one| {
            one.logical >= begin && one.logical < end && one.place > 0 && one.is_written
        });
        let bytes: u64 = inside.map(|one| one.bytes).sum();
        assert_eq!(
            bytes,
            (end - begin).next_multiple_of(4096),
            "{:?}",
            file.extents()
        );
    }
    file.check_unchanged().unwrap();
    let again = MountedFile::open(&temporary.path).unwrap();
    assert_eq!(
        (again.identity(), again.extents()),
        (identity, file.extents())
    );
    assert!(temporary.set_immutable(false));
    assert_eq!(file.check_unchanged().unwrap_err().code(), "usage");
    temporary.file.write_all_at(&[8], 0).unwrap();
    assert!(temporary.set_immutable(true));
    assert_eq!(file.check_unchanged().unwrap_err().code(), "mismatch");
}

#[test]
fn a_file_in_many_pieces_is_asked_for_several_times() {
    let temporary = Temporary::new("pieces");
    let pieces = 3 * ioctl::MOST as u64;
    for piece in 0..pieces {
        temporary.file.write_all_at(&[1], piece * 16_384).unwrap();
    }
    let Some(file) = temporary.mounted() else {
        return;
    };
    let file = file.unwrap();
    let begins: Vec<u64> = file.extents().iter().map(|one| one.logical).collect();
    let expected: Vec<u64> = (0..pieces).map(|piece| piece * 16_384).collect();
    assert_eq!(begins, expected);
}

#[test]
fn blocks_that_were_not_written_are_refused() {
    let temporary = Temporary::new("unwritten");
    if fallocate(&temporary.file, FallocateFlags::empty(), 0, 1 << 16).is_err() {
        eprintln!("skipped: no blocks are allocated ahead here");
        return;
    }
    match temporary.mounted() {
        Some(Err(Error::Usage { cause, .. })) => {
            assert!(
                cause.contains("is not written") && cause.contains("unwritten"),
                "{cause}"
            );
        }
        Some(other) => panic!("{other:?}"),
        None => {}
    }
}

/// What a store reads of a file is looked at by host-shell/bindings/python/tests/test_mounted.py, which mounts an image.
#[cfg(feature = "sim")]
#[test]
fn a_store_with_another_file_system_is_refused() {
    use crate::files::PlacedFile;
    use nvme_store::Store;
    use nvme_store::StoreOptions;
    let temporary = Temporary::new("placed");
    temporary.file.write_all_at(&[7; 70_001], 0).unwrap();
    let mut about = vec![0; 1 << 16];
    about[1024 + 0x38..][..2].copy_from_slice(&(EXT4 as u16).to_le_bytes());
    let mut open = |device: &str, uuid: [u8; 16]| {
        let store = Store::open(device, &StoreOptions::default()).unwrap();
        about[1024 + 0x68..][..16].copy_from_slice(&uuid);
        store.write_at(0, &about).unwrap();
        std::sync::Arc::new(store)
    };
    let Some(file) = temporary.mounted() else {
        return;
    };
    let uuid = file.unwrap().identity().uuid;
    let refused = |store: &std::sync::Arc<Store>| {
        let file = temporary.mounted().unwrap().unwrap();
        match PlacedFile::new(file, store, None).unwrap_err() {
            Error::Usage { cause, .. } => cause,
            other => panic!("{other}"),
        }
    };
    let other = refused(&open("sim:mem?size=64KiB", [9; 16]));
    assert!(other.contains("does not hold the file system"), "{other}");
    let short = refused(&open("sim:mem?size=64KiB", uuid));
    assert!(short.contains("past the 65536 bytes"), "{short}");
    let part = PlacedFile::new(
        temporary.mounted().unwrap().unwrap(),
        &open("sim:mem?size=64KiB", uuid),
        Some(1),
    );
    assert!(matches!(part, Err(Error::Device { .. })), "{part:?}");
}

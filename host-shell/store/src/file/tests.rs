//! Tests of stores on files: both kinds of IO, errors of the medium, durability.

use super::*;
use crate::lane::LaneOperation;
use crate::space::StoreSpace;
use crate::table::Table;
use crate::testing::{TestFile, has_uring, options};
use crate::transfer;
use nvme_driver::sysfs::testing::Tree;

const BOTH: [FileIo; 2] = [FileIo::Pread, FileIo::Uring];

/// Returns options for each kind of file access that this machine allows.
fn ways() -> impl Iterator<Item = StoreOptions> {
    let has_uring = has_uring();
    let here = move |way: &FileIo| *way == FileIo::Pread || has_uring;
    BOTH.into_iter().filter(here).map(|file_io| StoreOptions {
        file_io,
        ..options()
    })
}

/// Returns a store over the file at `path`, which is said to have `len` bytes.
fn pretend(path: &str, len: u64, options: &StoreOptions) -> StoreSpace {
    let file = OpenOptions::new().read(true).open(path).unwrap();
    let path = path.into();
    let file = Arc::new(RegularFile { file, path });
    StoreSpace::of(member(file, len, None, options).unwrap())
}

#[test]
fn a_file_that_shrank_is_an_error_that_says_so() {
    for options in ways() {
        let file = TestFile::new(1 << 20);
        let space = StoreSpace::of(open(&file.text(), &options).unwrap());
        let shorter = OpenOptions::new().write(true).open(file.path()).unwrap();
        shorter.set_len(5000).unwrap();
        let mut data = vec![0; 20_000];
        let error = transfer::read(&space, 0, &mut data).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("shorter than when it was opened"),
            "{error}"
        );
        assert_eq!(error.code(), "file");
        transfer::read(&space, 0, &mut data[..5000]).unwrap();
    }
}

#[test]
fn an_error_of_the_medium_keeps_its_errno() {
    for options in ways() {
        // Nothing is mapped at address 0: the system answers with EIO.
        let space = pretend("/proc/self/mem", 1 << 20, &options);
        let error = transfer::read(&space, 0, &mut [0; 100]).unwrap_err();
        let Error::File { action, source, .. } = &error else {
            panic!("{error:?}");
        };
        assert_eq!((*action, source.raw_os_error()), ("read", Some(libc::EIO)));
        assert!(error.remedy().contains("medium"));
    }
}

#[test]
fn a_refused_write_or_flush_is_an_error_of_that_call() {
    for options in ways() {
        let file = TestFile::new(4096);
        // Open for reading, and not known to be.
        let space = pretend(&file.text(), 4096, &options);
        for op in [LaneOperation::Write, LaneOperation::WriteFua] {
            let error = transfer::write(&space, 0, &[1; 100], op).unwrap_err();
            assert!(error.to_string().starts_with("cannot write"), "{error}");
        }
        let space = pretend("/dev/null", 4096, &options);
        let error = transfer::flush(&space).unwrap_err();
        assert!(error.to_string().starts_with("cannot flush"), "{error}");
    }
}

#[test]
fn forced_and_flushed_writes_reach_the_file() {
    for options in ways() {
        let file = TestFile::new(1 << 20);
        let space = StoreSpace::of(open(&file.text(), &options).unwrap());
        let data: Vec<u8> = (0..600_000).map(|at| (at / 7) as u8).collect();
        transfer::write(&space, 3, &data, LaneOperation::WriteFua).unwrap();
        transfer::write(&space, 700_000, &data[..1000], LaneOperation::Write).unwrap();
        transfer::flush(&space).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        assert!(bytes[3..][..data.len()] == data && bytes[700_000..][..1000] == data[..1000]);
        assert_eq!(bytes.len(), 1 << 20);
    }
}

#[test]
fn an_error_of_the_medium_is_the_status_of_its_rows() {
    for options in ways() {
        let space = pretend("/proc/self/mem", 1 << 20, &options);
        let table = Table::new(Arc::new(space), 0, 100, 1000).unwrap();
        let mut status = [9; 3];
        let report = table.gather((&[0i64, 1, -1]).into(), &mut [1; 3000], Some(&mut status));
        let report = report.unwrap();
        assert_eq!((status, report.errno), ([-4, -4, -1], Some(libc::EIO)));
        assert!(matches!(report.check().unwrap_err(), Error::File { .. }));
    }
}

#[test]
fn files_that_may_not_be_written_are_opened_for_reading() {
    let file = TestFile::new(4096);
    let (_, why) = open_file(file.path(), &options(), false, 0).unwrap();
    assert!(why.is_none());
    let (_, why) = open_file(file.path(), &options(), true, libc::O_EXCL).unwrap();
    assert!(why.unwrap().0.contains("a real device"));
    assert!(is_denied(&io::Error::from_raw_os_error(libc::EROFS)));
    assert!(is_denied(&io::Error::from_raw_os_error(libc::EACCES)));
    assert!(!is_denied(&io::Error::from_raw_os_error(libc::EIO)));
    // A program that runs may not be written, not even by root.
    let program = std::env::current_exe().unwrap();
    let (_, why) = open_file(&program, &options(), false, 0).unwrap();
    assert!(why.unwrap().0.contains("cannot be written"));
    let forced = StoreOptions {
        allow_write: true,
        ..options()
    };
    assert!(open_file(&program, &forced, false, 0).is_err());
}

#[test]
fn a_block_device_in_use_is_refused() {
    let tree = Tree::new();
    tree.link("sys/dev/block/259:1", "../../devices/x/nvme0n1/nvme0n1p1");
    tree.file("sys/class/block/nvme0n1p1/dev", "259:1\n");
    let number = libc::makedev(259, 1);
    let path = Path::new("/dev/disk/by-id/data");
    check_unused(&tree.host(), path, number, false).unwrap();
    let line = "36 21 259:1 / / rw - ext4 /dev/root rw\n";
    tree.file("proc/self/mountinfo", line);
    let error = check_unused(&tree.host(), path, number, false).unwrap_err();
    assert!(matches!(error, Error::Usage { .. }));
    assert!(error.to_string().contains("it is the boot disk"), "{error}");
    // Without sysfs the name counts.
    let error = check_unused(&tree.host(), Path::new("/dev/nvme0n1p1"), 0, false).unwrap_err();
    assert!(error.to_string().contains("is mounted at /"), "{error}");
}

#[test]
fn the_system_may_refuse_io_uring() {
    // The limit on descriptors leaves none for a ring, as in some containers.
    let file = TestFile::new(4096);
    let path = open(&file.text(), &options()).unwrap().path;
    assert_eq!(path.path == "io_uring", has_uring(), "{}", path.why);
    assert_eq!(path.why.contains("io_uring was refused"), !has_uring());
    // A ring of more entries than the system takes is refused everywhere.
    let long = StoreOptions {
        depth: 40_000,
        file_io: FileIo::Auto,
        ..options()
    };
    let path = open(&file.text(), &long).unwrap().path;
    assert_eq!(path.path, "pread");
    assert!(path.why.contains("io_uring was refused"), "{}", path.why);
    let forced = StoreOptions {
        file_io: FileIo::Uring,
        ..long
    };
    let error = open(&file.text(), &forced).err().unwrap();
    assert!(
        error.to_string().starts_with("io_uring_setup failed"),
        "{error}"
    );
}

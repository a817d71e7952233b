//! Helpers of the stores' tests: files, stores of every kind, and bytes that encode their offset.

use super::{FileIo, Store, StoreOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A file with a unique name, removed at the end.
pub struct TestFile(PathBuf);

impl TestFile {
    pub fn new(bytes: u64) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("nvme-gpu-store-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(bytes).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn text(&self) -> String {
        self.0.display().to_string()
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The time of a command in tests of lost ones: machines that run tests are busy.
#[cfg(feature = "sim")]
pub const SHORT: Duration = Duration::from_secs(1);

/// Returns options with few small queues and a short time limit.
pub fn options() -> StoreOptions {
    StoreOptions {
        queues: 3,
        depth: 8,
        timeout: Duration::from_secs(5),
        ..StoreOptions::default()
    }
}

/// Returns whether this machine lets a process use `io_uring`; a test that is skipped prints it.
pub fn has_uring() -> bool {
    let file = TestFile::new(4096);
    let options = StoreOptions {
        file_io: FileIo::Uring,
        ..options()
    };
    match Store::open(&file.text(), &options) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: {error}");
            false
        }
    }
}

#[cfg(feature = "sim")]
pub fn of_file(file: &TestFile, file_io: FileIo) -> Store {
    let options = StoreOptions {
        file_io,
        ..options()
    };
    Store::open(&file.text(), &options).unwrap()
}

#[cfg(feature = "sim")]
pub fn of_sim(more: &str) -> Store {
    Store::open(&format!("sim:mem?{more}"), &options()).unwrap()
}

/// Returns stores of every kind of a little more than 1 MiB, each with its name; files are kept beside them.
#[cfg(feature = "sim")]
pub fn every_kind() -> Vec<(&'static str, Store, Option<TestFile>)> {
    let mut all = vec![
        ("512", of_sim("size=1MiB&block=512&noiob=24"), None),
        ("4096", of_sim("size=1MiB&block=4096&mdts=1"), None),
    ];
    let file = TestFile::new((1 << 20) + 777);
    all.push(("pread", of_file(&file, FileIo::Pread), Some(file)));
    if has_uring() {
        let file = TestFile::new((1 << 20) + 777);
        all.push(("io_uring", of_file(&file, FileIo::Uring), Some(file)));
    }
    let file = TestFile::new(1 << 20);
    let members = vec![
        of_sim("size=512KiB&block=512"),
        of_file(&file, FileIo::Auto),
        of_sim("size=512KiB&block=4096"),
    ];
    all.push((
        "stripe",
        Store::stripe(members, 12 << 10).unwrap(),
        Some(file),
    ));
    all
}

/// Fills `data` with bytes that depend on their offset and on `seed`.
#[cfg(feature = "sim")]
pub fn pattern(offset: u64, seed: u64, data: &mut [u8]) {
    for (at, byte) in (offset..).zip(data) {
        *byte = (at.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed) >> 29) as u8;
    }
}

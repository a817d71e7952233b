//! A long stretch of a namespace, written and compared by blocking calls.

use crate::{Outcome, pattern, said};
use nvme_host::Namespace;
use nvme_host::core::spec::Lba;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;

const CHUNK: u64 = 1 << 20;
/// Linux on x86-64.
const O_DIRECT: i32 = 0o40000;

/// Writes `mib` mebibytes from LBA 0 on and flushes.
pub fn fill(namespace: &mut Namespace, seed: u64, mib: u64) -> Outcome {
    let mut chunk = vec![0; CHUNK as usize];
    for number in 0..mib {
        pattern::fill(seed, number * CHUNK, &mut chunk);
        let lba = lba_of(namespace, number);
        namespace.write(lba, &chunk).map_err(said)?;
    }
    namespace.flush().map_err(said)?;
    println!("{mib} MiB written with pattern {seed}");
    Ok(())
}

/// Reads `mib` mebibytes from LBA 0 on and compares them.
pub fn check(namespace: &mut Namespace, seed: u64, mib: u64) -> Outcome {
    let mut chunk = vec![0; CHUNK as usize];
    for number in 0..mib {
        let lba = lba_of(namespace, number);
        namespace.read(lba, &mut chunk).map_err(said)?;
        if let Some(at) = pattern::difference(seed, number * CHUNK, &chunk) {
            return Err(format!("pattern {seed} differs at byte {at}"));
        }
    }
    println!("{mib} MiB compared with pattern {seed}");
    Ok(())
}

/// Compares the first `mib` mebibytes of a block device with the pattern, past the page cache.
pub fn compare(seed: u64, mib: u64, path: &str) -> Outcome {
    let failed = |error| format!("{path}: {error}");
    let mut file = direct(path)?;
    let mut memory = vec![0; 2 * CHUNK as usize];
    let chunk = aligned(&mut memory);
    for number in 0..mib {
        file.read_exact(chunk).map_err(failed)?;
        if let Some(at) = pattern::difference(seed, number * CHUNK, chunk) {
            return Err(format!("{path}: pattern {seed} differs at byte {at}"));
        }
    }
    println!("{mib} MiB of {path} compared with pattern {seed}");
    Ok(())
}

/// Writes the pattern to the first `mib` mebibytes of a block device, past the page cache.
pub fn store(seed: u64, mib: u64, path: &str) -> Outcome {
    let failed = |error| format!("{path}: {error}");
    let mut file = direct(path)?;
    let mut memory = vec![0; 2 * CHUNK as usize];
    let chunk = aligned(&mut memory);
    for number in 0..mib {
        pattern::fill(seed, number * CHUNK, chunk);
        file.write_all(chunk).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    println!("{mib} MiB of {path} written with pattern {seed}");
    Ok(())
}

fn direct(path: &str) -> Result<File, String> {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(O_DIRECT);
    options
        .open(path)
        .map_err(|error| format!("{path}: {error}"))
}

/// Returns a chunk of `memory` that starts on a page, as O_DIRECT requires.
fn aligned(memory: &mut [u8]) -> &mut [u8] {
    let start = memory.as_ptr().align_offset(4096);
    &mut memory[start..start + CHUNK as usize]
}

fn lba_of(namespace: &Namespace, chunk: u64) -> Lba {
    Lba(chunk * CHUNK / u64::from(namespace.block_bytes()))
}

//! A long stretch of a namespace, written and compared by blocking calls.

use crate::{Outcome, pattern, said};
use nvme_host::Namespace;
use nvme_host::core::spec::Lba;
use std::io::Write;

const CHUNK: u64 = 1 << 20;

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

/// Writes `mib` mebibytes of the pattern to standard output.
pub fn print(seed: u64, mib: u64) -> Outcome {
    let mut out = std::io::stdout().lock();
    let mut chunk = vec![0; CHUNK as usize];
    for number in 0..mib {
        pattern::fill(seed, number * CHUNK, &mut chunk);
        out.write_all(&chunk).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn lba_of(namespace: &Namespace, chunk: u64) -> Lba {
    Lba(chunk * CHUNK / u64::from(namespace.block_bytes()))
}

//! The image that the demo makes: data that anyone can make again from the seed.

use super::Demo;
use crate::cli::{check_stop, progress};
use nvme_host::{Error, Result};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use xxhash_rust::xxh3::xxh3_64;

/// The image file, removed at the end unless it is to be kept.
pub struct Image {
    pub path: PathBuf,
    keep: bool,
    /// A checksum of each unit, taken of the bytes that went into the file.
    pub sums: Vec<u64>,
}

impl Drop for Image {
    fn drop(&mut self) {
        if !self.keep {
            // Someone else may have removed it; there is nothing to say about that.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Image {
    /// Makes the image of `demo`, with a checksum for every `unit` bytes.
    pub fn create(demo: &Demo, unit: u64) -> Result<Self> {
        let name = format!("nvme-gpu-demo-{}.img", std::process::id());
        let path = demo
            .image
            .clone()
            .unwrap_or_else(|| std::env::temp_dir().join(name));
        let file = File::create_new(&path).map_err(Error::file("create", &path))?;
        let mut image = Self {
            path,
            keep: false,
            sums: Vec::new(),
        };
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        let bar = progress::bytes(demo.size, "image");
        let mut data = Data::new(demo.seed);
        let mut bytes = vec![0; unit as usize];
        let mut left = demo.size;
        while left > 0 {
            check_stop()?;
            let len = left.min(unit) as usize;
            data.fill(&mut bytes[..len]);
            image.sums.push(xxh3_64(&bytes[..len]));
            writer
                .write_all(&bytes[..len])
                .map_err(Error::file("write", &image.path))?;
            left -= len as u64;
            bar.inc(len as u64);
        }
        writer.flush().map_err(Error::file("write", &image.path))?;
        bar.finish_and_clear();
        image.keep = demo.keep;
        Ok(image)
    }
}

/// The words of the image, in order: those that kernels check, where there are kernels.
#[cfg(feature = "cuda")]
struct Data {
    seed: u64,
    next: u64,
}

#[cfg(feature = "cuda")]
impl Data {
    fn new(seed: u64) -> Self {
        Self { seed, next: 0 }
    }

    /// Fills whole words.
    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&nvme_host::cuda::data_word(self.seed, self.next).to_le_bytes());
            self.next += 1;
        }
    }
}

#[cfg(not(feature = "cuda"))]
use nvme_host::bench::SplitMix as Data;

//! The image that the demo makes, in a file behind the simulator or on the first blocks of a device:
//! data that anyone can make again from the seed.

use super::options::DemoCommand;
use crate::common::{check_stop, images, progress};
use nvme_host::core::spec::{Lba, Nsid};
use nvme_host::{Error, Result, units};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// The image. A file is removed at the end unless it is to be kept.
pub struct DemoImage {
    /// The file; none when it lies on a device.
    pub path: Option<PathBuf>,
    keep: bool,
    /// The device that it is read from, as `--device` names it.
    pub device: String,
    /// Description of the controller, in words.
    pub controller: String,
    /// Bytes of a block.
    pub block: u64,
    /// Bytes of a read.
    pub unit: u64,
    /// A checksum of each unit, taken of the bytes that went into the file.
    pub sums: Vec<u64>,
}

impl Drop for DemoImage {
    fn drop(&mut self) {
        if let Some(path) = self.path.as_ref().filter(|_| !self.keep) {
            // Another process may have removed the file; there is nothing to report about that.
            let _ = fs::remove_file(path);
        }
    }
}

impl DemoImage {
    /// Makes the image of `demo`, on its device or else in a file.
    pub fn create(demo: &DemoCommand) -> Result<Self> {
        match &demo.device {
            Some(device) => Self::on_device(demo, device),
            None => Self::in_file(demo),
        }
    }

    fn in_file(demo: &DemoCommand) -> Result<Self> {
        let block = u64::from(demo.block);
        if !matches!(demo.block, 512 | 4096) {
            return Err(Error::usage(
                format!("blocks of {block} bytes do not exist in the simulator"),
                "use --block 512 or 4096",
            ));
        }
        // 128 KiB is the simulator's default MDTS.
        let unit = unit(demo, block, 128 << 10)?;
        let name = format!("nvme-gpu-demo-{}.img", std::process::id());
        let path = demo
            .image
            .clone()
            .unwrap_or_else(|| std::env::temp_dir().join(name));
        check_space(&path, demo.size)?;
        let file = File::create_new(&path).map_err(Error::file("create", &path))?;
        let (queues, threads) = (demo.queues.max(2), demo.sim_threads);
        let audit = if demo.audit { "on" } else { "off" };
        let mut image = Self {
            device: format!(
                "sim:{}?block={block}&queues={queues}&threads={threads}&audit={audit}",
                images::escaped(&path.display().to_string())
            ),
            path: Some(path.clone()),
            keep: false,
            controller: format!("embedded simulator on {threads} CPU thread(s)"),
            block,
            unit,
            sums: Vec::new(),
        };
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        image.fill(demo, |_, bytes| {
            let written = writer.write_all(bytes);
            written.map_err(Error::file("write", &path))
        })?;
        writer.flush().map_err(Error::file("write", &path))?;
        image.keep = demo.keep;
        Ok(image)
    }

    fn on_device(demo: &DemoCommand, device: &str) -> Result<Self> {
        let opened = nvme_host::open(device)?;
        demo.write.check(&*opened, "demo")?;
        let controller = demo.access.start(opened, &demo.config())?;
        let mut namespace = controller.namespace(Nsid(1))?;
        let block = u64::from(namespace.block_bytes());
        let unit = unit(demo, block, controller.max_transfer().min(128 << 10))?;
        namespace.check(Lba(0), demo.size / block)?;
        let mut image = Self {
            path: None,
            keep: false,
            device: device.to_owned(),
            controller: controller.device().describe(),
            block,
            unit,
            sums: Vec::new(),
        };
        image.fill(demo, |at, bytes| namespace.write(Lba(at / block), bytes))?;
        namespace.flush()?;
        drop(namespace);
        controller.shut_down()?;
        Ok(image)
    }

    /// Hands the data to `sink`, unit by unit with its place, and notes the checksums.
    fn fill(
        &mut self,
        demo: &DemoCommand,
        mut sink: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let bar = progress::bytes(demo.size, "image");
        let mut data = ImageWords::new(demo.seed);
        let mut bytes = vec![0; self.unit as usize];
        let mut at = 0;
        while at < demo.size {
            check_stop()?;
            let len = (demo.size - at).min(self.unit);
            let part = &mut bytes[..len as usize];
            data.fill(part);
            self.sums.push(xxh3_64(part));
            sink(at, part)?;
            at += len;
            bar.inc(len);
        }
        bar.finish_and_clear();
        Ok(())
    }
}

/// Refuses an image that the file system of `path` has no room for.
fn check_space(path: &Path, size: u64) -> Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    // If the folder cannot be examined, creating the file will fail with a clearer error.
    let Ok(space) = rustix::fs::statvfs(folder.unwrap_or(Path::new("."))) else {
        return Ok(());
    };
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if size > free {
        let (size, free) = (units::bytes(size), units::bytes(free));
        let cause = format!("{size} do not fit into the {free} that are free");
        return Err(Error::file("create", path)(std::io::Error::new(
            std::io::ErrorKind::StorageFull,
            cause,
        )));
    }
    Ok(())
}

/// Returns the number of bytes of a read: whole blocks, `most` at most.
fn unit(demo: &DemoCommand, block: u64, most: u64) -> Result<u64> {
    if demo.size == 0 || !demo.size.is_multiple_of(block) {
        let size = demo.size;
        return Err(Error::usage(
            format!("--size {size} is not a whole number of {block}-byte blocks"),
            format!("use a multiple of {block}"),
        ));
    }
    match demo.bs.min(most) / block * block {
        0 => Err(Error::usage(
            format!("--bs {} is less than a block", demo.bs),
            format!("use at least {block}"),
        )),
        unit => Ok(unit),
    }
}

/// The words of the image, in order: the same words that kernels check.
#[cfg(feature = "cuda")]
struct ImageWords {
    seed: u64,
    next: u64,
}

#[cfg(feature = "cuda")]
impl ImageWords {
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
use nvme_host::bench::SplitMix as ImageWords;

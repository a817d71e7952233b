//! `p2p`: whether the controller reaches the memory of another device, and at what rate.

use crate::common::{NamespaceArgs, WriteArgs, number, output, some_bytes};
use clap::Args;
use nvme_host::bench::SplitMix;
use nvme_host::core::CommandData;
use nvme_host::core::spec::{Lba, Nsid, Sqe, nvm};
use nvme_host::units::parse_bytes;
use nvme_host::{Controller, DmaBuffer, DmaPages, DriverQueue, Error, Namespace, Result};
use serde_json::json;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Check peer-to-peer transfers: blocks straight into the memory of another device and back
///
/// The peer's memory and the blocks are restored at the end. Without --allow-write only reads into the peer are checked
/// on a real disk.
#[derive(Args)]
pub struct PeerCommand {
    #[command(flatten)]
    namespace: NamespaceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// The peer's memory: /sys/bus/pci/devices/BDF/resourceN, or vfio:BDF?bar=N of a function bound to vfio-pci (which
    /// iommu=iommufd needs)
    #[arg(long, value_name = "FILE")]
    peer: PathBuf,
    /// Bytes into it
    #[arg(long, default_value = "0", value_parser = parse_bytes)]
    offset: u64,
    /// Bytes to move each way
    #[arg(long, default_value = "1MiB", value_parser = some_bytes)]
    size: u64,
    /// First block to use
    #[arg(long, short = 's', default_value_t = 0, value_parser = number::<u64>(0..=u64::MAX))]
    lba: u64,
}

/// Limit of a transfer in bytes: its data is kept in memory several times.
const MOST: u64 = 1 << 30;

/// The controller's two paths to the same blocks: through the peer, and through this process.
struct PeerPaths {
    queue: DriverQueue,
    disk: Namespace,
    nsid: Nsid,
    lba: Lba,
    peer: DmaBuffer,
    largest: u64,
}

impl PeerCommand {
    pub fn run(self) -> Result<()> {
        let nsid = self.namespace.nsid();
        let device = &self.namespace.device;
        let opened = device.open()?;
        let writes = self.write.check(&*opened, "p2p").is_ok();
        let config = match writes {
            true => self.namespace.config(),
            false => device.reading(),
        };
        let controller = device.access.start(opened, &config)?;
        let mut disk = controller.namespace(nsid)?;
        let block = u64::from(disk.block_bytes());
        let size = self.size;
        if size == 0 || !size.is_multiple_of(4096.max(block)) {
            return Err(Error::usage(
                format!("--size {size} is not whole pages and blocks"),
                format!("use a multiple of {}", 4096.max(block)),
            ));
        }
        disk.check(Lba(self.lba), size / block)?;
        if size > MOST {
            return Err(Error::usage(
                format!("--size {size} is more than is held in memory for the check"),
                format!("use at most {}", MOST),
            ));
        }
        let mut before = vec![0; size as usize];
        disk.read(Lba(self.lba), &mut before)?;
        let mut ways = PeerPaths {
            queue: controller.create_queue_pair(64)?,
            disk,
            nsid,
            lba: Lba(self.lba),
            peer: self.map(&controller)?,
            largest: controller.max_transfer() / block * block,
        };
        let kept = ways.peer.as_slice().to_vec();
        let outcome = ways.check(&before, writes);
        // Both are restored, whatever was found.
        ways.peer.as_mut_slice().copy_from_slice(&kept);
        let restored = if writes {
            ways.disk.write(Lba(self.lba), &before)
        } else {
            Ok(())
        };
        let (read, write) = outcome?;
        restored?;
        drop(ways);
        controller.shut_down()?;
        self.report(read, write)
    }

    fn map(&self, controller: &Controller) -> Result<DmaBuffer> {
        let pages = self.pages()?;
        DmaBuffer::over(controller.device(), Arc::new(pages))
    }

    fn pages(&self) -> Result<DmaPages> {
        let size = self.size as usize;
        #[cfg(feature = "vfio")]
        if let Some(bar) = self
            .peer
            .to_str()
            .and_then(|name| name.strip_prefix("vfio:"))
        {
            return nvme_host::vfio::bar(bar, self.offset, size);
        }
        let file = OpenOptions::new().read(true).write(true).open(&self.peer);
        let file = file.map_err(Error::file("open", &self.peer))?;
        DmaPages::of_file(file.into(), self.offset, size)
    }

    fn report(&self, read: Duration, write: Option<Duration>) -> Result<()> {
        let rate = |time: Duration| self.size as f64 / time.as_secs_f64() / 1e9;
        if self.namespace.device.form.json {
            return output::json(&json!({
                "bytes": self.size,
                "read_verified": true,
                "read_gb_per_s": rate(read),
                "write_verified": write.is_some(),
                "write_gb_per_s": write.map(rate),
            }));
        }
        let write = match write {
            Some(time) => format!("every byte right, {:.3} GB/s", rate(time)),
            None => "not tried (--allow-write)".to_owned(),
        };
        output::print(&format!(
            "disk to peer: every byte right, {:.3} GB/s\npeer to disk: {write}",
            rate(read)
        ))
    }
}

impl PeerPaths {
    /// Transfers data both ways and compares; returns the durations. `before` is the content of the blocks.
    fn check(&mut self, before: &[u8], writes: bool) -> Result<(Duration, Option<Duration>)> {
        let mut data = before.to_vec();
        if writes {
            SplitMix::new(1).fill(&mut data);
            self.disk.write(self.lba, &data)?;
        }
        // Inverted first, so that old data cannot pass for data that arrives.
        let inverse: Vec<u8> = data.iter().map(|byte| !byte).collect();
        self.peer.as_mut_slice().copy_from_slice(&inverse);
        let read = self.move_all("Read into the peer", nvm::read)?;
        if self.peer.as_slice() != data {
            return Err(Error::Mismatch {
                what: "what arrived in the peer's memory is not what the disk holds: its status was success, so the transfer was lost on the way".to_owned(),
            });
        }
        if !writes {
            return Ok((read, None));
        }
        self.peer.as_mut_slice().copy_from_slice(&inverse);
        let write = self.move_all("Write from the peer", nvm::write)?;
        self.disk.read(self.lba, &mut data)?;
        if data != inverse {
            return Err(Error::Mismatch {
                what: "what arrived on the disk is not what the peer's memory holds".to_owned(),
            });
        }
        Ok((read, Some(write)))
    }

    /// Transfers the peer's memory once, several commands at a time.
    fn move_all(&mut self, what: &str, command: fn(Nsid, Lba, u32) -> Sqe) -> Result<Duration> {
        let block = u64::from(self.disk.block_bytes());
        let (mut at, size) = (0, self.peer.len() as u64);
        let mut failure = None;
        let begin = Instant::now();
        // After a failure the commands in flight are waited for: they still move data.
        while (at < size && failure.is_none()) || self.queue.in_flight() > 0 {
            let mut submitted = false;
            let depth = self.queue.depth().min(8);
            while at < size && failure.is_none() && self.queue.in_flight() < depth {
                let len = self.largest.min(size - at);
                let lba = Lba(self.lba.0 + at / block);
                let sqe = command(self.nsid, lba, (len / block) as u32);
                let iova = self.peer.iova().offset(at);
                let data = CommandData::Contiguous { iova, len };
                if let Err(refused) = self.queue.submit_data(sqe, data, None) {
                    let otherwise = |error: nvme_host::core::SubmitError| {
                        Error::device(error.to_string(), "try again")
                    };
                    failure = Some(refused.error.into_error(otherwise));
                    break;
                }
                submitted = true;
                at += len;
            }
            if submitted {
                self.queue.ring();
            }
            match self.queue.wait()? {
                Some(done) if !done.is_success() => {
                    failure.get_or_insert(self.queue.error_of(&done, what));
                }
                _ => {}
            }
        }
        failure.map_or_else(|| Ok(begin.elapsed()), Err)
    }
}

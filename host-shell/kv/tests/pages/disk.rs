//! A disk in memory with a volatile cache: power cuts that keep any sectors, and writes that go wrong.

use nvme_driver::error::{Error, Result};
use nvme_kv::BlockMedium;
use nvme_store::StoreTransfer;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const SECTOR: usize = 512;

/// A fault of writes that touch a range of bytes.
#[derive(Clone, Debug)]
pub enum WriteFault {
    /// It is reported as written, and is not.
    Dropped,
    /// It ends with an error, and nothing is written.
    Failed,
    /// It ends with an error; the bytes arrive when [`MemoryDisk::arrive`] is called.
    Late,
    /// It ends with an error after the first sector.
    Torn,
    /// It is reported as written, and lies this number of bytes further on.
    Misdirected(u64),
}

#[derive(Default)]
struct DiskState {
    durable: Vec<u8>,
    cached: BTreeMap<usize, [u8; SECTOR]>,
    /// Writes and flushes up to the power cut; the one that finds 0 is cut.
    left: Option<u64>,
    is_dead: bool,
    random: u64,
    faults: Vec<(std::ops::Range<u64>, u32, WriteFault)>,
    late: Vec<(u64, Vec<u8>)>,
    unreadable: Vec<std::ops::Range<u64>>,
    fails_flushes: bool,
    reads_fail: bool,
}

/// A disk that several stores, one after the other, are opened on.
#[derive(Clone)]
pub struct MemoryDisk(Arc<Mutex<DiskState>>);

impl DiskState {
    fn random(&mut self) -> u64 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Counts a step; true if the power is cut during it.
    fn is_cut(&mut self) -> Result<bool> {
        if self.is_dead {
            return Err(gone());
        }
        match &mut self.left {
            Some(0) => {
                self.is_dead = true;
                Ok(true)
            }
            Some(left) => {
                *left -= 1;
                Ok(false)
            }
            None => Ok(false),
        }
    }

    fn put(&mut self, offset: u64, data: &[u8], is_durable: bool) {
        assert!(offset.is_multiple_of(SECTOR as u64) && data.len().is_multiple_of(SECTOR));
        for (sector, bytes) in (offset as usize / SECTOR..).zip(data.as_chunks::<SECTOR>().0) {
            if is_durable {
                self.cached.remove(&sector);
                self.durable[sector * SECTOR..][..SECTOR].copy_from_slice(bytes);
            } else {
                self.cached.insert(sector, *bytes);
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8], is_durable: bool) -> Result<()> {
        if self.is_cut()? {
            // Any sectors of it were written.
            for (at, sector) in data.as_chunks::<SECTOR>().0.iter().enumerate() {
                if self.random() & 1 == 0 {
                    self.put(offset + (at * SECTOR) as u64, sector, is_durable);
                }
            }
            return Err(gone());
        }
        let end = offset + data.len() as u64;
        let hit = |(range, _, _): &(std::ops::Range<u64>, u32, WriteFault)| {
            range.start < end && offset < range.end
        };
        if let Some(at) = self.faults.iter().position(hit) {
            self.faults[at].1 -= 1;
            let fault = self.faults[at].2.clone();
            if self.faults[at].1 == 0 {
                self.faults.remove(at);
            }
            return self.go_wrong(&fault, offset, data);
        }
        self.put(offset, data, is_durable);
        Ok(())
    }

    fn go_wrong(&mut self, fault: &WriteFault, offset: u64, data: &[u8]) -> Result<()> {
        match fault {
            WriteFault::Dropped => return Ok(()),
            WriteFault::Misdirected(by) => {
                self.put(offset.wrapping_add(*by), data, true);
                return Ok(());
            }
            WriteFault::Failed => {}
            WriteFault::Late => self.late.push((offset, data.to_vec())),
            WriteFault::Torn => self.put(offset, &data[..SECTOR], true),
        }
        Err(failed("the write"))
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        if self.is_dead || self.reads_fail {
            return Err(gone());
        }
        let range = offset..offset + data.len() as u64;
        let hit = |bad: &&std::ops::Range<u64>| bad.start < range.end && range.start < bad.end;
        if self.unreadable.iter().find(hit).is_some() {
            return Err(failed("the read"));
        }
        let end = offset as usize + data.len();
        data.copy_from_slice(&self.durable[offset as usize..end]);
        let sectors = offset as usize / SECTOR..end.div_ceil(SECTOR);
        for (sector, bytes) in self.cached.range(sectors) {
            let at = sector * SECTOR;
            let (from, to) = (at.max(offset as usize), (at + SECTOR).min(end));
            data[from - offset as usize..to - offset as usize]
                .copy_from_slice(&bytes[from - at..to - at]);
        }
        Ok(())
    }
}

fn gone() -> Error {
    Error::Gone {
        cause: "the power is off".to_owned(),
    }
}

/// An error of one place.
fn failed(what: &str) -> Error {
    Error::File {
        action: "use",
        path: what.into(),
        source: std::io::Error::from_raw_os_error(5),
    }
}

impl MemoryDisk {
    pub fn new(bytes: usize, seed: u64) -> Self {
        Self(Arc::new(Mutex::new(DiskState {
            durable: vec![0; bytes],
            random: seed,
            ..DiskState::default()
        })))
    }

    fn change<T>(&self, change: impl FnOnce(&mut DiskState) -> T) -> T {
        change(&mut self.0.lock().unwrap())
    }

    /// Cuts the power during the write or flush that comes after `steps` others.
    pub fn cut_after(&self, steps: u64) {
        self.change(|disk| disk.left = Some(steps));
    }

    /// Switches the power off, if it is on, and on again: of what was not durable any sectors remain.
    pub fn restart(&self) {
        self.change(|disk| {
            for (sector, bytes) in std::mem::take(&mut disk.cached) {
                if disk.random() & 1 == 0 {
                    disk.durable[sector * SECTOR..][..SECTOR].copy_from_slice(&bytes);
                }
            }
            (disk.is_dead, disk.left) = (false, None);
        });
    }

    /// True once the power was cut.
    pub fn is_dead(&self) -> bool {
        self.change(|disk| disk.is_dead)
    }

    /// Lets the next `times` writes that touch `range` go wrong.
    pub fn fault(&self, range: std::ops::Range<u64>, times: u32, fault: WriteFault) {
        self.change(|disk| disk.faults.push((range, times, fault)));
    }

    /// Lets late writes arrive.
    pub fn arrive(&self) {
        self.change(|disk| {
            for (offset, data) in std::mem::take(&mut disk.late) {
                disk.put(offset, &data, true);
            }
        });
    }

    /// Makes a range of bytes unreadable.
    pub fn wear(&self, range: std::ops::Range<u64>) {
        self.change(|disk| disk.unreadable.push(range));
    }

    /// Makes all bytes readable.
    pub fn repair(&self) {
        self.change(|disk| disk.unreadable.clear());
    }

    pub fn fail_flushes(&self, fails: bool) {
        self.change(|disk| disk.fails_flushes = fails);
    }

    pub fn fail_reads(&self, fail: bool) {
        self.change(|disk| disk.reads_fail = fail);
    }

    /// Changes bytes on the medium.
    pub fn corrupt(&self, offset: u64, change: impl FnOnce(&mut [u8])) {
        self.change(|disk| {
            assert!(disk.cached.is_empty());
            change(&mut disk.durable[offset as usize..]);
        });
    }
}

impl BlockMedium for MemoryDisk {
    fn bytes(&self) -> u64 {
        self.change(|disk| disk.durable.len() as u64)
    }

    fn block_bytes(&self) -> u32 {
        SECTOR as u32
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.change(|disk| disk.read(offset, data))
    }

    fn transfer_all(&self, transfers: &mut [StoreTransfer<'_>]) -> Vec<Result<()>> {
        let one = |transfer: &mut StoreTransfer<'_>| match transfer {
            StoreTransfer::Read(offset, data) => self.read_at(*offset, data),
            StoreTransfer::Write(offset, data) => {
                self.change(|disk| disk.write(*offset, data, false))
            }
        };
        transfers.iter_mut().map(one).collect()
    }

    fn write_durable(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.change(|disk| disk.write(offset, data, true))
    }

    fn flush(&self) -> Result<()> {
        self.change(|disk| {
            let cut = disk.is_cut()?;
            if disk.fails_flushes {
                return Err(failed("the flush"));
            }
            for (sector, bytes) in std::mem::take(&mut disk.cached) {
                if !cut || disk.random() & 1 == 0 {
                    disk.durable[sector * SECTOR..][..SECTOR].copy_from_slice(&bytes);
                }
            }
            match cut {
                true => Err(gone()),
                false => Ok(()),
            }
        })
    }
}

//! Moves rows between a namespace and GPU memory, by commands of a kernel. In the guest a stand-in replaces the GPU,
//! and udmabuf exports its memory: the controller, the IOMMU and the module are those that a GPU would use.
// UNSAFETY: requests hold addresses of GPU memory.
#![allow(unsafe_code)]

use crate::{Outcome, patient, pattern, said};
use nvme_host::cuda::{DeviceMemory, QueueTier, RowRequest, RowsOptions, Stream};
use nvme_host::store::GpuOptions;
use nvme_host::{Store, StoreOptions};
use std::time::{Duration, Instant};

/// Bytes of the namespace that rows are in.
const BYTES: usize = 4 << 20;
const SEED: u64 = 77;
const WAIT: Duration = Duration::from_secs(30);
/// Value of bytes that no transfer has touched.
const CANARY: u8 = 0xC5;
const ROWS: usize = 160;

/// Gathers, scatters and reads ranges of `device`, whose data the GPU has to reach by `tier`. Tier 3 is asked for; the
/// others have to be found.
pub fn run(device: &str, tier: u32) -> Outcome {
    let (bench, mut image) = prepared(device, tier)?;
    for (offset, row_bytes) in [(0, 4096), (0, 512), (7, 100), (4096, 12_288)] {
        bench.gather(&image, offset, row_bytes)?;
    }
    bench.read(&image)?;
    bench.scatter(&mut image)
}

/// Gathers, resets the function behind the driver's back, and gathers again: the queues are created again, in any
/// placement of their rings.
pub fn reset(device: &str, tier: u32) -> Outcome {
    let (bench, image) = prepared(device, tier)?;
    let address = device.split_once(':').map_or("", |(_, address)| address);
    let path = format!("/sys/bus/pci/devices/{address}/reset");
    for _ in 0..2 {
        bench.gather(&image, 0, 4096)?;
        std::fs::write(&path, "1").map_err(|error| format!("{path}: {error}"))?;
        let begin = Instant::now();
        while let Err(cause) = bench.gather(&image, 0, 4096) {
            println!("after a reset of the function: {cause}");
            if begin.elapsed() > patient(WAIT) {
                return Err("no rows after a reset of the function".to_owned());
            }
        }
        println!(
            "rows again {} ms after a reset",
            begin.elapsed().as_millis()
        );
        bench.gather(&image, 7, 100)?;
    }
    Ok(())
}

/// Returns a store of `device` whose first bytes are those of the image.
fn prepared(device: &str, tier: u32) -> Result<(Bench, Vec<u8>), String> {
    let options = StoreOptions {
        allow_write: true,
        queues: 2,
        timeout: patient(Duration::from_secs(2)),
        tier: (tier == 3).then_some(QueueTier::GpuRings),
        gpu: Some(GpuOptions {
            rows: RowsOptions {
                queues: 4,
                entries: 64,
                stations: 2,
                ..RowsOptions::default()
            },
            ..GpuOptions::default()
        }),
        ..StoreOptions::default()
    };
    let store = Store::open(device, &options).map_err(said)?;
    let path = store.path();
    println!("{}", path.why);
    if path.tier != Some(tier) {
        return Err(format!("tier {:?} instead of {tier}", path.tier));
    }
    let mut image = vec![0; BYTES];
    pattern::fill(SEED, 0, &mut image);
    store.write_at(0, &image).map_err(said)?;
    let stream = Stream::new(store.gpu().ok_or("a store without a GPU")?).map_err(said)?;
    Ok((Bench { store, stream }, image))
}

struct Bench {
    store: Store,
    stream: Stream,
}

impl Bench {
    fn memory(&self, bytes: &[u8]) -> Result<DeviceMemory, String> {
        let gpu = self.store.gpu().ok_or("a store without a GPU")?;
        let memory = DeviceMemory::new(gpu, bytes.len()).map_err(said)?;
        memory.upload(0, bytes).map_err(said)?;
        Ok(memory)
    }

    fn gather(&self, image: &[u8], offset: usize, row_bytes: usize) -> Outcome {
        let rows = (BYTES - offset) / row_bytes;
        let table = self
            .store
            .table(offset as u64, rows as u64, row_bytes as u64)
            .map_err(said)?;
        // Rows twice, and one that the table lacks.
        let mut ids: Vec<i64> = (0..ROWS as i64)
            .map(|row| row * row * 7919 % rows as i64)
            .collect();
        ids[5] = ids[150];
        ids[9] = rows as i64;
        let words: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let (ids_there, out) = (
            self.memory(&words)?,
            self.memory(&vec![CANARY; ROWS * row_bytes])?,
        );
        let status = self.memory(&[0xFF; 4 * ROWS])?;
        let request = RowRequest {
            ids: ids_there.address(),
            wide_ids: true,
            count: ROWS as u64,
            out: out.address(),
            out_stride: row_bytes as u64,
            status: status.address(),
        };
        // SAFETY: the memory outlives the gather, which is waited for.
        let pending = unsafe { table.gather_on_gpu(&request, self.stream.handle()) };
        pending
            .and_then(|pending| pending.wait(patient(WAIT)))
            .map_err(said)?;
        let (mut have, mut codes) = (vec![0; ROWS * row_bytes], vec![0; 4 * ROWS]);
        out.download(0, &mut have).map_err(said)?;
        status.download(0, &mut codes).map_err(said)?;
        for (number, (row, id)) in have.chunks(row_bytes).zip(&ids).enumerate() {
            let is_there = (*id as usize) < rows;
            let begin = offset + *id as usize * row_bytes;
            let zeros = vec![0; row_bytes];
            let expected = match is_there {
                true => &image[begin..begin + row_bytes],
                false => &zeros[..],
            };
            let code = i32::from_le_bytes(codes[4 * number..][..4].try_into().unwrap_or_default());
            if row != expected || (code == 0) != is_there {
                return Err(format!(
                    "row {id} of {row_bytes} bytes is wrong (code {code})"
                ));
            }
        }
        println!("{ROWS} rows of {row_bytes} bytes gathered");
        Ok(())
    }

    fn read(&self, image: &[u8]) -> Outcome {
        let (from, bytes) = (3, 1_000_001);
        let out = self.memory(&vec![CANARY; bytes + 64])?;
        let stream = self.stream.handle();
        // SAFETY: the memory outlives the read, which is waited for.
        let pending = unsafe {
            self.store
                .read_on_gpu(from as u64, bytes as u64, out.address() + 5, stream)
        };
        let ended = pending
            .and_then(|pending| pending.wait(patient(WAIT)))
            .map_err(said)?;
        let mut have = vec![0; bytes + 64];
        out.download(0, &mut have).map_err(said)?;
        let is_right = have[5..][..bytes] == image[from..][..bytes];
        let around = have[..5].iter().chain(&have[5 + bytes..]);
        if ended.failures.rows != 0 || !is_right || around.into_iter().any(|byte| *byte != CANARY) {
            return Err(format!("{bytes} bytes from {from} on are wrong"));
        }
        println!("{bytes} bytes read");
        Ok(())
    }

    fn scatter(&self, image: &mut [u8]) -> Outcome {
        let row_bytes = 4096;
        let table = self
            .store
            .table(0, (BYTES / row_bytes) as u64, row_bytes as u64);
        let table = table.map_err(said)?;
        let ids: Vec<i32> = (0..64).map(|row| row * 13 % 1024).collect();
        let mut rows = vec![0; ids.len() * row_bytes];
        pattern::fill(SEED + 1, 0, &mut rows);
        let words: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let (ids_there, from) = (self.memory(&words)?, self.memory(&rows)?);
        let request = RowRequest {
            ids: ids_there.address(),
            wide_ids: false,
            count: ids.len() as u64,
            out: from.address(),
            out_stride: row_bytes as u64,
            status: 0,
        };
        // SAFETY: the memory outlives the scatter, which is waited for.
        let pending = unsafe { table.scatter_on_gpu(&request, self.stream.handle()) };
        pending
            .and_then(|pending| pending.wait(patient(WAIT)))
            .map_err(said)?;
        for (id, row) in ids.iter().zip(rows.chunks(row_bytes)) {
            image[*id as usize * row_bytes..][..row_bytes].copy_from_slice(row);
        }
        let mut have = vec![0; BYTES];
        self.store.read_at(0, &mut have).map_err(said)?;
        if have != image {
            return Err("the drive differs after a scatter".to_owned());
        }
        println!("{} rows scattered", ids.len());
        Ok(())
    }
}

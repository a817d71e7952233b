//! A station whose block left with a command that has no end stays taken, with its result cells, until the controller
//! was reset; then the host frees it, with cells that are zero. A station that a block has claimed and not lost stays
//! taken.
// UNSAFETY: words of a store's kernels, by the addresses that it gives to kernels of users.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::gather::{Drive, Job, dice, text};
use crate::hazards::current;
use crate::limits::limit;
use crate::report::{Outcome, Report};
use cudarc::driver::sys::{self, CUresult};
use nvme_core::sync::AtomicU32;
use nvme_gpu_kernel::gate::{AdmissionGate, words as gate_words};
use nvme_gpu_kernel::rows::{GatherLaunch, STATION_CELLS, code};
use std::time::{Duration, Instant};

/// Stations of [`Drive`]; the one that is lost, and one that is claimed.
const STATIONS: u32 = 4;
const LOST: u32 = 2;
const CLAIMED: u32 = 1;
const TAKEN: u32 = 1;
/// Content of the result cells that were not freed.
const MARK: u64 = 0x5A5A_5A5A_0001_0001;

pub fn all(report: &mut Report, bench: &Bench) {
    report.test("gather/fault/lost-station", |_| lost(bench));
}

/// The words of a store's stations in memory of the GPU.
struct Words(GatherLaunch);

impl Words {
    fn put(&self, address: u64, bytes: &[u8]) -> Outcome<()> {
        // SAFETY: the address names words of the store for a station that is taken; no kernel uses them.
        let result = unsafe { sys::cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len()) };
        checked(result)
    }

    fn get(&self, address: u64, bytes: &mut [u8]) -> Outcome<()> {
        // SAFETY: as above, except that kernels may use the words meanwhile, which are only read here.
        let result =
            unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address, bytes.len()) };
        checked(result)
    }

    /// Takes a station, whose cells are marked.
    fn take(&self, station: u32) -> Outcome<()> {
        let cells = MARK.to_le_bytes().repeat(STATION_CELLS as usize);
        self.put(
            self.0.stations + u64::from(station) * 4,
            &TAKEN.to_le_bytes(),
        )?;
        self.put(self.cells_of(station), &cells)
    }

    fn cells_of(&self, station: u32) -> u64 {
        self.0.queues.cells + u64::from(station * STATION_CELLS) * 8
    }

    fn is_taken(&self, station: u32) -> Outcome<bool> {
        let mut word = [0; 4];
        self.get(self.0.stations + u64::from(station) * 4, &mut word)?;
        Ok(u32::from_le_bytes(word) != 0)
    }

    /// Returns whether each cell of the station is `value`.
    fn cells_are(&self, station: u32, value: u64) -> Outcome<bool> {
        let mut cells = vec![0; STATION_CELLS as usize * 8];
        self.get(self.cells_of(station), &mut cells)?;
        Ok(cells
            .as_chunks::<8>()
            .0
            .iter()
            .all(|cell| *cell == value.to_le_bytes()))
    }

    /// Returns the gate, by words that the host and the GPU reach by the same address.
    fn gate(&self) -> AdmissionGate<'_> {
        let first = std::ptr::with_exposed_provenance::<AtomicU32>(self.0.gate as usize);
        // SAFETY: the words belong to a gate and are never freed.
        let words = unsafe { std::slice::from_raw_parts(first, gate_words(STATIONS)) };
        AdmissionGate::new(words).unwrap_or_else(|| unreachable!("words of a gate"))
    }
}

fn checked(result: CUresult) -> Outcome<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(format!("a copy of a store's words: {other:?}")),
    }
}

fn lost(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    current(&drive)?;
    let table = drive.table(0, 4096);
    let words = Words(drive.rows(&table)?.device_rows().map_err(text)?);
    if words.0.station_count != STATIONS {
        return Err(format!("{} stations", words.0.station_count));
    }
    let mut throw = dice(19);
    // Whether all rows were read; none is wrong.
    let mut gather = || -> Outcome<bool> {
        let ids = (0..600).map(|_| throw(table.rows) as i64).collect();
        let codes = drive.run(&Job::new(&drive, table, ids, true, 0)?)?;
        Ok(codes.iter().all(|code| *code == code::OK))
    };
    words.take(LOST)?;
    words.take(CLAIMED)?;
    let gate = words.gate();
    gate.enter(LOST)
        .map_err(|why| format!("the gate is shut: {why:?}"))?;
    gate.leave_lost(LOST);
    for _ in 0..5 {
        if !gather()? {
            return Err("rows failed beside the lost station".to_owned());
        }
        if !words.is_taken(LOST)? || !words.cells_are(LOST, MARK)? {
            return Err("the lost station was given back before a reset".to_owned());
        }
    }
    gate.report_trouble();
    let begin = Instant::now();
    while words.is_taken(LOST)? {
        if begin.elapsed() > limit() {
            return Err("the lost station is not given back".to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    if !words.cells_are(LOST, 0)? {
        return Err("the lost station was given back with its cells as they were".to_owned());
    }
    // Rows of launches that met the shut gate fail; later ones are read.
    while !gather()? {
        if begin.elapsed() > limit() {
            return Err("rows fail after the reset".to_owned());
        }
    }
    if !words.is_taken(CLAIMED)? || !words.cells_are(CLAIMED, MARK)? {
        return Err("a station that a block had claimed was given to others".to_owned());
    }
    Ok("kept until the reset, and given back empty".to_owned())
}

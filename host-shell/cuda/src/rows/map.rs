//! Ranges of a table that lies in several, in GPU memory, for kernels that gather its rows.

use super::super::driver::Gpu;
use super::super::memory::DeviceMemory;
use super::super::module::{KernelFunction, Module};
use super::slot::Named;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::MAPPED;
use nvme_gpu_kernel::extents::{ExtentMap, MappedLaunch, TableExtent};
use std::sync::Arc;

/// Ranges of a table, from its first row to its last. Launches that use it keep its memory alive until they have ended,
/// and graphs for as long as they may run one.
pub struct TableMap {
    memory: Arc<DeviceMemory>,
    count: u32,
    /// Bitwise or of all offsets and lengths of the ranges: a power of two that divides it divides each of them.
    bits: u64,
    /// The same for the ends and beginnings of ranges inside rows.
    borders: u64,
    /// Bits in which two bytes of one range may differ; all of them if a row lies in two ranges.
    spread: u64,
    pub(super) kernels: MappedKernels,
}

/// The kernels that gather rows of such tables. They are loaded before the first launch, which could wait for others
/// otherwise.
#[derive(Clone, Copy)]
pub(super) struct MappedKernels {
    pub gather: KernelFunction,
    pub gather_batched: KernelFunction,
    pub gather_cached: KernelFunction,
    pub gather_batched_cached: KernelFunction,
    pub begin_batched: KernelFunction,
    pub finish_batched: KernelFunction,
    pub gather_batched_wide: KernelFunction,
    pub finish_batched_wide: KernelFunction,
    pub gather_striped: KernelFunction,
    pub gather_batched_striped: KernelFunction,
    pub claim_rows: KernelFunction,
    pub gather_listed: KernelFunction,
    pub gather_listed_striped: KernelFunction,
}

impl MappedKernels {
    fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::of_image(gpu, &MAPPED)?;
        Ok(Self {
            gather: module.function("nvme_gather_mapped")?,
            gather_batched: module.function("nvme_gather_batched_mapped")?,
            gather_cached: module.function("nvme_gather_cached_mapped")?,
            gather_batched_cached: module.function("nvme_gather_batched_cached_mapped")?,
            begin_batched: module.function("nvme_begin_batched_mapped")?,
            finish_batched: module.function("nvme_finish_batched_mapped")?,
            gather_batched_wide: module.function("nvme_gather_batched_wide_mapped")?,
            finish_batched_wide: module.function("nvme_finish_batched_wide_mapped")?,
            gather_striped: module.function("nvme_gather_striped_mapped")?,
            gather_batched_striped: module.function("nvme_gather_batched_striped_mapped")?,
            claim_rows: module.function("nvme_claim_rows_mapped")?,
            gather_listed: module.function("nvme_gather_listed_mapped")?,
            gather_listed_striped: module.function("nvme_gather_listed_striped_mapped")?,
        })
    }
}

impl TableMap {
    /// Copies `extents`, at least one, of a table of `bytes` bytes, with rows of `row_bytes`, to the memory
    /// of `gpu`.
    ///
    /// # Errors
    /// As [`DeviceMemory::new`] and [`Module::of_image`]; [`Error::Usage`] for 2^31 ranges and more.
    pub fn new(
        gpu: &Arc<Gpu>,
        extents: &[TableExtent],
        (bytes, row_bytes): (u64, u64),
    ) -> Result<Self> {
        let count = u32::try_from(extents.len()).ok();
        let Some(count) = count.filter(|count| *count < 1 << 31) else {
            return Err(Error::usage(
                format!("a table of {} ranges exceeds 2^31 - 1", extents.len()),
                "copy the file onto an empty file system",
            ));
        };
        let words: Vec<u8> = extents
            .iter()
            .flat_map(|extent| [extent.first, extent.byte])
            .flat_map(u64::to_le_bytes)
            .collect();
        let memory = DeviceMemory::new(gpu, words.len())?;
        memory.upload(0, &words)?;
        let inside = |pair: &&[TableExtent]| !pair[1].first.is_multiple_of(row_bytes.max(1));
        let border =
            |pair: &[TableExtent]| pair[1].byte | (pair[0].byte + (pair[1].first - pair[0].first));
        let ends = extents.iter().skip(1).map(|next| next.first);
        let ends = ends.chain([bytes]);
        let spread =
            |(one, end): (&TableExtent, u64)| one.byte ^ (one.byte + (end - one.first - 1));
        Ok(Self {
            kernels: MappedKernels::load(gpu)?,
            memory: Arc::new(memory),
            count,
            bits: extents
                .iter()
                .fold(0, |all, one| all | one.first | one.byte),
            spread: match extents.windows(2).any(|pair| inside(&pair)) {
                true => u64::MAX,
                false => extents
                    .iter()
                    .zip(ends)
                    .map(spread)
                    .fold(0, |all, one| all | one),
            },
            borders: extents
                .windows(2)
                .filter(inside)
                .map(border)
                .fold(0, |all, one| all | one),
        })
    }

    /// Returns a number with the property that a power of two which divides it divides the addresses of all rows and of
    /// parts of rows.
    pub fn bits(&self) -> u64 {
        self.bits
    }

    /// True if the parts of a row fill whole blocks, so that they follow one another in a slot.
    pub(super) fn is_of_blocks(&self, block_bytes: u32) -> bool {
        self.borders.is_multiple_of(block_bytes.into())
    }

    /// True if no row lies in two ranges.
    pub(super) fn is_of_whole_rows(&self) -> bool {
        self.spread != u64::MAX
    }

    /// True if each row lies inside one stripe of `1 << shift` bytes, since each range does and no row lies in two.
    pub(super) fn is_in_stripes(&self, shift: u32) -> bool {
        self.spread >> shift == 0
    }

    /// Returns the parameters of a launch of one of the [`kernels`](Self::kernels).
    pub(super) fn launch<T>(&self, launch: T) -> MappedLaunch<T> {
        let map = ExtentMap {
            extents: self.memory.address(),
            count: self.count,
            reserved: 0,
        };
        MappedLaunch { launch, map }
    }

    /// Returns the keep-alive of a launch: `map`, if it uses one, together with `other`.
    pub(super) fn named(map: Option<&Self>, other: Named) -> Named {
        let Some(map) = map else {
            return other;
        };
        let memory = Arc::clone(&map.memory);
        match other {
            Some(other) => Some(Arc::new((memory, other)) as _),
            None => Some(memory as _),
        }
    }
}

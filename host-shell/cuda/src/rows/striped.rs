//! Rows of striped drives: the GPU submits to the queues of all of them.
//!
//! Each member keeps its own queues, gate, slots and watch thread. A launch uses the summary words of the first
//! member.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::super::memory::DeviceMemory;
use super::distinct::DistinctPlace;
use super::kernels::RowKernels;
use super::parameters::LaunchParameters;
use super::pending::of_member;
use super::state::{RowsState, StationMemory};
use super::wide::WideRows;
use super::{GatherOptions, GpuRows, PendingRows, RowRequest, RowTable, TableMap, closed, put_one};
use nvme_core::spec::nvm;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::rows::{
    BLOCK_THREADS, GatherLaunch, MEMBERS, StripedGather, StripedMember, WARP_BYTES, slot_bytes,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Drives in stripes whose queues a GPU drives.
pub struct StripedRows {
    members: Vec<Arc<GpuRows>>,
    /// States of the members, which determine the outcome of a launch.
    states: Arc<[Arc<RowsState>]>,
    words: Arc<StripeWords>,
    stations: u32,
    stripe_shift: u32,
    block_shift: u32,
    max_transfer: u64,
    timeout: Duration,
}

/// Memory that launches over the stripes refer to: kept until they have ended, and for as long as a graph may run one.
struct StripeWords {
    /// A word for each station, 0 while it is free, and a [`StripedMember`] for each drive.
    memory: DeviceMemory,
    /// Memory that the words of the drives refer to.
    _stations: Vec<Arc<StationMemory>>,
}

impl StripedRows {
    /// Joins the members in stripes of `stripe_bytes` bytes, `len` bytes in all. `None` for arrangements that the
    /// kernel does not support: members of several GPUs, more than [`MEMBERS`] of them, a stripe size that is no power
    /// of two, and 2^32 stripes or more.
    ///
    /// # Errors
    /// Without memory.
    pub fn new(members: Vec<Arc<GpuRows>>, stripe_bytes: u64, len: u64) -> Result<Option<Self>> {
        let Some(first) = members.first() else {
            return Ok(None);
        };
        let is_one_gpu = members
            .iter()
            .all(|one| one.gpu().index() == first.gpu().index());
        let is_few = members.len() as u64 <= u64::from(MEMBERS)
            && stripe_bytes.is_power_of_two()
            && len / stripe_bytes < 1 << 32;
        if !is_one_gpu || !is_few {
            return Ok(None);
        }
        let least = |of: fn(&GpuRows) -> u64| members.iter().map(|one| of(one)).min().unwrap_or(0);
        let block = |one: &Arc<GpuRows>| one.info.block_bytes.trailing_zeros();
        let stations = least(|one| u64::from(one.state.stations)) as u32;
        let words = members
            .iter()
            .map(|one| one.member().ok_or_else(closed))
            .collect::<Result<Vec<StripedMember>>>()?;
        let _guest = first.gpu().enter()?;
        let head = head(stations);
        let memory = DeviceMemory::new(
            first.gpu(),
            head as usize + words.len() * size_of::<StripedMember>(),
        )?;
        let bytes = words.iter().flat_map(bytes_of).collect::<Vec<u8>>();
        memory.upload(head as usize, &bytes)?;
        Ok(Some(Self {
            words: Arc::new(StripeWords {
                memory,
                _stations: stations_of(&members),
            }),
            stations,
            stripe_shift: stripe_bytes.trailing_zeros(),
            block_shift: members.iter().map(block).max().unwrap_or(0),
            max_transfer: least(|one| one.max_transfer),
            timeout: members
                .iter()
                .map(|one| one.timeout)
                .max()
                .unwrap_or_default(),
            states: members.iter().map(|one| Arc::clone(&one.state)).collect(),
            members,
        }))
    }

    /// True if a slot holds a row of `table`, which touches two members at most.
    pub fn fits(&self, table: &RowTable) -> bool {
        let most = WARP_BYTES
            .min(self.max_transfer)
            .min(1 << self.stripe_shift);
        self.slot_bytes(table) <= most
    }

    fn slot_bytes(&self, table: &RowTable) -> u64 {
        slot_bytes(table.first_byte, table.row_bytes, self.block_shift)
    }

    /// Does the same as [`GpuRows::gather`], of a table that [fits](Self::fits), without a cache.
    ///
    /// # Safety
    /// As [`GpuRows::gather`].
    ///
    /// # Errors
    /// As [`GpuRows::gather`].
    pub unsafe fn gather(
        &self,
        table: &RowTable,
        request: &RowRequest,
        ways: GatherOptions<'_>,
        stream: u64,
    ) -> Result<PendingRows> {
        let (widen, map) = (ways.widen, ways.map);
        let (words, Some(first)) = (&self.words, self.members.first()) else {
            return Err(closed());
        };
        if !self.fits(table) {
            return Err(Error::usage(
                format!("rows of {} bytes do not fit into slots", table.row_bytes),
                "use smaller rows, or longer stripes",
            ));
        }
        let request = &request.judged_for_gather(first.gpu(), table, widen, stream)?;
        for (index, member) in self.members.iter().enumerate() {
            let checked = member.check_current(nvm::opcode::READ);
            checked.map_err(|error| of_member(Some(index), error))?;
        }
        let conversion = WideRows::judged(widen, first.gpu(), stream)?;
        let wide = WideRows::new(table, request, conversion)?;
        let launch = GatherLaunch {
            failed_as: wide.failed_as(ways.failed),
            ..self.launch(words.memory.address(), table, &wide.stored)
        };
        let over = |gather| StripedGather {
            gather,
            members: words.memory.address() + head(self.stations),
            stripe_shift: self.stripe_shift,
            member_count: self.members.len() as u32,
        };
        if let Some(distinct) = first.distinct(&launch, ways) {
            let place = DistinctPlace {
                map,
                stripes: Some(over(launch)),
                named: Some(Arc::clone(words) as _),
            };
            // SAFETY: the caller keeps the conditions under `# Safety`.
            let pending = unsafe { first.gather_distinct_at(distinct, &wide, place, stream) };
            return Ok(pending?.over(&self.states));
        }
        // SAFETY: the caller keeps the conditions; the launch stores all rows where the request wants them.
        let pending = unsafe {
            first.widened(&wide, stream, |slot| {
                let slot = slot.moving_rows_of(&launch);
                let named = TableMap::named(map, Some(Arc::clone(words) as _));
                first.start(launch, (slot, named), stream, |kernels, gather, blocks| {
                    // SAFETY: the caller vouches for the request's addresses, the others are ours until each gate is
                    // shut for good and nothing is inside.
                    self.put_gather(kernels, (over(gather), blocks), map, stream)
                })
            })
        };
        Ok(pending?.over(&self.states))
    }

    /// Enqueues the kernel that gathers `striped` in `stream`: by queues that its blocks own, or by shared ones and with
    /// `blocks` blocks. Counts which.
    ///
    /// # Safety
    /// As [`gather`](Self::gather).
    unsafe fn put_gather(
        &self,
        kernels: &RowKernels,
        (striped, blocks): (StripedGather, u32),
        map: Option<&TableMap>,
        stream: u64,
    ) -> Result<()> {
        let counts = self.states.first().map(|one| &one.counts);
        let batched = self.batched(&striped, map);
        let count = counts.map(|counts| match &batched {
            Some(_) => &counts.owned,
            None => &counts.shared,
        });
        count.map(|count| count.fetch_add(1, Ordering::Relaxed));
        // SAFETY: the kernels take one `BatchedStripes` or one `StripedGather`, or one with a map; the caller vouches for
        // its addresses.
        unsafe {
            match batched {
                Some((batched, shape)) => {
                    let size = (shape.blocks, shape.threads);
                    let kernel = kernels.gather_batched_striped;
                    let mapped = |map: &TableMap| map.kernels.gather_batched_striped;
                    put_one(kernels, (kernel, mapped), (size, map), batched, stream)
                }
                None => {
                    let size = (blocks, BLOCK_THREADS);
                    let mapped = |map: &TableMap| map.kernels.gather_striped;
                    let kernel = kernels.gather_striped;
                    put_one(kernels, (kernel, mapped), (size, map), striped, stream)
                }
            }
        }
    }

    /// Returns the drives, in the order of the stripes.
    pub(super) fn members(&self) -> impl Iterator<Item = &GpuRows> {
        self.members.iter().map(|one| &**one)
    }

    fn launch(&self, stations: u64, table: &RowTable, request: &RowRequest) -> GatherLaunch {
        let common = LaunchParameters {
            slot: self.slot_bytes(table),
            max_transfer: self.max_transfer,
            timeout: self.timeout,
            block_shift: self.block_shift,
            stations: self.stations,
        };
        GatherLaunch {
            stations,
            ..common.gather(table, request)
        }
    }
}

impl GpuRows {
    /// Returns the share of this drive in a launch over stripes; `None` once the store was closed.
    fn member(&self) -> Option<StripedMember> {
        let (lent, slots) = (self.lent.as_ref()?, self.slots.as_ref()?);
        Some(StripedMember {
            queues: self.queues(lent),
            gate: self.state.memory.board.gate_address(),
            stations: self.state.memory.free.address(),
            slots: slots.address(),
            slots_iova: slots.iova().0,
            nsid: self.info.nsid.0,
            block_shift: self.info.block_bytes.trailing_zeros(),
        })
    }
}

fn stations_of(members: &[Arc<GpuRows>]) -> Vec<Arc<StationMemory>> {
    let memory = |one: &Arc<GpuRows>| Arc::clone(&one.state.memory);
    members.iter().map(memory).collect()
}

/// Returns the number of bytes of the words of the stations: the members come after them.
fn head(stations: u32) -> u64 {
    (u64::from(stations) * 4).next_multiple_of(64)
}

fn bytes_of(member: &StripedMember) -> [u8; size_of::<StripedMember>()] {
    // SAFETY: the structure has only integers, without padding: 64 bytes.
    unsafe { std::mem::transmute(*member) }
}

//! The bytes of a store: one member, or several in stripes, with the locks and counters that all calls share.
//! Translates offsets of the store into offsets of members; nothing below knows of stripes.

use super::background::BackgroundThreads;
use super::counters::{StoreCounter, StoreCounters, StoreStats};
use super::file::FileChanges;
use super::member::StoreMember;
use super::options::DataPath;
use super::ranges::RangeLocks;
use nvme_core::stripes::StripeLayout;
use nvme_driver::error::{Error, Result};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The members of a store as one range of bytes.
pub(crate) struct StoreSpace {
    /// Present when a GPU gathers rows of all members: it refers to their queues, and is dropped before them.
    #[cfg(feature = "cuda")]
    pub striped: Option<nvme_cuda::StripedRows>,
    pub members: Vec<StoreMember>,
    /// Bytes of one member before the next one follows; without meaning for one member.
    pub stripe_bytes: u64,
    /// Each member has one stripe, and fills the first bytes of it.
    pub is_joined: bool,
    pub len: u64,
    /// The largest block of a member.
    pub block_bytes: u32,
    pub read_bytes: u32,
    pub locks: RangeLocks,
    pub background: BackgroundThreads,
    /// Number of writes by the CPU that have ended.
    writes: AtomicU64,
    pub counters: Arc<StoreCounters>,
    recoveries: Recoveries,
}

/// Bytes that one command moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemberPiece {
    pub member: usize,
    /// Place in the member.
    pub offset: u64,
    /// Place in the store.
    pub at: u64,
    pub bytes: u32,
    /// Number by which the call recognises the piece.
    pub key: usize,
}

impl MemberPiece {
    /// Returns its bytes in the store.
    pub fn range(&self) -> Range<u64> {
        self.at..self.at + u64::from(self.bytes)
    }
}

/// Returns the bytes that two ranges share; empty when there are none.
pub(crate) fn common(one: &Range<u64>, other: &Range<u64>) -> Range<u64> {
    let start = one.start.max(other.start);
    start..one.end.min(other.end).max(start)
}

impl StoreSpace {
    pub fn of(member: StoreMember) -> Self {
        let len = member.len;
        Self::new(vec![member], len.max(1), len)
    }

    /// Joins several members in stripes, whose size was checked.
    ///
    /// # Errors
    /// Without memory of the GPU.
    pub fn striped(members: Vec<StoreMember>, stripe_bytes: u64) -> Result<Self> {
        let shortest = members.iter().map(|member| member.len).min().unwrap_or(0);
        let stripes = shortest / stripe_bytes;
        let len = stripes * stripe_bytes * members.len() as u64;
        Self::of_several(members, stripe_bytes, len)
    }

    /// # Errors
    /// Makes a store of several members without GPU memory.
    fn of_several(members: Vec<StoreMember>, stripe_bytes: u64, len: u64) -> Result<Self> {
        #[cfg(feature = "cuda")]
        let striped = {
            // Where a GPU has queues of each.
            let rows = members.iter().map(|member| member.rows.clone());
            match rows.collect::<Option<Vec<_>>>() {
                Some(rows) => nvme_cuda::StripedRows::new(rows, stripe_bytes, len)?,
                None => None,
            }
        };
        Ok(Self {
            #[cfg(feature = "cuda")]
            striped,
            ..Self::new(members, stripe_bytes, len)
        })
    }

    /// Joins several members, each in a stripe that is as long as the longest of them, or longer.
    ///
    /// # Errors
    /// Without memory of the GPU; [`Error::Usage`] for members that 64 bits do not count together.
    pub fn joined(members: Vec<StoreMember>) -> Result<Self> {
        let longest = members
            .iter()
            .map(|one| one.len.max(one.block_bytes.into()));
        let stripe_bytes = longest.max().and_then(u64::checked_next_power_of_two);
        let before = stripe_bytes.and_then(|one| one.checked_mul(members.len() as u64));
        let (Some(stripe_bytes), Some(_), Some(last)) = (stripe_bytes, before, members.last())
        else {
            return Err(Error::usage(
                "the members are longer than 2^64 bytes",
                "join fewer",
            ));
        };
        let len = stripe_bytes * (members.len() as u64 - 1) + last.len;
        Ok(Self {
            is_joined: true,
            ..Self::of_several(members, stripe_bytes, len)?
        })
    }

    fn new(members: Vec<StoreMember>, stripe_bytes: u64, len: u64) -> Self {
        let counters = Arc::new(StoreCounters::publish());
        let controllers = members.iter().filter_map(|one| one.controller.as_ref());
        let recoveries: Recoveries = controllers
            .map(|one| Arc::clone(one.recoveries()))
            .collect();
        let largest = |of: fn(&StoreMember) -> u32| members.iter().map(of).max().unwrap_or(1);
        Self {
            #[cfg(feature = "cuda")]
            striped: None,
            block_bytes: largest(|member| member.block_bytes),
            read_bytes: largest(|member| member.read_bytes),
            stripe_bytes,
            is_joined: false,
            len,
            locks: RangeLocks::default(),
            background: BackgroundThreads::default(),
            writes: AtomicU64::new(0),
            recoveries,
            members,
            counters,
        }
    }

    /// Records that writes have ended: rows in caches of a GPU are stale, and so are rows that were read ahead.
    pub fn wrote(&self) {
        // Release: pairs with the acquire load of the count. A reader that sees the new count also sees the
        // effects of the write, so it cannot take bytes read before the write for current.
        self.writes.fetch_add(1, Ordering::Release);
        for member in &self.members {
            if let Some(changes) = &member.changes {
                changes.wrote();
            }
        }
        #[cfg(feature = "cuda")]
        for rows in self
            .members
            .iter()
            .filter_map(|member| member.rows.as_ref())
        {
            rows.wrote();
        }
    }

    /// Returns the number of writes by the CPU that have ended. Tests compare it with the writes that they
    /// made, since a cached row is stale exactly when this number has changed.
    #[cfg(all(test, feature = "sim"))]
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Acquire)
    }

    /// Returns a number that changes with each write that has ended.
    pub fn write_mark(&self) -> u64 {
        let mut hash = DefaultHasher::new();
        self.writes.load(Ordering::Acquire).hash(&mut hash);
        for member in &self.members {
            member
                .changes
                .as_ref()
                .map(FileChanges::mark)
                .hash(&mut hash);
            #[cfg(feature = "cuda")]
            member
                .rows
                .as_ref()
                .map(|rows| rows.writes_ended())
                .hash(&mut hash);
        }
        hash.finish()
    }

    /// Checks that `bytes` bytes from `offset` on lie in the store: their range.
    ///
    /// # Errors
    /// [`Error::Usage`].
    pub fn check(&self, offset: u64, bytes: u64) -> Result<Range<u64>> {
        let most = self.end_past(offset);
        let end = offset.checked_add(bytes).filter(|end| *end <= most);
        let end = end.ok_or_else(|| {
            let cause = match self.is_joined {
                true => format!(
                    "{bytes} bytes from {offset} on end past byte {most}, where a member of the store ends"
                ),
                false => format!(
                    "{bytes} bytes from {offset} on end past the store, which has {} bytes",
                    self.len
                ),
            };
            Error::usage(cause, "ask for a range inside the store")
        })?;
        Ok(offset..end)
    }

    /// # Errors
    /// [`Error::Usage`] when a member cannot be written.
    pub fn check_writable(&self) -> Result<()> {
        let why = self.members.iter().find_map(|one| one.read_only.as_ref());
        match why {
            Some((cause, remedy)) => Err(Error::usage(cause.clone(), *remedy)),
            None => Ok(()),
        }
    }

    /// Extends `range` to multiples of `unit`, within the store.
    pub fn rounded(&self, range: &Range<u64>, unit: u32) -> Range<u64> {
        let unit = u64::from(unit);
        let end = range.end.checked_next_multiple_of(unit);
        let most = self.end_past(range.start);
        range.start / unit * unit..end.map_or(most, |end| end.min(most))
    }

    /// Returns the end of the bytes among which `offset` is: of the store, or of the member of a joined one.
    fn end_past(&self, offset: u64) -> u64 {
        let member = (offset / self.stripe_bytes) as usize;
        match self.members.get(member).filter(|_| self.is_joined) {
            Some(of) => member as u64 * self.stripe_bytes + of.len,
            None => self.len,
        }
    }

    /// Appends the commands that move `range`, whole blocks, in order.
    pub fn split(&self, range: Range<u64>, key: usize, pieces: &mut Vec<MemberPiece>) {
        let mut at = range.start;
        while at < range.end {
            let (member, offset, room) = self.place(at);
            let of = &self.members[member];
            let mut bytes = (range.end - at).min(room).min(u64::from(of.most_bytes));
            if of.boundary_bytes > 0 {
                bytes = bytes.min(of.boundary_bytes - offset % of.boundary_bytes);
            }
            pieces.push(MemberPiece {
                member,
                offset,
                at,
                // At most `most_bytes`.
                bytes: bytes as u32,
                key,
            });
            at += bytes;
        }
    }

    /// Locates byte `at`: member, offset there, and bytes up to the end of the stripe.
    fn place(&self, at: u64) -> (usize, u64, u64) {
        let several = StripeLayout::new(self.stripe_bytes, self.members.len() as u32);
        match several.filter(|_| self.members.len() > 1) {
            Some(stripes) => {
                let spot = stripes.spot(at);
                (spot.member as usize, spot.offset, spot.room)
            }
            None => (0, at, u64::MAX),
        }
    }

    /// Returns `error` of a member, with its name where there are several.
    pub fn of_member(&self, member: usize, error: Error) -> Error {
        if self.members.len() == 1 {
            return error;
        }
        let name = format!("member {member} ({})", self.members[member].path.device);
        match &error {
            Error::Gone { .. }
            | Error::Changed { .. }
            | Error::Command { .. }
            | Error::Timeout { .. }
            | Error::Device { .. } => error.with_context(&name),
            // Files name themselves.
            _ => error,
        }
    }

    /// Returns the data path of the store, with the reason for it.
    pub fn path(&self) -> DataPath {
        let mut members = self.member_paths();
        if members.len() == 1 {
            return members.remove(0);
        }
        let all = |of: fn(&DataPath) -> &str| {
            let texts: Vec<&str> = members.iter().map(of).collect();
            texts.join("|")
        };
        let stripe = nvme_units::bytes(self.stripe_bytes);
        #[cfg_attr(not(feature = "cuda"), expect(unused_mut))]
        let mut shown = DataPath {
            device: format!("stripe:{}", all(|one| &one.device)),
            data: "host",
            tier: None,
            path: all(|one| &one.path),
            why: format!("{} members in stripes of {stripe}", members.len()),
        };
        #[cfg(feature = "cuda")]
        self.path_of_stripes(&mut shown);
        shown
    }

    pub fn member_paths(&self) -> Vec<DataPath> {
        self.members.iter().map(StoreMember::shown).collect()
    }

    /// Names a slow command in the log.
    #[cold]
    pub fn note_slow(&self, member: usize, piece: &MemberPiece, latency: Duration) {
        let device = &self.members[member].path.device;
        let (offset, bytes) = (piece.offset, piece.bytes);
        let ms = latency.as_millis() as u64;
        tracing::warn!(target: "nvme_gpu", device, offset, bytes, ms, "a command took {ms} ms");
    }

    /// Publishes the data path, and lets the members' GPUs report what they count.
    pub fn begin_counting(&self) {
        self.counters.begin(&self.path());
        #[cfg(feature = "cuda")]
        for rows in self.members.iter().filter_map(|one| one.rows.as_ref()) {
            // The function does not keep the members open.
            let (counters, recoveries) = (Arc::clone(&self.counters), Arc::clone(&self.recoveries));
            let mut last = nvme_cuda::RowCounts::default();
            rows.report_to(move |now| {
                add_counts(&counters, now, &last);
                last = *now;
                count_recoveries(&counters, &recoveries);
            });
        }
    }

    /// Records how often the controllers of the members were recovered.
    pub fn count_recoveries(&self) {
        count_recoveries(&self.counters, &self.recoveries);
    }

    pub fn stats(&self) -> StoreStats {
        self.count_recoveries();
        #[cfg(feature = "cuda")]
        for rows in self.members.iter().filter_map(|one| one.rows.as_ref()) {
            rows.report_counts();
        }
        self.counters.stats()
    }
}

/// Counts of the recoveries of controllers.
type Recoveries = Arc<[Arc<AtomicU64>]>;

fn count_recoveries(counters: &StoreCounters, recoveries: &Recoveries) {
    let all = recoveries.iter().map(|one| one.load(Ordering::Relaxed));
    counters.raise(StoreCounter::Recoveries, all.sum());
}

/// Adds what a member's GPU has counted since `last` to the store's counters.
#[cfg(feature = "cuda")]
fn add_counts(counters: &StoreCounters, now: &nvme_cuda::RowCounts, last: &nvme_cuda::RowCounts) {
    use StoreCounter::*;
    for (counter, now, then) in [
        (OwnedGathers, now.owned, last.owned),
        (SharedGathers, now.shared, last.shared),
        (OwnedScatters, now.owned_scatters, last.owned_scatters),
        (SharedScatters, now.shared_scatters, last.shared_scatters),
        (BegunGathers, now.begun, last.begun),
        (LateRows, now.late_rows, last.late_rows),
        (FailedRows, now.failed_rows, last.failed_rows),
        (RowsRead, now.read.rows, last.read.rows),
        (BytesRead, now.read.bytes, last.read.bytes),
        (RowsWritten, now.written.rows, last.written.rows),
        (BytesWritten, now.written.bytes, last.written.bytes),
        (UniqueAsked, now.unique_asked, last.unique_asked),
        (UniqueRead, now.unique_read, last.unique_read),
        (CacheAsked, now.cache_asked, last.cache_asked),
        (CacheHits, now.cache_hits, last.cache_hits),
        (WaitedNs, now.waited_ns, last.waited_ns),
        // A gauge: the sum of the members' wraps around together with its parts.
        (LaunchesUnderWay, now.under_way, last.under_way),
    ] {
        counters.add(counter, now.wrapping_sub(then));
    }
    let launch = |of: &nvme_cuda::RowCounts| (of.last_blocks, of.last_registers);
    if launch(now) != launch(last) {
        counters.set(LaunchBlocks, now.last_blocks);
        counters.set(LaunchRegisters, now.last_registers);
    }
}

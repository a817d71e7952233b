//! The index in memory: slots with their pages, the order of their last use, and the slots that are free.
//! When a store is opened it is rebuilt from the checkpoint and the log, whose records decide which page a
//! slot holds.
//!
//! Freeing is logged in two steps, between which the index is not locked: what dies while the drive is written is not
//! in the records of that write, and its slot is not free after it.

use crate::key::PageKey;
use crate::record::PageRecord;
use std::collections::{HashMap, VecDeque};

/// No neighbour in the order of use.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    /// Nothing is in it, and the log says so.
    Free,
    /// A page is being written that is not committed.
    Saving,
    /// It holds a committed page.
    Live,
    /// Its page is not found any more. It is free once that is logged and no one reads from it.
    Dead { is_logged: bool },
}

#[derive(Clone, Copy)]
struct SlotEntry {
    record: PageRecord,
    state: SlotState,
    pins: u32,
    older: u32,
    newer: u32,
}

const UNUSED: SlotEntry = SlotEntry {
    record: PageRecord {
        key: PageKey([0; PageKey::BYTES]),
        generation: 0,
        checksum: 0,
        slot: 0,
        length: 0,
    },
    state: SlotState::Free,
    pins: 0,
    older: NONE,
    newer: NONE,
};

/// Pages by their keys, and slots by their state. Pages that no one pins are in the order of their last use.
pub(crate) struct PageIndex {
    slots: Vec<SlotEntry>,
    live: HashMap<PageKey, u32>,
    saving: HashMap<PageKey, u32>,
    /// The front was free for longest: a late write of its last page has had the most time to arrive.
    free: VecDeque<u32>,
    /// Dead slots whose freeing is not logged yet. The first `logging` of them are in records that are being written,
    /// or in a write that failed.
    unlogged: Vec<u32>,
    logging: usize,
    oldest: u32,
    newest: u32,
}

impl PageIndex {
    /// Makes an index of `slots` slots with room for `pages` pages. Slots are free after [`restored`](Self::restored).
    pub fn new(slots: u32, pages: usize) -> Self {
        Self {
            slots: vec![UNUSED; slots as usize],
            live: HashMap::with_capacity(pages.min(slots as usize)),
            saving: HashMap::new(),
            free: VecDeque::new(),
            unlogged: Vec::new(),
            logging: 0,
            oldest: NONE,
            newest: NONE,
        }
    }

    /// Adds a page that a checkpoint or the log names, as the one used last.
    ///
    /// # Errors
    /// The rule that the record breaks.
    pub fn restore(&mut self, record: &PageRecord, page_bytes: u32) -> Result<(), &'static str> {
        let Some(entry) = self.slots.get_mut(record.slot as usize) else {
            return Err("a record names a slot that does not exist");
        };
        if !(1..=page_bytes).contains(&record.length) {
            return Err("a record names a page of a length that does not fit into a slot");
        }
        if entry.state != SlotState::Free {
            return Err("a record commits a page to a slot that holds one");
        }
        if self.live.contains_key(&record.key) {
            return Err("a record commits a page whose key is there");
        }
        entry.record = *record;
        entry.state = SlotState::Live;
        self.live.insert(record.key, record.slot);
        self.link(record.slot);
        Ok(())
    }

    /// Removes a page that the log frees.
    ///
    /// # Errors
    /// The rule that the record breaks.
    pub fn restore_free(&mut self, record: &PageRecord) -> Result<(), &'static str> {
        let entry = self.slots.get(record.slot as usize);
        let entry = entry.filter(|entry| entry.state == SlotState::Live && entry.record == *record);
        if entry.is_none() {
            return Err("a record frees a page that is not there");
        }
        self.unlink(record.slot);
        self.live.remove(&record.key);
        self.slots[record.slot as usize].state = SlotState::Free;
        Ok(())
    }

    /// Ends the recovery: slots without a page are free.
    pub fn restored(&mut self) {
        let slots = self.slots.iter().zip(0..);
        let free = slots.filter(|(entry, _)| entry.state == SlotState::Free);
        self.free = free.map(|(_, slot)| slot).collect();
    }

    /// Returns the number of pages that are found.
    pub fn pages(&self) -> usize {
        self.live.len()
    }

    /// Returns the number of slots that can be written at once.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of slots that are free once the log says so: no one reads from them.
    pub fn dead(&self) -> usize {
        let is_unused = |slot: &&u32| self.slots[**slot as usize].pins == 0;
        self.unlogged.iter().filter(is_unused).count()
    }

    /// True if the key has a committed page.
    pub fn contains(&self, key: &PageKey) -> bool {
        self.live.contains_key(key)
    }

    /// Returns the length of the page of a key in bytes.
    pub fn length(&self, key: &PageKey) -> Option<u32> {
        let slot = *self.live.get(key)?;
        Some(self.slots[slot as usize].record.length)
    }

    /// True if a page of this key is being written.
    pub fn is_saving(&self, key: &PageKey) -> bool {
        self.saving.contains_key(key)
    }

    /// Returns the page of a key; it stays in its slot until [`unpin`](Self::unpin).
    pub fn pin(&mut self, key: &PageKey) -> Option<PageRecord> {
        let slot = *self.live.get(key)?;
        if self.slots[slot as usize].pins == 0 {
            self.unlink(slot);
        }
        let entry = &mut self.slots[slot as usize];
        entry.pins += 1;
        Some(entry.record)
    }

    /// Takes one pin away; without any the page is the one that was used last, or its slot is free.
    pub fn unpin(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        entry.pins -= 1;
        if entry.pins > 0 {
            return;
        }
        match entry.state {
            SlotState::Live => self.link(slot),
            SlotState::Dead { is_logged: true } => self.set_free(slot),
            _ => {}
        }
    }

    /// Makes the page of a key the one that was used last.
    pub fn touch(&mut self, key: &PageKey) {
        if self.pin(key).is_some() {
            let slot = self.live[key];
            self.unpin(slot);
        }
    }

    /// Takes a free slot for a page that is going to be written.
    pub fn reserve(&mut self, key: PageKey) -> Option<u32> {
        let slot = self.free.pop_front()?;
        let entry = &mut self.slots[slot as usize];
        entry.state = SlotState::Saving;
        entry.record.key = key;
        self.saving.insert(key, slot);
        Some(slot)
    }

    /// Gives a slot back whose page was not committed, as the one to be used last.
    pub fn release(&mut self, slot: u32) {
        let key = self.slots[slot as usize].record.key;
        self.saving.remove(&key);
        self.set_free(slot);
    }

    /// Makes the page of a reserved slot one that is found.
    pub fn commit(&mut self, record: &PageRecord) {
        let entry = &mut self.slots[record.slot as usize];
        entry.record = *record;
        entry.state = SlotState::Live;
        self.saving.remove(&record.key);
        self.live.insert(record.key, record.slot);
        self.link(record.slot);
    }

    /// Makes a page one that is not found, if it is still the one of `generation`; returns true then.
    pub fn forget(&mut self, key: &PageKey, generation: u64) -> bool {
        let slot = self.live.get(key).copied();
        let of = |slot: &u32| self.slots[*slot as usize].record.generation == generation;
        let Some(slot) = slot.filter(of) else {
            return false;
        };
        self.kill(slot);
        true
    }

    /// Makes the page of a key one that is not found; returns true if there was one.
    pub fn remove(&mut self, key: &PageKey) -> bool {
        let slot = self.live.get(key).copied();
        slot.inspect(|slot| self.kill(*slot)).is_some()
    }

    /// Makes all pages ones that are not found.
    pub fn clear(&mut self) {
        let slots: Vec<u32> = self.live.values().copied().collect();
        slots.into_iter().for_each(|slot| self.kill(slot));
    }

    /// Makes the page one that is not found that was used before all others and is not pinned.
    pub fn evict(&mut self) -> bool {
        let oldest = self.oldest;
        if oldest != NONE {
            self.kill(oldest);
        }
        oldest != NONE
    }

    fn kill(&mut self, slot: u32) {
        if self.slots[slot as usize].pins == 0 {
            self.unlink(slot);
        }
        let entry = &mut self.slots[slot as usize];
        entry.state = SlotState::Dead { is_logged: false };
        self.live.remove(&entry.record.key);
        self.unlogged.push(slot);
    }

    /// Returns the pages whose freeing is not logged yet, for one write of the journal.
    pub fn begin_logging(&mut self) -> Vec<PageRecord> {
        self.logging = self.unlogged.len();
        let record = |slot: &u32| self.slots[*slot as usize].record;
        self.unlogged.iter().map(record).collect()
    }

    /// Notes that the log, or a checkpoint, knows of the pages that [`begin_logging`](Self::begin_logging) returned last.
    pub fn end_logging(&mut self) {
        let logged: Vec<u32> = self.unlogged.drain(..self.logging).collect();
        self.logging = 0;
        for slot in logged {
            let entry = &mut self.slots[slot as usize];
            entry.state = SlotState::Dead { is_logged: true };
            if entry.pins == 0 {
                self.set_free(slot);
            }
        }
    }

    /// Returns all pages that are found, in the order of their last use; pinned ones are in use.
    pub fn snapshot(&self) -> Vec<PageRecord> {
        let mut records = Vec::with_capacity(self.live.len());
        let mut slot = self.oldest;
        while let Some(entry) = self.slots.get(slot as usize) {
            records.push(entry.record);
            slot = entry.newer;
        }
        let is_pinned = |entry: &&SlotEntry| entry.pins > 0 && entry.state == SlotState::Live;
        let pinned = self.slots.iter().filter(is_pinned);
        records.extend(pinned.map(|entry| entry.record));
        records
    }

    fn set_free(&mut self, slot: u32) {
        self.slots[slot as usize].state = SlotState::Free;
        self.free.push_back(slot);
    }

    /// Puts a page at the end of the order of use.
    fn link(&mut self, slot: u32) {
        let newest = self.newest;
        let entry = &mut self.slots[slot as usize];
        (entry.older, entry.newer) = (newest, NONE);
        match self.slots.get_mut(newest as usize) {
            Some(before) => before.newer = slot,
            None => self.oldest = slot,
        }
        self.newest = slot;
    }

    /// Takes a page out of the order of use.
    fn unlink(&mut self, slot: u32) {
        let SlotEntry { older, newer, .. } = self.slots[slot as usize];
        match self.slots.get_mut(older as usize) {
            Some(before) => before.newer = newer,
            None => self.oldest = newer,
        }
        match self.slots.get_mut(newer as usize) {
            Some(after) => after.older = older,
            None => self.newest = older,
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "index/tests.rs"]
mod tests;

//! Pages of an area that a process has for itself, or shares.

use crate::{SharedPageStore, SharedPins};
use nvme_kv::{
    AreaLayout, BlockMedium, KvStats, PageKey, PageStore, RecoveryReport, Result, StoreOutcome,
    WeakPins,
};
use std::sync::Arc;

/// The pages of an area that this process has for itself, or shares with others. The calls are those of [`PageStore`].
pub enum OpenedArea<M: BlockMedium + 'static> {
    /// This process alone has the area.
    Own(Arc<PageStore<M>>),
    /// Processes share it.
    Shared(Arc<SharedPageStore<M>>),
}

impl<M: BlockMedium + 'static> Clone for OpenedArea<M> {
    fn clone(&self) -> Self {
        match self {
            Self::Own(pages) => Self::Own(Arc::clone(pages)),
            Self::Shared(pages) => Self::Shared(Arc::clone(pages)),
        }
    }
}

/// Pages that stay in their places until this is dropped, or the area is closed, which this does not keep open.
pub enum AreaPins<M: BlockMedium + 'static> {
    /// Pins of an area of this process.
    Own(WeakPins<PageStore<M>, M>),
    /// Pins that the owner of the area holds.
    Shared(SharedPins<M>),
}

impl<M: BlockMedium + 'static> AreaPins<M> {
    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        match self {
            Self::Own(pins) => pins.len(),
            Self::Shared(pins) => pins.len(),
        }
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<M: BlockMedium + Send + Sync + 'static> OpenedArea<M> {
    /// As [`PageStore::key`].
    pub fn key(&self, hash: &[u8], part: u32) -> PageKey {
        match self {
            Self::Own(pages) => pages.key(hash, part),
            Self::Shared(pages) => pages.key(hash, part),
        }
    }

    /// As [`PageStore::lengths`]. Without an owner no page is found.
    pub fn lengths(&self, keys: &[PageKey]) -> Vec<Option<u32>> {
        match self {
            Self::Own(pages) => pages.lengths(keys),
            Self::Shared(pages) => pages.lengths(keys),
        }
    }

    /// As [`PageStore::touch`].
    pub fn touch(&self, keys: &[PageKey]) {
        match self {
            Self::Own(pages) => pages.touch(keys),
            Self::Shared(pages) => pages.touch(keys),
        }
    }

    /// Pins the first pages that are found without a gap.
    pub fn pin_prefix(&self, keys: &[PageKey]) -> AreaPins<M> {
        match self {
            Self::Own(pages) => AreaPins::Own(WeakPins::of_prefix(pages, keys)),
            Self::Shared(pages) => AreaPins::Shared(pages.pin_prefix(keys)),
        }
    }

    /// As [`PageStore::store_all`].
    pub fn store_all(&self, pages: &[(PageKey, &[u8])]) -> Vec<Result<StoreOutcome>> {
        match self {
            Self::Own(store) => store.store_all(pages),
            Self::Shared(store) => store.store_all(pages),
        }
    }

    /// As [`PageStore::load_all`].
    pub fn load_all(&self, pages: &mut [(PageKey, &mut [u8])]) -> Vec<Result<usize>> {
        match self {
            Self::Own(store) => store.load_all(pages),
            Self::Shared(store) => store.load_all(pages),
        }
    }

    /// As [`PageStore::remove`].
    pub fn remove(&self, keys: &[PageKey]) -> Result<usize> {
        match self {
            Self::Own(pages) => pages.remove(keys),
            Self::Shared(pages) => pages.remove(keys),
        }
    }

    /// As [`PageStore::clear`].
    pub fn clear(&self) -> Result<()> {
        match self {
            Self::Own(pages) => pages.clear(),
            Self::Shared(pages) => pages.clear(),
        }
    }

    /// As [`PageStore::checkpoint`].
    pub fn checkpoint(&self) -> Result<()> {
        match self {
            Self::Own(pages) => pages.checkpoint(),
            Self::Shared(pages) => pages.checkpoint(),
        }
    }

    /// As [`PageStore::stats`].
    pub fn stats(&self) -> Result<KvStats> {
        match self {
            Self::Own(pages) => Ok(pages.stats()),
            Self::Shared(pages) => pages.stats(),
        }
    }

    /// Returns the layout of the area, and what opening it found.
    pub fn area(&self) -> Result<(AreaLayout, RecoveryReport)> {
        match self {
            Self::Own(pages) => Ok((pages.layout(), pages.recovery())),
            Self::Shared(pages) => pages.area(),
        }
    }

    /// Returns whether this process owns the area, the number of the opening, and lookups that no owner answered.
    pub fn role(&self) -> Result<(bool, u32, u64)> {
        match self {
            Self::Own(pages) => Ok((true, pages.epoch(), 0)),
            Self::Shared(pages) => {
                let (is_owner, epoch) = pages.owner()?;
                Ok((is_owner, epoch, pages.unanswered()))
            }
        }
    }
}

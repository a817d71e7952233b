//! A command as the collective and the shared queue take it.

use crate::group::{Group, transpose, unroll};
use crate::mem::SqRing;
use crate::queue_pair::{Data, Place};
use crate::spec::Sqe;

/// What a lane submits.
#[derive(Clone, Copy, Debug)]
pub struct Command<'d> {
    /// The entry, without CID and data pointer.
    pub sqe: Sqe,
    /// Where its data lies. The memory belongs to the command until it has ended.
    pub(crate) place: Place<'d>,
    /// What its end is told to: a result cell (shared queue) or a word for the caller (collective).
    /// Below [`MAX_TAGS`](crate::queue_state::MAX_TAGS).
    pub tag: u32,
    /// Whether the command defines dword 0 of its completion; reading it costs another load.
    pub wants_dw0: bool,
}

impl<'d> Command<'d> {
    /// A command that defines no dword 0, as all of the NVM command set's reads and writes.
    #[inline(always)]
    pub const fn new(sqe: Sqe, data: Data<'d>, tag: u32) -> Self {
        Self {
            sqe,
            place: Place::of(data),
            tag,
            wants_dw0: false,
        }
    }

    /// The same with other data.
    #[inline(always)]
    pub const fn with_data(mut self, data: Data<'d>) -> Self {
        self.place = Place::of(data);
        self
    }

    /// The same, and whether dword 0 of its completion is wanted: one more read of the bus.
    #[inline(always)]
    pub const fn wanting_dw0(mut self, wants: bool) -> Self {
        self.wants_dw0 = wants;
        self
    }
}

/// The index of no entry.
pub(crate) const NO_ENTRY: u32 = u32::MAX;

/// Writes the entries of the members that have one, each at its ring index.
///
/// Eight lanes write an entry together where the group has octets: one full 64-byte write on the bus.
#[inline(always)]
pub(crate) fn write_entries<G: Group>(group: &G, ring: &SqRing<'_>, index: u32, sqe: Sqe) {
    if !group.octets() {
        if index != NO_ENTRY {
            ring.write(index, sqe);
        }
        return;
    }
    let whole = sqe.to_words();
    let mut words = [0; 8];
    unroll!(8, word => { words[word] = whole[word]; });
    transpose(group, &mut words);
    let word = group.rank() & 7;
    unroll!(8, member => {
        let index = group.of_octet(index, member as u32);
        if index != NO_ENTRY {
            ring.write_word(index, word, words[member]);
        }
    });
}

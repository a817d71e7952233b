//! A command as the collective and the shared queue take it.

use crate::group::{Group, transpose, unroll};
use crate::mem::SqRing;
use crate::queue_pair::Data;
use crate::spec::Sqe;

/// What a lane submits.
#[derive(Clone, Copy, Debug)]
pub struct Command<'d> {
    /// The entry, without CID and data pointer.
    pub sqe: Sqe,
    /// Where its data lies. The memory belongs to the command until it has ended.
    pub data: Data<'d>,
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
            data,
            tag,
            wants_dw0: false,
        }
    }
}

/// Writes the entries of the members that have one, each at its ring index.
///
/// Eight lanes write an entry together where the group has octets: one full 64-byte write on the bus.
#[inline(always)]
pub(crate) fn write_entries<G: Group>(group: &G, ring: &SqRing<'_>, entry: Option<(u32, Sqe)>) {
    const NONE: u32 = u32::MAX;
    if !group.octets() {
        if let Some((index, sqe)) = entry {
            ring.write(index, sqe);
        }
        return;
    }
    let (index, mut words) = match entry {
        Some((index, sqe)) => (index, sqe.to_words()),
        None => (NONE, [0; 8]),
    };
    transpose(group, &mut words);
    let word = group.rank() & 7;
    unroll!(8, member => {
        let index = group.of_octet(index, member as u32);
        if index != NONE {
            ring.write_word(index, word, words[member]);
        }
    });
}

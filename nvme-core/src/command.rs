//! A command for a [`CollectiveQueue`](crate::CollectiveQueue) or a [`SharedQueue`](crate::SharedQueue), and the stores
//! of its entry into the ring.

use crate::group::{GroupVote, ThreadGroup, transpose, unroll};
use crate::mem::SqRing;
use crate::queue_pair::{CommandData, FlatData};
use crate::spec::Sqe;

/// A command of one member.
#[derive(Clone, Copy, Debug)]
pub struct MemberCommand<'d> {
    /// The entry, without CID and data pointer.
    pub sqe: Sqe,
    /// Location of its data. The memory belongs to the command until the command has ended.
    pub(crate) data: FlatData<'d>,
    /// Destination of its result: a result cell (shared queue) or a word for the caller (collective).
    /// Below [`MAX_TAGS`](crate::queue_state::MAX_TAGS).
    pub tag: u32,
    /// True if dword 0 of the completion is wanted; reading it costs another load.
    pub wants_dw0: bool,
}

impl<'d> MemberCommand<'d> {
    /// Makes a command that wants no dword 0, as all reads and writes of the NVM command set.
    #[inline(always)]
    pub const fn new(sqe: Sqe, data: CommandData<'d>, tag: u32) -> Self {
        Self {
            sqe,
            data: FlatData::of(data),
            tag,
            wants_dw0: false,
        }
    }

    /// Replaces the data.
    #[inline(always)]
    pub const fn with_data(mut self, data: CommandData<'d>) -> Self {
        self.data = FlatData::of(data);
        self
    }

    /// Sets whether dword 0 of the completion is wanted: one more read of the bus.
    #[inline(always)]
    pub const fn wanting_dw0(mut self, wants: bool) -> Self {
        self.wants_dw0 = wants;
        self
    }
}

/// Entries that one store of 32 lanes covers, eight lanes an entry.
pub(crate) const ROW: u32 = 4;

/// Returns the index, among the group's entries, of the one that a member with `mine` in `vote` writes.
///
/// If a whole warp takes part, its four tiles write neighbouring entries in the same instruction: whole lines
/// of 128 bytes, which the bus carries with one header each.
#[inline(always)]
pub(crate) fn entry_of<G: ThreadGroup>(group: &G, vote: GroupVote) -> u32 {
    let rank = group.rank();
    if group.tiles() && vote.leading == vote.total && rank < vote.total & !31 {
        (rank & !31) + (rank & 7) * ROW + rank / 8 % ROW
    } else {
        vote.before
    }
}

/// The index that stands for no entry.
pub(crate) const NO_ENTRY: u32 = u32::MAX;

/// Writes the entries of the members that have one, each at its ring index.
///
/// In a group with tiles eight lanes write an entry together: one full 64-byte write on the bus.
#[inline(always)]
pub(crate) fn write_entries<G: ThreadGroup>(group: &G, ring: &SqRing<'_>, index: u32, sqe: Sqe) {
    if !group.tiles() {
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
        let index = group.of_tile(index, member as u32);
        if index != NO_ENTRY {
            ring.write_word(index, word, words[member]);
        }
    });
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    struct Member {
        rank: u32,
        tiles: bool,
    }

    impl ThreadGroup for Member {
        fn size(&self) -> u32 {
            96
        }

        fn rank(&self) -> u32 {
            self.rank
        }

        fn sync(&self) {}

        fn vote(&self, _mine: bool) -> GroupVote {
            unreachable!("places are worked out from a vote")
        }

        fn broadcast(&self, value: u32) -> u32 {
            value
        }

        fn tiles(&self) -> bool {
            self.tiles
        }
    }

    /// Returns the entry index of each member in `yes`, when exactly the members in `yes` vote yes.
    fn places(tiles: bool, yes: &[u32]) -> Vec<u32> {
        let leading = (0u32..).zip(yes).take_while(|(rank, one)| rank == *one);
        let leading = leading.count() as u32;
        let place_of = |(before, rank): (u32, &u32)| {
            let member = Member { rank: *rank, tiles };
            let vote = GroupVote {
                total: yes.len() as u32,
                before,
                leading,
            };
            entry_of(&member, vote)
        };
        (0..).zip(yes).map(place_of).collect()
    }

    #[test]
    fn every_entry_is_taken_once_whichever_members_submit() {
        for tiles in [false, true] {
            for total in 0..=96 {
                for gap in [None, Some(0), Some(40)] {
                    let yes: Vec<u32> = (0..96).filter(|rank| Some(*rank) != gap).collect();
                    let yes = &yes[..total.min(yes.len())];
                    let mut taken = places(tiles, yes);
                    taken.sort_unstable();
                    assert!(taken.iter().copied().eq(0..yes.len() as u32), "{yes:?}");
                }
            }
        }
    }

    #[test]
    fn tiles_of_a_whole_warp_write_neighbours() {
        let all: Vec<u32> = (0..70).collect();
        let places = places(true, &all);
        for warp in places[..64].chunks(32) {
            for member in 0..8 {
                let row: Vec<u32> = (0..4).map(|tile| warp[tile * 8 + member]).collect();
                assert!(row[0].is_multiple_of(ROW));
                assert!(row.windows(2).all(|two| two[0] + 1 == two[1]), "{row:?}");
            }
        }
        assert_eq!(places[64..], [64, 65, 66, 67, 68, 69]);
    }
}

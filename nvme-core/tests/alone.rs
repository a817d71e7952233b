//! A group of one: its one member's values are the results of every exchange and vote.
#![cfg(not(loom))]

use nvme_core::group::{GroupVote, LoneThread, ThreadGroup};

#[test]
fn one_member_agrees_with_itself() {
    assert_eq!(
        (LoneThread.size(), LoneThread.rank(), LoneThread.leads()),
        (1, 0, true)
    );
    for (mine, count) in [(false, 0), (true, 1)] {
        let vote = GroupVote {
            total: count,
            before: 0,
            leading: count,
        };
        assert_eq!(LoneThread.vote(mine), vote);
    }
    assert_eq!(LoneThread.broadcast(7), 7);
    LoneThread.sync();
}

/// Exchanges with the seven neighbours of a tile, which a lone thread lacks, return the thread's
/// own value.
#[test]
fn one_member_is_no_tile() {
    assert!(!LoneThread.tiles());
    for other in 0..8 {
        assert_eq!(LoneThread.of_tile(42, other), 42);
        assert_eq!(LoneThread.swap(u64::MAX - 1, other), u64::MAX - 1);
    }
}

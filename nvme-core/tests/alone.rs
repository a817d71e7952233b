//! A group of one: everything that a larger group agrees on is what its one member says.
#![cfg(not(loom))]

use nvme_core::group::{Alone, Group, Vote};

#[test]
fn one_member_agrees_with_itself() {
    assert_eq!((Alone.size(), Alone.rank(), Alone.leads()), (1, 0, true));
    for (mine, count) in [(false, 0), (true, 1)] {
        let vote = Vote {
            total: count,
            before: 0,
            leading: count,
        };
        assert_eq!(Alone.vote(mine), vote);
    }
    assert_eq!(Alone.broadcast(7), 7);
    Alone.sync();
}

/// What is asked of the seven neighbours that it lacks is answered by the member itself.
#[test]
fn one_member_is_no_tile() {
    assert!(!Alone.tiles());
    for other in 0..8 {
        assert_eq!(Alone.of_tile(42, other), 42);
        assert_eq!(Alone.swap(u64::MAX - 1, other), u64::MAX - 1);
    }
}

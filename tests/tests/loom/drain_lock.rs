//! The release of the drain word must also order the next holder but one, past a holder that found nothing.

use loom::thread;
use nvme_core::DrainResult;
use nvme_core::group::LoneThread;
use nvme_core::spec::Status;
use nvme_core::sync::{spin, uncontended};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::model::{Bound, Stage, check, finish, place};
use std::sync::Arc;

#[test]
fn a_late_read_and_a_holder_that_finds_nothing() {
    check(
        "one drains and reads dword 0 late, another drains nothing, a third gives the entry back: it is not overwritten before it is read",
        Bound::Staged,
        || {
            // Given back by quarters: two entries.
            let (rig, stage) = (Arc::new(Rig::new(8, 7, 2, 0)), Stage::default());
            let tokens = [0, 1].map(|cell| place(&rig.shared(), cell, cell));
            let mut hand = Hand::new(&rig);
            let fetched = [hand.fetch().unwrap(), hand.fetch().unwrap()];
            hand.complete(fetched[0].cid(), Status::SUCCESS, fetched[0].cdw10);
            let holders = [DrainResult::Took(1), DrainResult::Took(0)].map(|takes| {
                let (rig, stage) = (rig.clone(), stage.clone());
                thread::spawn(move || {
                    let turn = u64::from(takes == DrainResult::Took(0));
                    stage.wait(turn);
                    // A load may still find the entry from before the completion.
                    while uncontended(|| rig.shared().drain(&LoneThread)) != takes {
                        spin();
                    }
                    stage.reach(turn + 1);
                })
            });
            stage.wait(2);
            hand.complete(fetched[1].cid(), Status::SUCCESS, fetched[1].cdw10);
            while rig.shared().drain(&LoneThread) != DrainResult::Took(1) {
                spin();
            }
            hand.scribble();
            holders
                .into_iter()
                .for_each(|holder| holder.join().unwrap());
            for (token, number) in tokens.into_iter().zip(0..) {
                finish(&rig.shared(), &token, number);
            }
        },
    );
}

//! Tests of stores whose drive fails: lost commands, resets, refused writes, a drive that has left.

use super::super::testing::{SHORT, every_kind, of_sim, options, pattern};
use super::super::{Error, Store, StoreOptions, lane};
use super::cause;

#[test]
fn a_store_works_after_a_lost_command() {
    for fault in ["drop@op=read,nth=3", "stubborn:10s@op=read,nth=3"] {
        let options = StoreOptions {
            timeout: SHORT,
            ..options()
        };
        let store = Store::open(&format!("sim:mem?size=4MiB&fault={fault}"), &options).unwrap();
        let mut all = vec![0; 4 << 20];
        pattern(0, 1, &mut all);
        store.write_at(0, &all).unwrap();
        let mut back = vec![0; all.len()];
        let error = store.read_at(0, &mut back).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{fault}: {error}");
        store.read_at(0, &mut back).unwrap();
        assert!(back == all, "{fault}");
    }
}

#[test]
fn a_command_that_a_reset_took_away_is_sent_again() {
    let store = of_sim("size=4MiB&fault=cfs@op=read,nth=4");
    let mut all = vec![0; 4 << 20];
    pattern(0, 2, &mut all);
    store.write_at(0, &all).unwrap();
    let mut back = vec![0; all.len()];
    store.read_at(0, &mut back).unwrap();
    assert!(back == all);
    assert!(store.stats().retries > 0);
}

/// Commands of a call that ended early hold their buffers until they end, and are none of the next call's.
#[test]
fn a_call_that_ended_early_harms_no_later_one() {
    let mut stores = every_kind();
    let delayed = of_sim("size=1MiB&fault=delay:2ms@op=read,every=2");
    stores.push(("delayed", delayed, None));
    for (name, store, _file) in stores {
        for round in 1..10u8 {
            for member in &store.space.members {
                let mut lanes = member.pool.take(1000, 1 << 30, usize::MAX);
                for lane in &mut lanes.lanes {
                    lane.begin().unwrap();
                    for bytes in [member.most_bytes, 4096] {
                        let op = lane::LaneOperation::Read;
                        let command = lane::LaneCommand {
                            op,
                            offset: 0,
                            bytes,
                        };
                        while lane.submit(&command, 0, &mut |_| ()).unwrap() {}
                    }
                    lane.ring().unwrap();
                    assert!(round > 1 || lane.in_flight() >= 8, "{name}");
                }
            }
            let data = vec![round; 300_000];
            store.write_at(1, &data).unwrap();
            let mut back = vec![0; data.len()];
            store.read_at(1, &mut back).unwrap();
            assert!(back == data, "{name}");
        }
    }
}

#[test]
fn a_refused_write_changes_nothing_beside_its_range() {
    // The edge is read, the write fails.
    let store = of_sim("size=1MiB&block=4096&fault=status:0x280@op=write,nth=2");
    store.write_at(0, &[9; 8192]).unwrap();
    let error = store.write_at(4000, &[1; 200]).unwrap_err();
    assert!(matches!(error, Error::Command { status, .. } if status.code() == 0x280));
    assert!(cause(error).contains("Write of 2 blocks from LBA 0"));
    let mut back = [0; 8192];
    store.read_at(0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 9));
    // A failed read of an edge ends the write before anything is written.
    let store = of_sim("size=1MiB&block=4096&fault=status:0x281@op=read,nth=1");
    let error = store.write_at(10, &[1; 200]).unwrap_err();
    assert!(matches!(error, Error::Command { status, .. } if status.code() == 0x281));
    store.write_at(10, &[1; 200]).unwrap();
    let failing = of_sim("size=1MiB&fault=status:0x6@op=flush,nth=1");
    assert!(cause(failing.flush().unwrap_err()).contains("Flush"));
    failing.flush().unwrap();
}

#[test]
fn a_drive_that_left_stays_gone() {
    let store = of_sim("size=1MiB&fault=allones@op=read,nth=2");
    store.read_at(0, &mut [0; 10]).unwrap();
    for _ in 0..3 {
        let error = store.read_at(0, &mut [0; 10]).unwrap_err();
        assert!(matches!(error, Error::Gone { .. }), "{error}");
        let error = store.write_at(0, &[0; 10]).unwrap_err();
        assert!(matches!(error, Error::Gone { .. }), "{error}");
        assert!(matches!(store.flush().unwrap_err(), Error::Gone { .. }));
    }
}

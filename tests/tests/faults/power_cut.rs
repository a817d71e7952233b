//! Data that a power cut keeps, and data that it loses: flush, FUA and the volatile write cache.

use nvme_core::spec::{Lba, Nsid, nvm};
use nvme_core::{AbortReason, CommandData, CommandOutcome};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, MemoryStore};
use nvme_tests::{Pair, Setup, with_pair};

const NS: Nsid = Nsid(1);

fn config(write_cache: bool) -> Config {
    let store = Box::new(MemoryStore::new(1 << 20).unwrap());
    Config {
        namespaces: vec![NamespaceConfig::new(512, store)],
        write_cache,
        ..Config::empty()
    }
}

fn write(pair: &mut Pair<'_>, lba: u64, value: u8, fua: bool) {
    let area = pair.buffer(512);
    pair.memory.write(area.iova, &[value; 512]);
    let mut sqe = nvm::write(NS, Lba(lba), 1);
    if fua {
        sqe.cdw12 |= nvm::FUA;
    }
    let data = CommandData::Contiguous {
        iova: area.iova,
        len: 512,
    };
    assert!(pair.run(0, sqe, data).is_success());
}

/// Returns the block at `lba`, which holds one value throughout.
fn read(pair: &mut Pair<'_>, lba: u64) -> u8 {
    let area = pair.buffer(512);
    let data = CommandData::Contiguous {
        iova: area.iova,
        len: 512,
    };
    assert!(pair.run(0, nvm::read(NS, Lba(lba), 1), data).is_success());
    let mut got = [0; 512];
    pair.memory.read(area.iova, &mut got);
    assert!(
        got.iter().all(|byte| *byte == got[0]),
        "a torn block at {lba}"
    );
    got[0]
}

fn cut(pair: &mut Pair<'_>) {
    pair.sim.power_cut();
    pair.bring_up().unwrap();
}

#[test]
fn what_was_not_flushed_is_lost_and_the_rest_stays() {
    with_pair(config(true), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        assert!(pair.info.as_ref().unwrap().volatile_write_cache);
        write(pair, 0, 1, false);
        write(pair, 1, 1, false);
        assert!(pair.run(0, nvm::flush(NS), CommandData::None).is_success());
        assert_eq!(pair.sim.unflushed_bytes(), 0);
        write(pair, 1, 2, false);
        write(pair, 2, 2, false);
        write(pair, 3, 3, true);
        assert_eq!(
            read(pair, 1),
            2,
            "a read sees what was written, cached or not"
        );
        cut(pair);
        let after: Vec<u8> = (0..4).map(|lba| read(pair, lba)).collect();
        assert_eq!(after, [1, 1, 0, 3]);
    });
}

#[test]
fn without_a_write_cache_nothing_is_lost() {
    with_pair(config(false), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        assert!(!pair.info.as_ref().unwrap().volatile_write_cache);
        write(pair, 5, 9, false);
        cut(pair);
        assert_eq!(read(pair, 5), 9);
    });
}

#[test]
fn a_flush_of_every_namespace_keeps_every_namespace() {
    with_pair(config(true), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        write(pair, 0, 4, false);
        assert!(
            pair.run(0, nvm::flush(Nsid::ALL), CommandData::None)
                .is_success()
        );
        cut(pair);
        assert_eq!(read(pair, 0), 4);
    });
}

/// A reset of the controller is no power cut.
#[test]
fn a_reset_loses_nothing() {
    with_pair(config(true), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        write(pair, 7, 8, false);
        pair.bring_up().unwrap();
        assert_eq!(read(pair, 7), 8);
    });
}

#[test]
fn commands_in_flight_at_the_cut_end_as_aborted() {
    with_pair(config(true), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        let area = pair.buffer(512);
        let data = || CommandData::Contiguous {
            iova: area.iova,
            len: 512,
        };
        for lba in 0..5 {
            pair.submit(0, nvm::read(NS, Lba(lba), 1), data()).unwrap();
        }
        pair.io[0].ring();
        cut(pair);
        assert_eq!(pair.outstanding(), 0);
        let aborted = CommandOutcome::Aborted(AbortReason::ControllerReset);
        assert_eq!(
            pair.ended
                .iter()
                .filter(|end| end.outcome == aborted)
                .count(),
            5
        );
        assert_eq!(read(pair, 0), 0);
    });
}

//! Bring-up over controllers of every shape, and over ones that do not come up.

use nvme_core::spec::register::{Aqa, Cc, Csts, offset};
use nvme_core::spec::{Lba, Nsid, PageSize, Status, nvm};
use nvme_core::{BringupError, CommandData, RegisterAccess, shutdown};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Fault, FaultCondition, FaultRule, MemoryStore};
use nvme_tests::{Pair, Setup, with_pair};

fn namespace(block_bytes: u32, bytes: u64) -> NamespaceConfig {
    NamespaceConfig::new(block_bytes, Box::new(MemoryStore::new(bytes).unwrap()))
}

fn config() -> Config {
    Config {
        namespaces: vec![namespace(512, 1 << 20)],
        ..Config::empty()
    }
}

/// Writes a block through every queue pair and reads it back.
fn works(pair: &mut Pair<'_>, nsid: Nsid) {
    let block = u64::from(pair.limits(nsid).block_bytes);
    let buffer = pair.buffer(block);
    for queue in 0..pair.info.as_ref().unwrap().created as usize {
        let sent = vec![queue as u8 + 1; block as usize];
        let data = CommandData::Contiguous {
            iova: buffer.iova,
            len: block,
        };
        pair.memory.write(buffer.iova, &sent);
        assert!(
            pair.run(queue, nvm::write(nsid, Lba(queue as u64), 1), data)
                .is_success()
        );
        pair.memory.write(buffer.iova, &vec![0; block as usize]);
        assert!(
            pair.run(queue, nvm::read(nsid, Lba(queue as u64), 1), data)
                .is_success()
        );
        let mut got = vec![0; block as usize];
        pair.memory.read(buffer.iova, &mut got);
        assert_eq!(got, sent);
    }
    assert_eq!(
        pair.memory.refused(),
        [0; 0],
        "the controller reached for memory it was not given"
    );
}

#[test]
fn controllers_of_every_shape_come_up() {
    let base = Setup::default;
    let cases: [(&str, Config, Setup); 8] = [
        ("plain", config(), base()),
        (
            "queues of two",
            Config {
                mqes: 2,
                ..config()
            },
            Setup {
                queues: vec![(2, 2)],
                ..base()
            },
        ),
        (
            "wide doorbells",
            Config {
                dstrd: 10,
                ..config()
            },
            Setup {
                queues: vec![(16, 16); 3],
                ..base()
            },
        ),
        (
            "64-byte doorbells",
            Config {
                dstrd: 4,
                ..config()
            },
            Setup {
                queues: vec![(5, 7); 4],
                ..base()
            },
        ),
        (
            "4 KiB blocks",
            Config {
                namespaces: vec![namespace(4096, 1 << 20)],
                ..config()
            },
            base(),
        ),
        (
            "slow to be ready",
            Config {
                ready_delay_ns: 400_000_000,
                ..config()
            },
            base(),
        ),
        (
            "smallest admin rings",
            config(),
            Setup {
                admin: (2, 2),
                ..base()
            },
        ),
        (
            "64 KiB pages",
            Config {
                mpsmin: 4,
                mpsmax: 4,
                ..config()
            },
            Setup {
                memory: 32 << 20,
                ..base()
            },
        ),
    ];
    for (name, config, setup) in cases {
        println!("{name}");
        let queues = setup.queues.len() as u32;
        let (dstrd, mpsmin) = (config.dstrd, config.mpsmin);
        with_pair(config, setup, |pair| {
            pair.bring_up().unwrap();
            let info = pair.info.clone().unwrap();
            assert_eq!((info.created, info.queue_pairs), (queues, queues));
            assert_eq!(info.capabilities.dstrd, dstrd);
            assert_eq!(info.capabilities.page, PageSize::from_mps(mpsmin).unwrap());
            works(pair, Nsid(1));
        });
    }
}

#[test]
fn fewer_queues_than_asked_for_are_negotiated_down() {
    let setup = Setup {
        queues: vec![(8, 8); 6],
        ..Setup::default()
    };
    with_pair(
        Config {
            max_queues: 2,
            ..config()
        },
        setup,
        |pair| {
            // Only the doorbells of existing queues are mapped, so the plan contains no other queues.
            pair.io.truncate(2);
            pair.bring_up().unwrap();
            let info = pair.info.as_ref().unwrap();
            assert_eq!((info.queue_pairs, info.created), (2, 2));
            works(pair, Nsid(1));
        },
    );
}

#[test]
fn every_namespace_is_found_with_its_own_format() {
    let namespaces = vec![
        namespace(512, 1 << 20),
        namespace(4096, 2 << 20),
        namespace(512, 4096),
    ];
    with_pair(
        Config {
            namespaces,
            ..Config::empty()
        },
        Setup::default(),
        |pair| {
            pair.bring_up().unwrap();
            let found = pair.info.as_ref().unwrap().namespaces.clone();
            let shapes: Vec<_> = found
                .iter()
                .map(|ns| (ns.nsid.0, ns.block_bytes, ns.blocks))
                .collect();
            assert_eq!(shapes, [(1, 512, 2048), (2, 4096, 512), (3, 512, 8)]);
            assert!(found.iter().all(|ns| ns.is_supported()));
            for nsid in 1..=3 {
                works(pair, Nsid(nsid));
            }
        },
    );
}

#[test]
fn a_namespace_with_metadata_is_seen_and_refused() {
    let mut with_metadata = namespace(512, 1 << 20);
    with_metadata.metadata_bytes = 8;
    let config = Config {
        namespaces: vec![with_metadata],
        ..Config::empty()
    };
    with_pair(config, Setup::default(), |pair| {
        pair.bring_up().unwrap();
        let found = pair.info.as_ref().unwrap().namespaces[0];
        assert_eq!(found.metadata_bytes, 8);
        assert!(!found.is_supported());
    });
}

/// MDTS counts in units of CAP.MPSMIN, PRPs in CC.MPS.
#[test]
fn the_largest_transfer_counts_in_the_smallest_pages() {
    for (mpsmin, mdts, bytes) in [
        (0, 1, Some(8 << 10)),
        (2, 1, Some(32 << 10)),
        (1, 3, Some(64 << 10)),
        (0, 0, None),
    ] {
        let config = Config {
            mpsmin,
            mdts,
            ..config()
        };
        with_pair(
            config,
            Setup {
                memory: 64 << 20,
                ..Setup::default()
            },
            |pair| {
                pair.bring_up().unwrap();
                assert_eq!(
                    pair.info.as_ref().unwrap().max_transfer,
                    bytes,
                    "MPSMIN {mpsmin} MDTS {mdts}"
                );
            },
        );
    }
}

#[test]
fn a_ready_bit_that_sticks_is_an_error_within_its_deadline() {
    for nth in [1, 2] {
        let mut config = config();
        let when = FaultCondition {
            nth: Some(nth),
            ..FaultCondition::default()
        };
        config.faults.rules.push(FaultRule {
            when,
            what: Fault::StuckReady,
        });
        with_pair(config, Setup::default(), |pair| {
            // The first change of CC.EN sets it; the second one, at the next bring-up, clears it.
            let ready = nth == 1;
            if !ready {
                pair.bring_up().unwrap();
            }
            let before = pair.now_ns;
            let error = pair.bring_up().unwrap_err();
            assert!(
                matches!(error, BringupError::ReadyTimeout { ready: wanted, .. } if wanted == ready),
                "{error:?}"
            );
            let took_ms = (pair.now_ns - before) / 1_000_000;
            let BringupError::ReadyTimeout { ms, .. } = error else {
                unreachable!()
            };
            assert!(took_ms <= u64::from(ms) + 1, "{took_ms} ms, allowed {ms}");
        });
    }
}

#[test]
fn an_admin_command_that_fails_or_vanishes_is_named() {
    for (what, expected) in [
        (Fault::Drop, BringupError::CommandTimeout { opcode: 6 }),
        (
            Fault::Status(Status::INTERNAL_ERROR),
            BringupError::Command {
                opcode: 6,
                status: Status::INTERNAL_ERROR,
            },
        ),
        (Fault::AllOnes, BringupError::DeviceGone),
        (Fault::Cfs, BringupError::FatalStatus),
    ] {
        let mut config = config();
        let when = FaultCondition {
            qid: Some(0),
            opcode: Some(6),
            ..FaultCondition::default()
        };
        config.faults.rules.push(FaultRule { when, what });
        with_pair(config, Setup::default(), |pair| {
            let error = pair.bring_up().unwrap_err();
            match (error, expected) {
                // The controller may add DNR or More to the status that the fault names.
                (
                    BringupError::Command { opcode: 6, status },
                    BringupError::Command { status: wanted, .. },
                ) => assert_eq!(status.code(), wanted.code()),
                (error, expected) => assert_eq!(error, expected),
            }
        });
    }
}

#[test]
fn a_device_that_left_the_bus_is_gone() {
    let mut config = config();
    let when = FaultCondition {
        nth: Some(1),
        ..FaultCondition::default()
    };
    config.faults.rules.push(FaultRule {
        when,
        what: Fault::AllOnes,
    });
    with_pair(config, Setup::default(), |pair| {
        pair.bring_up().unwrap();
        pair.submit(0, nvm::flush(Nsid(1)), CommandData::None)
            .unwrap();
        pair.io[0].ring();
        pair.sim.step(pair.now_ns);
        assert_eq!(pair.registers().read32(offset::CSTS), u32::MAX);
        assert_eq!(pair.bring_up(), Err(BringupError::DeviceGone));
    });
}

/// A controller that firmware, or a driver that crashed, left enabled with other queues.
#[test]
fn a_controller_left_enabled_is_taken_over() {
    with_pair(config(), Setup::default(), |pair| {
        let bar = pair.registers();
        let mut aqa = Aqa(0);
        aqa.set_asqs_z(3);
        aqa.set_acqs_z(3);
        let old = pair.buffer(8192);
        bar.write32(offset::AQA, aqa.0);
        bar.write64(offset::ASQ, old.iova.0);
        bar.write64(offset::ACQ, old.iova.offset(4096).0);
        let mut cc = Cc(0);
        cc.set_iosqes(6);
        cc.set_iocqes(4);
        cc.set_en(true);
        bar.write32(offset::CC, cc.0);
        pair.sim.step(0);
        assert!(Csts(bar.read32(offset::CSTS)).rdy());
        pair.bring_up().unwrap();
        works(pair, Nsid(1));
    });
}

#[test]
fn shutdown_normal_and_abrupt_ends_disabled() {
    for kind in [
        shutdown::ShutdownKind::Normal,
        shutdown::ShutdownKind::Abrupt,
    ] {
        let config = Config {
            shutdown_delay_ns: 50_000_000,
            ..config()
        };
        with_pair(config, Setup::default(), |pair| {
            pair.bring_up().unwrap();
            let bar = pair.registers();
            let timeout_ms = pair.info.as_ref().unwrap().shutdown_timeout_ms;
            let mut machine = shutdown::ShutdownMachine::new(kind, timeout_ms);
            let mut saw_request = false;
            while let shutdown::ShutdownStep::Wait { until_ns } =
                machine.step(&bar, pair.now_ns).unwrap()
            {
                saw_request |= Cc(bar.read32(offset::CC)).shn() != 0;
                pair.sleep_until(until_ns);
            }
            assert!(saw_request);
            assert!(
                pair.now_ns >= 50_000_000,
                "it did not wait for the controller"
            );
            assert!(!Csts(bar.read32(offset::CSTS)).rdy());
            pair.bring_up().unwrap();
            works(pair, Nsid(1));
        });
    }
}

/// Bring-up may write no data that depend on what a page held before.
#[test]
fn bring_up_works_again_and_again() {
    with_pair(config(), Setup::default(), |pair| {
        for _ in 0..5 {
            pair.bring_up().unwrap();
            works(pair, Nsid(1));
        }
    });
}

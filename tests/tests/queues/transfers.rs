//! Data: every size and offset around the edges of pages, lists and MDTS, against reference bytes.

use nvme_core::spec::{Iova, Lba, Nsid, Status, nvm};
use nvme_core::{CommandData, PointerError, SubmitError, sgl};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, MemoryStore, Rule};
use nvme_tests::{PAGE, Pair, Rng, Setup, with_pair};

const NS: Nsid = Nsid(1);

fn config(block_bytes: u32, mdts: u8) -> Config {
    let store = Box::new(MemoryStore::new(4 << 20).unwrap());
    let namespaces = vec![NamespaceConfig::new(block_bytes, store)];
    Config {
        namespaces,
        mdts,
        ..Config::empty()
    }
}

fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

/// Writes random bytes from `iova` to `lba` and checks the namespace, then reads them back
/// elsewhere and checks that nothing around the buffer was changed.
fn round_trip(pair: &mut Pair<'_>, lba: u64, blocks: u64, from: Iova, to: Iova) {
    let len = blocks * u64::from(pair.limits(NS).block_bytes);
    let sent = random(&mut pair.rng.clone(), len as usize);
    pair.rng.word();
    pair.memory.write(from, &sent);
    assert!(
        pair.transfer(nvm::write, NS, Lba(lba), blocks, from)
            .is_success()
    );
    assert!(
        pair.transfer(nvm::compare, NS, Lba(lba), blocks, from)
            .is_success()
    );

    let guard = vec![0xA5; len as usize + 16];
    pair.memory.write(Iova(to.0 - 8), &guard);
    assert!(
        pair.transfer(nvm::read, NS, Lba(lba), blocks, to)
            .is_success()
    );
    let mut got = vec![0; len as usize + 16];
    pair.memory.read(Iova(to.0 - 8), &mut got);
    let end = got.len() - 8;
    assert!(
        got[8..end] == sent,
        "{blocks} blocks at {lba}, from {from} to {to}: wrong bytes"
    );
    assert_eq!(
        (&got[..8], &got[end..]),
        (&guard[..8], &guard[..8]),
        "bytes around the buffer"
    );
    assert_eq!(pair.memory.refused(), [0; 0]);
}

/// Lengths either side of one page, two pages, and a full list page; dword offsets at its edges.
#[test]
fn sizes_and_offsets_around_page_and_list_boundaries() {
    for block_bytes in [512u32, 4096] {
        let setup = Setup {
            memory: 24 << 20,
            max_bytes: 4 << 20,
            slots: 4,
            ..Setup::default()
        };
        with_pair(config(block_bytes, 0), setup, |pair| {
            pair.bring_up().unwrap();
            let (from, to) = (pair.buffer(3 << 20), pair.buffer(3 << 20));
            let per_page = PAGE / u64::from(block_bytes);
            let mut lengths = vec![1, per_page, 2 * per_page, 3 * per_page, 8 * per_page];
            // 512 entries fill a list page: 513 pages of data with the one in PRP1.
            lengths.extend([512 * per_page, 513 * per_page, 514 * per_page]);
            let around: Vec<u64> = lengths
                .iter()
                .flat_map(|len| [len - 1, *len, len + 1])
                .filter(|len| *len > 0)
                .collect();
            for blocks in around {
                for offset in [0, 4, 8, 508, 512, 4092] {
                    let other = (offset + 4) % PAGE;
                    let (from, to) = (
                        from.iova.offset(offset + PAGE),
                        to.iova.offset(other + PAGE),
                    );
                    round_trip(pair, blocks % 7, blocks, from, to);
                }
            }
        });
    }
}

/// Transfers around MDTS are split; the controller would refuse a piece above it.
#[test]
fn transfers_around_mdts_are_split() {
    for (mdts, mpsmin) in [(1, 0), (3, 0), (1, 1)] {
        let setup = Setup {
            memory: 24 << 20,
            slots: 4,
            breaks: &[Rule::TooLong],
            ..Setup::default()
        };
        with_pair(
            Config {
                mpsmin,
                ..config(512, mdts)
            },
            setup,
            |pair| {
                pair.bring_up().unwrap();
                let most = (PAGE << mpsmin << mdts) / 512;
                assert_eq!(pair.info.as_ref().unwrap().max_transfer, Some(most * 512));
                let (from, to) = (pair.buffer(1 << 20), pair.buffer(1 << 20));
                for blocks in [
                    most - 1,
                    most,
                    most + 1,
                    2 * most - 1,
                    2 * most,
                    2 * most + 1,
                    5 * most,
                ] {
                    let before = pair.ended.len();
                    round_trip(pair, 3, blocks, from.iova.offset(12), to.iova.offset(20));
                    let commands = (pair.ended.len() - before) as u64;
                    assert_eq!(commands, 3 * blocks.div_ceil(most), "{blocks} blocks");
                }
                let too_long = CommandData::Contiguous {
                    iova: from.iova,
                    len: (most + 1) * 512,
                };
                let status = pair.run(0, nvm::read(NS, Lba(0), most as u32 + 1), too_long);
                assert!(status.is(Status::INVALID_FIELD), "above MDTS: {status}");
            },
        );
    }
}

#[test]
fn transfers_stop_at_the_namespaces_boundaries() {
    let mut config = config(512, 5);
    config.namespaces[0].noiob = 24;
    with_pair(config, Setup::default(), |pair| {
        pair.bring_up().unwrap();
        assert_eq!(pair.limits(NS).boundary_blocks, 24);
        let (from, to) = (pair.buffer(64 << 10), pair.buffer(64 << 10));
        for (lba, blocks, pieces) in [(0, 24, 1), (23, 1, 1), (23, 2, 2), (10, 60, 3), (24, 48, 2)]
        {
            let before = pair.ended.len();
            round_trip(pair, lba, blocks, from.iova, to.iova.offset(8));
            assert_eq!(
                pair.ended.len() - before,
                3 * pieces,
                "{blocks} blocks from {lba}"
            );
        }
    });
}

/// The pages are in no order, and the SGL has a piece that is skipped.
#[test]
fn scattered_buffers_arrive_in_order() {
    with_pair(config(512, 0), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        let area = pair.buffer(16 * PAGE);
        let sent = random(&mut Rng::new(9), 3 * PAGE as usize);
        pair.memory.write(area.iova, &sent);
        assert!(
            pair.transfer(nvm::write, NS, Lba(0), 24, area.iova)
                .is_success()
        );

        let page = |index: u64| area.iova.offset(index * PAGE);
        let pages = [page(9), page(4), page(12), page(6)];
        let data = CommandData::Pages {
            offset: 100,
            len: 3 * PAGE,
            pages: &pages,
        };
        assert!(pair.run(0, nvm::read(NS, Lba(0), 24), data).is_success());
        let mut got = Vec::new();
        for (index, at) in pages.iter().enumerate() {
            let mut bytes = vec![0; PAGE as usize];
            pair.memory.read(*at, &mut bytes);
            let range = if index == 0 {
                100..4096
            } else if index == 3 {
                0..100
            } else {
                0..4096
            };
            got.extend_from_slice(&bytes[range]);
        }
        assert!(got == sent, "pages");

        let segments = [
            sgl::SglSegment::Data {
                iova: page(5).offset(17),
                len: 1000,
            },
            sgl::SglSegment::Discard { len: 24 },
            sgl::SglSegment::Data {
                iova: page(14),
                len: 2 * 4096,
            },
            sgl::SglSegment::Data {
                iova: page(3),
                len: 3072,
            },
        ];
        assert!(pair.info.as_ref().unwrap().sgl);
        assert!(
            pair.run(0, nvm::read(NS, Lba(0), 24), CommandData::Sgl(&segments))
                .is_success()
        );
        let mut got = vec![0; 1000];
        pair.memory.read(page(5).offset(17), &mut got);
        assert!(got == sent[..1000], "first segment");
        let mut got = vec![0; 8192];
        pair.memory.read(page(14), &mut got);
        assert!(got == sent[1024..1024 + 8192], "after what was discarded");
    });
}

/// Any buffer the core maps, the controller walks to the same bytes: random lengths, offsets and
/// pages, contiguous and scattered, at every page size.
#[test]
fn random_buffers_are_walked_as_they_were_mapped() {
    for mpsmin in [0u8, 1, 4] {
        let setup = Setup {
            memory: 32 << 20,
            slots: 4,
            seed: 77 + u64::from(mpsmin),
            ..Setup::default()
        };
        let config = Config {
            mpsmin,
            ..config(512, 0)
        };
        with_pair(config, setup, |pair| {
            pair.bring_up().unwrap();
            let page = pair.page().bytes();
            let (image, area) = (pair.buffer(4 << 20), pair.buffer(8 << 20));
            let content = random(&mut pair.rng.clone(), 4 << 20);
            pair.memory.write(image.iova, &content);
            for start in (0..8192).step_by(1024) {
                let from = image.iova.offset(start * 512);
                let written = pair.transfer(nvm::write, NS, Lba(start), 1024, from);
                assert!(written.is_success());
            }
            for _ in 0..80 {
                let blocks = 1 + pair.rng.below(2000);
                let lba = pair.rng.below(8192 - blocks);
                let offset = pair.rng.below(page / 4) * 4;
                let len = blocks * 512;
                let count = (offset + len).div_ceil(page);
                let mut pages: Vec<Iova> = (0..(8 << 20) / page)
                    .map(|index| area.iova.offset(index * page))
                    .collect();
                let scattered = pair.rng.below(2) == 0;
                if scattered {
                    for last in (1..pages.len()).rev() {
                        let other = pair.rng.below(last as u64 + 1) as usize;
                        pages.swap(last, other);
                    }
                }
                pages.truncate(count as usize);
                let data = if scattered {
                    CommandData::Pages {
                        offset,
                        len,
                        pages: &pages,
                    }
                } else {
                    CommandData::Contiguous {
                        iova: area.iova.offset(offset),
                        len,
                    }
                };
                let status = pair.run(0, nvm::read(NS, Lba(lba), blocks as u32), data);
                assert!(status.is_success(), "{status}");
                let mut got = vec![0; (count * page) as usize];
                for (at, bytes) in pages.iter().zip(got.chunks_mut(page as usize)) {
                    pair.memory.read(*at, bytes);
                }
                let (from, to) = (offset as usize, (offset + len) as usize);
                let expected = &content[lba as usize * 512..][..len as usize];
                assert!(
                    got[from..to] == *expected,
                    "{blocks} blocks at {offset}, {page}-byte pages"
                );
            }
            assert_eq!(pair.memory.refused(), [0; 0]);
        });
    }
}

#[test]
fn buffers_that_cannot_be_mapped_never_reach_the_controller() {
    with_pair(
        config(512, 0),
        Setup {
            max_bytes: 64 << 10,
            ..Setup::default()
        },
        |pair| {
            pair.bring_up().unwrap();
            let area = pair.buffer(PAGE);
            let commands = pair.sim.queue_stats(1).commands;
            let at = |iova, len| CommandData::Contiguous { iova, len };
            for (data, error) in [
                (at(area.iova.offset(2), 512), PointerError::Misaligned),
                (at(area.iova, 0), PointerError::Empty),
                (at(area.iova, 64 << 20), PointerError::ListTooSmall),
                (at(Iova(u64::MAX - 511), 1024), PointerError::TooLong),
            ] {
                let refused = pair.submit(0, nvm::read(NS, Lba(0), 1), data);
                assert_eq!(refused, Err(SubmitError::Map(error)));
            }
            pair.io[0].ring();
            pair.sim.step(pair.now_ns);
            assert_eq!(pair.sim.queue_stats(1).commands, commands);
            assert_eq!(pair.outstanding(), 0);
        },
    );
}

/// The status of a wrong command is returned to the caller.
#[test]
fn errors_come_back_as_their_status() {
    let setup = Setup {
        breaks: &[
            Rule::LbaRange,
            Rule::NamespaceAbsent,
            Rule::OpcodeUnsupported,
        ],
        ..Setup::default()
    };
    with_pair(config(512, 0), setup, |pair| {
        pair.bring_up().unwrap();
        let area = pair.buffer(PAGE);
        let data = || CommandData::Contiguous {
            iova: area.iova,
            len: 512,
        };
        let last = pair.limits(NS).blocks - 1;
        assert!(
            pair.run(0, nvm::read(NS, Lba(last), 1), data())
                .is_success()
        );
        let status = pair.run(0, nvm::read(NS, Lba(last + 1), 1), data());
        assert!(status.is(Status::LBA_OUT_OF_RANGE), "{status}");
        let status = pair.run(0, nvm::read(NS, Lba(u64::MAX), 1), data());
        assert!(status.is(Status::LBA_OUT_OF_RANGE), "{status}");
        let status = pair.run(0, nvm::read(Nsid(9), Lba(0), 1), data());
        assert!(status.is(Status::INVALID_NAMESPACE), "{status}");
        let status = pair.run(0, nvme_core::spec::Sqe::new(0x7E, NS), CommandData::None);
        assert!(status.is(Status::INVALID_OPCODE), "{status}");
        pair.memory.write(area.iova, &[1; 512]);
        let status = pair.run(0, nvm::compare(NS, Lba(0), 1), data());
        assert!(status.is(Status::COMPARE_FAILURE), "{status}");
        let outside = CommandData::Contiguous {
            iova: Iova(0x1000),
            len: 512,
        };
        let status = pair.run(0, nvm::read(NS, Lba(0), 1), outside);
        assert!(status.is(Status::DATA_TRANSFER_ERROR), "{status}");
        assert_eq!(pair.memory.refused(), [0x1000]);
    });
}

/// Zeroes and deallocation have no buffer, or a range list that the test wrote.
#[test]
fn write_zeroes_and_deallocate_clear_what_they_name() {
    with_pair(config(512, 0), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        let area = pair.buffer(2 * PAGE);
        pair.memory.write(area.iova, &[7; 8192]);
        assert!(
            pair.transfer(nvm::write, NS, Lba(0), 16, area.iova)
                .is_success()
        );
        assert!(
            pair.run(0, nvm::write_zeroes(NS, Lba(2), 3), CommandData::None)
                .is_success()
        );
        let mut range = Vec::new();
        for (slba, blocks) in [(8u64, 2u32), (12, 1)] {
            range.extend(0u32.to_le_bytes());
            range.extend(blocks.to_le_bytes());
            range.extend(slba.to_le_bytes());
        }
        pair.memory.write(area.iova, &range);
        let data = CommandData::Contiguous {
            iova: area.iova,
            len: 32,
        };
        assert!(pair.run(0, nvm::deallocate(NS, 2), data).is_success());
        assert!(
            pair.transfer(nvm::read, NS, Lba(0), 16, area.iova)
                .is_success()
        );
        let mut got = vec![0; 8192];
        pair.memory.read(area.iova, &mut got);
        let zeroed: Vec<usize> = (0..16)
            .filter(|block| got[block * 512..][..512].iter().all(|byte| *byte == 0))
            .collect();
        assert_eq!(zeroed, [2, 3, 4, 8, 9, 12]);
    });
}

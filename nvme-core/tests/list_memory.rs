//! List memory: in every slot, at every offset, the longest transfer that its size is documented for is mapped.
#![cfg(not(loom))]

use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
use nvme_core::sgl::SglSegment;
use nvme_core::spec::{Iova, Lba, Nsid, PageSize, Qid, nvm};
use nvme_core::sync::{AtomicU32, AtomicU64};
use nvme_core::{
    CommandData, CommandSlot, ControllerIdentity, ListMemory, PointerError, QueueMemory, QueuePair,
    SubmitError, prp,
};

const SLOTS: usize = 7;
const BASE: u64 = 0x10_0000;

/// Submits one transfer per slot over list memory that begins at `base`; returns the result of each.
fn submit(
    base: u64,
    page: PageSize,
    share: usize,
    data: &[CommandData<'_>; SLOTS],
    sgl_bytes: bool,
) -> (Vec<Result<(), SubmitError>>, u64) {
    let sq: Vec<SqCell> = (0..8).map(|_| SqCell::default()).collect();
    let cq: Vec<CqCell> = (0..8).map(|_| CqCell::default()).collect();
    let words: Vec<AtomicU64> = (0..SLOTS * share).map(|_| AtomicU64::new(0)).collect();
    let bells: [AtomicU32; 2] = Default::default();
    let lists = ListMemory::new(DmaWords::new(&words, Iova(base)), page, share);
    let most = lists.max_transfer();
    let memory = QueueMemory {
        sq: SqRing::new(&sq, Iova(0)),
        cq: CqRing::new(&cq, Iova(0)),
        sq_doorbell: DoorbellRegister::new(&bells[0]),
        cq_doorbell: DoorbellRegister::new(&bells[1]),
        lists: lists.with_sgl_bytes(sgl_bytes),
    };
    let mut slots: Vec<CommandSlot<u32>> = (0..SLOTS).map(|_| CommandSlot::new()).collect();
    let mut pair = QueuePair::new(&ControllerIdentity::new(), Qid(1), memory, &mut slots[..]);
    let sqe = nvm::read(Nsid(1), Lba(0), 1);
    let each = data.iter().map(|data| {
        let sent = pair.submit(sqe, *data, 0, u64::MAX);
        sent.map(drop).map_err(|rejected| rejected.error)
    });
    (each.collect(), most)
}

/// Maps `len` bytes in every slot, with offsets into the first page that touch the most and the fewest pages.
fn each_slot_maps(base: u64, page: PageSize, share: usize, len: u64) -> bool {
    let offsets = [0, 4, 2048, page.bytes() - 4];
    offsets.into_iter().all(|offset| {
        let iova = Iova(0x4000_0000 + offset);
        let data = [CommandData::Contiguous { iova, len }; SLOTS];
        let (each, _) = submit(base, page, share, &data, false);
        each.iter().all(Result::is_ok)
    })
}

#[test]
fn the_documented_words_are_enough_in_every_slot() {
    for page in [PageSize::KIB4, PageSize::from_mps(1).unwrap()] {
        let per_page = page.prp_entries();
        let around = |entries: u64| entries - 3..entries + 4;
        let pages = (1..8)
            .chain([100, 255, 256, 257, 300])
            .chain(around(per_page))
            .chain(around(2 * per_page))
            .chain(around(3 * per_page));
        for pages in pages {
            let len = pages * page.bytes();
            let share = ListMemory::share(page, len);
            assert!(each_slot_maps(BASE, page, share, len), "{pages} pages");
            // Lists begin anywhere in a page: at its start, in its middle, and at its last word.
            let words = prp::list_words(page, len);
            for at in [0, 8, 1024, page.bytes() - 16, page.bytes() - 8] {
                assert!(
                    each_slot_maps(BASE + at, page, words, len),
                    "{pages} pages, {words} words from {at}"
                );
            }
        }
    }
}

#[test]
fn the_longest_transfer_is_what_every_slot_can_map_and_no_more() {
    let page = PageSize::KIB4;
    for at in [0, 8, 1024, 4088] {
        for share in [
            0, 1, 2, 3, 4, 5, 16, 100, 256, 300, 511, 512, 513, 514, 515, 1023, 1024, 1025, 1536,
        ] {
            let none = [CommandData::None; SLOTS];
            let (_, most) = submit(BASE + at, page, share, &none, false);
            assert!(
                each_slot_maps(BASE + at, page, share, most),
                "{share} words from {at}: not {most} bytes"
            );
            // The documentation promises that `list_words`, and `share` for a share that is placed like this one,
            // suffice.
            let words = prp::list_words(page, most);
            let is_placed = at.is_multiple_of(share.clamp(1, 512) as u64 * 8);
            let by_share = is_placed && ListMemory::share(page, most) == share;
            assert!(words <= share.max(1) || by_share, "{share} words from {at}");
            assert!(prp::list_words(page, most + 4096) > share);
        }
    }
}

#[test]
#[should_panic(expected = "8-byte aligned")]
fn list_memory_in_the_middle_of_a_word_is_refused() {
    ListMemory::new(DmaWords::new(&[], Iova(BASE + 4)), PageSize::KIB4, 0);
}

/// NVMe Base 2.0c, Identify Controller, SGLS bits 1:0: 10b asks for data blocks in dwords.
#[test]
fn data_blocks_are_in_dwords_unless_the_controller_takes_any_bytes() {
    let data = |iova, len| SglSegment::Data {
        iova: Iova(iova),
        len,
    };
    let odd = SglSegment::Discard { len: 3 };
    let lists = [
        vec![data(0x1000, 512)],
        vec![data(0x1002, 512)],
        vec![data(0x1000, 510)],
        vec![data(0x1000, 4), odd],
        vec![data(0x1000, 4), data(0x2000, 6), data(0x3000, 6)],
        vec![data(0x1000, 4), data(0x2001, 4)],
        vec![data(0x1000, 4), data(0x2004, 4)],
    ];
    let all: [CommandData<'_>; SLOTS] =
        std::array::from_fn(|index| CommandData::Sgl(&lists[index]));
    let misaligned = Err(SubmitError::Map(PointerError::Misaligned));
    let (strict, _) = submit(BASE, PageSize::KIB4, 8, &all, false);
    let expected = [
        Ok(()),
        misaligned,
        misaligned,
        Ok(()),
        misaligned,
        misaligned,
        Ok(()),
    ];
    assert_eq!(strict, expected);
    let (any, _) = submit(BASE, PageSize::KIB4, 8, &all, true);
    assert_eq!(any, [Ok(()); SLOTS]);
}

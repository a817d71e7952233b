//! Submission queue entries from the NVM command set's builders, and the content of their buffers.

use super::{NONE, assert_sqe, hex};
use nvme_core::spec::nvm::{self, DsmRange};
use nvme_core::spec::sgl::{SglDescriptor, kind};
use nvme_core::spec::{Cid, Lba, Nsid, Psdt, Sqe};
use zerocopy::IntoBytes;

#[test]
fn read_with_prps() {
    let read = nvm::read(Nsid(1), Lba(0x1122_3344_5566_7788), 8)
        .with_cid(Cid(0x1004))
        .with_prps(0x0000_0001_0000_0E00, 0x0000_0002_0000_1000);
    assert_sqe(
        read,
        [
            "02 00 04 10 01 00 00 00 00 00 00 00 00 00 00 00",
            "00 00 00 00 00 00 00 00 00 0e 00 00 01 00 00 00",
            "00 10 00 00 02 00 00 00 88 77 66 55 44 33 22 11",
            "07 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
        ],
    );
    assert_eq!(nvm::slba(&read), Lba(0x1122_3344_5566_7788));
    assert_eq!(nvm::blocks(&read), 8);
    assert_eq!(
        (read.opcode(), read.cid(), read.fuse(), read.psdt()),
        (2, Cid(0x1004), 0, Psdt::Prp)
    );
}

#[test]
fn read_with_sgl() {
    let block = SglDescriptor::new(kind::DATA_BLOCK, 0x0000_0001_0000_1000, 4096);
    assert_sqe(
        nvm::read(Nsid(2), Lba(0), 1).with_sgl(block.to_words()),
        [
            "02 40 00 00 02 00 00 00 00 00 00 00 00 00 00 00",
            "00 00 00 00 00 00 00 00 00 10 00 00 01 00 00 00",
            "00 10 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            NONE,
        ],
    );
}

/// Returns a command of namespace 1, LBA 256 with `opcode` and this CDW12.
fn range_command(opcode: &str, cdw12: &str) -> [String; 4] {
    [
        format!("{opcode} 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00"),
        NONE.into(),
        "00 00 00 00 00 00 00 00 00 01 00 00 00 00 00 00".into(),
        format!("{cdw12} 00 00 00 00 00 00 00 00 00 00 00 00"),
    ]
}

#[test]
fn commands_over_a_block_range() {
    let (nsid, lba) = (Nsid(1), Lba(256));
    let with = |mut sqe: Sqe, bits: u32| {
        sqe.cdw12 |= bits;
        sqe
    };
    let table = [
        (nvm::write(nsid, lba, 1), "01", "00 00 00 00"),
        (nvm::write(nsid, lba, 65_536), "01", "ff ff 00 00"),
        (
            with(nvm::write(nsid, lba, 2), nvm::FUA),
            "01",
            "01 00 00 40",
        ),
        (
            with(nvm::read(nsid, lba, 2), nvm::LIMITED_RETRY),
            "02",
            "01 00 00 80",
        ),
        (
            with(nvm::read(nsid, lba, 2), nvm::PRINFO),
            "02",
            "01 00 00 3c",
        ),
        (nvm::compare(nsid, lba, 4), "05", "03 00 00 00"),
        (nvm::write_zeroes(nsid, lba, 257), "08", "00 01 00 00"),
        (
            with(nvm::write_zeroes(nsid, lba, 1), nvm::DEAC),
            "08",
            "00 00 00 02",
        ),
        (nvm::verify(nsid, lba, 16), "0c", "0f 00 00 00"),
    ];
    for (sqe, opcode, cdw12) in table {
        let lines = range_command(opcode, cdw12);
        assert_sqe(sqe, [&lines[0], &lines[1], &lines[2], &lines[3]]);
        assert_eq!(nvm::slba(&sqe), lba);
    }
    assert_eq!(nvm::blocks(&nvm::write(nsid, lba, 65_536)), 65_536);
}

#[test]
fn flush() {
    assert_sqe(
        nvm::flush(Nsid::ALL).with_cid(Cid(0x8001)),
        [
            "00 00 01 80 ff ff ff ff 00 00 00 00 00 00 00 00",
            NONE,
            NONE,
            NONE,
        ],
    );
}

#[test]
fn dataset_management() {
    assert_sqe(
        nvm::deallocate(Nsid(1), 256),
        [
            "09 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 ff 00 00 00 04 00 00 00",
            NONE,
        ],
    );
    assert_eq!(nvm::deallocate(Nsid(1), 1).cdw10, 0);
    let range = DsmRange {
        attributes: 0,
        blocks: 8,
        slba: 0x0102_0304_0506_0708,
    };
    assert_eq!(
        range.as_bytes(),
        hex("00 00 00 00 08 00 00 00 08 07 06 05 04 03 02 01")
    );
}

#[test]
fn opcodes() {
    use nvm::opcode as n;
    let codes = [
        (n::FLUSH, 0x00),
        (n::WRITE, 0x01),
        (n::READ, 0x02),
        (n::WRITE_UNCORRECTABLE, 0x04),
        (n::COMPARE, 0x05),
        (n::WRITE_ZEROES, 0x08),
        (n::DATASET_MANAGEMENT, 0x09),
        (n::VERIFY, 0x0C),
        (n::RESERVATION_REPORT, 0x0E),
    ];
    for (named, code) in codes {
        assert_eq!(named, code);
    }
}

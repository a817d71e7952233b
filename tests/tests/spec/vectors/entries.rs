//! The dword common to all commands, SGL descriptors, and the completion queue entry.

use super::hex;
use nvme_core::spec::completion::phase_of;
use nvme_core::spec::sgl::{SglDescriptor, kind};
use nvme_core::spec::{Cid, Cqe, Nsid, Psdt, Qid, Sqe, Status};
use zerocopy::{FromBytes, IntoBytes};

#[test]
fn command_dword_0() {
    // Opcode 7:0, FUSE 9:8, PSDT 15:14, CID 31:16.
    let table = [
        (0x0000_0002, 0x02, 0, Psdt::Prp, 0x0000),
        (0xFFFF_01FF, 0xFF, 1, Psdt::Prp, 0xFFFF),
        (0x0001_4205, 0x05, 2, Psdt::SglMptrBuffer, 0x0001),
        (0x8000_8000, 0x00, 0, Psdt::SglMptrSgl, 0x8000),
        (0x1234_C080, 0x80, 0, Psdt::Reserved, 0x1234),
    ];
    for (cdw0, opcode, fuse, psdt, cid) in table {
        let mut sqe = Sqe::new(0, Nsid::NONE);
        sqe.cdw0 = cdw0;
        assert_eq!(
            (sqe.opcode(), sqe.fuse(), sqe.psdt(), sqe.cid()),
            (opcode, fuse, psdt, Cid(cid))
        );
        // Neither the identifier nor the data pointer changes a neighbouring field.
        assert_eq!(sqe.with_cid(Cid(0x55AA)).cdw0, cdw0 & 0xFFFF | 0x55AA_0000);
        assert_eq!(sqe.with_prps(0, 0).cdw0, cdw0 & 0xFFFF_3FFF);
        assert_eq!(sqe.with_sgl([0, 0]).cdw0, cdw0 & 0xFFFF_3FFF | 0x4000);
    }
}

#[test]
fn sgl_descriptors() {
    let table = [
        (
            kind::DATA_BLOCK,
            0x1000,
            512,
            "00 10 00 00 00 00 00 00 00 02 00 00 00 00 00 00",
        ),
        (
            kind::BIT_BUCKET,
            0,
            0x0001_0004,
            "00 00 00 00 00 00 00 00 04 00 01 00 00 00 00 10",
        ),
        (
            kind::SEGMENT,
            0x20_0000_0010,
            32,
            "10 00 00 00 20 00 00 00 20 00 00 00 00 00 00 20",
        ),
        (
            kind::LAST_SEGMENT,
            0xFFFF_FFF0,
            16,
            "f0 ff ff ff 00 00 00 00 10 00 00 00 00 00 00 30",
        ),
    ];
    for (kind, address, length, bytes) in table {
        let descriptor = SglDescriptor::new(kind, address, length);
        assert_eq!(descriptor.as_bytes(), hex(bytes));
        assert_eq!(descriptor.to_words().as_bytes(), hex(bytes));
        assert_eq!(SglDescriptor::from_words(descriptor.to_words()), descriptor);
    }
    let bytes = hex("00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 4f");
    let keyed = SglDescriptor::read_from_bytes(&bytes).unwrap();
    assert_eq!((keyed.kind(), keyed.sub_type()), (4, 0xF));
}

#[test]
fn completion_queue_entry() {
    // Invalid Field in Command with DNR is status 4002h; shifted over the phase tag, 8005h.
    let bytes = hex("dd cc bb aa 44 33 22 11 02 01 03 00 04 10 05 80");
    let cqe = Cqe::read_from_bytes(&bytes).unwrap();
    assert_eq!((cqe.dw0, cqe.dw1), (0xAABB_CCDD, 0x1122_3344));
    assert_eq!(
        (cqe.sqhd, cqe.sqid(), cqe.cid()),
        (0x0102, Qid(3), Cid(0x1004))
    );
    assert!(cqe.phase());
    assert_eq!(cqe.status(), Status(0x4002));
    assert_eq!(
        cqe.to_words(),
        [0x1122_3344_AABB_CCDD, 0x8005_1004_0003_0102]
    );
    assert_eq!(
        Cqe::from_words(0x1122_3344_AABB_CCDD, 0x8005_1004_0003_0102),
        cqe
    );
    assert_eq!(cqe.as_bytes(), bytes);

    let stale = Cqe::from_words(0, 0xFFFE_0000_0000_0000);
    assert!(!stale.phase());
    assert_eq!(stale.status(), Status(0x7FFF));
    assert!(phase_of(0x0001_0000_0000_0000) && !phase_of(0xFFFE_FFFF_FFFF_FFFF));
}

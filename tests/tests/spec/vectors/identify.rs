//! Identify Controller and the bits of its capability fields.

use super::page;
use nvme_core::spec::identify::*;
use nvme_core::spec::log_page;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

#[test]
fn controller() {
    let bytes = page(
        4096,
        &[
            (0, "36 1b f4 1a"),
            (
                4,
                "53 4e 2d 30 30 31 20 20 20 20 20 20 20 20 20 20 20 20 20 20",
            ),
            (24, "41 20 44 72 69 76 65"),
            (64, "31 2e 30 20 20 20 20 20"),
            (72, "06 00 54 52 0a 07 34 12"),
            (
                80,
                "00 00 02 00 40 0d 03 00 80 84 1e 00 00 09 00 00 0f 00 00 80",
            ),
            (100, "01 00"),
            (111, "01"),
            (112, "f0 f1 f2 f3 f4 f5 f6 f7 f8 f9 fa fb fc fd fe ff"),
            (128, "0a 00 14 00 1e 00"),
            (253, "01 82 03"),
            (256, "0a 01 03 07 16 2f 3f 01 01 01 57 01 61 01 64 00"),
            (272, "00 40 00 00 00 10 00 00"),
            (280, "00 00 00 00 00 00 00 40 01"),
            (296, "00 10"),
            (312, "01 00 00 01 0a 00 01 ff"),
            (320, "0a 00 01 00 11 01 57 01 03 00 00 80"),
            (332, "04 00 00 00 08 00 02 00 03 00 0a 0b"),
            (344, "20 00 00 00 10 00 00 00 05 00 00 00 09 00"),
            (368, "11"),
            (
                512,
                "66 44 00 01 20 00 00 00 5f 01 01 00 04 07 ff 00 07 00 01 02 03 00 01 00",
            ),
            (536, "02 00 0f 00 40 00 00 00"),
            (544, "33"),
            (560, "44 00 00 00"),
            (768, "6e 71 6e 2e 32 30 31 34 2d 30 38"),
            (1792, "55"),
            (
                2048,
                "c4 09 00 00 05 00 00 00 06 00 00 00 01 02 03 04 90 01 40 00 e8 03 82",
            ),
            (2080, "20 03 00 03"),
            (3072, "77"),
        ],
    );
    let id = IdentifyController::read_from_bytes(&bytes).unwrap();
    assert_eq!((id.vid, id.ssvid), (0x1B36, 0x1AF4));
    assert_eq!(
        [&id.sn[..], &id.mn, &id.fr].map(|bytes| PrintableText(bytes).to_string()),
        ["SN-001", "A Drive", "1.0"]
    );
    assert_eq!(
        (id.rab, id.ieee, id.cmic, id.mdts, id.cntlid),
        (6, [0x00, 0x54, 0x52], 10, 7, 0x1234)
    );
    assert_eq!(
        (id.ver, id.rtd3r, id.rtd3e),
        (0x0002_0000, 200_000, 2_000_000)
    );
    assert_eq!(
        (id.oaes, id.ctratt, id.rrls, id.cntrltype),
        (0x900, 0x8000_000F, 1, 1)
    );
    assert_eq!((id.fguid[0], id.fguid[15]), (0xF0, 0xFF));
    assert_eq!((id.crdt1, id.crdt2, id.crdt3), (10, 20, 30));
    assert_eq!((id.nvmsr, id.vwci, id.mec), (1, 0x82, 3));
    assert_eq!(
        id.oacs,
        oacs::FORMAT | oacs::NS_MANAGEMENT | oacs::DOORBELL_BUFFER
    );
    assert_eq!(
        (id.acl, id.abort_limit(), id.aerl, id.async_event_limit()),
        (3, 4, 7, 8)
    );
    assert_eq!(
        (id.frmw, id.lpa, id.elpe, id.error_entries()),
        (0x16, 0x2F, 63, 64)
    );
    assert_eq!(
        (id.npss, id.power_states().len(), id.avscc, id.apsta),
        (1, 2, 1, 1)
    );
    assert_eq!((id.wctemp, id.cctemp, id.mtfa), (343, 353, 100));
    assert_eq!(
        (id.hmpre, id.hmmin, id.hmminds, id.hmmaxd),
        (0x4000, 0x1000, 4, 8)
    );
    assert_eq!(log_page::u128(&id.tnvmcap), 0x01_4000_0000_0000_0000);
    assert_eq!(log_page::u128(&id.unvmcap), 0x1000);
    assert_eq!(
        (id.rpmbs, id.edstt, id.dsto, id.fwug),
        (0x0100_0001, 10, 1, 255)
    );
    assert_eq!(
        (id.kas, id.hctma, id.mntmt, id.mxtmt, id.sanicap),
        (10, 1, 273, 343, 0x8000_0003)
    );
    assert_eq!(
        (id.nsetidmax, id.endgidmax, id.anatt, id.anacap),
        (2, 3, 10, 11)
    );
    assert_eq!(
        (id.anagrpmax, id.nanagrpid, id.pels, id.domainid),
        (32, 16, 5, 9)
    );
    assert_eq!(
        (id.megcap[0], id.sqes, id.cqes, id.maxcmd, id.nn),
        (0x11, 0x66, 0x44, 256, 32)
    );
    assert_eq!(id.oncs, 0x15F);
    assert_eq!(
        (id.fuses, id.fna, id.vwc),
        (
            1,
            fna::CRYPTO_ERASE,
            vwc::PRESENT | vwc::BROADCAST_SUPPORTED
        )
    );
    assert_eq!(
        (id.awun, id.awupf, id.icsvscc, id.nwpc, id.acwu, id.ocfs),
        (255, 7, 1, 2, 3, 1)
    );
    assert_eq!(id.sgls & sgls::SUPPORT, sgls::DWORD_ALIGNMENT);
    assert_eq!(
        id.sgls & !sgls::SUPPORT,
        sgls::BIT_BUCKET | sgls::BYTE_ALIGNED_MPTR | sgls::LONGER_THAN_TRANSFER | sgls::MPTR_SGL
    );
    assert_eq!((id.mnan, id.maxdna[0], id.maxcna), (64, 0x33, 0x44));
    assert_eq!(PrintableText::of_nqn(&id.subnqn).to_string(), "nqn.2014-08");
    assert_eq!((id.fabrics[0], id.vs[0]), (0x55, 0x77));

    let [active, idle] = id.power_states() else {
        panic!("two power states")
    };
    assert_eq!(
        (active.mp, active.flags, active.max_power()),
        (2500, 0, 250_000)
    );
    assert_eq!((active.enlat, active.exlat), (5, 6));
    assert_eq!(
        (active.rrt, active.rrl, active.rwt, active.rwl),
        (1, 2, 3, 4)
    );
    assert_eq!(
        (active.idlp, active.ips, active.actp, active.apws),
        (400, 0x40, 1000, 0x82)
    );
    // 0.08 W, counted in 0.0001 W, no I/O.
    assert_eq!(
        (idle.flags, idle.max_power()),
        (PowerState::MXPS | PowerState::NOPS, 800)
    );
    assert_eq!(id.as_bytes(), bytes);
}

#[test]
fn controller_counts_are_bounded() {
    let mut id = IdentifyController::new_zeroed();
    assert_eq!(
        (id.abort_limit(), id.async_event_limit(), id.error_entries()),
        (1, 1, 1)
    );
    (id.acl, id.aerl, id.elpe, id.npss) = (255, 255, 255, 255);
    assert_eq!(
        (id.abort_limit(), id.async_event_limit(), id.error_entries()),
        (256, 256, 256)
    );
    assert_eq!(id.power_states().len(), 32);
}

#[test]
fn capability_bits() {
    let oncs = [
        oncs::COMPARE,
        oncs::WRITE_UNCORRECTABLE,
        oncs::DATASET_MANAGEMENT,
        oncs::WRITE_ZEROES,
        oncs::SAVE_SELECT,
        oncs::RESERVATIONS,
        oncs::TIMESTAMP,
        oncs::VERIFY,
        oncs::COPY,
    ];
    assert_eq!(
        oncs,
        [
            0x001, 0x002, 0x004, 0x008, 0x010, 0x020, 0x040, 0x080, 0x100
        ]
    );
    let oacs = [
        oacs::SECURITY,
        oacs::FORMAT,
        oacs::FIRMWARE,
        oacs::NS_MANAGEMENT,
        oacs::SELF_TEST,
        oacs::DIRECTIVES,
        oacs::NVME_MI,
        oacs::VIRTUALIZATION,
        oacs::DOORBELL_BUFFER,
        oacs::GET_LBA_STATUS,
        oacs::LOCKDOWN,
    ];
    assert_eq!(
        oacs,
        [
            0x001, 0x002, 0x004, 0x008, 0x010, 0x020, 0x040, 0x080, 0x100, 0x200, 0x400
        ]
    );
    let oaes = [
        oaes::NAMESPACE_ATTRIBUTE,
        oaes::FIRMWARE_ACTIVATION,
        oaes::ANA_CHANGE,
        oaes::SUBSYSTEM_SHUTDOWN,
    ];
    assert_eq!(oaes, [0x0100, 0x0200, 0x0800, 0x8000]);
    let lpa = [
        lpa::SMART_PER_NAMESPACE,
        lpa::COMMANDS_SUPPORTED,
        lpa::EXTENDED_DATA,
        lpa::TELEMETRY,
        lpa::PERSISTENT_EVENT,
        lpa::SUPPORTED_PAGES,
    ];
    assert_eq!(lpa, [0x01, 0x02, 0x04, 0x08, 0x10, 0x20]);
    assert_eq!(
        [vwc::PRESENT, vwc::BROADCAST, vwc::BROADCAST_NOT_SUPPORTED],
        [0x01, 0x06, 0x04]
    );
    assert_eq!(
        [
            fna::FORMAT_ALL,
            fna::ERASE_ALL,
            fna::CRYPTO_ERASE,
            fna::NO_BROADCAST
        ],
        [1, 2, 4, 8]
    );
    assert_eq!(
        [
            sanicap::CRYPTO_ERASE,
            sanicap::BLOCK_ERASE,
            sanicap::OVERWRITE,
            sanicap::NO_DEALLOCATE_INHIBITED,
            sanicap::MODIFIES_MEDIA,
            sanicap::NOT_MODIFIED
        ],
        [1, 2, 4, 0x2000_0000, 0xC000_0000, 0x4000_0000]
    );
    let nsfeat = [
        nsfeat::THIN,
        nsfeat::ATOMICS,
        nsfeat::DEALLOCATED_ERROR,
        nsfeat::NO_ID_REUSE,
        nsfeat::OPTIMAL,
    ];
    assert_eq!(nsfeat, [0x01, 0x02, 0x04, 0x08, 0x10]);
    assert_eq!(
        [dlfeat::READ_BEHAVIOR, dlfeat::WRITE_ZEROES_DEALLOCATE],
        [0x07, 0x08]
    );
    assert_eq!([dlfeat::READS_ZERO, dlfeat::READS_ONES], [1, 2]);
    assert_eq!(
        [sgls::SUPPORT, sgls::ANY_ALIGNMENT, sgls::DWORD_ALIGNMENT],
        [3, 1, 2]
    );
    assert_eq!(IdentifyNamespace::EXTENDED_METADATA, 0x10);
}

#[test]
fn padded_text() {
    let table: [(&[u8], &str); 7] = [
        (b"QEMU NVMe Ctrl      ", "QEMU NVMe Ctrl"),
        (b"   1", "1"),
        (b"ab\0cd\0\0", "ab\\x00cd"),
        (b"ab\xFFcd  ", "ab\\xffcd"),
        (b"line\nbreak", "line\\x0abreak"),
        (b"\xC3\xA9\\", "\\xc3\\xa9\\x5c"),
        (b" \0 ", ""),
    ];
    for (bytes, expected) in table {
        assert_eq!(PrintableText(bytes).to_string(), expected, "{bytes:?}");
    }
}

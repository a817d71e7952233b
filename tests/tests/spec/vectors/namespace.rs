//! Identify Namespace, the namespace list and the identification descriptors.

use super::{hex, page};
use nvme_core::spec::identify::*;
use nvme_core::spec::{Nsid, log_page};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

#[test]
fn namespace() {
    let bytes = page(
        4096,
        &[
            (
                0,
                "00 00 00 00 01 00 00 00 00 00 80 00 00 00 00 00 00 00 40 00 00 00 00 00",
            ),
            (24, "1f 01 01 01 02 03 04 05"),
            (32, "e4 09 07 00 03 00 00 00 ff 00 10 00 7f 00 00 01"),
            (48, "00 00 00 00 00 20"),
            (64, "1f 00 0f 00 3f 00 2f 00 7f 00 80 00 00 04 00 00 7f"),
            (82, "00"),
            (92, "06 00 00 00"),
            (99, "01 02 00 03 00"),
            (104, "01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f 10"),
            (120, "a1 a2 a3 a4 a5 a6 a7 a8"),
            (128, "00 00 09 02 08 00 0c 00"),
            (380, "40 00 0c 01"),
            (384, "99"),
        ],
    );
    let ns = IdentifyNamespace::read_from_bytes(&bytes).unwrap();
    assert_eq!(
        (ns.nsze, ns.ncap, ns.nuse),
        (0x1_0000_0000, 0x80_0000, 0x40_0000)
    );
    assert_eq!(
        (ns.nsfeat, ns.nlbaf, ns.lba_formats(), ns.flbas, ns.mc),
        (0x1F, 1, 2, 1, 1)
    );
    assert_eq!((ns.dpc, ns.dps, ns.nmic, ns.rescap), (2, 3, 4, 5));
    assert_eq!(
        (ns.fpi, ns.dlfeat & dlfeat::READ_BEHAVIOR),
        (0xE4, dlfeat::READS_ZERO)
    );
    assert_eq!((ns.nawun, ns.nawupf, ns.nacwu), (7, 3, 0));
    assert_eq!(
        (ns.nabsn, ns.nabo, ns.nabspf, ns.noiob),
        (255, 16, 127, 256)
    );
    assert_eq!(log_page::u128(&ns.nvmcap), 0x2000_0000_0000);
    assert_eq!(
        (ns.npwg, ns.npwa, ns.npdg, ns.npda, ns.nows),
        (31, 15, 63, 47, 127)
    );
    assert_eq!((ns.mssrl, ns.mcl, ns.msrc), (128, 1024, 127));
    assert_eq!(
        (ns.anagrpid, ns.nsattr, ns.nvmsetid, ns.endgid),
        (6, 1, 2, 3)
    );
    assert_eq!(
        (ns.nguid[0], ns.nguid[15], ns.eui64[0], ns.eui64[7]),
        (1, 16, 0xA1, 0xA8)
    );
    assert_eq!(
        ns.lbaf[0],
        LbaFormat {
            ms: 0,
            lbads: 9,
            rp: 2
        }
    );
    assert_eq!(
        ns.lba_format(),
        LbaFormat {
            ms: 8,
            lbads: 12,
            rp: 0
        }
    );
    assert_eq!(ns.block_bytes(), Some(4096));
    assert_eq!(
        ns.lbaf[63],
        LbaFormat {
            ms: 64,
            lbads: 12,
            rp: 1
        }
    );
    assert_eq!(ns.vs[0], 0x99);
    assert_eq!(ns.as_bytes(), bytes);
}

#[test]
fn lba_format_index() {
    // (NLBAF, NULBAF, FLBAS) -> index: bits 6:5 count only with more than 16 formats; bit 4 never.
    let table = [
        (0, 0, 0x00, 0),
        (15, 0, 0x1F, 15),
        (15, 0, 0x6F, 15),
        (16, 0, 0x20, 16),
        (63, 0, 0x7F, 63),
        (10, 6, 0x25, 21),
        (255, 255, 0x65, 53),
    ];
    for (nlbaf, nulbaf, flbas, index) in table {
        let mut ns = IdentifyNamespace::new_zeroed();
        (ns.nlbaf, ns.nulbaf, ns.flbas) = (nlbaf, nulbaf, flbas);
        assert_eq!(
            ns.lba_format_index(),
            index,
            "NLBAF {nlbaf}, NULBAF {nulbaf}, FLBAS {flbas:#x}"
        );
        assert!((1..=64).contains(&ns.lba_formats()));
    }
}

#[test]
fn block_sizes() {
    let table = [
        (0, None),
        (8, None),
        (9, Some(512)),
        (12, Some(4096)),
        (31, Some(0x8000_0000)),
        (32, None),
        (255, None),
    ];
    for (lbads, bytes) in table {
        assert_eq!(
            LbaFormat {
                ms: 0,
                lbads,
                rp: 0
            }
            .block_bytes(),
            bytes,
            "LBADS {lbads}"
        );
    }
}

#[test]
fn namespace_list() {
    let bytes = page(
        4096,
        &[(0, "01 00 00 00 02 00 00 00 00 01 00 00"), (16, "09")],
    );
    let list = ActiveNamespaces::read_from_bytes(&bytes).unwrap();
    assert_eq!(
        list.iter().collect::<Vec<_>>(),
        [Nsid(1), Nsid(2), Nsid(256)]
    );
    let full = ActiveNamespaces([7; 1024]);
    assert_eq!(full.iter().count(), 1024);
    assert_eq!(ActiveNamespaces::new_zeroed().iter().count(), 0);
}

#[test]
fn namespace_descriptors() {
    let uuid = "10 11 12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f";
    let bytes = page(
        4096,
        &[
            (0, "01 08 00 00 a1 a2 a3 a4 a5 a6 a7 a8"),
            (12, "03 10 00 00"),
            (16, uuid),
            (32, "04 01 00 00 00"),
            (37, "ee 02 00 00 01 02"),
            (47, "02 10"),
        ],
    );
    // The last one is ended by the length 0 of the descriptor before it.
    let found: Vec<_> = descriptors(&bytes).collect();
    assert_eq!(
        found,
        [
            NamespaceDescriptor {
                nidt: nidt::EUI64,
                nid: &hex("a1 a2 a3 a4 a5 a6 a7 a8")
            },
            NamespaceDescriptor {
                nidt: nidt::UUID,
                nid: &hex(uuid)
            },
            NamespaceDescriptor {
                nidt: nidt::CSI,
                nid: &[0]
            },
            NamespaceDescriptor {
                nidt: 0xEE,
                nid: &[1, 2]
            },
        ]
    );
    assert_eq!(
        (nidt::EUI64, nidt::NGUID, nidt::UUID, nidt::CSI),
        (1, 2, 3, 4)
    );
}

#[test]
fn descriptors_that_do_not_fit_end_the_list() {
    for (bytes, count) in [("", 0), ("01", 0), ("01 02 00", 0), ("01 02 00 00 aa", 0)] {
        assert_eq!(descriptors(&hex(bytes)).count(), count, "{bytes}");
    }
    assert_eq!(
        descriptors(&hex("01 01 00 00 aa 02 ff 00 00 bb")).count(),
        1
    );
    // A page can hold at most this many descriptors: 819 of 5 bytes.
    let dense: Vec<u8> = [9, 1, 0, 0, 1].into_iter().cycle().take(4096).collect();
    assert_eq!(descriptors(&dense).count(), 819);
}

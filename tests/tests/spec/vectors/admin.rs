//! Submission queue entries of the admin command builders.

use super::{NONE, assert_sqe, hex};
use nvme_core::spec::admin::{self, FeatureSelect, QueueParams, cns};
use nvme_core::spec::feature::{self, HmbDescriptor, fid};
use nvme_core::spec::log_page::lid;
use nvme_core::spec::{Cid, Iova, Nsid, Qid};
use zerocopy::IntoBytes;

const QUEUE: QueueParams = QueueParams {
    qid: Qid(3),
    entries: 1024,
    iova: Iova(0x0001_2345_6000),
};

#[test]
fn create_io_completion_queue() {
    assert_sqe(
        admin::create_io_cq(QUEUE, Some(5)).with_cid(Cid(0xBEEF)),
        [
            "05 00 ef be 00 00 00 00 00 00 00 00 00 00 00 00",
            "00 00 00 00 00 00 00 00 00 60 45 23 01 00 00 00",
            "00 00 00 00 00 00 00 00 03 00 ff 03 03 00 05 00",
            NONE,
        ],
    );
    // Polled, the longest queue there is.
    assert_sqe(
        admin::create_io_cq(
            QueueParams {
                qid: Qid(0xFFFF),
                entries: 65_536,
                iova: Iova(0x1000),
            },
            None,
        ),
        [
            "05 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            "00 00 00 00 00 00 00 00 00 10 00 00 00 00 00 00",
            "00 00 00 00 00 00 00 00 ff ff ff ff 01 00 00 00",
            NONE,
        ],
    );
}

#[test]
fn create_io_submission_queue() {
    assert_sqe(
        admin::create_io_sq(QUEUE, Qid(7)).with_cid(Cid(1)),
        [
            "01 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00",
            "00 00 00 00 00 00 00 00 00 60 45 23 01 00 00 00",
            "00 00 00 00 00 00 00 00 03 00 ff 03 01 00 07 00",
            NONE,
        ],
    );
    // The shortest queue.
    assert_sqe(
        admin::create_io_sq(
            QueueParams {
                entries: 2,
                ..QUEUE
            },
            Qid(0x0102),
        ),
        [
            "01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            "00 00 00 00 00 00 00 00 00 60 45 23 01 00 00 00",
            "00 00 00 00 00 00 00 00 03 00 01 00 01 00 02 01",
            NONE,
        ],
    );
}

#[test]
fn delete_io_queues() {
    assert_sqe(
        admin::delete_io_sq(Qid(0x1234)),
        [
            NONE,
            NONE,
            "00 00 00 00 00 00 00 00 34 12 00 00 00 00 00 00",
            NONE,
        ],
    );
    assert_sqe(
        admin::delete_io_cq(Qid(0x1234)),
        [
            "04 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 34 12 00 00 00 00 00 00",
            NONE,
        ],
    );
}

#[test]
fn identify() {
    assert_sqe(
        admin::identify(cns::CONTROLLER, Nsid::NONE).with_prps(0xFFFF_F000, 0),
        [
            "06 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            "00 00 00 00 00 00 00 00 00 f0 ff ff 00 00 00 00",
            "00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00",
            NONE,
        ],
    );
    assert_sqe(
        admin::identify(cns::ACTIVE_NAMESPACES, Nsid(0x0201)),
        [
            "06 00 00 00 01 02 00 00 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00",
            NONE,
        ],
    );
}

#[test]
fn identify_structure_codes() {
    let codes = [
        (cns::NAMESPACE, 0x00),
        (cns::CONTROLLER, 0x01),
        (cns::ACTIVE_NAMESPACES, 0x02),
        (cns::NAMESPACE_DESCRIPTORS, 0x03),
        (cns::CSI_NAMESPACE, 0x05),
        (cns::CSI_CONTROLLER, 0x06),
        (cns::INDEPENDENT_NAMESPACE, 0x08),
        (cns::ALLOCATED_NAMESPACES, 0x10),
        (cns::ALLOCATED_NAMESPACE, 0x11),
        (cns::NAMESPACE_CONTROLLERS, 0x12),
        (cns::CONTROLLERS, 0x13),
    ];
    for (named, code) in codes {
        assert_eq!(named, code);
    }
}

#[test]
fn get_log_page() {
    // 512 bytes are 128 dwords: NUMDL is 7Fh.
    let smart = admin::get_log_page(lid::SMART, Nsid::ALL, 512, 0);
    assert_sqe(
        smart,
        [
            "02 00 00 00 ff ff ff ff 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 02 00 7f 00 00 00 00 00",
            NONE,
        ],
    );
    assert_eq!(admin::log_page_bytes(&smart), 512);
    // 48D14h bytes are 12345h dwords: NUMDL is 2344h, NUMDU is 1.
    let long = admin::get_log_page(lid::COMMANDS_SUPPORTED, Nsid::NONE, 0x4_8D14, 0x1_0000_0200);
    assert_sqe(
        long,
        [
            "02 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 05 00 44 23 01 00 00 00",
            "00 02 00 00 01 00 00 00 00 00 00 00 00 00 00 00",
        ],
    );
    assert_eq!(admin::log_page_bytes(&long), 0x4_8D14);
}

#[test]
fn get_and_set_features() {
    let selects = [
        (FeatureSelect::Current, "04 00 00 00"),
        (FeatureSelect::Default, "04 01 00 00"),
        (FeatureSelect::Saved, "04 02 00 00"),
        (FeatureSelect::Capabilities, "04 03 00 00"),
    ];
    for (select, cdw10) in selects {
        assert_sqe(
            admin::get_features(fid::TEMPERATURE, select, Nsid::NONE, 0x0011_0000),
            [
                "0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
                NONE,
                &format!("00 00 00 00 00 00 00 00 {cdw10} 00 00 11 00"),
                NONE,
            ],
        );
    }
    assert_sqe(
        admin::set_features(fid::NUMBER_OF_QUEUES, Nsid::NONE, 0x000F_0007),
        [
            "09 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 07 00 00 00 07 00 0f 00",
            NONE,
        ],
    );
    assert_eq!(feature::SAVE, 0x8000_0000);
}

#[test]
fn host_memory_buffer() {
    assert_sqe(
        feature::host_memory_buffer(true, false, 0x4000, Iova(0x0012_3456_7890), 8),
        [
            "09 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 0d 00 00 00 01 00 00 00",
            "00 40 00 00 90 78 56 34 12 00 00 00 08 00 00 00",
        ],
    );
    let cdw11 = |enable, back| feature::host_memory_buffer(enable, back, 1, Iova(0), 1).cdw11;
    assert_eq!([cdw11(false, false), cdw11(true, true)], [0, 3]);
    let piece = HmbDescriptor {
        address: 0x0000_0080_1234_5000,
        pages: 0x0102,
        reserved: 0,
    };
    assert_eq!(
        piece.as_bytes(),
        hex("00 50 34 12 80 00 00 00 02 01 00 00 00 00 00 00")
    );
}

#[test]
fn abort_event_request_and_keep_alive() {
    assert_sqe(
        admin::abort(Qid(2), Cid(0x0ABC)),
        [
            "08 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 02 00 bc 0a 00 00 00 00",
            NONE,
        ],
    );
    let opcode_only =
        |opcode: &str| format!("{opcode} 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00");
    assert_sqe(
        admin::async_event_request(),
        [&opcode_only("0c"), NONE, NONE, NONE],
    );
    assert_sqe(admin::keep_alive(), [&opcode_only("18"), NONE, NONE, NONE]);
}

#[test]
fn format_nvm() {
    // Format 37 is 10_0101b: 5 in bits 3:0, 2 in bits 13:12; user data erase is 1 in bits 11:9.
    assert_sqe(
        admin::format_nvm(Nsid(1), 37, 1),
        [
            "80 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 05 22 00 00 00 00 00 00",
            NONE,
        ],
    );
    assert_eq!(admin::format_nvm(Nsid::ALL, 0, 2).cdw10, 0x0400);
    assert_eq!(admin::format_nvm(Nsid::ALL, 63, 0).cdw10, 0x300F);
}

#[test]
fn sanitize() {
    use nvme_core::spec::admin::{SanitizeAction as Action, SanitizeFields, sanitize_bits as bits};
    // Overwrite, 3 passes, inverted, unrestricted exit, no deallocation, a pattern.
    let all = SanitizeFields {
        action: Action::Overwrite,
        unrestricted: true,
        passes: 3,
        invert: true,
        no_deallocate: true,
        pattern: 0xA1B2_C3D4,
    };
    assert_sqe(
        admin::sanitize(all),
        [
            "84 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 3b 03 00 00 d4 c3 b2 a1",
            NONE,
        ],
    );
    let cdw10 = |action| admin::sanitize(SanitizeFields::new(action)).cdw10;
    // Sixteen passes are written as 0.
    let sixteen = admin::sanitize(SanitizeFields { passes: 16, ..all });
    assert_eq!(sixteen.cdw10, 0x30B);
    // Passes and pattern belong to an overwrite.
    let erase = admin::sanitize(SanitizeFields {
        action: Action::BlockErase,
        ..all
    });
    assert_eq!((erase.cdw10, erase.cdw11), (0x20A, 0));
    for (action, code) in [
        (Action::ExitFailureMode, 1),
        (Action::BlockErase, 2),
        (Action::CryptoErase, 4),
    ] {
        assert_eq!(cdw10(action), code);
        assert_eq!(Action::of(code | 0xFFFF_FFF8), Some(action));
    }
    assert_eq!(cdw10(Action::Overwrite), 0x13);
    assert_eq!([0, 5, 6, 7].map(Action::of), [None; 4]);
    assert_eq!(
        [
            bits::SANACT,
            bits::AUSE,
            bits::OWPASS,
            bits::OIPBP,
            bits::NDAS
        ],
        [0x007, 0x008, 0x0F0, 0x100, 0x200]
    );
}

#[test]
fn host_behavior_support() {
    use nvme_core::spec::feature::HostBehavior;
    use zerocopy::FromBytes;
    let bytes = super::page(512, &[(0, "01 02 03 04"), (511, "05")]);
    let behavior = HostBehavior::read_from_bytes(&bytes).unwrap();
    let known = (behavior.acre, behavior.etdas, behavior.lbafee);
    assert_eq!(known, (1, 2, 3));
    assert_eq!(behavior.as_bytes(), bytes);
}

#[test]
fn format_settings() {
    // Format 18 is 01_0010b; metadata in the data buffer, protection type 3 in its first bytes, erased
    // cryptographically.
    let mut format = admin::Format::new(18, 2);
    format.set_mset(true);
    format.set_pi(3);
    format.set_pil(true);
    assert_sqe(
        format.command(Nsid::ALL),
        [
            "80 00 00 00 ff ff ff ff 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 72 15 00 00 00 00 00 00",
            NONE,
        ],
    );
    assert_eq!((format.lbafl(), format.lbafu(), format.ses()), (2, 1, 2));
}

#[test]
fn get_log_page_options() {
    let options = admin::LogOptions {
        lsp: 0x55,
        lsi: 0x1234,
        rae: true,
        uuid_index: 0x7F,
        csi: 2,
        index_offset: true,
    };
    let page = admin::get_log_page(lid::PERSISTENT_EVENT, Nsid::ALL, 0x2_0000, 0x1_0000_0200);
    assert_sqe(
        options.apply(page),
        [
            "02 00 00 00 ff ff ff ff 00 00 00 00 00 00 00 00",
            NONE,
            "00 00 00 00 00 00 00 00 0d d5 ff 7f 00 00 34 12",
            "00 02 00 00 01 00 00 00 7f 00 80 02 00 00 00 00",
        ],
    );
    assert_eq!(admin::LogOptions::default().apply(page), page);
}

#[test]
fn opcodes() {
    use admin::opcode as a;
    let codes = [
        (a::DELETE_IO_SQ, 0x00),
        (a::CREATE_IO_SQ, 0x01),
        (a::GET_LOG_PAGE, 0x02),
        (a::DELETE_IO_CQ, 0x04),
        (a::CREATE_IO_CQ, 0x05),
        (a::IDENTIFY, 0x06),
        (a::ABORT, 0x08),
        (a::SET_FEATURES, 0x09),
        (a::GET_FEATURES, 0x0A),
        (a::ASYNC_EVENT_REQUEST, 0x0C),
        (a::NAMESPACE_MANAGEMENT, 0x0D),
        (a::FIRMWARE_COMMIT, 0x10),
        (a::FIRMWARE_DOWNLOAD, 0x11),
        (a::DEVICE_SELF_TEST, 0x14),
        (a::NAMESPACE_ATTACHMENT, 0x15),
        (a::KEEP_ALIVE, 0x18),
        (a::DOORBELL_BUFFER_CONFIG, 0x7C),
        (a::FORMAT_NVM, 0x80),
        (a::SANITIZE, 0x84),
        (a::GET_LBA_STATUS, 0x86),
    ];
    for (named, code) in codes {
        assert_eq!(named, code);
    }
}

//! The status field: its bits, and every code that the specification names.

use nvme_core::spec::Status;

#[test]
fn fields() {
    // DNR 14, More 13, CRD 12:11, SCT 10:8, SC 7:0
    let table = [
        (0x0000, (0, 0x00, 0, false, false)),
        (0x4002, (0, 0x02, 0, false, true)),
        (0x2281, (2, 0x81, 0, true, false)),
        (0x510A, (1, 0x0A, 2, false, true)),
        (0x0822, (0, 0x22, 1, false, false)),
        (0x7FFF, (7, 0xFF, 3, true, true)),
    ];
    for (raw, fields) in table {
        let status = Status(raw);
        let got = (
            status.sct(),
            status.sc(),
            status.crd(),
            status.more(),
            status.dnr(),
        );
        assert_eq!(got, fields, "{raw:#06x}");
        let (sct, sc, crd, more, dnr) = fields;
        let mut built = Status::new(sct, sc).with_crd(crd);
        if more {
            built = built.with_more();
        }
        if dnr {
            built = built.with_dnr();
        }
        assert_eq!(built, status, "{raw:#06x}");
    }
}

#[test]
fn retry_hints_do_not_change_the_meaning() {
    let status = Status::NAMESPACE_NOT_READY
        .with_crd(3)
        .with_more()
        .with_dnr();
    assert_eq!(status, Status(0x7882));
    assert_eq!(status.with_crd(1), Status(0x6882));
    assert_eq!(
        (status.code(), status.name()),
        (0x082, Some("Namespace Not Ready"))
    );
    assert!(status.is(Status::NAMESPACE_NOT_READY) && status != Status::NAMESPACE_NOT_READY);
    assert!(Status(0x7800).is_success());
    assert!(
        !Status(0x0100).is_success(),
        "type 1, code 0 is an invalid completion queue"
    );
}

#[test]
fn setting_a_hint_again_leaves_it_set() {
    let hints = Status::SUCCESS.with_more().with_dnr();
    assert_eq!(
        (hints, hints.with_more(), hints.with_dnr()),
        (Status(0x6000), hints, hints)
    );
}

#[test]
fn type_and_code_both_tell_statuses_apart() {
    let invalid_field = Status(0x0002);
    for other in [0x0003, 0x0102, 0x4003, 0x4102] {
        assert!(!invalid_field.is(Status(other)), "{other:#06x}");
    }
}

#[test]
fn text() {
    let table = [
        (Status(0x0000), "Successful Completion (0x0000)"),
        (Status(0x4002), "Invalid Field in Command (0x0002, DNR)"),
        (Status(0x7285), "Compare Failure (0x0285, CRD 2, More, DNR)"),
        (Status(0x0017), "Unknown generic status (0x0017)"),
        (Status(0x0104), "Unknown command specific status (0x0104)"),
        (Status(0x02FF), "Unknown media error (0x02ff)"),
        (Status(0x0304), "Unknown path error (0x0304)"),
        (Status(0x0400), "Unknown status type (0x0400)"),
        (Status(0x07C0), "Vendor specific status (0x07c0)"),
    ];
    for (status, text) in table {
        assert_eq!(status.to_string(), text);
    }
}

/// Type, code and constant of every status that the specification names.
#[rustfmt::skip]
const NAMED: &[(u8, u8, Status)] = &[
    (0, 0x00, Status::SUCCESS),
    (0, 0x01, Status::INVALID_OPCODE),
    (0, 0x02, Status::INVALID_FIELD),
    (0, 0x03, Status::CID_CONFLICT),
    (0, 0x04, Status::DATA_TRANSFER_ERROR),
    (0, 0x05, Status::ABORTED_POWER_LOSS),
    (0, 0x06, Status::INTERNAL_ERROR),
    (0, 0x07, Status::ABORT_REQUESTED),
    (0, 0x08, Status::ABORTED_SQ_DELETION),
    (0, 0x09, Status::ABORTED_FAILED_FUSED),
    (0, 0x0A, Status::ABORTED_MISSING_FUSED),
    (0, 0x0B, Status::INVALID_NAMESPACE),
    (0, 0x0C, Status::COMMAND_SEQUENCE_ERROR),
    (0, 0x0D, Status::INVALID_SGL_SEGMENT),
    (0, 0x0E, Status::INVALID_SGL_COUNT),
    (0, 0x0F, Status::DATA_SGL_LENGTH_INVALID),
    (0, 0x10, Status::METADATA_SGL_LENGTH_INVALID),
    (0, 0x11, Status::SGL_TYPE_INVALID),
    (0, 0x12, Status::INVALID_CMB_USE),
    (0, 0x13, Status::INVALID_PRP_OFFSET),
    (0, 0x14, Status::ATOMIC_WRITE_UNIT_EXCEEDED),
    (0, 0x15, Status::OPERATION_DENIED),
    (0, 0x16, Status::SGL_OFFSET_INVALID),
    (0, 0x18, Status::HOST_ID_INCONSISTENT_FORMAT),
    (0, 0x19, Status::KEEP_ALIVE_EXPIRED),
    (0, 0x1A, Status::KEEP_ALIVE_INVALID),
    (0, 0x1B, Status::ABORTED_PREEMPT),
    (0, 0x1C, Status::SANITIZE_FAILED),
    (0, 0x1D, Status::SANITIZE_IN_PROGRESS),
    (0, 0x1E, Status::SGL_GRANULARITY_INVALID),
    (0, 0x1F, Status::NOT_SUPPORTED_FOR_CMB_QUEUE),
    (0, 0x20, Status::NAMESPACE_WRITE_PROTECTED),
    (0, 0x21, Status::COMMAND_INTERRUPTED),
    (0, 0x22, Status::TRANSIENT_TRANSPORT_ERROR),
    (0, 0x23, Status::PROHIBITED_BY_LOCKDOWN),
    (0, 0x24, Status::ADMIN_MEDIA_NOT_READY),
    (0, 0x80, Status::LBA_OUT_OF_RANGE),
    (0, 0x81, Status::CAPACITY_EXCEEDED),
    (0, 0x82, Status::NAMESPACE_NOT_READY),
    (0, 0x83, Status::RESERVATION_CONFLICT),
    (0, 0x84, Status::FORMAT_IN_PROGRESS),
    (0, 0x85, Status::INVALID_VALUE_SIZE),
    (0, 0x86, Status::INVALID_KEY_SIZE),
    (0, 0x87, Status::KEY_DOES_NOT_EXIST),
    (0, 0x88, Status::UNRECOVERED_ERROR),
    (0, 0x89, Status::KEY_EXISTS),
    (1, 0x00, Status::INVALID_CQ),
    (1, 0x01, Status::INVALID_QID),
    (1, 0x02, Status::INVALID_QUEUE_SIZE),
    (1, 0x03, Status::ABORT_LIMIT_EXCEEDED),
    (1, 0x05, Status::AER_LIMIT_EXCEEDED),
    (1, 0x06, Status::INVALID_FIRMWARE_SLOT),
    (1, 0x07, Status::INVALID_FIRMWARE_IMAGE),
    (1, 0x08, Status::INVALID_INTERRUPT_VECTOR),
    (1, 0x09, Status::INVALID_LOG_PAGE),
    (1, 0x0A, Status::INVALID_FORMAT),
    (1, 0x0B, Status::FIRMWARE_NEEDS_CONVENTIONAL_RESET),
    (1, 0x0C, Status::INVALID_QUEUE_DELETION),
    (1, 0x0D, Status::FEATURE_NOT_SAVEABLE),
    (1, 0x0E, Status::FEATURE_NOT_CHANGEABLE),
    (1, 0x0F, Status::FEATURE_NOT_NAMESPACE_SPECIFIC),
    (1, 0x10, Status::FIRMWARE_NEEDS_SUBSYSTEM_RESET),
    (1, 0x11, Status::FIRMWARE_NEEDS_CONTROLLER_RESET),
    (1, 0x12, Status::FIRMWARE_NEEDS_MAX_TIME),
    (1, 0x13, Status::FIRMWARE_ACTIVATION_PROHIBITED),
    (1, 0x14, Status::OVERLAPPING_RANGE),
    (1, 0x15, Status::NAMESPACE_INSUFFICIENT_CAPACITY),
    (1, 0x16, Status::NAMESPACE_ID_UNAVAILABLE),
    (1, 0x18, Status::NAMESPACE_ALREADY_ATTACHED),
    (1, 0x19, Status::NAMESPACE_IS_PRIVATE),
    (1, 0x1A, Status::NAMESPACE_NOT_ATTACHED),
    (1, 0x1B, Status::THIN_PROVISIONING_NOT_SUPPORTED),
    (1, 0x1C, Status::CONTROLLER_LIST_INVALID),
    (1, 0x1D, Status::SELF_TEST_IN_PROGRESS),
    (1, 0x1E, Status::BOOT_PARTITION_WRITE_PROHIBITED),
    (1, 0x1F, Status::INVALID_CONTROLLER_ID),
    (1, 0x20, Status::INVALID_SECONDARY_STATE),
    (1, 0x21, Status::INVALID_RESOURCE_COUNT),
    (1, 0x22, Status::INVALID_RESOURCE_ID),
    (1, 0x23, Status::SANITIZE_PROHIBITED_PMR),
    (1, 0x24, Status::ANA_GROUP_ID_INVALID),
    (1, 0x25, Status::ANA_ATTACH_FAILED),
    (1, 0x26, Status::INSUFFICIENT_CAPACITY),
    (1, 0x27, Status::NAMESPACE_ATTACHMENT_LIMIT_EXCEEDED),
    (1, 0x28, Status::LOCKDOWN_NOT_SUPPORTED),
    (1, 0x29, Status::COMMAND_SET_NOT_SUPPORTED),
    (1, 0x2A, Status::COMMAND_SET_NOT_ENABLED),
    (1, 0x2B, Status::COMMAND_SET_COMBINATION_REJECTED),
    (1, 0x2C, Status::INVALID_COMMAND_SET),
    (1, 0x2D, Status::IDENTIFIER_UNAVAILABLE),
    (1, 0x7F, Status::STREAM_ALLOCATION_FAILED),
    (1, 0x80, Status::CONFLICTING_ATTRIBUTES),
    (1, 0x81, Status::INVALID_PROTECTION_INFORMATION),
    (1, 0x82, Status::WRITE_TO_READ_ONLY),
    (1, 0x83, Status::COMMAND_SIZE_LIMIT_EXCEEDED),
    (1, 0xB8, Status::ZONE_BOUNDARY_ERROR),
    (1, 0xB9, Status::ZONE_IS_FULL),
    (1, 0xBA, Status::ZONE_IS_READ_ONLY),
    (1, 0xBB, Status::ZONE_IS_OFFLINE),
    (1, 0xBC, Status::ZONE_INVALID_WRITE),
    (1, 0xBD, Status::TOO_MANY_ACTIVE_ZONES),
    (1, 0xBE, Status::TOO_MANY_OPEN_ZONES),
    (1, 0xBF, Status::INVALID_ZONE_TRANSITION),
    (2, 0x80, Status::WRITE_FAULT),
    (2, 0x81, Status::UNRECOVERED_READ_ERROR),
    (2, 0x82, Status::GUARD_CHECK_ERROR),
    (2, 0x83, Status::APPLICATION_TAG_CHECK_ERROR),
    (2, 0x84, Status::REFERENCE_TAG_CHECK_ERROR),
    (2, 0x85, Status::COMPARE_FAILURE),
    (2, 0x86, Status::ACCESS_DENIED),
    (2, 0x87, Status::DEALLOCATED_BLOCK),
    (2, 0x88, Status::STORAGE_TAG_CHECK_ERROR),
    (3, 0x00, Status::INTERNAL_PATH_ERROR),
    (3, 0x01, Status::ANA_PERSISTENT_LOSS),
    (3, 0x02, Status::ANA_INACCESSIBLE),
    (3, 0x03, Status::ANA_TRANSITION),
    (3, 0x60, Status::CONTROLLER_PATHING_ERROR),
    (3, 0x70, Status::HOST_PATHING_ERROR),
    (3, 0x71, Status::ABORTED_BY_HOST),
];

#[test]
fn every_code_has_its_number() {
    for &(sct, sc, status) in NAMED {
        assert_eq!((status.sct(), status.sc()), (sct, sc), "{status}");
        assert_eq!(Status::new(sct, sc), status);
    }
    let listed: Vec<Status> = NAMED.iter().map(|&(_, _, status)| status).collect();
    assert_eq!(
        Status::NAMED,
        listed,
        "a constant is missing from this table, or the order differs"
    );
}

#[test]
fn names_are_of_named_codes_only_and_differ() {
    let mut names = Vec::new();
    for code in 0..0x800u16 {
        let named = NAMED
            .iter()
            .any(|&(sct, sc, _)| code == u16::from(sct) << 8 | u16::from(sc));
        let name = Status(code).name();
        assert_eq!(name.is_some(), named, "{code:#05x}");
        names.extend(name);
    }
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "two codes share a name");
}

#[test]
fn spot_checked_names() {
    let table = [
        (0x005, "Commands Aborted due to Power Loss Notification"),
        (0x013, "PRP Offset Invalid"),
        (0x024, "Admin Command Media Not Ready"),
        (0x080, "LBA Out of Range"),
        (0x100, "Completion Queue Invalid"),
        (0x103, "Abort Command Limit Exceeded"),
        (0x109, "Invalid Log Page"),
        (0x182, "Attempted Write to Read Only Range"),
        (0x281, "Unrecovered Read Error"),
        (0x287, "Deallocated or Unwritten Logical Block"),
        (0x371, "Command Aborted By Host"),
    ];
    for (code, name) in table {
        assert_eq!(Status(code).name(), Some(name));
    }
}

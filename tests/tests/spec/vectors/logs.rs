//! Log pages: their fields, bits and identifiers.

use super::{hex, page};
use nvme_core::spec::Status;
use nvme_core::spec::log_page::*;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

#[test]
fn identifiers() {
    let table = [
        (lid::SUPPORTED, 0x00, "Supported Log Pages"),
        (lid::ERROR, 0x01, "Error Information"),
        (lid::SMART, 0x02, "SMART / Health Information"),
        (lid::FIRMWARE, 0x03, "Firmware Slot Information"),
        (lid::CHANGED_NAMESPACES, 0x04, "Changed Namespace List"),
        (
            lid::COMMANDS_SUPPORTED,
            0x05,
            "Commands Supported and Effects",
        ),
        (lid::SELF_TEST, 0x06, "Device Self-test"),
        (lid::TELEMETRY_HOST, 0x07, "Telemetry Host-Initiated"),
        (
            lid::TELEMETRY_CONTROLLER,
            0x08,
            "Telemetry Controller-Initiated",
        ),
        (lid::ENDURANCE_GROUP, 0x09, "Endurance Group Information"),
        (
            lid::PREDICTABLE_LATENCY,
            0x0A,
            "Predictable Latency Per NVM Set",
        ),
        (
            lid::PREDICTABLE_LATENCY_EVENTS,
            0x0B,
            "Predictable Latency Event Aggregate",
        ),
        (lid::ANA, 0x0C, "Asymmetric Namespace Access"),
        (lid::PERSISTENT_EVENT, 0x0D, "Persistent Event Log"),
        (lid::LBA_STATUS, 0x0E, "LBA Status Information"),
        (
            lid::ENDURANCE_GROUP_EVENTS,
            0x0F,
            "Endurance Group Event Aggregate",
        ),
        (lid::MEDIA_UNIT_STATUS, 0x10, "Media Unit Status"),
        (
            lid::SUPPORTED_CAPACITY,
            0x11,
            "Supported Capacity Configuration List",
        ),
        (
            lid::FEATURE_EFFECTS,
            0x12,
            "Feature Identifiers Supported and Effects",
        ),
        (
            lid::MI_EFFECTS,
            0x13,
            "NVMe-MI Commands Supported and Effects",
        ),
        (lid::LOCKDOWN, 0x14, "Command and Feature Lockdown"),
        (lid::BOOT_PARTITION, 0x15, "Boot Partition"),
        (lid::ROTATIONAL_MEDIA, 0x16, "Rotational Media Information"),
        (lid::DISCOVERY, 0x70, "Discovery"),
        (lid::RESERVATION, 0x80, "Reservation Notification"),
        (lid::SANITIZE, 0x81, "Sanitize Status"),
    ];
    for (named, code, text) in table {
        assert_eq!((named, name(code)), (code, Some(text)));
    }
    assert_eq!([name(0x17), name(0x6F), name(0xC0), name(0xFF)], [None; 4]);
}

#[test]
fn error_information() {
    // Write Fault with DNR is status 4280h; shifted over the phase tag, 8500h.
    let bytes = hex("2a 00 00 00 00 00 00 00 03 00 04 10 00 85 28 00 \
         08 07 06 05 04 03 02 01 01 00 00 00 c0 00 00 00 \
         88 77 66 55 44 33 22 11 cd ab 00 00 00 00 00 00 \
         00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00");
    let entry = ErrorEntry::read_from_bytes(&bytes).unwrap();
    assert_eq!((entry.error_count, entry.sqid, entry.cid), (42, 3, 0x1004));
    assert_eq!(entry.status(), Status::WRITE_FAULT.with_dnr());
    assert_eq!(
        (entry.parameter_error_location, entry.lba, entry.nsid),
        (40, 0x0102_0304_0506_0708, 1)
    );
    assert_eq!((entry.vendor_log_page, entry.trtype), (0xC0, 0));
    assert_eq!(
        (entry.command_specific, entry.trtype_specific),
        (0x1122_3344_5566_7788, 0xABCD)
    );
    assert_eq!(entry.as_bytes(), bytes);
}

#[test]
fn smart_health_information() {
    let bytes = page(
        512,
        &[
            (0, "09 2c 01 64 0a 03 05"),
            (32, "01 00 00 00 00 00 00 00 01"),
            (48, "02"),
            (64, "03"),
            (80, "04"),
            (96, "05"),
            (112, "06"),
            (128, "07"),
            (144, "08"),
            (160, "09"),
            (176, "0a"),
            (192, "0b 00 00 00 0c 00 00 00"),
            (200, "2d 01 2e 01 00 00 00 00 00 00 00 00 00 00 30 01"),
            (216, "0d 00 00 00 0e 00 00 00 0f 00 00 00 10 00 00 01"),
        ],
    );
    let mut smart = SmartData::read_from_bytes(&bytes).unwrap();
    assert_eq!(
        smart.critical_warning,
        critical_warning::SPARE | critical_warning::READ_ONLY
    );
    assert_eq!(
        (
            smart.kelvins(),
            smart.available_spare,
            smart.spare_threshold
        ),
        (300, 100, 10)
    );
    assert_eq!(
        (smart.percentage_used, smart.endurance_group_warning),
        (3, 5)
    );
    assert_eq!(u128(&smart.data_units_read), 0x1_0000_0000_0000_0001);
    let counts = [
        &smart.data_units_written,
        &smart.host_reads,
        &smart.host_writes,
        &smart.busy_minutes,
        &smart.power_cycles,
        &smart.power_on_hours,
        &smart.unsafe_shutdowns,
        &smart.media_errors,
        &smart.error_log_entries,
    ];
    assert_eq!(counts.map(u128), [2, 3, 4, 5, 6, 7, 8, 9, 10]);
    assert_eq!((smart.warning_minutes, smart.critical_minutes), (11, 12));
    assert_eq!(smart.temperature_sensors, [301, 302, 0, 0, 0, 0, 0, 304]);
    assert_eq!((smart.tmt1_transitions, smart.tmt2_transitions), (13, 14));
    assert_eq!((smart.tmt1_seconds, smart.tmt2_seconds), (15, 0x0100_0010));
    assert_eq!(smart.as_bytes(), bytes);
    assert_eq!(SmartData::DATA_UNIT_BYTES, 512_000);

    smart.set_kelvins(0x0155);
    assert_eq!(smart.as_bytes()[..4], [0x09, 0x55, 0x01, 0x64]);
}

#[test]
fn critical_warnings() {
    let bits = [
        critical_warning::SPARE,
        critical_warning::TEMPERATURE,
        critical_warning::RELIABILITY,
        critical_warning::READ_ONLY,
        critical_warning::BACKUP,
        critical_warning::PERSISTENT_MEMORY,
    ];
    assert_eq!(bits, [0x01, 0x02, 0x04, 0x08, 0x10, 0x20]);
}

#[test]
fn counts_of_128_bits() {
    let bytes: [u8; 16] = hex("01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f 10")
        .try_into()
        .unwrap();
    assert_eq!(u128(&bytes), 0x100F_0E0D_0C0B_0A09_0807_0605_0403_0201);
    assert_eq!(
        nvme_core::spec::log_page::bytes(0x100F_0E0D_0C0B_0A09_0807_0605_0403_0201),
        bytes
    );
}

#[test]
fn firmware_slots() {
    let bytes = page(
        512,
        &[
            (0, "21"),
            (8, "31 2e 30 20 20 20 20 20"),
            (16, "31 2e 31 20 20 20 20 20"),
            (56, "37"),
        ],
    );
    let slots = FirmwareSlots::read_from_bytes(&bytes).unwrap();
    assert_eq!((slots.active_slot(), slots.next_slot()), (1, 2));
    assert_eq!(
        (&slots.frs[0], &slots.frs[1], slots.frs[6][0]),
        (b"1.0     ", b"1.1     ", b'7')
    );
    assert_eq!(slots.as_bytes(), bytes);
}

#[test]
fn active_firmware_info() {
    // AFI: slot in bits 2:0, slot after the next reset in 6:4; 3 and 7 are reserved.
    for (afi, active, next) in [(0x01, 1, 0), (0x27, 7, 2), (0x73, 3, 7), (0x8A, 2, 0)] {
        let mut slots = FirmwareSlots::new_zeroed();
        slots.afi = afi;
        assert_eq!(
            (slots.active_slot(), slots.next_slot()),
            (active, next),
            "AFI {afi:#04x}"
        );
    }
}

#[test]
fn commands_supported_and_effects() {
    // Admin 06h (Identify) at 24, Format NVM at 512; I/O 00h (Flush) at 1024, 01h (Write) at 1028.
    let bytes = page(
        4096,
        &[
            (24, "01 00 00 00"),
            (512, "17 00 02 00"),
            (1024, "01"),
            (1028, "03"),
            (2044, "01 00 08 00"),
        ],
    );
    let log = CommandsSupported::read_from_bytes(&bytes).unwrap();
    assert_eq!(log.acs[0x06], effects::SUPPORTED);
    let format = effects::SUPPORTED | effects::BLOCK_CONTENT | effects::NAMESPACE_CAPABILITY;
    assert_eq!(
        log.acs[0x80] & !effects::SUBMISSION,
        format | effects::CONTROLLER_CAPABILITY
    );
    assert_eq!(log.acs[0x80] & effects::SUBMISSION, 2 << 16);
    assert_eq!(log.iocs[0x00], effects::SUPPORTED);
    assert_eq!(log.iocs[0x01], effects::SUPPORTED | effects::BLOCK_CONTENT);
    assert_eq!(log.iocs[0xFF], effects::SUPPORTED | effects::UUID_SELECTION);
    assert_eq!(effects::NAMESPACE_INVENTORY, 8);
    assert_eq!(
        log.acs
            .iter()
            .chain(&log.iocs)
            .filter(|&&dword| dword != 0)
            .count(),
        5
    );
    assert_eq!(log.as_bytes(), bytes);
}

#[test]
fn supported_log_pages() {
    let bytes = page(1024, &[(0, "01"), (8, "01 00 00 00"), (1020, "03")]);
    let pages = SupportedPages::read_from_bytes(&bytes).unwrap();
    assert_eq!(
        (pages.lids[0], pages.lids[1], pages.lids[2], pages.lids[255]),
        (1, 0, 1, 3)
    );
    assert_eq!(pages.as_bytes(), bytes);
}

#[test]
fn feature_identifiers_supported_and_effects() {
    // FID 06h at 24, 84h at 528.
    let bytes = page(1024, &[(24, "01 00 20 00"), (528, "13 00 18 02")]);
    let log = FeatureEffects::read_from_bytes(&bytes).unwrap();
    assert_eq!(
        log.fis[0x06],
        effects::SUPPORTED | effects::SCOPE_CONTROLLER
    );
    let changes = effects::SUPPORTED | effects::BLOCK_CONTENT | effects::CONTROLLER_CAPABILITY;
    let scope = effects::SCOPE_NAMESPACE | effects::SCOPE_SUBSYSTEM;
    assert_eq!(log.fis[0x84], changes | effects::UUID_SELECTION | scope);
    assert_eq!(
        [
            effects::SCOPE_NVM_SET,
            effects::SCOPE_ENDURANCE_GROUP,
            effects::SCOPE_DOMAIN
        ],
        [0x0040_0000, 0x0080_0000, 0x0100_0000]
    );
    assert_eq!(log.as_bytes(), bytes);
}

#[test]
fn mi_commands_supported_and_effects() {
    let bytes = page(4096, &[(4, "01 00 00 00"), (1020, "09"), (1024, "ff")]);
    let log = MiEffects::read_from_bytes(&bytes).unwrap();
    assert_eq!((log.mcs[1], log.mcs[255], log.mcs[2]), (1, 9, 0));
    assert_eq!(log.as_bytes(), bytes);
}

#[test]
fn sanitize_status() {
    // In progress, 9 passes complete, global data erased; overwrite with 3 passes.
    let bytes = page(
        512,
        &[
            (0, "00 40 4a 01 33 00 00 00"),
            (8, "01 00 00 00 02 00 00 00 03 00 00 00"),
            (20, "04 00 00 00 05 00 00 00 ff ff ff ff"),
            (32, "77"),
        ],
    );
    let log = SanitizeStatus::read_from_bytes(&bytes).unwrap();
    assert_eq!((log.sprog, log.scdw10), (0x4000, 0x33));
    assert_eq!(
        (log.state(), log.passes()),
        (sanitize_state::IN_PROGRESS, 9)
    );
    assert!(log.is_global_data_erased());
    assert_eq!((log.eto, log.etbe, log.etce), (1, 2, 3));
    let further = (log.etond, log.etbend, log.etcend);
    assert_eq!(further, (4, 5, SanitizeStatus::NOT_REPORTED));
    assert_eq!(log.as_bytes(), bytes);
    let states = [
        sanitize_state::NEVER,
        sanitize_state::SUCCESS,
        sanitize_state::IN_PROGRESS,
        sanitize_state::FAILED,
        sanitize_state::DEALLOCATED,
    ];
    assert_eq!(states, [0, 1, 2, 3, 4]);
    assert_eq!(SanitizeStatus::IDLE, 0xFFFF);
    assert_eq!(
        [
            command_set_event::RESERVATION,
            command_set_event::SANITIZE_COMPLETED,
            command_set_event::SANITIZE_DEALLOCATED
        ],
        [0, 1, 2]
    );
}

//! The wire types against a source that this project did not write: the C headers of libnvme.
//!
//! A C program generated here prints offsets, sizes and codes as the C compiler sees them; each must
//! equal ours. `cargo xtask test` installs the headers (Debian: libnvme-dev) and runs it.

use nvme_core::spec::feature::HostBehavior;
use nvme_core::spec::identify::{IdentifyController, IdentifyNamespace, LbaFormat, PowerState};
use nvme_core::spec::log_page::{
    ErrorEntry, FeatureEffects, FirmwareSlots, MiEffects, SanitizeStatus, SmartData,
};
use nvme_core::spec::nvm::DsmRange;
use nvme_core::spec::{Status, admin, feature, identify, log_page, nvm, register};
use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

/// A C expression and its expected value.
type Expectation = (String, u64);

macro_rules! layout {
    ($list:ident, $rust:ty, $c:literal: $($field:ident = $c_field:literal),* $(,)?) => {
        $list.push((format!("sizeof(struct {})", $c), size_of::<$rust>() as u64));
        $($list.push((format!("offsetof(struct {}, {})", $c, $c_field), offset_of!($rust, $field) as u64));)*
    };
    ($list:ident, $rust:ty, $c:literal; $($field:ident),* $(,)?) => {
        $list.push((format!("sizeof(struct {})", $c), size_of::<$rust>() as u64));
        $($list.push((format!("offsetof(struct {}, {})", $c, stringify!($field)), offset_of!($rust, $field) as u64));)*
    };
}

macro_rules! codes {
    ($list:ident: $($c:literal = $rust:expr),* $(,)?) => {
        $list.extend([$(($c.to_owned(), u64::from($rust))),*]);
    };
}

fn structures() -> Vec<Expectation> {
    let mut list = Vec::new();
    layout!(list, IdentifyController, "nvme_id_ctrl";
        vid, ssvid, sn, mn, fr, rab, ieee, cmic, mdts, cntlid, ver, rtd3r, rtd3e, oaes, ctratt, rrls,
        cntrltype, fguid, crdt1, crdt2, crdt3, nvmsr, vwci, mec, oacs, acl, aerl, frmw, lpa, elpe, npss,
        avscc, apsta, wctemp, cctemp, mtfa, hmpre, hmmin, tnvmcap, unvmcap, rpmbs, edstt, dsto, fwug, kas,
        hctma, mntmt, mxtmt, sanicap, hmminds, hmmaxd, nsetidmax, endgidmax, anatt, anacap, anagrpmax,
        nanagrpid, pels, domainid, megcap, sqes, cqes, maxcmd, nn, oncs, fuses, fna, vwc, awun, awupf,
        icsvscc, nwpc, acwu, ocfs, sgls, mnan, maxdna, maxcna, subnqn, psd);
    layout!(list, PowerState, "nvme_id_psd": mp = "mp", flags = "flags", enlat = "enlat", exlat = "exlat",
        rrt = "rrt", rrl = "rrl", rwt = "rwt", rwl = "rwl", idlp = "idlp", ips = "ips", actp = "actp",
        apws = "apws");
    layout!(list, IdentifyNamespace, "nvme_id_ns";
        nsze, ncap, nuse, nsfeat, nlbaf, flbas, mc, dpc, dps, nmic, rescap, fpi, dlfeat, nawun, nawupf,
        nacwu, nabsn, nabo, nabspf, noiob, nvmcap, npwg, npwa, npdg, npda, nows, mssrl, mcl, msrc, nulbaf,
        anagrpid, nsattr, nvmsetid, endgid, nguid, eui64, lbaf);
    layout!(list, LbaFormat, "nvme_lbaf": ms = "ms", lbads = "ds", rp = "rp");
    layout!(list, ErrorEntry, "nvme_error_log_page": error_count = "error_count", sqid = "sqid",
        cid = "cmdid", phase_status = "status_field", parameter_error_location = "parm_error_location",
        lba = "lba", nsid = "nsid", vendor_log_page = "vs", trtype = "trtype", command_specific = "cs",
        trtype_specific = "trtype_spec_info");
    layout!(list, SmartData, "nvme_smart_log": critical_warning = "critical_warning",
        temperature = "temperature", available_spare = "avail_spare", spare_threshold = "spare_thresh",
        percentage_used = "percent_used", data_units_read = "data_units_read",
        data_units_written = "data_units_written", host_reads = "host_reads", host_writes = "host_writes",
        busy_minutes = "ctrl_busy_time", power_cycles = "power_cycles", power_on_hours = "power_on_hours",
        unsafe_shutdowns = "unsafe_shutdowns", media_errors = "media_errors",
        error_log_entries = "num_err_log_entries", warning_minutes = "warning_temp_time",
        critical_minutes = "critical_comp_time", temperature_sensors = "temp_sensor");
    layout!(list, FirmwareSlots, "nvme_firmware_slot": afi = "afi", frs = "frs");
    layout!(list, SanitizeStatus, "nvme_sanitize_log_page": sprog = "sprog", sstat = "sstat",
        scdw10 = "scdw10", eto = "eto", etbe = "etbe", etce = "etce", etond = "etond", etbend = "etbend",
        etcend = "etcend");
    layout!(list, FeatureEffects, "nvme_fid_supported_effects_log": fis = "fid_support");
    layout!(list, MiEffects, "nvme_mi_cmd_supported_effects_log": mcs = "mi_cmd_support");
    layout!(list, HostBehavior, "nvme_feat_host_behavior": acre = "acre");
    layout!(list, DsmRange, "nvme_dsm_range": attributes = "cattr", blocks = "nlb", slba = "slba");
    list
}

fn numbers() -> Vec<Expectation> {
    let mut list = Vec::new();
    codes!(list:
        "NVME_REG_CAP" = register::offset::CAP, "NVME_REG_VS" = register::offset::VS,
        "NVME_REG_INTMS" = register::offset::INTMS, "NVME_REG_INTMC" = register::offset::INTMC,
        "NVME_REG_CC" = register::offset::CC, "NVME_REG_CSTS" = register::offset::CSTS,
        "NVME_REG_NSSR" = register::offset::NSSR, "NVME_REG_AQA" = register::offset::AQA,
        "NVME_REG_ASQ" = register::offset::ASQ, "NVME_REG_ACQ" = register::offset::ACQ,
        "NVME_REG_CMBLOC" = register::offset::CMBLOC, "NVME_REG_CMBSZ" = register::offset::CMBSZ,
        "NVME_REG_BPINFO" = register::offset::BPINFO, "NVME_REG_CMBMSC" = register::offset::CMBMSC,
        "NVME_REG_CMBSTS" = register::offset::CMBSTS, "NVME_REG_CRTO" = register::offset::CRTO,
        "NVME_REG_PMRCAP" = register::offset::PMRCAP,
        "nvme_cmd_flush" = nvm::opcode::FLUSH, "nvme_cmd_write" = nvm::opcode::WRITE,
        "nvme_cmd_read" = nvm::opcode::READ, "nvme_cmd_write_uncor" = nvm::opcode::WRITE_UNCORRECTABLE,
        "nvme_cmd_compare" = nvm::opcode::COMPARE, "nvme_cmd_write_zeroes" = nvm::opcode::WRITE_ZEROES,
        "nvme_cmd_dsm" = nvm::opcode::DATASET_MANAGEMENT, "nvme_cmd_verify" = nvm::opcode::VERIFY,
        "nvme_admin_delete_sq" = admin::opcode::DELETE_IO_SQ, "nvme_admin_create_sq" = admin::opcode::CREATE_IO_SQ,
        "nvme_admin_get_log_page" = admin::opcode::GET_LOG_PAGE, "nvme_admin_delete_cq" = admin::opcode::DELETE_IO_CQ,
        "nvme_admin_create_cq" = admin::opcode::CREATE_IO_CQ, "nvme_admin_identify" = admin::opcode::IDENTIFY,
        "nvme_admin_abort_cmd" = admin::opcode::ABORT, "nvme_admin_set_features" = admin::opcode::SET_FEATURES,
        "nvme_admin_get_features" = admin::opcode::GET_FEATURES, "nvme_admin_async_event" = admin::opcode::ASYNC_EVENT_REQUEST,
        "nvme_admin_keep_alive" = admin::opcode::KEEP_ALIVE, "nvme_admin_dbbuf" = admin::opcode::DOORBELL_BUFFER_CONFIG,
        "nvme_admin_format_nvm" = admin::opcode::FORMAT_NVM, "nvme_admin_sanitize_nvm" = admin::opcode::SANITIZE,
        "NVME_IDENTIFY_CNS_NS" = admin::cns::NAMESPACE, "NVME_IDENTIFY_CNS_CTRL" = admin::cns::CONTROLLER,
        "NVME_IDENTIFY_CNS_NS_ACTIVE_LIST" = admin::cns::ACTIVE_NAMESPACES,
        "NVME_IDENTIFY_CNS_NS_DESC_LIST" = admin::cns::NAMESPACE_DESCRIPTORS,
        "NVME_IDENTIFY_CNS_CSI_NS" = admin::cns::CSI_NAMESPACE,
        "NVME_IDENTIFY_CNS_CSI_CTRL" = admin::cns::CSI_CONTROLLER,
        "NVME_FEAT_FID_ARBITRATION" = feature::fid::ARBITRATION,
        "NVME_FEAT_FID_POWER_MGMT" = feature::fid::POWER_MANAGEMENT,
        "NVME_FEAT_FID_TEMP_THRESH" = feature::fid::TEMPERATURE,
        "NVME_FEAT_FID_ERR_RECOVERY" = feature::fid::ERROR_RECOVERY,
        "NVME_FEAT_FID_VOLATILE_WC" = feature::fid::VOLATILE_WRITE_CACHE,
        "NVME_FEAT_FID_NUM_QUEUES" = feature::fid::NUMBER_OF_QUEUES,
        "NVME_FEAT_FID_ASYNC_EVENT" = feature::fid::ASYNC_EVENT,
        "NVME_FEAT_FID_AUTO_PST" = feature::fid::AUTONOMOUS_POWER,
        "NVME_FEAT_FID_HOST_MEM_BUF" = feature::fid::HOST_MEMORY_BUFFER,
        "NVME_FEAT_FID_TIMESTAMP" = feature::fid::TIMESTAMP,
        "NVME_FEAT_FID_KATO" = feature::fid::KEEP_ALIVE,
        "NVME_FEAT_FID_LBA_RANGE" = feature::fid::LBA_RANGE_TYPE,
        "NVME_FEAT_FID_IRQ_COALESCE" = feature::fid::INTERRUPT_COALESCING,
        "NVME_FEAT_FID_IRQ_CONFIG" = feature::fid::INTERRUPT_VECTOR,
        "NVME_FEAT_FID_WRITE_ATOMIC" = feature::fid::WRITE_ATOMICITY,
        "NVME_FEAT_FID_HCTM" = feature::fid::THERMAL_MANAGEMENT,
        "NVME_FEAT_FID_NOPSC" = feature::fid::NON_OPERATIONAL_POWER,
        "NVME_FEAT_FID_RRL" = feature::fid::READ_RECOVERY_LEVEL,
        "NVME_FEAT_FID_PLM_CONFIG" = feature::fid::PREDICTABLE_LATENCY,
        "NVME_FEAT_FID_PLM_WINDOW" = feature::fid::PREDICTABLE_LATENCY_WINDOW,
        "NVME_FEAT_FID_LBA_STS_INTERVAL" = feature::fid::LBA_STATUS_INTERVAL,
        "NVME_FEAT_FID_HOST_BEHAVIOR" = feature::fid::HOST_BEHAVIOR,
        "NVME_FEAT_FID_SANITIZE" = feature::fid::SANITIZE_CONFIG,
        "NVME_FEAT_FID_ENDURANCE_EVT_CFG" = feature::fid::ENDURANCE_GROUP_EVENT,
        "NVME_FEAT_FID_IOCS_PROFILE" = feature::fid::COMMAND_SET_PROFILE,
        "NVME_FEAT_FID_SPINUP_CONTROL" = feature::fid::SPINUP_CONTROL,
        "NVME_FEAT_FID_ENH_CTRL_METADATA" = feature::fid::ENHANCED_CONTROLLER_METADATA,
        "NVME_FEAT_FID_CTRL_METADATA" = feature::fid::CONTROLLER_METADATA,
        "NVME_FEAT_FID_NS_METADATA" = feature::fid::NAMESPACE_METADATA,
        "NVME_FEAT_FID_SW_PROGRESS" = feature::fid::SOFTWARE_PROGRESS,
        "NVME_FEAT_FID_HOST_ID" = feature::fid::HOST_IDENTIFIER,
        "NVME_FEAT_FID_RESV_MASK" = feature::fid::RESERVATION_NOTIFICATION,
        "NVME_FEAT_FID_RESV_PERSIST" = feature::fid::RESERVATION_PERSISTENCE,
        "NVME_FEAT_FID_WRITE_PROTECT" = feature::fid::WRITE_PROTECTION,
        "NVME_LOG_LID_ERROR" = log_page::lid::ERROR, "NVME_LOG_LID_SMART" = log_page::lid::SMART,
        "NVME_LOG_LID_FW_SLOT" = log_page::lid::FIRMWARE,
        "NVME_LOG_LID_CHANGED_NS" = log_page::lid::CHANGED_NAMESPACES,
        "NVME_LOG_LID_CMD_EFFECTS" = log_page::lid::COMMANDS_SUPPORTED,
        "NVME_LOG_LID_DEVICE_SELF_TEST" = log_page::lid::SELF_TEST,
        "NVME_LOG_LID_TELEMETRY_HOST" = log_page::lid::TELEMETRY_HOST,
        "NVME_LOG_LID_TELEMETRY_CTRL" = log_page::lid::TELEMETRY_CONTROLLER,
        "NVME_LOG_LID_ENDURANCE_GROUP" = log_page::lid::ENDURANCE_GROUP,
        "NVME_LOG_LID_PREDICTABLE_LAT_NVMSET" = log_page::lid::PREDICTABLE_LATENCY,
        "NVME_LOG_LID_PREDICTABLE_LAT_AGG" = log_page::lid::PREDICTABLE_LATENCY_EVENTS,
        "NVME_LOG_LID_ANA" = log_page::lid::ANA,
        "NVME_LOG_LID_PERSISTENT_EVENT" = log_page::lid::PERSISTENT_EVENT,
        "NVME_LOG_LID_LBA_STATUS" = log_page::lid::LBA_STATUS,
        "NVME_LOG_LID_ENDURANCE_GRP_EVT" = log_page::lid::ENDURANCE_GROUP_EVENTS,
        "NVME_LOG_LID_DISCOVER" = log_page::lid::DISCOVERY,
        "NVME_LOG_LID_RESERVATION" = log_page::lid::RESERVATION,
        "NVME_LOG_LID_SANITIZE" = log_page::lid::SANITIZE,
        "NVME_LOG_LID_SUPPORTED_LOG_PAGES" = log_page::lid::SUPPORTED,
        "NVME_LOG_LID_FID_SUPPORTED_EFFECTS" = log_page::lid::FEATURE_EFFECTS,
        "NVME_LOG_LID_MI_CMD_SUPPORTED_EFFECTS" = log_page::lid::MI_EFFECTS,
        "NVME_SANITIZE_SANACT_EXIT_FAILURE" = admin::SanitizeAction::ExitFailureMode as u32,
        "NVME_SANITIZE_SANACT_START_BLOCK_ERASE" = admin::SanitizeAction::BlockErase as u32,
        "NVME_SANITIZE_SANACT_START_OVERWRITE" = admin::SanitizeAction::Overwrite as u32,
        "NVME_SANITIZE_SANACT_START_CRYPTO_ERASE" = admin::SanitizeAction::CryptoErase as u32,
        "NVME_SANITIZE_SSTAT_STATUS_NEVER_SANITIZED" = log_page::sanitize_state::NEVER,
        "NVME_SANITIZE_SSTAT_STATUS_COMPLETE_SUCCESS" = log_page::sanitize_state::SUCCESS,
        "NVME_SANITIZE_SSTAT_STATUS_COMPLETED_FAILED" = log_page::sanitize_state::FAILED,
        "NVME_SANITIZE_SSTAT_STATUS_ND_COMPLETE_SUCCESS" = log_page::sanitize_state::DEALLOCATED,
        "NVME_SANITIZE_SSTAT_GLOBAL_DATA_ERASED" = log_page::SanitizeStatus::GLOBAL_DATA_ERASED,
        "NVME_CTRL_SANICAP_CES" = identify::sanicap::CRYPTO_ERASE,
        "NVME_CTRL_SANICAP_BES" = identify::sanicap::BLOCK_ERASE,
        "NVME_CTRL_SANICAP_OWS" = identify::sanicap::OVERWRITE,
        "NVME_CTRL_SANICAP_NDI" = identify::sanicap::NO_DEALLOCATE_INHIBITED,
        "(unsigned)NVME_CTRL_SANICAP_NODMMAS" = identify::sanicap::MODIFIES_MEDIA,
        "NVME_FID_SUPPORTED_EFFECTS_FSUPP" = log_page::effects::SUPPORTED,
        "NVME_FID_SUPPORTED_EFFECTS_UDCC" = log_page::effects::BLOCK_CONTENT,
        "NVME_FID_SUPPORTED_EFFECTS_CCC" = log_page::effects::CONTROLLER_CAPABILITY,
        "NVME_FID_SUPPORTED_EFFECTS_UUID_SEL" = log_page::effects::UUID_SELECTION,
        "NVME_FID_SUPPORTED_EFFECTS_SCOPE_NS << NVME_FID_SUPPORTED_EFFECTS_SCOPE_SHIFT"
            = log_page::effects::SCOPE_NAMESPACE,
        "NVME_FID_SUPPORTED_EFFECTS_SCOPE_CTRL << NVME_FID_SUPPORTED_EFFECTS_SCOPE_SHIFT"
            = log_page::effects::SCOPE_CONTROLLER,
        "NVME_FID_SUPPORTED_EFFECTS_SCOPE_NSS << NVME_FID_SUPPORTED_EFFECTS_SCOPE_SHIFT"
            = log_page::effects::SCOPE_SUBSYSTEM,
        "NVME_AER_CSS_NVM_RESERVATION" = log_page::command_set_event::RESERVATION,
        "NVME_AER_CSS_NVM_SANITIZE_COMPLETED" = log_page::command_set_event::SANITIZE_COMPLETED,
        "NVME_AER_CSS_NVM_UNEXPECTED_SANITIZE_DEALLOC" = log_page::command_set_event::SANITIZE_DEALLOCATED,
        "NVME_AER_ERROR" = log_page::event_type::ERROR,
        "NVME_AER_SMART" = log_page::event_type::SMART,
        "NVME_AER_NOTICE" = log_page::event_type::NOTICE,
        "NVME_AER_CSS" = log_page::event_type::COMMAND_SET,
        "NVME_AER_VS" = log_page::event_type::VENDOR,
        "NVME_AER_ERROR_INVALID_DB_REG" = log_page::error_event::INVALID_DOORBELL_REGISTER,
        "NVME_AER_ERROR_INVALID_DB_VAL" = log_page::error_event::INVALID_DOORBELL_VALUE,
        "NVME_AER_ERROR_DIAG_FAILURE" = log_page::error_event::DIAGNOSTIC_FAILURE,
        "NVME_AER_ERROR_PERSISTENT_INTERNAL_ERROR" = log_page::error_event::PERSISTENT_INTERNAL,
        "NVME_AER_ERROR_TRANSIENT_INTERNAL_ERROR" = log_page::error_event::TRANSIENT_INTERNAL,
        "NVME_AER_ERROR_FW_IMAGE_LOAD_ERROR" = log_page::error_event::FIRMWARE_LOAD,
    );
    list
}

fn statuses() -> Vec<Expectation> {
    // libnvme names the status code type and the code apart.
    let mut list = Vec::new();
    let mut add = |sct: &str, sc: &str, status: Status| {
        list.push((
            format!("(NVME_SCT_{sct} << 8 | NVME_SC_{sc})"),
            u64::from(status.0),
        ));
    };
    use Status as S;
    for (sc, status) in [
        ("SUCCESS", S::SUCCESS),
        ("INVALID_OPCODE", S::INVALID_OPCODE),
        ("INVALID_FIELD", S::INVALID_FIELD),
        ("CMDID_CONFLICT", S::CID_CONFLICT),
        ("DATA_XFER_ERROR", S::DATA_TRANSFER_ERROR),
        ("POWER_LOSS", S::ABORTED_POWER_LOSS),
        ("INTERNAL", S::INTERNAL_ERROR),
        ("ABORT_REQ", S::ABORT_REQUESTED),
        ("ABORT_QUEUE", S::ABORTED_SQ_DELETION),
        ("FUSED_FAIL", S::ABORTED_FAILED_FUSED),
        ("FUSED_MISSING", S::ABORTED_MISSING_FUSED),
        ("INVALID_NS", S::INVALID_NAMESPACE),
        ("CMD_SEQ_ERROR", S::COMMAND_SEQUENCE_ERROR),
        ("SGL_INVALID_LAST", S::INVALID_SGL_SEGMENT),
        ("SGL_INVALID_COUNT", S::INVALID_SGL_COUNT),
        ("SGL_INVALID_DATA", S::DATA_SGL_LENGTH_INVALID),
        ("SGL_INVALID_METADATA", S::METADATA_SGL_LENGTH_INVALID),
        ("SGL_INVALID_TYPE", S::SGL_TYPE_INVALID),
        ("CMB_INVALID_USE", S::INVALID_CMB_USE),
        ("PRP_INVALID_OFFSET", S::INVALID_PRP_OFFSET),
        ("AWU_EXCEEDED", S::ATOMIC_WRITE_UNIT_EXCEEDED),
        ("OP_DENIED", S::OPERATION_DENIED),
        ("SGL_INVALID_OFFSET", S::SGL_OFFSET_INVALID),
        ("HOSTID_FORMAT", S::HOST_ID_INCONSISTENT_FORMAT),
        ("KAT_EXPIRED", S::KEEP_ALIVE_EXPIRED),
        ("KAT_INVALID", S::KEEP_ALIVE_INVALID),
        ("SANITIZE_FAILED", S::SANITIZE_FAILED),
        ("SANITIZE_IN_PROGRESS", S::SANITIZE_IN_PROGRESS),
        ("SGL_INVALID_GRANULARITY", S::SGL_GRANULARITY_INVALID),
        ("CMD_IN_CMBQ_NOT_SUPP", S::NOT_SUPPORTED_FOR_CMB_QUEUE),
        ("NS_WRITE_PROTECTED", S::NAMESPACE_WRITE_PROTECTED),
        ("CMD_INTERRUPTED", S::COMMAND_INTERRUPTED),
        ("TRAN_TPORT_ERROR", S::TRANSIENT_TRANSPORT_ERROR),
        ("ADMIN_CMD_MEDIA_NOT_READY", S::ADMIN_MEDIA_NOT_READY),
        ("LBA_RANGE", S::LBA_OUT_OF_RANGE),
        ("CAP_EXCEEDED", S::CAPACITY_EXCEEDED),
        ("NS_NOT_READY", S::NAMESPACE_NOT_READY),
        ("RESERVATION_CONFLICT", S::RESERVATION_CONFLICT),
        ("FORMAT_IN_PROGRESS", S::FORMAT_IN_PROGRESS),
    ] {
        add("GENERIC", sc, status);
    }
    for (sc, status) in [
        ("CQ_INVALID", S::INVALID_CQ),
        ("QID_INVALID", S::INVALID_QID),
        ("QUEUE_SIZE", S::INVALID_QUEUE_SIZE),
        ("ABORT_LIMIT", S::ABORT_LIMIT_EXCEEDED),
        ("ASYNC_LIMIT", S::AER_LIMIT_EXCEEDED),
        ("FIRMWARE_SLOT", S::INVALID_FIRMWARE_SLOT),
        ("FIRMWARE_IMAGE", S::INVALID_FIRMWARE_IMAGE),
        ("INVALID_VECTOR", S::INVALID_INTERRUPT_VECTOR),
        ("INVALID_LOG_PAGE", S::INVALID_LOG_PAGE),
        ("INVALID_FORMAT", S::INVALID_FORMAT),
        ("INVALID_QUEUE", S::INVALID_QUEUE_DELETION),
        ("FEATURE_NOT_SAVEABLE", S::FEATURE_NOT_SAVEABLE),
        ("FEATURE_NOT_CHANGEABLE", S::FEATURE_NOT_CHANGEABLE),
        ("FEATURE_NOT_PER_NS", S::FEATURE_NOT_NAMESPACE_SPECIFIC),
        ("OVERLAPPING_RANGE", S::OVERLAPPING_RANGE),
        ("NS_INSUFFICIENT_CAP", S::NAMESPACE_INSUFFICIENT_CAPACITY),
        ("NS_ID_UNAVAILABLE", S::NAMESPACE_ID_UNAVAILABLE),
        ("NS_ALREADY_ATTACHED", S::NAMESPACE_ALREADY_ATTACHED),
        ("NS_IS_PRIVATE", S::NAMESPACE_IS_PRIVATE),
        ("NS_NOT_ATTACHED", S::NAMESPACE_NOT_ATTACHED),
        ("THIN_PROV_NOT_SUPP", S::THIN_PROVISIONING_NOT_SUPPORTED),
        ("CTRL_LIST_INVALID", S::CONTROLLER_LIST_INVALID),
        ("SELF_TEST_IN_PROGRESS", S::SELF_TEST_IN_PROGRESS),
        ("BP_WRITE_PROHIBITED", S::BOOT_PARTITION_WRITE_PROHIBITED),
        ("INVALID_CTRL_ID", S::INVALID_CONTROLLER_ID),
        ("INVALID_SEC_CTRL_STATE", S::INVALID_SECONDARY_STATE),
        ("INVALID_CTRL_RESOURCES", S::INVALID_RESOURCE_COUNT),
        ("INVALID_RESOURCE_ID", S::INVALID_RESOURCE_ID),
        ("ANA_GROUP_ID_INVALID", S::ANA_GROUP_ID_INVALID),
        ("ANA_ATTACH_FAILED", S::ANA_ATTACH_FAILED),
        ("IOCS_NOT_SUPPORTED", S::COMMAND_SET_NOT_SUPPORTED),
        ("IOCS_NOT_ENABLED", S::COMMAND_SET_NOT_ENABLED),
        ("INVALID_IOCS", S::INVALID_COMMAND_SET),
        ("ID_UNAVAILABLE", S::IDENTIFIER_UNAVAILABLE),
        ("BAD_ATTRIBUTES", S::CONFLICTING_ATTRIBUTES),
        ("INVALID_PI", S::INVALID_PROTECTION_INFORMATION),
        ("READ_ONLY", S::WRITE_TO_READ_ONLY),
        ("CMD_SIZE_LIMIT_EXCEEDED", S::COMMAND_SIZE_LIMIT_EXCEEDED),
        ("ZNS_BOUNDARY_ERROR", S::ZONE_BOUNDARY_ERROR),
        ("ZNS_INVAL_TRANSITION", S::INVALID_ZONE_TRANSITION),
    ] {
        add("CMD_SPECIFIC", sc, status);
    }
    for (sc, status) in [
        ("WRITE_FAULT", S::WRITE_FAULT),
        ("READ_ERROR", S::UNRECOVERED_READ_ERROR),
        ("GUARD_CHECK", S::GUARD_CHECK_ERROR),
        ("APPTAG_CHECK", S::APPLICATION_TAG_CHECK_ERROR),
        ("REFTAG_CHECK", S::REFERENCE_TAG_CHECK_ERROR),
        ("COMPARE_FAILED", S::COMPARE_FAILURE),
        ("ACCESS_DENIED", S::ACCESS_DENIED),
        ("UNWRITTEN_BLOCK", S::DEALLOCATED_BLOCK),
        ("STORAGE_TAG_CHECK", S::STORAGE_TAG_CHECK_ERROR),
    ] {
        add("MEDIA", sc, status);
    }
    for (sc, status) in [
        ("ANA_INTERNAL_PATH_ERROR", S::INTERNAL_PATH_ERROR),
        ("ANA_PERSISTENT_LOSS", S::ANA_PERSISTENT_LOSS),
        ("ANA_INACCESSIBLE", S::ANA_INACCESSIBLE),
        ("ANA_TRANSITION", S::ANA_TRANSITION),
        ("CTRL_PATH_ERROR", S::CONTROLLER_PATHING_ERROR),
        ("HOST_PATH_ERROR", S::HOST_PATHING_ERROR),
        ("CMD_ABORTED_BY_HOST", S::ABORTED_BY_HOST),
    ] {
        add("PATH", sc, status);
    }
    let flags = S::SUCCESS.with_dnr().with_more().with_crd(3);
    list.push((
        "(NVME_SC_DNR | NVME_SC_MORE | NVME_SC_CRD)".into(),
        u64::from(flags.0),
    ));
    list
}

/// Compiles and runs a program that prints each expression.
fn evaluate(expressions: &[Expectation]) -> Vec<u64> {
    let mut source = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <libnvme.h>\nint main(void) {\n",
    );
    for (expression, _) in expressions {
        writeln!(
            source,
            "printf(\"%llu\\n\", (unsigned long long)({expression}));"
        )
        .unwrap();
    }
    source.push_str("return 0;\n}\n");
    let folder = std::env::temp_dir().join(format!("nvme-spec-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (c, binary) = (folder.join("spec.c"), folder.join("spec"));
    std::fs::write(&c, source).unwrap();
    let built = Command::new("cc")
        .arg("-o")
        .arg(&binary)
        .arg(&c)
        .output()
        .unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let ran = Command::new(&binary).output().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(ran.status.success());
    let text = String::from_utf8(ran.stdout).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
#[ignore = "needs cc and the headers of libnvme (apt-get install libnvme-dev); cargo xtask test runs it"]
fn structures_registers_opcodes_and_statuses_are_those_of_libnvme() {
    let expectations = [structures(), numbers(), statuses()].concat();
    let actual = evaluate(&expectations);
    assert_eq!(actual.len(), expectations.len());
    let wrong: Vec<_> = expectations
        .iter()
        .zip(&actual)
        .filter(|(ours, theirs)| ours.1 != **theirs)
        .collect();
    assert!(
        wrong.is_empty(),
        "(C expression, ours), libnvme's: {wrong:#x?}"
    );
    println!("{} values equal", actual.len());
}

//! Controller properties: offsets, doorbells, bit fields, and the dwords of features and events.

use nvme_core::spec::PageSize;
use nvme_core::spec::feature::*;
use nvme_core::spec::log_page::{AsyncEvent, error_event, event_type};
use nvme_core::spec::register::*;

/// For each field: its largest value sets exactly the bits of the mask, and no other bit changes it.
macro_rules! masks {
    ($type:ident: $($get:ident, $set:ident, $max:expr, $mask:expr;)*) => {
        $({
            let mut value = $type(0);
            value.$set($max);
            assert_eq!(value.0, $mask, "{} of {}", stringify!($set), stringify!($type));
            assert_eq!($type($mask).$get(), $max, "{}", stringify!($get));
            assert_eq!($type(!$mask).$get(), Default::default(), "{}", stringify!($get));
        })*
    };
}

#[test]
fn property_offsets() {
    let table = [
        (offset::CAP, 0x00),
        (offset::VS, 0x08),
        (offset::INTMS, 0x0C),
        (offset::INTMC, 0x10),
        (offset::CC, 0x14),
        (offset::CSTS, 0x1C),
        (offset::NSSR, 0x20),
        (offset::AQA, 0x24),
        (offset::ASQ, 0x28),
        (offset::ACQ, 0x30),
        (offset::CMBLOC, 0x38),
        (offset::CMBSZ, 0x3C),
        (offset::BPINFO, 0x40),
        (offset::CMBMSC, 0x50),
        (offset::CMBSTS, 0x58),
        (offset::CRTO, 0x68),
        (offset::PMRCAP, 0xE00),
        (offset::DOORBELLS, 0x1000),
    ];
    for (named, expected) in table {
        assert_eq!(named, expected);
    }
}

#[test]
fn doorbell_offsets() {
    // (queue, DSTRD) -> submission tail, completion head, bytes for queues 0 to this one
    let table = [
        (0, 0, 0x1000, 0x1004, 8),
        (1, 0, 0x1008, 0x100C, 16),
        (8, 0, 0x1040, 0x1044, 72),
        (0, 4, 0x1000, 0x1040, 128),
        (3, 4, 0x1180, 0x11C0, 512),
        (65_535, 0, 0x8_0FF8, 0x8_0FFC, 0x8_0000),
        (1, 15, 0x4_1000, 0x6_1000, 0x8_0000),
        (16_383, 15, 0xFFFC_1000, 0xFFFE_1000, u32::MAX),
        // Past 4 GiB: no wrapped offset of another queue's doorbell.
        (16_384, 15, u32::MAX, u32::MAX, u32::MAX),
        (65_535, 15, u32::MAX, u32::MAX, u32::MAX),
    ];
    for (qid, dstrd, tail, head, bytes) in table {
        assert_eq!(
            sq_tail_doorbell(qid, dstrd),
            tail,
            "queue {qid}, DSTRD {dstrd}"
        );
        assert_eq!(
            cq_head_doorbell(qid, dstrd),
            head,
            "queue {qid}, DSTRD {dstrd}"
        );
        assert_eq!(
            doorbell_bytes(qid, dstrd),
            bytes,
            "queue {qid}, DSTRD {dstrd}"
        );
    }
}

#[test]
fn controller_capabilities() {
    // What a QEMU-like controller shows: 2,048 entries, contiguous, 7.5 s, NVM and I/O command sets,
    // pages of 4 KiB to 64 KiB, a controller memory buffer, ready with media.
    let cap = Cap(0x0A40_0820_0F01_07FF);
    assert_eq!(
        (cap.mqes(), cap.cqr(), cap.to(), cap.dstrd()),
        (2048, true, 15, 0)
    );
    assert_eq!(
        (cap.css(), cap.mpsmin(), cap.mpsmax(), cap.crms()),
        (0x41, 0, 4, 1)
    );
    assert_eq!(
        (cap.cmbs(), cap.pmrs(), cap.nssrs(), cap.bps()),
        (true, false, false, false)
    );
    assert_eq!((cap.ams(), cap.nsss()), (0, false));

    masks!(Cap:
        cqr, set_cqr, true, 0x0000_0000_0001_0000;
        ams, set_ams, 3, 0x0000_0000_0006_0000;
        to, set_to, 0xFF, 0x0000_0000_FF00_0000;
        dstrd, set_dstrd, 0xF, 0x0000_000F_0000_0000;
        nssrs, set_nssrs, true, 0x0000_0010_0000_0000;
        css, set_css, 0xFF, 0x0000_1FE0_0000_0000;
        bps, set_bps, true, 0x0000_2000_0000_0000;
        mpsmin, set_mpsmin, 0xF, 0x000F_0000_0000_0000;
        mpsmax, set_mpsmax, 0xF, 0x00F0_0000_0000_0000;
        pmrs, set_pmrs, true, 0x0100_0000_0000_0000;
        cmbs, set_cmbs, true, 0x0200_0000_0000_0000;
        nsss, set_nsss, true, 0x0400_0000_0000_0000;
        crms, set_crms, 3, 0x1800_0000_0000_0000;
    );
    for (entries, mqes_z) in [(2, 1), (2048, 0x7FF), (65_536, 0xFFFF)] {
        let mut cap = Cap(0);
        cap.set_mqes(entries);
        assert_eq!((cap.0, cap.mqes()), (mqes_z, entries));
        assert_eq!(Cap(mqes_z | !0xFFFF).mqes(), entries);
    }
}

#[test]
fn version_configuration_and_status() {
    let vs = Vs(0x0001_0402);
    assert_eq!((vs.mjr(), vs.mnr(), vs.ter()), (1, 4, 2));
    masks!(Vs:
        ter, set_ter, 0xFF, 0x0000_00FF;
        mnr, set_mnr, 0xFF, 0x0000_FF00;
        mjr, set_mjr, 0xFFFF, 0xFFFF_0000;
    );

    let cc = Cc(0x0046_0001);
    assert_eq!(
        (cc.en(), cc.css(), cc.mps(), cc.ams(), cc.shn()),
        (true, 0, 0, 0, 0)
    );
    assert_eq!((cc.iosqes(), cc.iocqes(), cc.crime()), (6, 4, false));
    masks!(Cc:
        en, set_en, true, 0x0000_0001;
        css, set_css, 7, 0x0000_0070;
        mps, set_mps, 0xF, 0x0000_0780;
        ams, set_ams, 7, 0x0000_3800;
        shn, set_shn, 3, 0x0000_C000;
        iosqes, set_iosqes, 0xF, 0x000F_0000;
        iocqes, set_iocqes, 0xF, 0x00F0_0000;
        crime, set_crime, true, 0x0100_0000;
    );
    masks!(Csts:
        rdy, set_rdy, true, 0x01;
        cfs, set_cfs, true, 0x02;
        shst, set_shst, 3, 0x0C;
        nssro, set_nssro, true, 0x10;
        pp, set_pp, true, 0x20;
        st, set_st, true, 0x40;
    );
    // Ready, shutdown complete.
    let csts = Csts(0x0000_0009);
    assert_eq!((csts.rdy(), csts.cfs(), csts.shst()), (true, false, 2));
}

#[test]
fn memory_page_sizes() {
    // 2^(12 + MPS) bytes
    for (mps, bytes) in [(0, 4096), (1, 8192), (4, 65_536), (15, 128 << 20)] {
        let page = PageSize::from_mps(mps).unwrap();
        assert_eq!((page.bytes(), page.mps()), (bytes, mps));
    }
    assert_eq!(PageSize::from_mps(16), None);
}

#[test]
fn admin_queue_attributes() {
    // 32 submission entries, 64 completion entries.
    let aqa = Aqa(0x003F_001F);
    assert_eq!((aqa.asqs_z(), aqa.acqs_z()), (31, 63));
    masks!(Aqa:
        asqs_z, set_asqs_z, 0xFFF, 0x0000_0FFF;
        acqs_z, set_acqs_z, 0xFFF, 0x0FFF_0000;
    );
}

#[test]
fn controller_memory_buffer() {
    masks!(Cmbloc:
        bir, set_bir, 7, 0x0000_0007;
        cqmms, set_cqmms, true, 0x0000_0008;
        cqpds, set_cqpds, true, 0x0000_0010;
        cdpmls, set_cdpmls, true, 0x0000_0020;
        cdpcils, set_cdpcils, true, 0x0000_0040;
        cdmmms, set_cdmmms, true, 0x0000_0080;
        cqda, set_cqda, true, 0x0000_0100;
        ofst, set_ofst, 0xF_FFFF, 0xFFFF_F000;
    );
    masks!(Cmbsz:
        sqs, set_sqs, true, 0x0000_0001;
        cqs, set_cqs, true, 0x0000_0002;
        lists, set_lists, true, 0x0000_0004;
        rds, set_rds, true, 0x0000_0008;
        wds, set_wds, true, 0x0000_0010;
        szu, set_szu, 0xF, 0x0000_0F00;
        sz, set_sz, 0xF_FFFF, 0xFFFF_F000;
    );
    // 64 MiB in BAR 2 at 0: 64 units of 1 MiB, everything but completion queues allowed.
    assert_eq!(Cmbloc(0x0000_0002).bir(), 2);
    let cmbsz = Cmbsz(0x0004_021D);
    assert_eq!(
        (cmbsz.sqs(), cmbsz.cqs(), cmbsz.unit(), cmbsz.bytes()),
        (true, false, Some(1 << 20), 64 << 20)
    );
    let units = [4096, 65_536, 1 << 20, 1 << 24, 1 << 28, 1 << 32, 1 << 36];
    for (szu, unit) in units.into_iter().enumerate() {
        assert_eq!(Cmbsz((szu as u32) << 8).unit(), Some(unit));
    }
    assert_eq!(
        (Cmbsz(0x0000_1700).unit(), Cmbsz(0x0000_1700).bytes()),
        (None, 0)
    );
    masks!(Cmbmsc:
        cre, set_cre, true, 0x0000_0000_0000_0001;
        cmse, set_cmse, true, 0x0000_0000_0000_0002;
        cba, set_cba, 0x000F_FFFF_FFFF_FFFF, 0xFFFF_FFFF_FFFF_F000;
    );
    assert_eq!(
        Cmbmsc(0x0000_0012_3456_7003).cba() << 12,
        0x0000_0012_3456_7000
    );
}

#[test]
fn controller_ready_timeouts() {
    // 10 s with media, 1 s without.
    let crto = Crto(0x0002_0014);
    assert_eq!((crto.crwmt(), crto.crimt()), (20, 2));
    masks!(Crto:
        crwmt, set_crwmt, 0xFFFF, 0x0000_FFFF;
        crimt, set_crimt, 0xFFFF, 0xFFFF_0000;
    );
}

#[test]
fn feature_identifiers() {
    let table = [
        (fid::ARBITRATION, 0x01, "Arbitration"),
        (fid::POWER_MANAGEMENT, 0x02, "Power Management"),
        (fid::LBA_RANGE_TYPE, 0x03, "LBA Range Type"),
        (fid::TEMPERATURE, 0x04, "Temperature Threshold"),
        (fid::ERROR_RECOVERY, 0x05, "Error Recovery"),
        (fid::VOLATILE_WRITE_CACHE, 0x06, "Volatile Write Cache"),
        (fid::NUMBER_OF_QUEUES, 0x07, "Number of Queues"),
        (fid::INTERRUPT_COALESCING, 0x08, "Interrupt Coalescing"),
        (
            fid::INTERRUPT_VECTOR,
            0x09,
            "Interrupt Vector Configuration",
        ),
        (fid::WRITE_ATOMICITY, 0x0A, "Write Atomicity Normal"),
        (fid::ASYNC_EVENT, 0x0B, "Asynchronous Event Configuration"),
        (
            fid::AUTONOMOUS_POWER,
            0x0C,
            "Autonomous Power State Transition",
        ),
        (fid::HOST_MEMORY_BUFFER, 0x0D, "Host Memory Buffer"),
        (fid::TIMESTAMP, 0x0E, "Timestamp"),
        (fid::KEEP_ALIVE, 0x0F, "Keep Alive Timer"),
        (
            fid::THERMAL_MANAGEMENT,
            0x10,
            "Host Controlled Thermal Management",
        ),
        (
            fid::NON_OPERATIONAL_POWER,
            0x11,
            "Non-Operational Power State Config",
        ),
        (fid::READ_RECOVERY_LEVEL, 0x12, "Read Recovery Level Config"),
        (
            fid::PREDICTABLE_LATENCY,
            0x13,
            "Predictable Latency Mode Config",
        ),
        (
            fid::PREDICTABLE_LATENCY_WINDOW,
            0x14,
            "Predictable Latency Mode Window",
        ),
        (
            fid::LBA_STATUS_INTERVAL,
            0x15,
            "LBA Status Information Report Interval",
        ),
        (fid::HOST_BEHAVIOR, 0x16, "Host Behavior Support"),
        (fid::SANITIZE_CONFIG, 0x17, "Sanitize Config"),
        (
            fid::ENDURANCE_GROUP_EVENT,
            0x18,
            "Endurance Group Event Configuration",
        ),
        (fid::COMMAND_SET_PROFILE, 0x19, "I/O Command Set Profile"),
        (fid::SPINUP_CONTROL, 0x1A, "Spinup Control"),
        (
            fid::ENHANCED_CONTROLLER_METADATA,
            0x7D,
            "Enhanced Controller Metadata",
        ),
        (fid::CONTROLLER_METADATA, 0x7E, "Controller Metadata"),
        (fid::NAMESPACE_METADATA, 0x7F, "Namespace Metadata"),
        (fid::SOFTWARE_PROGRESS, 0x80, "Software Progress Marker"),
        (fid::HOST_IDENTIFIER, 0x81, "Host Identifier"),
        (
            fid::RESERVATION_NOTIFICATION,
            0x82,
            "Reservation Notification Mask",
        ),
        (
            fid::RESERVATION_PERSISTENCE,
            0x83,
            "Reservation Persistence",
        ),
        (
            fid::WRITE_PROTECTION,
            0x84,
            "Namespace Write Protection Config",
        ),
    ];
    for (named, code, text) in table {
        assert_eq!((named, name(code)), (code, Some(text)));
    }
    // Reserved and vendor specific identifiers are data without a name.
    assert_eq!([name(0x00), name(0x1B), name(0xC0), name(0xFF)], [None; 4]);
}

#[test]
fn feature_dwords() {
    masks!(Arbitration:
        ab, set_ab, 7, 0x0000_0007;
        lpw_z, set_lpw_z, 0xFF, 0x0000_FF00;
        mpw_z, set_mpw_z, 0xFF, 0x00FF_0000;
        hpw_z, set_hpw_z, 0xFF, 0xFF00_0000;
    );
    masks!(PowerManagement: ps, set_ps, 0x1F, 0x1F; wh, set_wh, 7, 0xE0;);
    masks!(TemperatureThreshold:
        tmpth, set_tmpth, 0xFFFF, 0x0000_FFFF;
        tmpsel, set_tmpsel, 0xF, 0x000F_0000;
        thsel, set_thsel, 3, 0x0030_0000;
    );
    masks!(ErrorRecovery: tler, set_tler, 0xFFFF, 0x0000_FFFF; dulbe, set_dulbe, true, 0x0001_0000;);
    masks!(VolatileWriteCache: wce, set_wce, true, 1;);
    masks!(InterruptCoalescing: thr_z, set_thr_z, 0xFF, 0x00FF; time, set_time, 0xFF, 0xFF00;);
    masks!(InterruptVector: iv, set_iv, 0xFFFF, 0x0000_FFFF; cd, set_cd, true, 0x0001_0000;);
    masks!(WriteAtomicity: dn, set_dn, true, 1;);
    masks!(AutonomousPower: apste, set_apste, true, 1;);
    masks!(WriteProtection: state, set_state, 7, 7;);
    masks!(Capabilities:
        saveable, set_saveable, true, 1;
        namespace_specific, set_namespace_specific, true, 2;
        changeable, set_changeable, true, 4;
    );
    masks!(Timestamp:
        milliseconds, set_milliseconds, 0xFFFF_FFFF_FFFF, 0x0000_FFFF_FFFF_FFFF;
        synch, set_synch, true, 0x0001_0000_0000_0000;
        origin, set_origin, 7, 0x000E_0000_0000_0000;
    );
}

#[test]
fn number_of_queues() {
    // (submission, completion) wanted -> CDW11
    let table = [
        ((1, 1), 0x0000_0000),
        ((8, 16), 0x000F_0007),
        ((65_535, 65_535), 0xFFFE_FFFE),
        // FFFFh is not allowed in either half, and neither is asking for none.
        ((65_536, 0), 0x0000_FFFE),
    ];
    for ((sqs, cqs), cdw11) in table {
        assert_eq!(NumberOfQueues::request(sqs, cqs), cdw11);
    }
    assert_eq!(NumberOfQueues::granted(0x003F_0007), (8, 64));
    assert_eq!(NumberOfQueues::granted(0xFFFF_FFFF), (65_536, 65_536));
    masks!(NumberOfQueues: nsq_z, set_nsq_z, 0xFFFF, 0x0000_FFFF; ncq_z, set_ncq_z, 0xFFFF, 0xFFFF_0000;);
}

#[test]
fn asynchronous_event() {
    // Notice 02h, namespace attribute changed (info 00h), read log page 04h.
    let event = AsyncEvent(0x0004_0002);
    assert_eq!(
        (event.event_type(), event.info(), event.log_page()),
        (2, 0, 4)
    );
    masks!(AsyncEvent:
        event_type, set_event_type, 7, 0x0000_0007;
        info, set_info, 0xFF, 0x0000_FF00;
        log_page, set_log_page, 0xFF, 0x00FF_0000;
    );
}

#[test]
fn asynchronous_event_codes() {
    let types = [
        event_type::ERROR,
        event_type::SMART,
        event_type::NOTICE,
        event_type::COMMAND_SET,
        event_type::VENDOR,
    ];
    assert_eq!(types, [0, 1, 2, 6, 7]);
    let errors = [
        error_event::INVALID_DOORBELL_REGISTER,
        error_event::INVALID_DOORBELL_VALUE,
        error_event::DIAGNOSTIC_FAILURE,
        error_event::PERSISTENT_INTERNAL,
        error_event::TRANSIENT_INTERNAL,
        error_event::FIRMWARE_LOAD,
    ];
    assert_eq!(errors, [0, 1, 2, 3, 4, 5]);
}

//! Controller properties (BAR0 registers): offsets and bit fields.
//!
//! NVMe Base 2.0c, 3.1.3 (Controller Properties).

use bitfield::bitfield;

/// Byte offsets of the controller properties.
pub mod offset {
    /// Controller Capabilities, 64 bits.
    pub const CAP: u32 = 0x00;
    /// Version.
    pub const VS: u32 = 0x08;
    /// Interrupt Mask Set.
    pub const INTMS: u32 = 0x0C;
    /// Interrupt Mask Clear.
    pub const INTMC: u32 = 0x10;
    /// Controller Configuration.
    pub const CC: u32 = 0x14;
    /// Controller Status.
    pub const CSTS: u32 = 0x1C;
    /// NVM Subsystem Reset.
    pub const NSSR: u32 = 0x20;
    /// Admin Queue Attributes.
    pub const AQA: u32 = 0x24;
    /// Admin Submission Queue Base Address, 64 bits.
    pub const ASQ: u32 = 0x28;
    /// Admin Completion Queue Base Address, 64 bits.
    pub const ACQ: u32 = 0x30;
    /// Controller Memory Buffer Location.
    pub const CMBLOC: u32 = 0x38;
    /// Controller Memory Buffer Size.
    pub const CMBSZ: u32 = 0x3C;
    /// Boot Partition Information.
    pub const BPINFO: u32 = 0x40;
    /// Controller Memory Buffer Memory Space Control, 64 bits.
    pub const CMBMSC: u32 = 0x50;
    /// Controller Memory Buffer Status.
    pub const CMBSTS: u32 = 0x58;
    /// Controller Ready Timeouts.
    pub const CRTO: u32 = 0x68;
    /// Persistent Memory Region Capabilities.
    pub const PMRCAP: u32 = 0xE00;
    /// First doorbell (admin submission queue tail).
    pub const DOORBELLS: u32 = 0x1000;
}

/// Value for [`offset::NSSR`] that resets the NVM subsystem: "NVMe".
///
/// NVMe Base 2.0c, "Offset 20h: NSSR - NVM Subsystem Reset".
pub const SUBSYSTEM_RESET: u32 = 0x4E56_4D65;

/// Returns the bytes from 1000h on of `count` doorbells; `u32::MAX` if 32 bits do not suffice, which is past
/// the end of any BAR and so fails the caller's bounds check instead of naming another doorbell.
const fn doorbells(count: u32, dstrd: u8) -> u32 {
    match 4u32.checked_shl(dstrd as u32) {
        Some(stride) => count.saturating_mul(stride),
        None => u32::MAX,
    }
}

/// Returns the byte offset of the submission queue tail doorbell of queue `qid`, from the start of BAR0.
///
/// `u32::MAX` when the offset does not fit into 32 bits (DSTRD of 15 and 16,383 queues).
///
/// NVMe over PCIe 1.0c, 3.1.2.1 (Submission Queue y Tail Doorbell).
pub const fn sq_tail_doorbell(qid: u16, dstrd: u8) -> u32 {
    offset::DOORBELLS.saturating_add(doorbells(2 * qid as u32, dstrd))
}

/// Returns the byte offset of the completion queue head doorbell of queue `qid`, from the start of BAR0.
///
/// `u32::MAX` when the offset does not fit into 32 bits (DSTRD of 15 and 16,383 queues).
///
/// NVMe over PCIe 1.0c, 3.1.2.2 (Completion Queue y Head Doorbell).
pub const fn cq_head_doorbell(qid: u16, dstrd: u8) -> u32 {
    offset::DOORBELLS.saturating_add(doorbells(2 * qid as u32 + 1, dstrd))
}

/// Returns the bytes of BAR0 from 1000h on that the doorbells of queues 0 to `highest_qid` take; at most
/// `u32::MAX`.
pub const fn doorbell_bytes(highest_qid: u16, dstrd: u8) -> u32 {
    doorbells(2 * (highest_qid as u32 + 1), dstrd)
}

bitfield! {
    /// Controller Capabilities. NVMe Base 2.0c, 3.1.3.1 (Offset 0h: CAP).
    ///
    /// The register is constant while the controller is enabled, but may differ after a reset, for example
    /// with new firmware.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Cap(u64);
    impl Debug;
    u16, mqes_z, set_mqes_z: 15, 0;
    /// Contiguous queues required.
    pub cqr, set_cqr: 16;
    u8;
    /// Arbitration mechanisms supported: bit 0 weighted round robin, bit 1 vendor specific.
    pub ams, set_ams: 18, 17;
    /// Time-out for ready transitions, in units of 500 ms. Some controllers report 0; it is treated as at
    /// most 500 ms.
    pub to, set_to: 31, 24;
    /// Doorbell stride: doorbells are 4 << DSTRD bytes apart.
    pub dstrd, set_dstrd: 35, 32;
    /// NVM subsystem reset supported.
    pub bool, nssrs, set_nssrs: 36;
    /// Command sets supported: bit 0 NVM, bit 6 one or more I/O command sets, bit 7 none.
    pub css, set_css: 44, 37;
    /// Boot partition support.
    pub bool, bps, set_bps: 45;
    /// Memory page size minimum: 2^(12 + MPSMIN).
    pub mpsmin, set_mpsmin: 51, 48;
    /// Memory page size maximum: 2^(12 + MPSMAX).
    pub mpsmax, set_mpsmax: 55, 52;
    /// Persistent memory region supported.
    pub bool, pmrs, set_pmrs: 56;
    /// Controller memory buffer supported (the CMBMSC form).
    pub bool, cmbs, set_cmbs: 57;
    /// NVM subsystem shutdown supported.
    pub bool, nsss, set_nsss: 58;
    /// Controller ready modes supported: bit 0 with media, bit 1 independent of media.
    pub crms, set_crms: 60, 59;
}

impl Cap {
    /// Returns the largest queue that the controller supports, in entries (MQES is 0's based).
    pub fn mqes(&self) -> u32 {
        u32::from(self.mqes_z()) + 1
    }

    /// Sets MQES from a size in entries, 2 to 65,536.
    pub fn set_mqes(&mut self, entries: u32) {
        self.set_mqes_z(entries.saturating_sub(1).min(0xFFFF) as u16);
    }
}

bitfield! {
    /// Version. NVMe Base 2.0c, 3.1.3.2 (Offset 8h: VS).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Vs(u32);
    impl Debug;
    u8;
    /// Tertiary version.
    pub ter, set_ter: 7, 0;
    /// Minor version.
    pub mnr, set_mnr: 15, 8;
    u16;
    /// Major version.
    pub mjr, set_mjr: 31, 16;
}

bitfield! {
    /// Controller Configuration. NVMe Base 2.0c, 3.1.3.5 (Offset 14h: CC).
    ///
    /// Most fields may only be changed while EN is 0. Clearing EN resets the controller, and its memory is free
    /// once CSTS.RDY has become 0.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Cc(u32);
    impl Debug;
    /// Enable.
    pub en, set_en: 0;
    u8;
    /// I/O command set selected: 000b NVM, 110b all supported, 111b admin only.
    pub css, set_css: 6, 4;
    /// Memory page size: 2^(12 + MPS).
    pub mps, set_mps: 10, 7;
    /// Arbitration mechanism selected.
    pub ams, set_ams: 13, 11;
    /// Shutdown notification: 00b none, 01b normal, 10b abrupt.
    pub shn, set_shn: 15, 14;
    /// I/O submission queue entry size: 2^IOSQES bytes.
    pub iosqes, set_iosqes: 19, 16;
    /// I/O completion queue entry size: 2^IOCQES bytes.
    pub iocqes, set_iocqes: 23, 20;
    /// Controller ready independent of media enable.
    pub bool, crime, set_crime: 24;
}

bitfield! {
    /// Controller Status. NVMe Base 2.0c, 3.1.3.6 (Offset 1Ch: CSTS).
    ///
    /// A controller that has left the bus reads as all ones here, which sets RDY and CFS at once: compare
    /// with [`ALL_ONES`] before looking at single fields.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Csts(u32);
    impl Debug;
    /// Ready.
    pub rdy, set_rdy: 0;
    /// Controller fatal status.
    pub cfs, set_cfs: 1;
    u8;
    /// Shutdown status: 00b normal operation, 01b in progress, 10b complete.
    pub shst, set_shst: 3, 2;
    /// NVM subsystem reset occurred.
    pub bool, nssro, set_nssro: 4;
    /// Processing paused.
    pub bool, pp, set_pp: 5;
    /// Shutdown type: set if the shutdown is of the whole subsystem.
    pub bool, st, set_st: 6;
}

/// Value of every register of a controller that has left the bus.
pub const ALL_ONES: u32 = 0xFFFF_FFFF;

bitfield! {
    /// Admin Queue Attributes. NVMe Base 2.0c, 3.1.3.8 (Offset 24h: AQA).
    ///
    /// A driver writes it, and the base addresses of both admin queues, while CC.EN is 0; the controller takes
    /// them over when EN is set.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Aqa(u32);
    impl Debug;
    u16;
    /// Admin submission queue size, 0's based, at most 4,095.
    pub asqs_z, set_asqs_z: 11, 0;
    /// Admin completion queue size, 0's based, at most 4,095.
    pub acqs_z, set_acqs_z: 27, 16;
}

bitfield! {
    /// Controller Memory Buffer Location. NVMe Base 2.0c, 3.1.3.11 (Offset 38h: CMBLOC).
    ///
    /// All zero, together with a size of zero in CMBSZ, if the controller has no memory buffer or if the host
    /// has not enabled its registers.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Cmbloc(u32);
    impl Debug;
    u8;
    /// Base indicator register: the BAR that holds the buffer.
    pub bir, set_bir: 2, 0;
    /// Queue memory may be mixed: part of a queue in the buffer, part in host memory.
    pub bool, cqmms, set_cqmms: 3;
    /// Physically discontiguous queues are supported.
    pub bool, cqpds, set_cqpds: 4;
    /// The PRP or SGL lists of one command may be partly in the buffer.
    pub bool, cdpmls, set_cdpmls: 5;
    /// Lists may be in the buffer while the command is in host memory, or the reverse.
    pub bool, cdpcils, set_cdpcils: 6;
    /// The data and metadata of one command may be partly in the buffer.
    pub bool, cdmmms, set_cdmmms: 7;
    /// Queue dword alignment.
    pub bool, cqda, set_cqda: 8;
    u32;
    /// Offset of the buffer in the BAR, in units of CMBSZ.SZU.
    pub ofst, set_ofst: 31, 12;
}

bitfield! {
    /// Controller Memory Buffer Size. NVMe Base 2.0c, 3.1.3.12 (Offset 3Ch: CMBSZ).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Cmbsz(u32);
    impl Debug;
    /// Submission queues may be in the buffer.
    pub sqs, set_sqs: 0;
    /// Completion queues may be in the buffer.
    pub cqs, set_cqs: 1;
    /// PRP and SGL lists may be in the buffer.
    pub lists, set_lists: 2;
    /// Read data may be in the buffer.
    pub rds, set_rds: 3;
    /// Write data may be in the buffer.
    pub wds, set_wds: 4;
    u8;
    /// Size units: 4 KiB << (4 * SZU), up to 64 GiB (6).
    pub szu, set_szu: 11, 8;
    u32;
    /// Size in units of SZU.
    pub sz, set_sz: 31, 12;
}

impl Cmbsz {
    /// Returns the bytes of a size unit, or `None` when SZU holds a reserved value.
    pub fn unit(&self) -> Option<u64> {
        (self.szu() <= 6).then(|| 4096u64 << (4 * self.szu()))
    }

    /// Returns the size of the buffer in bytes; 0 when there is none or SZU is reserved.
    pub fn bytes(&self) -> u64 {
        self.unit().map_or(0, |unit| unit * u64::from(self.sz()))
    }
}

bitfield! {
    /// Controller Memory Buffer Memory Space Control. NVMe Base 2.0c, 3.1.3.16 (Offset 50h: CMBMSC).
    ///
    /// A controller whose CAP.CMBS is set hides its memory buffer until CRE is set here, and answers
    /// addresses in it only after CMSE was set with a base address.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Cmbmsc(u64);
    impl Debug;
    /// Capabilities registers enabled: CMBLOC and CMBSZ become readable.
    pub cre, set_cre: 0;
    /// Controller memory space enable.
    pub cmse, set_cmse: 1;
    u64;
    /// Controller base address, in units of 4 KiB.
    pub cba, set_cba: 63, 12;
}

bitfield! {
    /// Controller Ready Timeouts, in units of 500 ms. NVMe Base 2.0c, 3.1.3.21 (Offset 68h: CRTO).
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct Crto(u32);
    impl Debug;
    u16;
    /// Controller ready with media time-out.
    pub crwmt, set_crwmt: 15, 0;
    /// Controller ready independent of media time-out.
    pub crimt, set_crimt: 31, 16;
}

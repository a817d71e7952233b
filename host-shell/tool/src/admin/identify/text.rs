//! Identify structures as text: in hex where nvme-cli prints hex, with the names of the bits.

use crate::common::hex;
use nvme_host::core::spec::identify::{
    IdentifyController, IdentifyNamespace, dlfeat, fna, lpa, nsfeat, oacs, oaes, oncs, sanicap,
    sgls, vwc,
};
use serde_json::{Value, json};

/// A bit, and the name that the text has for it.
type Bit = (u64, &'static str);

/// Fields of Identify Controller that are numbers in hex without names for their bits.
const CONTROLLER_HEX: [&str; 19] = [
    "vid", "ssvid", "cntlid", "ctratt", "rrls", "nvmsr", "vwci", "mec", "avscc", "apsta", "rpmbs",
    "kas", "hctma", "anacap", "sqes", "cqes", "icsvscc", "nwpc", "ocfs",
];
const NAMESPACE_HEX: [&str; 9] = [
    "nsze", "ncap", "nuse", "mc", "dpc", "nmic", "rescap", "fpi", "nsattr",
];

const OACS: [Bit; 11] = [
    (oacs::SECURITY as u64, "Security Send/Receive"),
    (oacs::FORMAT as u64, "Format NVM"),
    (oacs::FIRMWARE as u64, "Firmware Commit/Download"),
    (oacs::NS_MANAGEMENT as u64, "Namespace Management"),
    (oacs::SELF_TEST as u64, "Device Self-test"),
    (oacs::DIRECTIVES as u64, "Directives"),
    (oacs::NVME_MI as u64, "NVMe-MI Send/Receive"),
    (oacs::VIRTUALIZATION as u64, "Virtualization Management"),
    (oacs::DOORBELL_BUFFER as u64, "Doorbell Buffer Config"),
    (oacs::GET_LBA_STATUS as u64, "Get LBA Status"),
    (oacs::LOCKDOWN as u64, "Lockdown"),
];
const ONCS: [Bit; 9] = [
    (oncs::COMPARE as u64, "Compare"),
    (oncs::WRITE_UNCORRECTABLE as u64, "Write Uncorrectable"),
    (oncs::DATASET_MANAGEMENT as u64, "Dataset Management"),
    (oncs::WRITE_ZEROES as u64, "Write Zeroes"),
    (oncs::SAVE_SELECT as u64, "Save and Select"),
    (oncs::RESERVATIONS as u64, "Reservations"),
    (oncs::TIMESTAMP as u64, "Timestamp"),
    (oncs::VERIFY as u64, "Verify"),
    (oncs::COPY as u64, "Copy"),
];
const OAES: [Bit; 4] = [
    (
        oaes::NAMESPACE_ATTRIBUTE as u64,
        "Namespace Attribute Notices",
    ),
    (
        oaes::FIRMWARE_ACTIVATION as u64,
        "Firmware Activation Notices",
    ),
    (oaes::ANA_CHANGE as u64, "ANA Change Notices"),
    (oaes::SUBSYSTEM_SHUTDOWN as u64, "Subsystem Shutdown Events"),
];
const LPA: [Bit; 6] = [
    (lpa::SMART_PER_NAMESPACE as u64, "SMART per namespace"),
    (
        lpa::COMMANDS_SUPPORTED as u64,
        "Commands Supported and Effects",
    ),
    (lpa::EXTENDED_DATA as u64, "extended data"),
    (lpa::TELEMETRY as u64, "Telemetry"),
    (lpa::PERSISTENT_EVENT as u64, "Persistent Event"),
    (
        lpa::SUPPORTED_PAGES as u64,
        "Supported Log Pages and effects",
    ),
];
const CMIC: [Bit; 4] = [
    (1, "several ports"),
    (2, "several controllers"),
    (4, "SR-IOV"),
    (8, "ANA"),
];
const FRMW: [Bit; 2] = [
    (1, "slot 1 read only"),
    (1 << 4, "activation without reset"),
];
const FNA: [Bit; 4] = [
    (fna::FORMAT_ALL as u64, "format applies to all namespaces"),
    (fna::ERASE_ALL as u64, "erase applies to all namespaces"),
    (fna::CRYPTO_ERASE as u64, "cryptographic erase"),
    (fna::NO_BROADCAST as u64, "no broadcast NSID"),
];
const SGLS: [Bit; 4] = [
    (sgls::BIT_BUCKET as u64, "bit bucket"),
    (sgls::BYTE_ALIGNED_MPTR as u64, "byte aligned MPTR"),
    (
        sgls::LONGER_THAN_TRANSFER as u64,
        "longer than the transfer",
    ),
    (sgls::MPTR_SGL as u64, "MPTR as SGL"),
];
const SANICAP: [Bit; 4] = [
    (sanicap::CRYPTO_ERASE as u64, "crypto erase"),
    (sanicap::BLOCK_ERASE as u64, "block erase"),
    (sanicap::OVERWRITE as u64, "overwrite"),
    (
        sanicap::NO_DEALLOCATE_INHIBITED as u64,
        "no-deallocate inhibited",
    ),
];
const NSFEAT: [Bit; 5] = [
    (nsfeat::THIN as u64, "thin provisioning"),
    (nsfeat::ATOMICS as u64, "NAWUN, NAWUPF, NACWU"),
    (nsfeat::DEALLOCATED_ERROR as u64, "deallocated block error"),
    (nsfeat::NO_ID_REUSE as u64, "no identifier reuse"),
    (nsfeat::OPTIMAL as u64, "NPWG, NPWA, NPDG, NPDA, NOWS"),
];

/// Returns the members of `value`, which come from `id`, in the form in which nvme-cli prints them.
pub fn controller(mut value: Value, id: &IdentifyController) -> Value {
    in_hex(&mut value, &CONTROLLER_HEX);
    let [a, b, c] = id.ieee;
    value["ieee"] = json!(format!("{c:02x}{b:02x}{a:02x}"));
    let version = format!("{}.{}.{}", id.ver >> 16, id.ver >> 8 & 0xFF, id.ver & 0xFF);
    value["ver"] = json!(format!("{:#x} ({version})", id.ver));
    value["rtd3r"] = json!(format!("{:#x} ({} us)", id.rtd3r, id.rtd3r));
    value["rtd3e"] = json!(format!("{:#x} ({} us)", id.rtd3e, id.rtd3e));
    let alignment = match id.sgls & sgls::SUPPORT {
        sgls::ANY_ALIGNMENT => [(sgls::ANY_ALIGNMENT.into(), "any alignment")],
        sgls::DWORD_ALIGNMENT => [(sgls::DWORD_ALIGNMENT.into(), "dword aligned")],
        _ => [(0, "")],
    };
    let sgls = [&alignment[..], &SGLS].concat();
    let fields: [(&str, u64, &[Bit]); 10] = [
        ("oaes", id.oaes.into(), &OAES),
        ("oacs", id.oacs.into(), &OACS),
        ("oncs", id.oncs.into(), &ONCS),
        ("lpa", id.lpa.into(), &LPA),
        ("fna", id.fna.into(), &FNA),
        ("sanicap", id.sanicap.into(), &SANICAP),
        ("cmic", id.cmic.into(), &CMIC),
        ("fuses", id.fuses.into(), &[(1, "Compare and Write")]),
        ("vwc", id.vwc.into(), &[(vwc::PRESENT as u64, "present")]),
        ("sgls", id.sgls.into(), &sgls),
    ];
    for (name, bits, names) in fields {
        value[name] = json!(hex::bits(bits, names));
    }
    let frmw = hex::bits(id.frmw.into(), &FRMW);
    value["frmw"] = json!(format!("{frmw}, {} slots", id.frmw >> 1 & 7));
    value
}

/// Returns the members of `value`, which come from `id`, in the form in which nvme-cli prints them.
pub fn namespace(mut value: Value, id: &IdentifyNamespace) -> Value {
    in_hex(&mut value, &NAMESPACE_HEX);
    value["nsfeat"] = json!(hex::bits(id.nsfeat.into(), &NSFEAT));
    let format = id.lba_format();
    let size = match id.block_bytes() {
        Some(bytes) => format!("blocks of {bytes} bytes"),
        None => "no usable blocks".to_owned(),
    };
    let flbas = format!("{:#x} (format {}, {size}", id.flbas, id.lba_format_index());
    value["flbas"] = json!(match format.ms {
        0 => flbas + ")",
        bytes => format!("{flbas}, {bytes} bytes of metadata)"),
    });
    let protection = match id.dps & 7 {
        0 => "no protection".to_owned(),
        kind => format!("protection type {kind}"),
    };
    value["dps"] = json!(format!("{:#x} ({protection})", id.dps));
    let reads = match id.dlfeat & dlfeat::READ_BEHAVIOR {
        dlfeat::READS_ZERO => "deallocated blocks read as 00h",
        dlfeat::READS_ONES => "deallocated blocks read as FFh",
        _ => "what deallocated blocks read as is not reported",
    };
    let deallocates = match id.dlfeat & dlfeat::WRITE_ZEROES_DEALLOCATE {
        0 => "",
        _ => ", Write Zeroes may deallocate",
    };
    value["dlfeat"] = json!(format!("{:#x} ({reads}{deallocates})", id.dlfeat));
    value
}

fn in_hex(value: &mut Value, names: &[&str]) {
    for name in names {
        if let Some(number) = value[*name].as_u64() {
            value[*name] = json!(format!("{number:#x}"));
        }
    }
}

//! `identify ctrl` and `identify ns`: the fields under nvme-cli's names.

mod text;

use crate::admin::passthru::dword;
use crate::common::{DeviceArgs, hex, output};
use clap::{Args, Subcommand};
use nvme_host::Result;
use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::identify::PrintableText;
use nvme_host::core::spec::identify::{IdentifyController, IdentifyNamespace, PowerState};
use nvme_host::core::spec::log_page::u128;
use serde_json::{Value, json};

/// Show the Identify structure of the controller or of a namespace
#[derive(Args)]
pub struct IdentifyCommand {
    #[command(subcommand)]
    what: IdentifySubject,
}

#[derive(Subcommand)]
enum IdentifySubject {
    Ctrl(ControllerSubject),
    Ns(NamespaceSubject),
}

/// The controller: identity, limits, optional commands
#[derive(Args)]
pub struct ControllerSubject {
    #[command(flatten)]
    device: DeviceArgs,
}

/// A namespace: size and formats
#[derive(Args)]
pub struct NamespaceSubject {
    #[command(flatten)]
    device: DeviceArgs,
    /// Namespace; 0xffffffff for what all have in common
    #[arg(long, short = 'n', value_name = "NSID", default_value = "1", value_parser = dword)]
    namespace_id: u32,
}

impl IdentifyCommand {
    pub fn run(self) -> Result<()> {
        match self.what {
            IdentifySubject::Ctrl(ctrl) => ctrl.run(),
            IdentifySubject::Ns(ns) => ns.run(),
        }
    }
}

impl ControllerSubject {
    pub fn run(self) -> Result<()> {
        let controller = self.device.start()?;
        let value = controller_json(controller.identify());
        match self.device.form.json {
            true => output::json(&value),
            false => output::table(
                "NVME Identify Controller:",
                &text::controller(value, controller.identify()),
            ),
        }
    }
}

impl NamespaceSubject {
    pub fn run(self) -> Result<()> {
        let controller = self.device.start()?;
        let nsid = Nsid(self.namespace_id);
        let identify = match nsid {
            Nsid::ALL => controller.identify_common()?,
            nsid => controller.identify_namespace(nsid)?,
        };
        let title = match nsid {
            Nsid::ALL => "NVME Identify Namespace 0xffffffff:".to_owned(),
            nsid => format!("NVME Identify Namespace {}:", nsid.0),
        };
        let mut value = namespace_json(&identify);
        if let Some(mask) = controller.storage_tag_mask(nsid)? {
            value["lbstm"] = json!(mask);
        }
        match self.device.form.json {
            true => output::json(&value),
            false => output::table(&title, &text::namespace(value, &identify)),
        }
    }
}

fn controller_json(id: &IdentifyController) -> Value {
    // The largest field of 128 bits fits in a JSON number only when it is small; like nvme-cli, as is.
    let large = |bytes: &[u8; 16]| {
        u64::try_from(u128(bytes)).map_or_else(|_| json!(u128(bytes).to_string()), |n| json!(n))
    };
    let ascii = |bytes: &[u8]| PrintableText(bytes).to_string();
    let ieee = u32::from_le_bytes([id.ieee[0], id.ieee[1], id.ieee[2], 0]);
    let mut object = json!({
        "vid": id.vid, "ssvid": id.ssvid, "sn": ascii(&id.sn), "mn": ascii(&id.mn), "fr": ascii(&id.fr),
        "rab": id.rab, "ieee": ieee, "cmic": id.cmic, "mdts": id.mdts, "cntlid": id.cntlid, "ver": id.ver,
        "rtd3r": id.rtd3r, "rtd3e": id.rtd3e, "oaes": id.oaes, "ctratt": id.ctratt, "rrls": id.rrls,
        "cntrltype": id.cntrltype, "fguid": hex::digits(&id.fguid), "crdt1": id.crdt1, "crdt2": id.crdt2, "crdt3": id.crdt3,
        "nvmsr": id.nvmsr, "vwci": id.vwci, "mec": id.mec,
    });
    let more = [
        json!({
            "oacs": id.oacs, "acl": id.acl, "aerl": id.aerl, "frmw": id.frmw, "lpa": id.lpa, "elpe": id.elpe,
            "npss": id.npss, "avscc": id.avscc, "apsta": id.apsta, "wctemp": id.wctemp, "cctemp": id.cctemp,
            "mtfa": id.mtfa, "hmpre": id.hmpre, "hmmin": id.hmmin, "tnvmcap": large(&id.tnvmcap),
            "unvmcap": large(&id.unvmcap), "rpmbs": id.rpmbs, "edstt": id.edstt, "dsto": id.dsto,
            "fwug": id.fwug, "kas": id.kas, "hctma": id.hctma, "mntmt": id.mntmt, "mxtmt": id.mxtmt,
            "sanicap": id.sanicap, "hmminds": id.hmminds, "hmmaxd": id.hmmaxd,
        }),
        json!({
            "nsetidmax": id.nsetidmax, "endgidmax": id.endgidmax, "anatt": id.anatt, "anacap": id.anacap,
            "anagrpmax": id.anagrpmax, "nanagrpid": id.nanagrpid, "pels": id.pels, "domainid": id.domainid,
            "megcap": large(&id.megcap),
            "sqes": id.sqes, "cqes": id.cqes, "maxcmd": id.maxcmd, "nn": id.nn, "oncs": id.oncs,
            "fuses": id.fuses, "fna": id.fna, "vwc": id.vwc, "awun": id.awun, "awupf": id.awupf,
            "icsvscc": id.icsvscc, "nwpc": id.nwpc, "acwu": id.acwu, "ocfs": id.ocfs, "sgls": id.sgls,
            "mnan": id.mnan, "maxdna": large(&id.maxdna), "maxcna": id.maxcna,
            "subnqn": PrintableText::of_nqn(&id.subnqn).to_string(),
        }),
    ];
    for part in more {
        extend(&mut object, part);
    }
    let states = id.psd.iter().take(usize::from(id.npss) + 1);
    object["psds"] = states.map(power_state_json).collect();
    object
}

fn power_state_json(state: &PowerState) -> Value {
    json!({
        "max_power": state.mp,
        "max_power_scale": u8::from(state.flags & PowerState::MXPS != 0),
        "non-operational_state": u8::from(state.flags & PowerState::NOPS != 0),
        "entry_lat": state.enlat, "exit_lat": state.exlat,
        "read_tput": state.rrt & 0x1F, "read_lat": state.rrl & 0x1F,
        "write_tput": state.rwt & 0x1F, "write_lat": state.rwl & 0x1F,
        "idle_power": state.idlp, "idle_scale": state.ips >> 6,
        "active_power": state.actp, "active_power_work": state.apws & 7, "active_scale": state.apws >> 6,
    })
}

fn namespace_json(id: &IdentifyNamespace) -> Value {
    let nvmcap = u128(&id.nvmcap);
    let current = id.lba_format_index();
    let mut object = json!({
        "nsze": id.nsze, "ncap": id.ncap, "nuse": id.nuse, "nsfeat": id.nsfeat, "nlbaf": id.nlbaf,
        "flbas": id.flbas, "mc": id.mc, "dpc": id.dpc, "dps": id.dps, "nmic": id.nmic, "rescap": id.rescap,
        "fpi": id.fpi, "dlfeat": id.dlfeat, "nawun": id.nawun, "nawupf": id.nawupf, "nacwu": id.nacwu,
        "nabsn": id.nabsn, "nabo": id.nabo, "nabspf": id.nabspf, "noiob": id.noiob,
        "nvmcap": u64::try_from(nvmcap).map_or_else(|_| json!(nvmcap.to_string()), |n| json!(n)),
    });
    extend(
        &mut object,
        json!({
            "npwg": id.npwg, "npwa": id.npwa, "npdg": id.npdg, "npda": id.npda, "nows": id.nows,
            "mssrl": id.mssrl, "mcl": id.mcl, "msrc": id.msrc, "nulbaf": id.nulbaf, "anagrpid": id.anagrpid, "nsattr": id.nsattr,
            "nvmsetid": id.nvmsetid, "endgid": id.endgid, "nguid": hex::digits(&id.nguid),
            "eui64": hex::digits(&id.eui64),
        }),
    );
    let formats = id.lbaf.iter().take(id.lba_formats()).enumerate();
    object["lbafs"] = formats
        .map(|(index, format)| json!({ "ms": format.ms, "ds": format.lbads, "rp": format.rp & 3, "in_use": u8::from(index == current) }))
        .collect();
    object
}

fn extend(object: &mut Value, part: Value) {
    if let (Value::Object(to), Value::Object(from)) = (object, part) {
        to.extend(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    /// FLBAS bits 6:5 count with more than 16 formats alone; NULBAF formats follow the common ones.
    #[test]
    fn the_format_in_use_is_marked() {
        let in_use = |flbas: u8, nlbaf: u8, nulbaf: u8| -> Vec<usize> {
            let mut id = IdentifyNamespace::new_zeroed();
            (id.flbas, id.nlbaf, id.nulbaf) = (flbas, nlbaf, nulbaf);
            let value = namespace_json(&id);
            let formats = value["lbafs"].as_array().unwrap();
            assert_eq!(formats.len(), usize::from(nlbaf + nulbaf) + 1);
            let marked = formats.iter().enumerate();
            let marked = marked.filter(|(_, format)| format["in_use"] == 1);
            marked.map(|(index, _)| index).collect()
        };
        assert_eq!(in_use(0x21, 1, 0), [1]);
        assert_eq!(in_use(0x61, 15, 0), [1]);
        assert_eq!(in_use(0x21, 17, 0), [17]);
        assert_eq!(in_use(0x21, 9, 8), [17]);
    }

    #[test]
    fn strings_that_differ_look_different() {
        let mut id = IdentifyController::new_zeroed();
        (id.sn, id.megcap[0], id.maxcna) = (*b"AB\xFFCD               ", 7, 9);
        let value = controller_json(&id);
        assert_eq!(value["sn"], "AB\\xffCD");
        assert_eq!((&value["megcap"], &value["maxcna"]), (&json!(7), &json!(9)));
    }

    /// The test puts values at the offsets of NVMe Base 2.0c, Identify Controller Data Structure, in their byte order.
    #[test]
    fn fields_at_their_bytes_come_out() {
        let mut bytes = [0u8; 4096];
        for (at, byte) in (112..128).zip(0xA0..) {
            bytes[at] = byte;
        }
        (bytes[544], bytes[545]) = (0x34, 0x12);
        let value = controller_json(&zerocopy::transmute!(bytes));
        assert_eq!(value["fguid"], "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf");
        assert_eq!(value["maxdna"], 0x1234);
        let mut bytes = [0u8; 4096];
        bytes[82] = 3;
        let value = namespace_json(&zerocopy::transmute!(bytes));
        assert_eq!(value["nulbaf"], 3);
        assert_eq!(value["lbafs"].as_array().unwrap().len(), 4);
    }
}

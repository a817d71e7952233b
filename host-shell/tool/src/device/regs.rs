//! `regs`: the controller's properties, decoded.

use crate::common::{DeviceArgs, output};
use clap::Args;
use nvme_host::Result;
use nvme_host::core::RegisterAccess;
use nvme_host::core::spec::register::{Aqa, Cap, Cc, Cmbloc, Cmbsz, Crto, Csts, Vs, offset};
use serde_json::{Value, json};

/// Show the controller's registers, decoded
#[derive(Args)]
pub struct RegsCommand {
    #[command(flatten)]
    device: DeviceArgs,
    /// Read them as they are found, without bringing the controller up
    #[arg(long)]
    raw: bool,
}

impl RegsCommand {
    pub fn run(self) -> Result<()> {
        if self.raw {
            let device = self.device.open()?;
            return self.show(device.registers());
        }
        let controller = self.device.start()?;
        self.show(controller.device().registers())
    }

    fn show(&self, registers: &dyn RegisterAccess) -> Result<()> {
        if self.device.form.json {
            output::json(&to_json(registers))
        } else {
            output::print(&to_text(registers))
        }
    }
}

fn to_json(registers: &dyn RegisterAccess) -> Value {
    let r32 = |at| registers.read32(at);
    let r64 = |at| registers.read64(at);
    json!({
        "cap": r64(offset::CAP), "vs": r32(offset::VS), "intms": r32(offset::INTMS), "intmc": r32(offset::INTMC),
        "cc": r32(offset::CC), "csts": r32(offset::CSTS), "nssr": r32(offset::NSSR), "aqa": r32(offset::AQA),
        "asq": r64(offset::ASQ), "acq": r64(offset::ACQ), "cmbloc": r32(offset::CMBLOC),
        "cmbsz": r32(offset::CMBSZ), "bpinfo": r32(offset::BPINFO), "cmbmsc": r64(offset::CMBMSC),
        "cmbsts": r32(offset::CMBSTS), "crto": r32(offset::CRTO), "pmrcap": r32(offset::PMRCAP),
    })
}

/// Registers as lines, each followed by the lines of its fields.
#[derive(Default)]
struct RegisterText(String);

impl RegisterText {
    fn register(&mut self, name: &str, value: u64, fields: &[(&str, String)]) {
        self.0.push_str(&format!("{name:<7} : {value:#x}\n"));
        for (name, value) in fields {
            self.0.push_str(&format!("    {name:<42} : {value}\n"));
        }
    }
}

fn to_text(registers: &dyn RegisterAccess) -> String {
    let mut text = RegisterText::default();
    capabilities(&mut text, registers);
    version(&mut text, registers);
    configuration(&mut text, registers);
    status(&mut text, registers);
    admin_queues(&mut text, registers);
    memory_buffer(&mut text, registers);
    timeouts(&mut text, registers);
    text.0
}

fn yes(set: bool) -> String {
    if set { "yes" } else { "no" }.to_owned()
}

/// Formats a page size of CAP or CC in bytes.
fn pages(mps: u8) -> String {
    format!("{} bytes", 4096u64 << mps)
}

/// Describes CAP.
fn capabilities(text: &mut RegisterText, registers: &dyn RegisterAccess) {
    let cap = Cap(registers.read64(offset::CAP));
    text.register(
        "cap",
        cap.0,
        &[
            ("Controller Memory Buffer Supported (CMBS)", yes(cap.cmbs())),
            ("Memory Page Size Maximum (MPSMAX)", pages(cap.mpsmax())),
            ("Memory Page Size Minimum (MPSMIN)", pages(cap.mpsmin())),
            (
                "Controller Ready Modes Supported (CRMS)",
                format!("{:#x}", cap.crms()),
            ),
            ("Command Sets Supported (CSS)", format!("{:#x}", cap.css())),
            ("NVM Subsystem Reset Supported (NSSRS)", yes(cap.nssrs())),
            (
                "Doorbell Stride (DSTRD)",
                format!("{} bytes", 4u32 << cap.dstrd()),
            ),
            ("Timeout (TO)", format!("{} ms", u32::from(cap.to()) * 500)),
            ("Contiguous Queues Required (CQR)", yes(cap.cqr())),
            (
                "Maximum Queue Entries Supported (MQES)",
                cap.mqes().to_string(),
            ),
        ],
    );
}

/// Describes VS.
fn version(text: &mut RegisterText, registers: &dyn RegisterAccess) {
    let vs = Vs(registers.read32(offset::VS));
    text.register(
        "version",
        vs.0.into(),
        &[(
            "NVMe specification",
            format!("{}.{}.{}", vs.mjr(), vs.mnr(), vs.ter()),
        )],
    );
}

/// Describes CC.
fn configuration(text: &mut RegisterText, registers: &dyn RegisterAccess) {
    let cc = Cc(registers.read32(offset::CC));
    text.register(
        "cc",
        cc.0.into(),
        &[
            (
                "I/O Completion Queue Entry Size (IOCQES)",
                format!("{} bytes", 1u32 << cc.iocqes()),
            ),
            (
                "I/O Submission Queue Entry Size (IOSQES)",
                format!("{} bytes", 1u32 << cc.iosqes()),
            ),
            ("Shutdown Notification (SHN)", cc.shn().to_string()),
            ("Arbitration Mechanism Selected (AMS)", cc.ams().to_string()),
            ("Memory Page Size (MPS)", pages(cc.mps())),
            ("I/O Command Set Selected (CSS)", format!("{:#x}", cc.css())),
            ("Enable (EN)", yes(cc.en())),
        ],
    );
}

/// Describes CSTS.
fn status(text: &mut RegisterText, registers: &dyn RegisterAccess) {
    let csts = Csts(registers.read32(offset::CSTS));
    let shst = match csts.shst() {
        0 => "normal operation",
        1 => "in progress",
        2 => "complete",
        _ => "reserved",
    };
    text.register(
        "csts",
        csts.0.into(),
        &[
            ("Processing Paused (PP)", yes(csts.pp())),
            ("NVM Subsystem Reset Occurred (NSSRO)", yes(csts.nssro())),
            ("Shutdown Status (SHST)", shst.to_owned()),
            ("Controller Fatal Status (CFS)", yes(csts.cfs())),
            ("Ready (RDY)", yes(csts.rdy())),
        ],
    );
}

/// Describes AQA, ASQ and ACQ.
fn admin_queues(text: &mut RegisterText, registers: &dyn RegisterAccess) {
    let aqa = Aqa(registers.read32(offset::AQA));
    text.register(
        "aqa",
        aqa.0.into(),
        &[
            (
                "Admin Completion Queue Size (ACQS)",
                format!("{} entries", u32::from(aqa.acqs_z()) + 1),
            ),
            (
                "Admin Submission Queue Size (ASQS)",
                format!("{} entries", u32::from(aqa.asqs_z()) + 1),
            ),
        ],
    );
    text.register("asq", registers.read64(offset::ASQ), &[]);
    text.register("acq", registers.read64(offset::ACQ), &[]);
}

/// Describes CMBLOC and CMBSZ.
fn memory_buffer(text: &mut RegisterText, registers: &dyn RegisterAccess) {
    let (location, size) = (
        Cmbloc(registers.read32(offset::CMBLOC)),
        Cmbsz(registers.read32(offset::CMBSZ)),
    );
    let none = size.sz() == 0;
    let memory = |text: String| {
        if none {
            "no controller memory buffer".to_owned()
        } else {
            text
        }
    };
    text.register(
        "cmbloc",
        location.0.into(),
        &[("Base (BIR)", memory(format!("BAR {}", location.bir())))],
    );
    text.register(
        "cmbsz",
        size.0.into(),
        &[("Size", memory(format!("{} bytes", size.bytes())))],
    );
}

/// Describes CRTO.
fn timeouts(text: &mut RegisterText, registers: &dyn RegisterAccess) {
    let crto = Crto(registers.read32(offset::CRTO));
    text.register(
        "crto",
        crto.0.into(),
        &[
            (
                "Ready Independent of Media Timeout (CRIMT)",
                format!("{} ms", u32::from(crto.crimt()) * 500),
            ),
            (
                "Ready With Media Timeout (CRWMT)",
                format!("{} ms", u32::from(crto.crwmt()) * 500),
            ),
        ],
    );
}

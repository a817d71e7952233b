//! The trace of QEMU's NVMe controller (`pci_nvme_*` events of its log) as input: it checks a
//! driver against a controller that is not this simulator.
//!
//! The trace does not contain entries as they are in memory. A command is its identifier, opcode,
//! namespace and the memory that QEMU has mapped for it; a completion is its identifier and status.
//! So phase tags, reported heads and PRP entries are not checked, and a completion counts from the
//! moment it is queued. A log may hold one controller only: the events do not name theirs.

use crate::auditor::Auditor;
use crate::capabilities::ControllerCapabilities;
use alloc::vec::Vec;
use nvme_spec::admin::QUEUE_CONTIGUOUS;
use nvme_spec::register::{Aqa, Cc};
use nvme_spec::{Cid, Nsid, PageSize, Sqe};

/// The events that are read, with the names that QEMU's `-trace` takes.
pub const EVENTS: [&str; 19] = [
    "pci_nvme_map_addr",
    "pci_nvme_io_cmd",
    "pci_nvme_admin_cmd",
    "pci_nvme_create_sq",
    "pci_nvme_create_cq",
    "pci_nvme_del_sq",
    "pci_nvme_del_cq",
    "pci_nvme_enqueue_req_completion",
    "pci_nvme_mmio_doorbell_cq",
    "pci_nvme_mmio_doorbell_sq",
    "pci_nvme_mmio_cfg",
    "pci_nvme_mmio_aqattr",
    "pci_nvme_mmio_asqaddr",
    "pci_nvme_mmio_acqaddr",
    "pci_nvme_mmio_asqaddr_hi",
    "pci_nvme_mmio_acqaddr_hi",
    "pci_nvme_mmio_start_success",
    "pci_nvme_mmio_stopped",
    "pci_nvme_pci_reset",
];

/// The command fetched last, completed by the events that describe it after its fetch.
struct FetchedCommand {
    sqid: u16,
    sqe: Sqe,
    spans: Vec<(u64, u64)>,
}

/// Reads a log line by line.
#[derive(Default)]
pub struct QemuTrace {
    auditor: Auditor,
    fetched: Option<FetchedCommand>,
    cc: u32,
    aqa: u32,
    asq: u64,
    acq: u64,
}

/// Returns the number after `name` in a line: `cid 5`, `qsize=7`, `addr 0x10`.
fn number(line: &str, name: &str) -> Option<u64> {
    let mut words = line.split([' ', '=', ',']).filter(|word| !word.is_empty());
    words.find(|word| *word == name)?;
    let word = words.next()?;
    match word.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => word.parse().ok(),
    }
}

impl QemuTrace {
    /// Starts the log of a controller with these namespaces.
    pub fn new(namespaces: &[u32]) -> Self {
        let mut trace = Self::default();
        trace
            .auditor
            .describe(ControllerCapabilities::unrestricted(namespaces));
        trace
    }

    /// Takes one line. Lines that are not in [`EVENTS`] are skipped.
    pub fn line(&mut self, line: &str) {
        // Some builds of QEMU write the process and the time before the event's name.
        let Some(at) = line.find("pci_nvme_") else {
            return;
        };
        let line = &line[at..];
        let (event, rest) = line.split_once(' ').unwrap_or((line, ""));
        if self.describe_command(event, rest).is_some() {
            return;
        }
        if EVENTS.contains(&event) {
            self.flush();
            // A line without its numbers is incomplete, as at the end of a log that was cut: it is
            // ignored.
            let _ = self.event(event, rest);
        }
    }

    /// Adds an event to the command fetched last, if it describes that command.
    fn describe_command(&mut self, event: &str, rest: &str) -> Option<()> {
        let fetched = self.fetched.as_mut()?;
        let sqe = &mut fetched.sqe;
        let queue = |qid: &str, size: &str| {
            Some(number(rest, qid)? as u32 | (number(rest, size)? as u32) << 16)
        };
        match event {
            "pci_nvme_map_addr" => fetched
                .spans
                .push((number(rest, "addr")?, number(rest, "len")?)),
            "pci_nvme_create_sq" => {
                sqe.cdw10 = queue("sqid", "qsize")?;
                sqe.cdw11 = number(rest, "qflags")? as u32 & QUEUE_CONTIGUOUS
                    | (number(rest, "cqid")? as u32) << 16;
                sqe.dptr[0] = number(rest, "addr")?;
            }
            "pci_nvme_create_cq" => {
                sqe.cdw10 = queue("cqid", "qsize")?;
                sqe.cdw11 = number(rest, "qflags")? as u32 & QUEUE_CONTIGUOUS;
                sqe.dptr[0] = number(rest, "addr")?;
            }
            "pci_nvme_del_sq" => sqe.cdw10 = number(rest, "sqid")? as u32,
            "pci_nvme_del_cq" => sqe.cdw10 = number(rest, "cqid")? as u32,
            _ => return None,
        }
        Some(())
    }

    fn event(&mut self, event: &str, rest: &str) -> Option<()> {
        let last = || {
            let hex = rest.rsplit("=0x").next()?;
            u64::from_str_radix(hex.trim(), 16).ok()
        };
        match event {
            "pci_nvme_io_cmd" | "pci_nvme_admin_cmd" => {
                let nsid = number(rest, "nsid").unwrap_or(0) as u32;
                let sqe = Sqe::new(number(rest, "opc")? as u8, Nsid(nsid));
                self.fetched = Some(FetchedCommand {
                    sqid: number(rest, "sqid")? as u16,
                    sqe: sqe.with_cid(Cid(number(rest, "cid")? as u16)),
                    spans: Vec::new(),
                });
            }
            "pci_nvme_enqueue_req_completion" => {
                let (cqid, cid) = (number(rest, "cqid")?, number(rest, "cid")?);
                let success = number(rest, "status")? == 0;
                self.auditor.completed(cqid as u16, cid as u16, success);
            }
            "pci_nvme_mmio_doorbell_sq" => {
                let (qid, tail) = (number(rest, "sqid")?, number(rest, "new_tail")?);
                self.auditor.reports_all(qid as u16);
                self.auditor.sq_doorbell(qid as u16, tail as u32, &|_| None);
            }
            "pci_nvme_mmio_doorbell_cq" => {
                let (qid, head) = (number(rest, "cqid")?, number(rest, "new_head")?);
                self.auditor.cq_doorbell(qid as u16, head as u32);
            }
            "pci_nvme_mmio_cfg" => self.cc = last()? as u32,
            "pci_nvme_mmio_aqattr" => self.aqa = last()? as u32,
            "pci_nvme_mmio_asqaddr" | "pci_nvme_mmio_asqaddr_hi" => self.asq = last()?,
            "pci_nvme_mmio_acqaddr" | "pci_nvme_mmio_acqaddr_hi" => self.acq = last()?,
            "pci_nvme_mmio_start_success" => {
                let page = PageSize::from_mps(Cc(self.cc).mps()).unwrap_or(PageSize::KIB4);
                let entries = |entries_z: u16| u32::from(entries_z) + 1;
                let aqa = Aqa(self.aqa);
                let asq = (Some(self.asq), entries(aqa.asqs_z()));
                let acq = (Some(self.acq), entries(aqa.acqs_z()));
                self.auditor.enable(page, asq, acq);
            }
            "pci_nvme_mmio_stopped" | "pci_nvme_pci_reset" => self.auditor.reset(),
            _ => {}
        }
        Some(())
    }

    /// Reports the command fetched last: no further event describes it.
    fn flush(&mut self) {
        if let Some(fetched) = self.fetched.take() {
            self.auditor
                .fetched_spans(fetched.sqid, &fetched.sqe, &fetched.spans);
        }
    }

    /// Ends the log and returns the auditor.
    pub fn end(mut self) -> Auditor {
        self.flush();
        self.auditor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Rule;
    use alloc::string::String;

    /// Enabled, one pair of queues of four entries created.
    const START: &str = "\
pci_nvme_mmio_aqattr wrote MMIO, admin queue attributes=0x70007
pci_nvme_mmio_asqaddr wrote MMIO, admin submission queue address=0x10000
pci_nvme_mmio_acqaddr wrote MMIO, admin completion queue address=0x11000
pci_nvme_mmio_cfg wrote MMIO, config controller config=0x460001
pci_nvme_mmio_start_success setting controller enable bit succeeded
pci_nvme_mmio_doorbell_sq sqid 0 new_tail 1
pci_nvme_admin_cmd cid 0 sqid 0 opc 0x5 opname 'NVME_ADM_CMD_CREATE_CQ'
pci_nvme_create_cq create completion queue, addr=0x13000, cqid=1, vector=0, qsize=3, qflags=1, ien=0
pci_nvme_enqueue_req_completion cid 0 cqid 0 dw0 0x0 dw1 0x0 status 0x0
pci_nvme_mmio_doorbell_cq cqid 0 new_head 1
pci_nvme_mmio_doorbell_sq sqid 0 new_tail 2
pci_nvme_admin_cmd cid 1 sqid 0 opc 0x1 opname 'NVME_ADM_CMD_CREATE_SQ'
pci_nvme_create_sq create submission queue, addr=0x12000, sqid=1, cqid=1, qsize=3, qflags=1
pci_nvme_enqueue_req_completion cid 1 cqid 0 dw0 0x0 dw1 0x0 status 0x0
";
    const READ: &str = "\
pci_nvme_mmio_doorbell_sq sqid 1 new_tail 1
pci_nvme_io_cmd cid 7 nsid 0x1 sqid 1 opc 0x2 opname 'NVME_NVM_CMD_READ'
pci_nvme_map_addr addr 0x20000 len 4096
";

    fn rules(text: &str) -> Vec<Rule> {
        let mut trace = QemuTrace::new(&[1]);
        (String::from(START) + text)
            .lines()
            .for_each(|line| trace.line(line));
        let auditor = trace.end();
        auditor.findings().iter().map(|one| one.rule).collect()
    }

    #[test]
    fn good_traffic_has_no_finding_and_is_seen() {
        let done = "pci_nvme_enqueue_req_completion cid 7 cqid 1 dw0 0x0 dw1 0x0 status 0x0\n";
        let text =
            String::from(START) + READ + done + "pci_nvme_mmio_doorbell_cq cqid 1 new_head 1\n";
        let mut trace = QemuTrace::new(&[1]);
        text.lines()
            .for_each(|line| trace.line(&(String::from("99@1.5:") + line)));
        let auditor = trace.end();
        assert_eq!(auditor.findings(), []);
        assert_eq!((auditor.seen(), auditor.in_flight()), ((3, 3), 0));
    }

    #[test]
    fn what_a_trace_shows_is_found() {
        let again = READ.replace("new_tail 1", "new_tail 2");
        let (one, two) = (
            again.replace("0x20000", "0x30000"),
            again.replace("cid 7", "cid 8"),
        );
        let cases = [
            (String::from(READ) + &one, Rule::CidReused),
            (String::from(READ) + &two, Rule::BufferShared),
            (READ.replace("nsid 0x1", "nsid 0x2"), Rule::NamespaceAbsent),
            (READ.replace("0x20000", "0x12040"), Rule::BufferShared),
            (
                READ.replace("new_tail 1", "new_tail 4"),
                Rule::DoorbellRange,
            ),
            (
                String::from("pci_nvme_mmio_doorbell_sq sqid 2 new_tail 1"),
                Rule::DoorbellAbsent,
            ),
            (
                String::from("pci_nvme_mmio_doorbell_cq cqid 1 new_head 1"),
                Rule::HeadDoorbell,
            ),
            (
                String::from(
                    "pci_nvme_enqueue_req_completion cid 9 cqid 1 dw0 0x0 dw1 0x0 status 0x0",
                ),
                Rule::UnknownCommand,
            ),
            (
                String::from(
                    "pci_nvme_mmio_doorbell_sq sqid 1 new_tail 2\n\
                     pci_nvme_mmio_doorbell_sq sqid 1 new_tail 1",
                ),
                Rule::TailDoorbell,
            ),
        ];
        for (text, rule) in cases {
            assert!(rules(&text).contains(&rule), "{rule:?}: {:?}", rules(&text));
        }
        // A reset forgets.
        let reset = "pci_nvme_mmio_stopped cleared controller enable bit\n";
        assert_eq!(rules(&(String::from(READ) + reset)), []);
    }
}

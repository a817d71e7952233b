//! Checks what bring-up asks, and how it uses the answers: the test chooses Identify data and statuses.

use nvme_core::bringup::{
    BringupConfig, BringupMachine, BringupStep, ControllerInfo, HostMemoryPages, NamespaceInfo,
    QueuePlan, UnusableNamespace,
};
use nvme_core::mem::DmaWords;
use nvme_core::spec::admin::{self, QueueParams, cns, opcode};
use nvme_core::spec::feature::{self, NumberOfQueues, fid};
use nvme_core::spec::identify::{IdentifyController, IdentifyNamespace, LbaFormat};
use nvme_core::spec::{Cid, Iova, Lba, Nsid, Qid, Sqe, Status};
use nvme_core::sync::{AtomicU64, Order, Scope};
use nvme_core::{BringupError, CommandSlot, QueuePair, RegisterAccess};
use nvme_tests::hand::{Hand, QID, Rig};
use nvme_tests::properties::Properties;
use zerocopy::{FromZeros, IntoBytes};

const MS: u64 = 1_000_000;
const START: u64 = 7_000 * MS;
const PAGE: u64 = 0x8000;

/// A controller that the test controls: its answers to the admin commands of bring-up.
struct Controller {
    properties: Properties,
    identify: IdentifyController,
    /// The list of active namespaces.
    list: Vec<u32>,
    /// Identify data of every namespace.
    namespace: IdentifyNamespace,
    /// A namespace that cannot be identified, and why.
    odd: Option<(u32, Status)>,
    /// Number of I/O submission and completion queues that it grants.
    granted: (u32, u32),
    /// Opcode and feature that it refuses.
    refused: Option<(u8, u8)>,
    /// Preferred and minimal bytes of its host memory buffer, and the memory that it gets.
    wish: Option<(u64, u64)>,
    gift: Option<HostMemoryPages>,
    /// Every command that was sent, without its identifier.
    asked: Vec<Sqe>,
    /// The words that each command found in the page.
    pages: Vec<Vec<u64>>,
}

impl Controller {
    fn new() -> Self {
        let mut identify = IdentifyController::new_zeroed();
        (identify.sqes, identify.cqes, identify.nn) = (0x66, 0x44, 8);
        Self {
            properties: Properties::new(),
            identify,
            list: vec![1],
            namespace: IdentifyNamespace::new_zeroed(),
            odd: None,
            granted: (4, 4),
            refused: None,
            wish: None,
            gift: None,
            asked: Vec::new(),
            pages: Vec::new(),
        }
    }

    fn answer(&mut self, sqe: Sqe, page: &[AtomicU64]) -> (Status, u32) {
        let words = page
            .iter()
            .map(|word| word.load(Order::Relaxed, Scope::Sys));
        self.pages.push(words.collect());
        self.asked.push(sqe);
        assert!(self.asked.len() < 100, "it asks without end");
        let what = (sqe.opcode(), sqe.cdw10 as u8);
        if self.refused == Some(what) {
            return (Status::INVALID_FIELD, 0);
        }
        if let (NAMESPACE, Some((nsid, status))) = (what, self.odd)
            && nsid == sqe.nsid
        {
            return (status, 0);
        }
        let fill = |bytes: &[u8]| {
            for (word, bytes) in page.iter().zip(bytes.chunks_exact(8)) {
                let value = u64::from_le_bytes(bytes.try_into().unwrap());
                word.store(value, Order::Relaxed, Scope::Sys);
            }
        };
        match what {
            (opcode::IDENTIFY, cns::CONTROLLER) => fill(self.identify.as_bytes()),
            (opcode::IDENTIFY, cns::NAMESPACE) => fill(self.namespace.as_bytes()),
            (opcode::IDENTIFY, cns::ACTIVE_NAMESPACES) => {
                let mut list = self.list.clone();
                list.resize(1024, 0);
                fill(list.as_bytes());
            }
            (opcode::SET_FEATURES, fid::NUMBER_OF_QUEUES) => {
                return (
                    Status::SUCCESS,
                    NumberOfQueues::request(self.granted.0, self.granted.1),
                );
            }
            _ => {}
        }
        (Status::SUCCESS, 0)
    }

    fn bring_up(&mut self, config: BringupConfig<'_>) -> Result<ControllerInfo, BringupError> {
        let (rig, bar) = (Rig::new(4, 3, 0, 0), Properties::new());
        let mut admin: QueuePair<'_, u32, Vec<CommandSlot<u32>>> = QueuePair::new(
            bar.identity(),
            QID,
            rig.memory(),
            (0..3).map(|_| CommandSlot::new()).collect(),
        );
        let mut hand = Hand::new(&rig);
        bar.cap.set(self.properties.cap.get());
        let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
        let mut machine = BringupMachine::new(&bar, config, DmaWords::new(&words, Iova(PAGE)))?;
        let other = HostMemoryPages {
            pages: 99,
            list: Iova(0),
            entries: 9,
        };
        loop {
            match machine.step(&bar, &mut admin, START)? {
                BringupStep::Ready => {
                    let again = machine.step(&bar, &mut admin, START + 1)?;
                    assert!(matches!(again, BringupStep::Ready), "it stays ready");
                    assert_eq!(hand.fetch(), None, "and sends nothing more");
                    return Ok(machine.info().clone());
                }
                BringupStep::Disabled(proof) => machine.enable(proof),
                BringupStep::HostMemory { preferred, minimum } => {
                    let before = self.wish.replace((preferred, minimum));
                    assert_eq!(before, None, "it wishes once");
                    machine.host_memory(self.gift);
                }
                BringupStep::Wait { until_ns } => {
                    assert!(until_ns > START && until_ns <= START + MS);
                    // Memory that was not asked for is ignored, and no command is left out because of it.
                    machine.host_memory(Some(other));
                    let sqe = hand.fetch().expect("a machine that waits has asked");
                    let cid = sqe.cid();
                    let (status, dw0) = self.answer(sqe.with_cid(Cid(0)), &words);
                    hand.complete(cid, status, dw0);
                }
            }
        }
    }

    /// Returns the commands that were sent, as (opcode, low byte of dword 10).
    fn script(&self) -> Vec<(u8, u8)> {
        let both = |sqe: &Sqe| (sqe.opcode(), sqe.cdw10 as u8);
        self.asked.iter().map(both).collect()
    }
}

const IDENTIFY: (u8, u8) = (opcode::IDENTIFY, cns::CONTROLLER);
const POWER: (u8, u8) = (opcode::SET_FEATURES, fid::AUTONOMOUS_POWER);
const QUEUES: (u8, u8) = (opcode::SET_FEATURES, fid::NUMBER_OF_QUEUES);
const MEMORY: (u8, u8) = (opcode::SET_FEATURES, fid::HOST_MEMORY_BUFFER);
const LIST: (u8, u8) = (opcode::IDENTIFY, cns::ACTIVE_NAMESPACES);
const NAMESPACE: (u8, u8) = (opcode::IDENTIFY, cns::NAMESPACE);

/// Changes one field of Identify Controller at a time, and checks that the driver reads it.
///
/// NVMe Base 2.0c, "Identify Controller Data Structure, I/O Command Set Independent".
#[test]
fn what_the_controller_says_of_itself_is_taken_over() {
    type Change = fn(&mut IdentifyController);
    let info = |change: Change| {
        let mut controller = Controller::new();
        change(&mut controller.identify);
        controller.bring_up(BringupConfig::default()).unwrap()
    };
    let plain = info(|_| {});
    assert_eq!(plain.version, 0x0002_0000);
    assert_eq!((plain.max_transfer, plain.oncs), (None, 0));
    assert_eq!((plain.abort_limit, plain.event_limit), (1, 1));
    assert_eq!((plain.shutdown_timeout_ms, plain.max_nsid), (0, 8));

    let limits = info(|id| (id.acl, id.aerl, id.oncs, id.oaes) = (3, 7, 0x15, 0x300));
    assert_eq!((plain.oaes, limits.oaes), (0, 0x300));
    assert_eq!((limits.abort_limit, limits.event_limit), (4, 8));
    assert_eq!(limits.oncs, 0x15);

    for (mdts, bytes) in [(1, Some(8 << 10)), (5, Some(128 << 10)), (255, None)] {
        let mut controller = Controller::new();
        controller.identify.mdts = mdts;
        let info = controller.bring_up(BringupConfig::default()).unwrap();
        assert_eq!(info.max_transfer, bytes, "MDTS {mdts}");
    }
    for (vwc, present) in [(0, false), (1, true), (6, false), (7, true)] {
        let mut controller = Controller::new();
        controller.identify.vwc = vwc;
        let info = controller.bring_up(BringupConfig::default()).unwrap();
        assert_eq!(info.volatile_write_cache, present, "VWC {vwc}");
    }
    for (sgls, usable) in [
        (0, false),
        (1, true),
        (2, true),
        (3, false),
        (1 << 16, false),
    ] {
        let mut controller = Controller::new();
        controller.identify.sgls = sgls;
        let info = controller.bring_up(BringupConfig::default()).unwrap();
        assert_eq!(info.sgl, usable, "SGLS {sgls}");
        assert_eq!(info.sgl_bytes, sgls == 1, "SGLS {sgls}");
    }
    // RTD3E counts microseconds; a fraction of a millisecond is a whole one.
    for (rtd3e, ms) in [(0, 0), (1, 1), (1000, 1), (1_500_001, 1501)] {
        let mut controller = Controller::new();
        controller.identify.rtd3e = rtd3e;
        let info = controller.bring_up(BringupConfig::default()).unwrap();
        assert_eq!(info.shutdown_timeout_ms, ms);
    }
}

#[test]
fn entries_of_another_size_are_refused() {
    for (sqes, cqes, good) in [
        (0x66, 0x44, true),
        (0, 0, true),
        (0xF6, 0xF4, true),
        (0x67, 0x44, false),
        (0x66, 0x45, false),
        (0x6F, 0x4F, false),
    ] {
        let mut controller = Controller::new();
        (controller.identify.sqes, controller.identify.cqes) = (sqes, cqes);
        let error = BringupError::EntrySize {
            sqes: sqes & 0xF,
            cqes: cqes & 0xF,
        };
        let result = controller.bring_up(BringupConfig::default()).map(|_| ());
        assert_eq!(result, if good { Ok(()) } else { Err(error) });
    }
}

#[test]
fn commands_come_in_order_and_the_first_error_that_matters_ends_them() {
    let full = [IDENTIFY, POWER, QUEUES, MEMORY, LIST, NAMESPACE];
    for refused in full {
        let mut controller = Controller::new();
        controller.identify.apsta = 1;
        (controller.identify.hmpre, controller.identify.hmmin) = (5, 3);
        controller.gift = Some(HostMemoryPages {
            pages: 4,
            list: Iova(0x7000),
            entries: 2,
        });
        controller.refused = Some(refused);
        let result = controller.bring_up(BringupConfig::default());
        // Power states and the host memory buffer are wishes of the controller, which works without them. A namespace
        // that cannot be identified is skipped; the queues and the other namespaces work. Without the list of
        // namespaces, each one is asked for.
        if [POWER, MEMORY, LIST, NAMESPACE].contains(&refused) {
            let asked = if refused == LIST { 8 } else { 1 };
            let walked = [&full[..5], &[NAMESPACE; 8][..asked]].concat();
            assert_eq!(controller.script(), walked);
            assert_eq!(result.unwrap().host_memory, refused != MEMORY);
        } else {
            let (opcode, status) = (refused.0, Status::INVALID_FIELD);
            assert_eq!(result, Err(BringupError::Command { opcode, status }));
            assert_eq!(controller.script().last(), Some(&refused));
        }
    }
}

/// The table is zero, whatever the page held before: the controller makes no transition without a request.
#[test]
fn power_states_do_not_change_by_themselves() {
    let mut controller = Controller::new();
    controller.identify.apsta = 1;
    controller.identify.sn = [0xAA; 20];
    controller.identify.mn = [0xBB; 40];
    controller.bring_up(BringupConfig::default()).unwrap();
    let sqe = controller.asked[1];
    assert_eq!((sqe.opcode(), sqe.cdw10 as u8), POWER);
    assert_eq!((sqe.cdw11, sqe.dptr), (0, [PAGE, 0]));
    assert_eq!(controller.pages[1][..32], [0; 32]);

    // Only bit 0 of APSTA says that there is something to set.
    let mut controller = Controller::new();
    controller.identify.apsta = 0b10;
    controller.bring_up(BringupConfig::default()).unwrap();
    assert_eq!(controller.script(), [IDENTIFY, QUEUES, LIST, NAMESPACE]);
}

/// HMPRE and HMMIN count 4 KiB, whatever CC.MPS is.
#[test]
fn a_host_memory_buffer_is_offered_when_the_controller_asks() {
    for (preferred, gives) in [(5, true), (5, false), (1, true), (0, true)] {
        let mut controller = Controller::new();
        (controller.identify.hmpre, controller.identify.hmmin) = (preferred, 3);
        let gift = HostMemoryPages {
            pages: 4,
            list: Iova(0x1_0000_7000),
            entries: 2,
        };
        controller.gift = gives.then_some(gift);
        let info = controller.bring_up(BringupConfig::default()).unwrap();
        let wished = preferred > 0;
        let wish = wished.then_some((u64::from(preferred) * 4096, 3 * 4096));
        assert_eq!(controller.wish, wish);
        assert_eq!(info.host_memory, gives && wished);
        let sent = controller
            .asked
            .iter()
            .find(|sqe| sqe.cdw10 as u8 == fid::HOST_MEMORY_BUFFER);
        let expected = feature::host_memory_buffer(true, false, 4, gift.list, 2);
        assert_eq!(sent, info.host_memory.then_some(&expected));
    }
}

#[test]
fn a_list_of_namespaces_ends_where_it_stops_making_sense() {
    let up_to = |last: u32| (1..=last).collect::<Vec<u32>>();
    for (list, nn, found) in [
        (vec![1, 2, 5, 8], 8, vec![1, 2, 5, 8]),
        (vec![3, 9, 4], 8, vec![3]),
        (vec![3, 3, 4], 8, vec![3]),
        (vec![2, 1], 8, vec![2]),
        (vec![2, 0, 3], 8, vec![2]),
        (vec![], 8, vec![]),
        (up_to(32), 100, up_to(32)),
        (up_to(40), 100, up_to(32)),
    ] {
        let mut controller = Controller::new();
        controller.identify.nn = nn;
        controller.list = list.clone();
        let info = controller.bring_up(BringupConfig::default()).unwrap();
        let nsids: Vec<u32> = info.namespaces.iter().map(|one| one.nsid.0).collect();
        assert_eq!(nsids, found);
        assert_eq!(info.more_namespaces, list.len() > 32);
        let asked: Vec<u32> = controller
            .asked
            .iter()
            .filter(|sqe| (sqe.opcode(), sqe.cdw10 as u8) == NAMESPACE)
            .map(|sqe| sqe.nsid)
            .collect();
        assert_eq!(asked, found, "each is identified once");
    }
}

/// NVM Command Set 1.0c, "Identify Namespace Data Structure, NVM Command Set".
#[test]
fn a_namespace_is_what_its_identify_data_says() {
    let mut identify = IdentifyNamespace::new_zeroed();
    (identify.nsze, identify.nlbaf, identify.noiob) = (1000, 1, 256);
    let format = |lbads, ms| LbaFormat { ms, lbads, rp: 0 };
    (identify.lbaf[0], identify.lbaf[1]) = (format(9, 0), format(12, 8));
    let plain = NamespaceInfo {
        nsid: Nsid(3),
        identified: Status::SUCCESS,
        blocks: 1000,
        block_bytes: 512,
        metadata_bytes: 0,
        protection: 0,
        extended: false,
        boundary_blocks: 256,
        write_protected: false,
        nguid: [0; 16],
        eui64: [0; 8],
    };
    let mut controller = Controller::new();
    (controller.list, controller.namespace) = (vec![3], identify);
    let info = controller.bring_up(BringupConfig::default()).unwrap();
    assert_eq!(info.namespaces[..], [plain]);
    assert_eq!(plain.last(), Lba(999));
    assert_eq!(NamespaceInfo { blocks: 0, ..plain }.last(), Lba(0));

    for (flbas, dps, extended, protection) in
        [(1, 0xF9, false, 1), (0x11, 8, true, 0), (0x11, 3, true, 3)]
    {
        (identify.flbas, identify.dps) = (flbas, dps);
        let expected = NamespaceInfo {
            block_bytes: 4096,
            metadata_bytes: 8,
            extended,
            protection,
            ..plain
        };
        assert_eq!(NamespaceInfo::from_identify(Nsid(3), &identify), expected);
    }
    for (block_bytes, metadata_bytes, supported) in [
        (512, 0, true),
        (65_536, 0, true),
        (0, 0, false),
        (131_072, 0, false),
        (512, 8, false),
    ] {
        let namespace = NamespaceInfo {
            block_bytes,
            metadata_bytes,
            ..plain
        };
        assert_eq!(namespace.is_supported(), supported, "{namespace:?}");
    }
}

/// A namespace of another command set, such as Key Value, ends Identify Namespace with an error. It stays in the
/// list with that reason, and the others work.
#[test]
fn a_namespace_that_cannot_be_identified_leaves_the_others_alone() {
    for status in [
        Status::INVALID_NAMESPACE,
        Status::INVALID_FIELD,
        Status(0x4000 | 0x2C), // DNR, Invalid I/O Command Set
        Status(0x06),
    ] {
        for odd in 1..=3u32 {
            let mut controller = Controller::new();
            let (namespace, identify) = (&mut controller.namespace, &mut controller.identify);
            (namespace.nsze, namespace.lbaf[0].lbads) = (1000, 9);
            identify.nn = 3;
            controller.list = vec![1, 2, 3];
            controller.odd = Some((odd, status));
            let info = controller.bring_up(BringupConfig::default()).unwrap();
            let got: Vec<_> = info
                .namespaces
                .iter()
                .map(|one| (one.nsid.0, one.blocks, one.unusable()))
                .collect();
            let expected = [1, 2, 3].map(|nsid| match nsid == odd {
                true => (nsid, 0, Some(UnusableNamespace::Identify(status))),
                false => (nsid, 1000, None),
            });
            assert_eq!(got, expected);
        }
    }
    let text = UnusableNamespace::Identify(Status::INVALID_NAMESPACE).to_string();
    assert!(
        text.contains("Invalid Namespace or Format") && text.contains("command set"),
        "{text}"
    );
}

/// Every reason is one line that says what to do.
#[test]
fn what_makes_a_namespace_unusable_is_said() {
    let mut identify = IdentifyNamespace::new_zeroed();
    (identify.nsze, identify.lbaf[0].lbads) = (1000, 9);
    let reason = |change: fn(&mut IdentifyNamespace)| {
        let mut changed = identify;
        change(&mut changed);
        NamespaceInfo::from_identify(Nsid(1), &changed).unusable()
    };
    assert_eq!(reason(|_| {}), None);
    for (got, expected, words) in [
        (
            reason(|ns| ns.nsze = 0),
            UnusableNamespace::NoBlocks,
            ["no blocks", "another"],
        ),
        (
            reason(|ns| ns.lbaf[0].lbads = 0),
            UnusableNamespace::BlockBytes(0),
            ["LBADS", "format"],
        ),
        (
            reason(|ns| ns.lbaf[0].lbads = 63),
            UnusableNamespace::BlockBytes(0),
            ["LBADS", "format"],
        ),
        (
            reason(|ns| ns.lbaf[0].lbads = 17),
            UnusableNamespace::BlockBytes(131_072),
            ["131072", "format"],
        ),
        (
            reason(|ns| ns.lbaf[0].ms = 8),
            UnusableNamespace::Metadata(8),
            ["8 bytes", "format"],
        ),
        (
            reason(|ns| ns.nsze = 1 << 55),
            UnusableNamespace::TooLarge,
            ["2^64", "format"],
        ),
    ] {
        assert_eq!(got, Some(expected));
        let text = expected.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
    assert_eq!(reason(|ns| ns.nsze = (1 << 55) - 1), None);
}

/// A controller that grants N pairs takes the identifiers 1 to N, whatever the order of the plans.
#[test]
fn plans_are_left_out_by_their_identifier() {
    let plan = |qid| QueuePlan {
        qid: Qid(qid),
        sq_entries: 16,
        sq_iova: Iova(0x10_0000),
        cq_entries: 16,
        cq_iova: Iova(0x20_0000),
        vector: None,
    };
    for (plans, granted, made) in [
        (&[5][..], 2, &[][..]),
        (&[5], 5, &[5]),
        (&[5, 1, 3], 3, &[1, 3]),
        (&[2, 4], 3, &[2]),
        (&[4, 2], 3, &[2]),
        (&[0, 1], 2, &[1]),
        (&[65_535], 4, &[]),
    ] {
        let plans: Vec<QueuePlan> = plans.iter().map(|qid| plan(*qid)).collect();
        let mut controller = Controller::new();
        (controller.granted, controller.list) = ((granted, granted), Vec::new());
        let config = BringupConfig {
            queue_pairs: 8,
            plans: &plans,
            ..BringupConfig::default()
        };
        let info = controller.bring_up(config).unwrap();
        let created = |opcode| {
            let of = controller.asked.iter().filter(|sqe| sqe.opcode() == opcode);
            of.map(|sqe| sqe.cdw10 as u16).collect::<Vec<_>>()
        };
        assert_eq!(created(opcode::CREATE_IO_CQ), made);
        assert_eq!(created(opcode::CREATE_IO_SQ), made);
        assert_eq!(info.created as usize, made.len());
        assert_eq!(info.queue_pairs, granted);
    }
}

/// NVMe Base 2.0c, 5.27.1.5 (Number of Queues): the host uses the smaller of the two numbers.
#[test]
fn no_more_queues_are_created_than_were_planned_and_granted() {
    let plans: Vec<QueuePlan> = (1..=3u16)
        .map(|qid| QueuePlan {
            qid: Qid(qid),
            sq_entries: 16,
            sq_iova: Iova(0x10_0000 * u64::from(qid)),
            cq_entries: 32,
            cq_iova: Iova(0x10_0000 * u64::from(qid) + 0x8000),
            vector: (qid == 2).then_some(9),
        })
        .collect();
    for (wanted, planned, granted, pairs, created) in [
        (4, 3, (9, 9), 4, 3),
        (3, 3, (2, 9), 2, 2),
        (3, 3, (9, 1), 1, 1),
        (2, 3, (9, 9), 2, 2),
        (0, 3, (9, 9), 1, 1),
        (4, 0, (9, 9), 4, 0),
        (100_000, 1, (65_535, 65_535), 65_535, 1),
    ] {
        let mut controller = Controller::new();
        (controller.granted, controller.list) = (granted, Vec::new());
        let config = BringupConfig {
            queue_pairs: wanted,
            plans: &plans[..planned],
            ..BringupConfig::default()
        };
        let info = controller.bring_up(config).unwrap();
        assert_eq!((info.queue_pairs, info.created), (pairs, created));
        let asked = NumberOfQueues::request(wanted, wanted);
        assert_eq!(controller.asked[1].cdw11, asked);
        let expected: Vec<Sqe> = plans[..created as usize]
            .iter()
            .flat_map(|plan| {
                let params = |entries, iova| QueueParams {
                    qid: plan.qid,
                    entries,
                    iova,
                };
                let cq = params(plan.cq_entries, plan.cq_iova);
                let sq = params(plan.sq_entries, plan.sq_iova);
                [
                    admin::create_io_cq(cq, plan.vector),
                    admin::create_io_sq(sq, plan.qid),
                ]
            })
            .collect();
        assert_eq!(controller.asked[3..], expected);
    }
}

//! The sequence of admin commands of bring-up, from Identify Controller to Create I/O Submission Queue. Each
//! step sends one command and waits for its completion before it decides about the next.

use super::namespace::NamespaceInfo;
use super::plan::{
    BringupConfig, BringupStep, ControllerInfo, HostMemoryPages, MAX_NAMESPACES, MAX_WALK, POLL_NS,
};
use crate::error::BringupError;
use crate::inflight::CommandSlot;
use crate::mem::DmaWords;
use crate::outcome::CommandOutcome;
use crate::queue_pair::{CommandData, QueuePair};
use crate::spec::admin::{self, QueueParams, cns};
use crate::spec::feature::{self, NumberOfQueues, fid};
use crate::spec::identify::{IdentifyController, IdentifyNamespace, sgls};
use crate::spec::{Cid, Nsid, Sqe, Status};
use zerocopy::FromBytes;

const IDENTIFY_BYTES: usize = 4096;
/// Active namespace identifiers in one list.
const LIST_ENTRIES: usize = 1024;

/// The next command, or the reason to return to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextCommand {
    Controller,
    PowerStates,
    Queues,
    AskMemory,
    GiveMemory(HostMemoryPages),
    Namespaces,
    Namespace(usize),
    /// Identifiers one by one: NVMe 1.0 has no list of the active ones.
    Walk(u32),
    CreateCq(usize),
    CreateSq(usize),
    Done,
}

#[derive(Debug)]
pub(super) struct BringupScript {
    todo: NextCommand,
    sent: Option<(Cid, u8)>,
    preferred_pages: u32,
    minimum_pages: u32,
    has_power_transitions: bool,
}

impl BringupScript {
    pub fn new() -> Self {
        Self {
            todo: NextCommand::Controller,
            sent: None,
            preferred_pages: 0,
            minimum_pages: 0,
            has_power_transitions: false,
        }
    }

    pub fn give(&mut self, memory: Option<HostMemoryPages>) {
        if self.todo == NextCommand::AskMemory {
            self.todo = memory.map_or(NextCommand::Namespaces, NextCommand::GiveMemory);
        }
    }

    pub fn step<B: Default, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>>(
        &mut self,
        info: &mut ControllerInfo,
        config: &BringupConfig<'_>,
        page: DmaWords<'_>,
        admin: &mut QueuePair<'_, B, S>,
        now_ns: u64,
    ) -> Result<BringupStep<'static>, BringupError> {
        loop {
            if let Some((cid, opcode)) = self.sent {
                let Some((status, dw0)) = answer(admin, cid, opcode, now_ns)? else {
                    return Ok(BringupStep::Wait {
                        until_ns: now_ns.saturating_add(POLL_NS),
                    });
                };
                self.sent = None;
                self.take(status, opcode, dw0, info, config, page)?;
            }
            match self.todo {
                NextCommand::Done => return Ok(BringupStep::Ready),
                NextCommand::AskMemory => {
                    // HMPRE and HMMIN count units of 4 KiB whatever CC.MPS is.
                    let bytes = |pages: u32| u64::from(pages) * 4096;
                    return Ok(BringupStep::HostMemory {
                        preferred: bytes(self.preferred_pages),
                        minimum: bytes(self.minimum_pages),
                    });
                }
                _ => {}
            }
            let (sqe, has_page) = self.command(info, config);
            let data = if has_page {
                // One page for every command that returns data. The table of Autonomous Power State
                // Transition has only 256 of these bytes, but a length within one page makes no difference to
                // the PRPs.
                CommandData::Contiguous {
                    iova: page.iova(),
                    len: IDENTIFY_BYTES as u64,
                }
            } else {
                CommandData::None
            };
            if self.todo == NextCommand::PowerStates {
                (0..32).for_each(|word| page.set(word, 0));
            }
            let deadline_ns = now_ns.saturating_add(config.command_timeout_ns);
            let cid = admin
                .submit(sqe, data, B::default(), deadline_ns)
                .map_err(|rejected| BringupError::Submit(rejected.error))?;
            admin.ring();
            self.sent = Some((cid, sqe.opcode()));
        }
    }

    fn command(&self, info: &ControllerInfo, config: &BringupConfig<'_>) -> (Sqe, bool) {
        let plan = |index: usize| config.plans[index];
        match self.todo {
            NextCommand::PowerStates => (
                admin::set_features(fid::AUTONOMOUS_POWER, Nsid::NONE, 0),
                true,
            ),
            NextCommand::Queues => {
                let wanted = config.queue_pairs.clamp(1, 65_535);
                let cdw11 = NumberOfQueues::request(wanted, wanted);
                (
                    admin::set_features(fid::NUMBER_OF_QUEUES, Nsid::NONE, cdw11),
                    false,
                )
            }
            NextCommand::GiveMemory(memory) => (
                feature::host_memory_buffer(true, false, memory.pages, memory.list, memory.entries),
                false,
            ),
            NextCommand::Namespaces => (admin::identify(cns::ACTIVE_NAMESPACES, Nsid::NONE), true),
            NextCommand::Namespace(index) => {
                let nsid = info.namespaces.get(index).map_or(Nsid::NONE, |ns| ns.nsid);
                (admin::identify(cns::NAMESPACE, nsid), true)
            }
            NextCommand::Walk(nsid) => (admin::identify(cns::NAMESPACE, Nsid(nsid)), true),
            NextCommand::CreateCq(index) => {
                let plan = plan(index);
                let params = QueueParams {
                    qid: plan.qid,
                    entries: plan.cq_entries,
                    iova: plan.cq_iova,
                };
                (admin::create_io_cq(params, plan.vector), false)
            }
            NextCommand::CreateSq(index) => {
                let plan = plan(index);
                let params = QueueParams {
                    qid: plan.qid,
                    entries: plan.sq_entries,
                    iova: plan.sq_iova,
                };
                (admin::create_io_sq(params, plan.qid), false)
            }
            NextCommand::Controller | NextCommand::AskMemory | NextCommand::Done => {
                (admin::identify(cns::CONTROLLER, Nsid::NONE), true)
            }
        }
    }

    /// Evaluates a completion and decides about the next command.
    fn take(
        &mut self,
        status: Status,
        opcode: u8,
        dw0: u32,
        info: &mut ControllerInfo,
        config: &BringupConfig<'_>,
        page: DmaWords<'_>,
    ) -> Result<(), BringupError> {
        // These commands are optional. A drive that refuses to change its power states, or to use the memory
        // it asked for, still works; so do the other namespaces when one cannot be identified, and all of
        // them on a drive without a list of active ones.
        let optional = matches!(
            self.todo,
            NextCommand::PowerStates
                | NextCommand::GiveMemory(_)
                | NextCommand::Namespaces
                | NextCommand::Namespace(_)
                | NextCommand::Walk(_)
        );
        if !status.is_success() && !optional {
            return Err(BringupError::Command { opcode, status });
        }
        self.todo = match self.todo {
            NextCommand::Controller => {
                self.take_controller(info, page)?;
                if self.has_power_transitions {
                    NextCommand::PowerStates
                } else {
                    NextCommand::Queues
                }
            }
            NextCommand::PowerStates => NextCommand::Queues,
            NextCommand::Queues => {
                let (sqs, cqs) = NumberOfQueues::granted(dw0);
                info.queue_pairs = sqs.min(cqs).min(config.queue_pairs.max(1));
                if self.preferred_pages > 0 {
                    NextCommand::AskMemory
                } else {
                    NextCommand::Namespaces
                }
            }
            NextCommand::GiveMemory(_) => {
                info.host_memory = status.is_success();
                NextCommand::Namespaces
            }
            NextCommand::Namespaces if !status.is_success() => {
                info.namespaces.clear();
                info.more_namespaces = false;
                next_walk(info, 1, config)
            }
            NextCommand::Namespaces => {
                take_list(info, page);
                next_namespace(info, 0, config)
            }
            NextCommand::Walk(nsid) => {
                take_walked(info, Nsid(nsid), status, page);
                next_walk(info, nsid + 1, config)
            }
            NextCommand::Namespace(index) => {
                take_namespace(info, index, status, page);
                next_namespace(info, index + 1, config)
            }
            NextCommand::CreateCq(index) => NextCommand::CreateSq(index),
            NextCommand::CreateSq(index) => {
                info.created += 1;
                next_queue(info, index + 1, config)
            }
            NextCommand::AskMemory | NextCommand::Done => self.todo,
        };
        Ok(())
    }

    fn take_controller(
        &mut self,
        info: &mut ControllerInfo,
        page: DmaWords<'_>,
    ) -> Result<(), BringupError> {
        let mut bytes = [0; IDENTIFY_BYTES];
        page.copy_to(&mut bytes);
        let Ok(identify) = IdentifyController::read_from_bytes(&bytes) else {
            return Ok(());
        };
        let (sqes, cqes) = (identify.sqes & 0xF, identify.cqes & 0xF);
        // Required sizes, as powers of two. A controller that reports 0 for both is accepted, since
        // every controller must support 64 and 16 bytes. Larger entries are refused, since the
        // rings are laid out for these sizes.
        if sqes > 6 || cqes > 4 {
            return Err(BringupError::EntrySize { sqes, cqes });
        }
        let unit = info.capabilities.mdts_unit.shift();
        info.max_transfer = match identify.mdts {
            0 => None,
            mdts => 1u64.checked_shl(unit + u32::from(mdts)),
        };
        info.oncs = identify.oncs;
        info.volatile_write_cache = identify.vwc & 1 != 0;
        let support = identify.sgls & sgls::SUPPORT;
        info.sgl = matches!(support, sgls::ANY_ALIGNMENT | sgls::DWORD_ALIGNMENT);
        info.sgl_bytes = support == sgls::ANY_ALIGNMENT;
        info.abort_limit = u32::from(identify.acl) + 1;
        info.event_limit = u32::from(identify.aerl) + 1;
        info.oaes = identify.oaes;
        info.shutdown_timeout_ms = identify.rtd3e.div_ceil(1000);
        info.serial = identify.sn;
        info.max_nsid = identify.nn;
        self.has_power_transitions = identify.apsta & 1 != 0;
        self.preferred_pages = identify.hmpre;
        self.minimum_pages = identify.hmmin;
        Ok(())
    }
}

/// Returns the status and dword 0 of command `cid` once it has completed; reports its deadline as an error.
fn answer<B, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>>(
    admin: &mut QueuePair<'_, B, S>,
    cid: Cid,
    opcode: u8,
    now_ns: u64,
) -> Result<Option<(Status, u32)>, BringupError> {
    while let Some(done) = admin.poll().map_err(BringupError::Fault)? {
        if let (true, CommandOutcome::Completed(status)) = (done.cid == cid, done.outcome) {
            return Ok(Some((status, done.dw0)));
        }
    }
    while let Some(expired) = admin.expire(now_ns) {
        if expired == cid {
            return Err(BringupError::CommandTimeout { opcode });
        }
    }
    Ok(None)
}

/// Reads the list of active identifiers. They ascend and end with 0; anything else ends the list.
fn take_list(info: &mut ControllerInfo, page: DmaWords<'_>) {
    info.namespaces.clear();
    info.more_namespaces = false;
    let mut before = 0;
    for index in 0..LIST_ENTRIES {
        let word = page.get(index / 2);
        let nsid = if index % 2 == 0 {
            word as u32
        } else {
            (word >> 32) as u32
        };
        if nsid <= before || nsid > info.max_nsid {
            break;
        }
        before = nsid;
        let namespace = NamespaceInfo::unknown(Nsid(nsid), Status::SUCCESS);
        if info.namespaces.push(namespace).is_err() {
            info.more_namespaces = true;
            break;
        }
    }
    debug_assert!(info.namespaces.len() <= MAX_NAMESPACES);
}

fn take_namespace(info: &mut ControllerInfo, index: usize, status: Status, page: DmaWords<'_>) {
    let Some(namespace) = info.namespaces.get_mut(index) else {
        return;
    };
    *namespace = identified(namespace.nsid, status, page);
}

/// Parses the Identify Namespace data in `page`; `status` is the command's own.
fn identified(nsid: Nsid, status: Status, page: DmaWords<'_>) -> NamespaceInfo {
    let mut bytes = [0; IDENTIFY_BYTES];
    page.copy_to(&mut bytes);
    match IdentifyNamespace::read_from_bytes(&bytes) {
        Ok(identify) if status.is_success() => NamespaceInfo::from_identify(nsid, &identify),
        _ => NamespaceInfo::unknown(nsid, status),
    }
}

/// Adds a namespace of a controller without a list: an inactive one has no blocks, or its Identify fails.
fn take_walked(info: &mut ControllerInfo, nsid: Nsid, status: Status, page: DmaWords<'_>) {
    let namespace = identified(nsid, status, page);
    let is_active = namespace.identified.is_success() && namespace.blocks != 0;
    if is_active && info.namespaces.push(namespace).is_err() {
        info.more_namespaces = true;
    }
}

fn next_walk(info: &mut ControllerInfo, nsid: u32, config: &BringupConfig<'_>) -> NextCommand {
    if nsid <= info.max_nsid.min(MAX_WALK) && !info.more_namespaces {
        return NextCommand::Walk(nsid);
    }
    info.more_namespaces |= nsid <= info.max_nsid;
    next_queue(info, 0, config)
}

fn next_namespace(info: &ControllerInfo, index: usize, config: &BringupConfig<'_>) -> NextCommand {
    if index < info.namespaces.len() {
        NextCommand::Namespace(index)
    } else {
        next_queue(info, 0, config)
    }
}

/// Returns the first plan from index `from` whose queue identifier is within the grant.
fn next_queue(info: &ControllerInfo, from: usize, config: &BringupConfig<'_>) -> NextCommand {
    let granted = 1..=info.queue_pairs;
    let mut rest = config.plans.iter().enumerate().skip(from);
    rest.find(|(_, plan)| granted.contains(&u32::from(plan.qid.0)))
        .map_or(NextCommand::Done, |(index, _)| NextCommand::CreateCq(index))
}

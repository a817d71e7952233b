//! The sequence of memory operations of every queue operation: the word, order and scope of each, and the
//! barriers of a group between them. docs/memory-model.md has the reason for each.
//!
//! loom explores two or three members and ignores scopes. These sequences are checked for groups of 1, 8, 32
//! and 64: each keeps the rules below, and together they are `sequences/expected.txt`. A change of an order,
//! of a scope or of the order of statements is a change of that file, to be reviewed with it.

mod lanes;
mod memory;
mod rules;

use crate::group::{GroupVote, ThreadGroup};
use crate::queue_pair::{CommandData, QueuePair};
use crate::queue_state::SharedState;
use crate::spec::{Iova, Nsid, Qid, Sqe};
use crate::sync::{AtomicU32, Order, Scope};
use crate::{CollectiveQueue, CommandSlot, ControllerIdentity, MemberCommand};
use lanes::GroupLane;
use memory::{OrderedController, PairMemory};
use std::fmt::Write as _;
use std::string::String;
use std::sync::Mutex;
use std::vec::Vec;
use std::{format, println};

const NEVER: u64 = 1 << 30;

/// A transfer of three pages, two in a list.
const DATA: CommandData<'static> = CommandData::Contiguous {
    iova: Iova(0x1000),
    len: 3 * 4096,
};

/// A count above that of any queue's commands.
const ALL: u32 = u32::MAX;

/// The operations of one member, each under its name.
#[derive(Default, PartialEq, Eq)]
struct OperationAccount(Vec<(&'static str, Vec<String>)>);

impl OperationAccount {
    /// Does `work` and notes its operations under `name`.
    fn note(&mut self, memory: &PairMemory, name: &'static str, work: impl FnOnce()) {
        self.0.push((name, memory.sequence(work)));
    }

    /// Returns the operations whose name begins with one of `names`.
    fn text(&self, names: &[&str]) -> String {
        let mut text = String::new();
        let asked = |name: &str| names.iter().any(|begin| name.starts_with(begin));
        for (name, steps) in self.0.iter().filter(|(name, _)| asked(name)) {
            let _ = writeln!(text, "{name}:");
            for step in steps {
                let _ = writeln!(text, "    {step}");
            }
        }
        text
    }

    fn steps(&self) -> Vec<&str> {
        let steps = self.0.iter().flat_map(|(_, steps)| steps);
        steps.map(String::as_str).collect()
    }
}

fn sqe() -> Sqe {
    Sqe::new(2, Nsid(1))
}

fn command(tag: u32, wants_dw0: bool) -> MemberCommand<'static> {
    MemberCommand::new(sqe(), DATA, tag).wanting_dw0(wants_dw0)
}

fn queue_pair() -> OperationAccount {
    let memory = PairMemory::new(4, 3);
    let slots: Vec<CommandSlot<()>> = (0..3).map(|_| CommandSlot::new()).collect();
    let mut pair = QueuePair::new(&ControllerIdentity::new(), Qid(1), memory.queue(), slots);
    let mut device = OrderedController::new(&memory);
    let mut account = OperationAccount::default();
    account.note(&memory, "submit", || {
        let cid = pair.submit(sqe(), DATA, (), NEVER);
        assert!(cid.is_ok());
    });
    account.note(&memory, "ring", || pair.ring());
    account.note(&memory, "ring, with nothing new", || pair.ring());
    device.complete(1);
    account.note(&memory, "poll", || {
        assert!(pair.poll().expect("no fault").is_some());
    });
    account.note(&memory, "poll, with nothing new", || {
        assert!(pair.poll().expect("no fault").is_none());
    });
    account
}

/// Runs each member of a collective of `size`, with commands that want dword 0 or not.
fn collective(size: usize, wants_dw0: bool) -> Vec<OperationAccount> {
    let memory = PairMemory::new(4 * size as u32, 2 * size as u32);
    let device = Mutex::new(OrderedController::new(&memory));
    GroupLane::run(size, |lane| {
        let mut account = OperationAccount::default();
        let mut queue = None;
        account.note(&memory, "resume", || {
            queue = Some(CollectiveQueue::resume(
                lane,
                memory.queue(),
                memory.state(),
            ));
        });
        let mut queue = queue.expect("resumed");
        let serve = || {
            lane.meet();
            if lane.leads() {
                device.lock().expect("no panic").complete(ALL);
            }
            lane.meet();
        };
        let submit = |queue: &mut CollectiveQueue<'_, _>, deadline| {
            let command = |_| command(lane.rank(), wants_dw0);
            let cid = queue.submit(true, command, deadline).expect("room");
            assert!(cid.is_some());
        };
        account.note(&memory, "submit", || submit(&mut queue, NEVER));
        account.note(&memory, "ring", || queue.ring());
        account.note(&memory, "submit, before a reap", || {
            submit(&mut queue, NEVER)
        });
        serve();
        account.note(&memory, "reap by one", || {
            assert_eq!(queue.reap::<1>(|_| ()), Ok(size as u32));
        });
        account.note(&memory, "publish", || queue.publish());
        account.note(&memory, "ring_within", || queue.ring_within(ALL));
        account.note(&memory, "submit, before a reap by four", || {
            submit(&mut queue, NEVER);
        });
        serve();
        account.note(&memory, "reap by four", || {
            assert_eq!(queue.reap::<4>(|_| ()), Ok(size as u32));
        });
        account.note(&memory, "ring, of what the reap published", || queue.ring());
        account.note(&memory, "submit, to expire", || submit(&mut queue, 0));
        account.note(&memory, "expire", || {
            assert_eq!(queue.expire(NEVER / 2, |_| ()), size as u32);
        });
        account.note(&memory, "suspend", || queue.suspend());
        account
    })
}

/// Runs each member of a group of `size` on a shared queue.
fn shared(size: usize, wants_dw0: bool) -> Vec<OperationAccount> {
    let memory = PairMemory::new(4 * size as u32, 2 * size as u32);
    let device = Mutex::new(OrderedController::new(&memory));
    GroupLane::run(size, |lane| {
        let mut account = OperationAccount::default();
        let queue = memory.shared();
        let mut token = None;
        account.note(&memory, "place", || {
            token = queue.place(&lane, command(lane.rank(), wants_dw0)).ok();
        });
        let token = token.expect("room");
        account.note(&memory, "ring", || queue.ring(&lane));
        account.note(&memory, "ring, with nothing new", || queue.ring(&lane));
        lane.meet();
        if lane.leads() {
            device.lock().expect("no panic").complete(ALL);
        }
        lane.meet();
        account.note(&memory, "drain, give a quarter back", || {
            queue.drain(&lane);
        });
        account.note(&memory, "poll", || assert!(queue.poll(&token).is_some()));
        account
    })
}

/// Returns the accounts of groups of every size, as text. Equal accounts share one heading.
fn text_of(name: &str, parts: &[&str], run: impl Fn(usize) -> Vec<OperationAccount>) -> String {
    let mut sections: Vec<(Vec<String>, String)> = Vec::new();
    for size in [1, 8, 32, 64] {
        let accounts = run(size);
        for account in &accounts {
            rules::check(&format!("{name}, of {size}"), &account.steps());
        }
        for (rank, account) in accounts.iter().enumerate() {
            let who = if rank == 0 { "leader" } else { "others" };
            let heading = format!("{who} of {size}");
            let text = account.text(parts);
            match sections.iter_mut().find(|(_, known)| *known == text) {
                Some((headings, _)) if headings.contains(&heading) => {}
                Some((headings, _)) => headings.push(heading),
                None => sections.push(([heading].into(), text)),
            }
        }
    }
    let section = |(headings, text): (Vec<String>, String)| {
        format!("[{name}: {}]\n{text}\n", headings.join(", "))
    };
    sections.into_iter().map(section).collect()
}

#[test]
fn each_operation_does_what_the_memory_model_says_in_its_order() {
    let pair = queue_pair();
    rules::check("queue pair", &pair.steps());
    let mut text = format!("[queue pair]\n{}\n", pair.text(&[""]));
    text += &text_of("collective", &[""], |size| collective(size, false));
    text += &text_of("shared queue", &[""], |size| shared(size, false));
    // Only the calls that take completions differ if dword 0 is wanted.
    let parts = &["reap", "drain"];
    text += &text_of("collective, dword 0 wanted", parts, |size| {
        collective(size, true)
    });
    text += &text_of("shared queue, dword 0 wanted", parts, |size| {
        shared(size, true)
    });
    let expected = include_str!("sequences/expected.txt");
    if text == expected {
        return;
    }
    println!("{text}");
    let mut section = "";
    for (now, then) in text.lines().zip(expected.lines()) {
        if now.starts_with('[') {
            section = now;
        }
        assert_eq!(
            now, then,
            "{section}: the sequence has changed. If the memory model allows it, change \
             nvme-core/src/sequences/expected.txt to what is printed above",
        );
    }
    panic!("the sequences have become longer or shorter; they are printed above");
}

/// A member of a group, and another thread that asks for the doorbell whenever the leader looks at the ring lock.
struct AskedMember<'m> {
    lane: GroupLane<'m>,
    lock: &'m AtomicU32,
}

impl ThreadGroup for AskedMember<'_> {
    fn size(&self) -> u32 {
        self.lane.size()
    }

    fn rank(&self) -> u32 {
        self.lane.rank()
    }

    fn sync(&self) {
        self.lane.sync();
    }

    fn vote(&self, mine: bool) -> GroupVote {
        self.lane.vote(mine)
    }

    fn broadcast(&self, value: u32) -> u32 {
        if self.leads() {
            self.lock.fetch_add(1, Order::Relaxed, Scope::Gpu);
        }
        self.lane.broadcast(value)
    }
}

/// The holder of the ring lock gives up after some rounds, and its leader unlocks with one swap. A second swap by
/// another member could release the lock while its next holder has it.
#[test]
fn the_leader_alone_releases_a_lock_that_is_asked_for_too_often() {
    let memory = PairMemory::new(16, 8);
    let state = SharedState::of(memory.state());
    let steps = GroupLane::run(4, |lane| {
        let group = AskedMember {
            lane,
            lock: state.ring_lock(),
        };
        memory.sequence(|| memory.shared().ring(&group))
    });
    assert_eq!(state.ring_lock().load(Order::Relaxed, Scope::Gpu), 0);
    let releases = |steps: &[String]| {
        let swaps = |step: &&String| step.starts_with("swap") && step.ends_with("ring lock");
        steps.iter().filter(swaps).count()
    };
    let counts: Vec<usize> = steps.iter().map(|steps| releases(steps)).collect();
    assert_eq!(counts, [1, 0, 0, 0], "{steps:#?}");
}

/// Entries that a kernel published and did not ring for are published again by the next kernel, before its
/// doorbell.
#[test]
fn a_queue_that_goes_on_fences_what_it_rings_for() {
    for size in [1, 8] {
        let memory = PairMemory::new(4 * size as u32, 2 * size as u32);
        let accounts = GroupLane::run(size, |lane| {
            let mut queue = CollectiveQueue::resume(lane, memory.queue(), memory.state());
            let placed = queue.submit(true, |_| command(lane.rank(), false), NEVER);
            assert!(placed.is_ok());
            queue.publish();
            queue.suspend();
            lane.meet();
            memory.sequence(|| {
                CollectiveQueue::resume(lane, memory.queue(), memory.state()).ring();
            })
        });
        let leader = &accounts[0];
        let at = |wanted: &str| leader.iter().position(|step| step == wanted);
        let (fence, bell) = (
            at("fence release sys"),
            at("store mmio relaxed sys: tail doorbell"),
        );
        assert!(
            bell.is_some() && fence.is_some() && fence < bell,
            "{leader:#?}"
        );
    }
}

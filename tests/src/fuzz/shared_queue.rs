//! A shared queue whose controller posts anything: each command ends at most once, as some entry that
//! was posted for it says; the first wrong entry refuses the queue; recovery ends the remaining commands.

use super::entries::{Entry, Posted, sizes};
use crate::hand::{Hand, Rig};
use crate::team::{Paused, Team};
use arbitrary::{Arbitrary, Unstructured};
use nvme_core::group::{ExecContext, GroupOp, LoneThread};
use nvme_core::queue_state::words;
use nvme_core::spec::{Cid, Iova, Nsid, Sqe};
use nvme_core::trace::TraceEvent;
use nvme_core::{
    AbortReason, CommandData, CommandOutcome, CommandToken, DrainResult, MemberCommand,
    SharedQueue, SubmitError, WaitError,
};
use std::cell::{Cell, RefCell};

/// Result cells; one more is named than there are.
const CELLS: usize = 6;

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Call {
    Place {
        tag: u8,
        wants_dw0: bool,
        pages: u8,
    },
    Ring,
    Drain {
        single: bool,
    },
    Post(Entry),
    Help,
    Wait {
        pick: u8,
        entry: Entry,
    },
    /// Submits a command; from tag 128 on it also waits for the end.
    Submit {
        tag: u8,
        entry: Entry,
    },
    Recover,
}

struct Lent {
    token: CommandToken,
    wants_dw0: bool,
    /// Number of entries that the head doorbell had freed when the command was placed.
    since: usize,
}

/// A thread that records its command: the identifier, the result of `look` at that time, and the end.
struct Recording<F, L> {
    paused: Paused<F>,
    placed: Cell<Option<(Cid, usize)>>,
    end: Cell<Option<TraceEvent>>,
    look: L,
}

impl<F: Fn(), L: Fn() -> usize> ExecContext for Recording<F, L> {
    fn now_ns(&self) -> u64 {
        self.paused.now_ns()
    }

    fn pause(&self, turn: u32) {
        self.paused.pause(turn);
    }

    fn record(&self, event: impl FnOnce() -> TraceEvent) {
        let event = event();
        match self.placed.get() {
            None => {
                let (cid, [_, nsid]) = (event.cid(), event.to_words());
                let expected = TraceEvent::submitted(event.qid(), cid, 2, nsid as u32);
                assert_eq!(event, expected);
                self.placed.set(Some((cid, (self.look)())));
            }
            Some(_) => assert_eq!(self.end.replace(Some(event)), None, "it ends once"),
        }
    }

    fn converged<A: GroupOp>(&self, key: u64, op: A) -> A::Output {
        self.paused.converged(key, op)
    }
}

struct Model<'a> {
    queue: SharedQueue<'a>,
    hand: RefCell<Hand<'a>>,
    posted: RefCell<Posted>,
    lent: Vec<Lent>,
}

/// Sizes, then submissions, waits and completions, right and wrong ones.
pub fn shared_queue(bytes: &[u8]) {
    let mut input = Unstructured::new(bytes);
    let Ok([entries, slots, start]) = sizes(&mut input) else {
        return;
    };
    assert!(words(entries) > 0);
    let rig = Rig::new(entries, slots, CELLS, start);
    let mut model = Model {
        queue: rig.shared(),
        hand: RefCell::new(Hand::new(&rig)),
        posted: RefCell::default(),
        lent: Vec::new(),
    };
    while !input.is_empty() {
        let Ok(call) = Call::arbitrary(&mut input) else {
            break;
        };
        if let Call::Recover = call {
            model.recover(&rig);
            model.hand = RefCell::new(Hand::new(&rig));
        } else {
            model.call(call);
        }
        model.settle();
        assert_eq!(model.queue.state().in_flight() as usize, model.lent.len());
    }
    model.recover(&rig);
}

fn command(tag: u8, wants_dw0: bool, pages: u8) -> MemberCommand<'static> {
    let data = CommandData::Contiguous {
        iova: Iova(0x10_0000),
        len: u64::from(pages % 9) * 4096,
    };
    MemberCommand::new(
        Sqe::new(2, Nsid(1)),
        data,
        u32::from(tag) % (CELLS as u32 + 1),
    )
    .wanting_dw0(wants_dw0)
}

impl Model<'_> {
    fn call(&mut self, call: Call) {
        match call {
            Call::Place {
                tag,
                wants_dw0,
                pages,
            } => {
                let command = command(tag, wants_dw0, pages);
                let placed = self.queue.place(&LoneThread, command);
                self.placed(placed, &command);
            }
            Call::Ring => self.queue.ring(&LoneThread),
            Call::Drain { single: true } => self.drained(self.queue.drain(&Team::of(1)[0])),
            Call::Drain { single: false } => self.drained(self.queue.drain(&LoneThread)),
            Call::Help => {
                let here = Paused::new(|| ());
                self.drained(self.queue.help_out(&here));
            }
            Call::Post(entry) => self.post(entry),
            Call::Wait { pick, entry } => self.wait(pick, entry),
            Call::Submit {
                tag: tag @ 128..,
                entry,
            } => self.run(tag, entry),
            Call::Submit { tag, entry } => {
                let command = command(tag, true, 1);
                let here = Paused::new(|| self.post(entry));
                // Time is virtual: a pause is a nanosecond.
                let placed = self.queue.submit(&here, command, 40);
                self.placed(placed, &command);
            }
            Call::Recover => {}
        }
    }

    fn drained(&self, drained: DrainResult) {
        assert_ne!(drained, DrainResult::Busy, "no other thread drains");
    }

    fn post(&self, entry: Entry) {
        self.posted
            .borrow_mut()
            .post(&mut self.hand.borrow_mut(), entry);
    }

    fn placed(&mut self, placed: Result<CommandToken, SubmitError>, command: &MemberCommand<'_>) {
        match placed {
            Ok(token) => {
                let busy = self.lent.iter().any(|one| one.token.cell() == token.cell());
                assert!(!busy && token.cell() < CELLS as u32, "the cell was taken");
                assert!(self.queue.fault().is_none(), "placed on a refused queue");
                self.lent.push(Lent {
                    token,
                    wants_dw0: command.wants_dw0,
                    since: self.hand.borrow_mut().look_back() as usize,
                });
            }
            Err(SubmitError::QueueFull) => {
                assert_eq!(self.lent.len() as u32, self.queue.state().slots());
            }
            Err(SubmitError::Refused) => assert!(self.queue.fault().is_some()),
            Err(SubmitError::CellBusy) => {
                let tag = command.tag;
                let taken = self.lent.iter().any(|one| one.token.cell() == tag);
                assert!(taken || tag >= CELLS as u32, "cell {tag} was free");
            }
            Err(SubmitError::Map(_)) => {}
            Err(SubmitError::Closed) => panic!("a kernel's queue says that it is refused"),
        }
    }

    /// Ends the commands of the model that the queue has ended.
    fn settle(&mut self) {
        let (queue, posted) = (&self.queue, self.posted.borrow());
        self.lent.retain(|one| match queue.poll(&one.token) {
            None => true,
            Some((CommandOutcome::Completed(status), dw0)) => {
                let told = posted.told(one.token.cid(), status, one.since);
                let dw0_told = |entry: &nvme_core::spec::Cqe| entry.dw0 == dw0;
                assert!(
                    told.clone().any(|entry| dw0_told(entry) || !one.wants_dw0),
                    "{} ended with {status}, {dw0:#x}: the controller did not say that",
                    one.token.cid()
                );
                false
            }
            Some((other, _)) => panic!("{other:?} without a reset"),
        });
    }

    /// Submits and waits in one call; the recorded outcome of the command must be the returned one.
    fn run(&mut self, tag: u8, entry: Entry) {
        let command = command(tag, true, 1);
        let here = Recording {
            paused: Paused::new(|| self.post(entry)),
            placed: Cell::default(),
            end: Cell::default(),
            look: || self.hand.borrow_mut().look_back() as usize,
        };
        let ran = self.queue.run(&here, || command, 40);
        let (placed, end) = (here.placed.get(), here.end.get());
        let qid = self.queue.state().qid();
        match ran {
            Ok(Err(error)) => {
                assert_eq!((placed, end), (None, None));
                self.placed(Err(error), &command);
            }
            Ok(Ok((CommandOutcome::Completed(status), dw0))) => {
                let (cid, since) = placed.expect("it was placed");
                let posted = self.posted.borrow();
                let told = posted.told(cid, status, since).any(|one| one.dw0 == dw0);
                assert!(
                    told,
                    "{cid} ended with {status}, {dw0:#x}: the controller did not say that"
                );
                assert_eq!(end, Some(TraceEvent::completed(qid, cid, status, 0)));
            }
            Ok(Ok((other, _))) => panic!("{other:?} without a reset"),
            Err((error, token)) => {
                let (cid, since) = placed.expect("it was placed");
                assert_eq!(cid, token.cid());
                let refused = self.queue.fault().is_some();
                assert_eq!(error == WaitError::Refused, refused);
                let [head, now_ns] = end.expect("it expired").to_words();
                let expired = TraceEvent::expired(qid, cid, now_ns);
                assert_eq!(TraceEvent::from_words([head, now_ns]), expired);
                self.lent.push(Lent {
                    token,
                    wants_dw0: true,
                    since,
                });
            }
        }
    }

    /// Waits in virtual time: to the command's end, its deadline, or a fault.
    fn wait(&mut self, pick: u8, entry: Entry) {
        if self.lent.is_empty() {
            return;
        }
        let index = usize::from(pick) % self.lent.len();
        let Lent {
            token,
            wants_dw0,
            since,
        } = self.lent.swap_remove(index);
        let copy = CommandToken::from_words([token.cell(), 0, u32::from(token.cid().0)]);
        let here = Paused::new(|| self.post(entry));
        let token = match self.queue.wait(&here, token, 60) {
            // For `settle`, which looks at the cell again.
            Ok(_) => copy,
            Err((WaitError::Refused, token)) => {
                assert!(self.queue.fault().is_some(), "refused without a fault");
                token
            }
            Err((WaitError::TimedOut, token)) => token,
        };
        self.lent.push(Lent {
            token,
            wants_dw0,
            since,
        });
    }

    /// Resets the controller: every command that is left ends as aborted, and the queue works again.
    fn recover(&mut self, rig: &Rig) {
        self.settle();
        let proof = rig.reset();
        assert_eq!(self.queue.recover(&proof), Some(self.lent.len() as u32));
        for one in self.lent.drain(..) {
            let end = self.queue.poll(&one.token).map(|(outcome, _)| outcome);
            assert_eq!(
                end,
                Some(CommandOutcome::Aborted(AbortReason::ControllerReset))
            );
        }
        assert!(self.queue.fault().is_none() && self.queue.state().in_flight() == 0);
        self.posted.replace(Posted::default());
    }
}

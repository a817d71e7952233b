//! The queues' states between launches: made, copied to the host, drained or recovered there, and copied back.
// UNSAFETY: states are viewed as atomics, and queues are attached by the addresses in their words.
#![allow(unsafe_code)]

use super::{Rig, Shape, text};
use crate::admin::{self, AdminQueue};
use crate::bench::Mode;
use nvme_core::bringup::QueuePlan;
use nvme_core::group::LoneThread;
use nvme_core::handoff::QueueWords;
use nvme_core::queue_state::{QueueState, words as state_words};
use nvme_core::spec::{Iova, Qid, register};
use nvme_core::sync::AtomicU32;
use nvme_core::{CollectiveQueue, DrainResult, Quiesced, ResultCells, SharedQueue};
use nvme_host::Device;

impl Rig<'_> {
    pub(super) fn init_states(&self) -> Result<(), String> {
        let Shape {
            entries,
            slots,
            start,
            ..
        } = self.shape;
        let len = state_words(entries);
        for (index, words) in self.words.iter().enumerate() {
            let state: Vec<AtomicU32> = (0..len).map(|_| AtomicU32::new(0)).collect();
            let view = QueueState::new(&state, Qid(words.qid as u16), entries, slots);
            view.ok_or("impossible queue sizes")?
                .init(Device::registers(&*self.sim).identity(), start);
            self.upload_state(index, &state)?;
        }
        Ok(())
    }

    fn upload_state(&self, index: usize, state: &[AtomicU32]) -> Result<(), String> {
        use nvme_core::sync::{Order, Scope};
        let words = state
            .iter()
            .map(|word| word.load(Order::Relaxed, Scope::Sys));
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        let at = index * bytes.len();
        self.states.upload(at, &bytes).map_err(text)
    }

    fn download_state(&self, index: usize) -> Result<Vec<AtomicU32>, String> {
        let mut bytes = vec![0; state_words(self.shape.entries) * 4];
        let at = index * bytes.len();
        self.states.download(at, &mut bytes).map_err(text)?;
        let words = bytes.chunks_exact(4);
        let word = |b: &[u8]| AtomicU32::new(u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        Ok(words.map(word).collect())
    }

    /// Brings the controller up, with every queue.
    pub(super) fn bring_up(
        &self,
        disabled: impl FnMut(&Quiesced<'_>) -> Result<(), String>,
    ) -> Result<AdminQueue, String> {
        let dstrd = self.sim.dstrd();
        let place = admin::Place {
            registers: self.sim.registers(),
            doorbells: [
                self.sim.doorbell(register::sq_tail_doorbell(0, dstrd)),
                self.sim.doorbell(register::cq_head_doorbell(0, dstrd)),
            ],
            pages: &self.admin,
            iova: Iova(self.admin.start().addr() as u64),
        };
        let plan = |words: &QueueWords| QueuePlan {
            qid: Qid(words.qid as u16),
            sq_entries: words.entries,
            sq_iova: Iova(words.sq),
            cq_entries: words.entries,
            cq_iova: Iova(words.cq),
            vector: None,
        };
        let plans: Vec<QueuePlan> = self.words.iter().map(plan).collect();
        admin::bring_up(&place, &plans, disabled)
    }

    /// Resets the controller, ends what is in flight and creates the queues again.
    ///
    /// Returns how many commands were in flight.
    pub fn recover(&mut self) -> Result<u32, String> {
        let mut ended = 0;
        let admin_queue = self.bring_up(|proof| {
            for (index, words) in self.words.iter().enumerate() {
                let state = self.download_state(index)?;
                let words = QueueWords {
                    state: state.as_ptr().addr() as u64,
                    ..*words
                };
                // SAFETY: the words have host addresses of rings that live as long as this rig, and of the copy.
                let attached = unsafe { words.attach() };
                let (memory, view) = attached.ok_or("impossible queue words")?;
                // The state afterwards fits a group that owns the queue as well.
                let queue = SharedQueue::new(memory, view, ResultCells::new(&[]));
                let count = queue.recover(proof);
                ended += count.ok_or("the proof is of another queue")?;
                self.upload_state(index, &state)?;
            }
            Ok(())
        })?;
        self.admin_queue = Some(admin_queue);
        self.cells.zero().map_err(text)?;
        Ok(ended)
    }

    /// Takes the completions that came since the last launch, on the host; returns how many.
    ///
    /// For the kind of queue that `mode` uses: one that a group owns, or one that is shared.
    pub fn drain(&mut self, mode: Mode) -> Result<u32, String> {
        let mut taken = 0;
        for (index, words) in self.words.iter().enumerate() {
            let state = self.download_state(index)?;
            let words = QueueWords {
                state: state.as_ptr().addr() as u64,
                ..*words
            };
            // SAFETY: the words have host addresses of rings that live as long as this rig, and of the copy.
            let attached = unsafe { words.attach() };
            let (memory, view) = attached.ok_or("impossible queue words")?;
            if matches!(mode, Mode::Shared | Mode::Divergent) {
                let queue = SharedQueue::new(memory, view, ResultCells::new(&[]));
                if let DrainResult::Took(count) = queue.drain(&LoneThread) {
                    taken += count;
                }
            } else {
                let mut queue = CollectiveQueue::resume(LoneThread, memory, view);
                taken += queue.reap::<1>(|_| {}).map_err(|fault| fault.to_string())?;
                queue.suspend();
            }
            self.upload_state(index, &state)?;
        }
        self.cells.zero().map_err(text)?;
        Ok(taken)
    }

    /// Has the controller abort every command in flight; returns how many it reports as aborted.
    pub fn abort(&mut self) -> Result<u32, String> {
        let mut aborted = 0;
        for (index, words) in self.words.iter().enumerate() {
            let state = self.download_state(index)?;
            let qid = Qid(words.qid as u16);
            let view = QueueState::new(&state, qid, words.entries, words.slots);
            let admin = self.admin_queue.as_mut().ok_or("no admin queue")?;
            for cid in view.ok_or("impossible queue sizes")?.cids() {
                aborted += u32::from(admin::abort(admin, qid, cid)?);
            }
        }
        Ok(aborted)
    }

    /// Returns the number of commands in flight on all queues, by the state.
    pub fn in_flight(&self) -> Result<u32, String> {
        let mut sum = 0;
        for (index, words) in self.words.iter().enumerate() {
            let state = self.download_state(index)?;
            let qid = Qid(words.qid as u16);
            let view = QueueState::new(&state, qid, words.entries, words.slots);
            sum += view.ok_or("impossible queue sizes")?.in_flight();
        }
        Ok(sum)
    }
}

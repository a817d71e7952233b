//! The life of a command: placed, published, polled, late, reclaimed.

use crate::account::{Failure, Record};
use crate::host::Mode;
use crate::model::{self, BLOCK_WORDS};
use crate::plan::{Form, Order, Verb};
use crate::queue::Late;
use crate::sabotage::Sabotage;
use crate::setup::{BLOCK_BYTES, BLOCKS, COMMAND_NS};
use crate::trace::Event;
use crate::world::World;
use nvme_core::sgl::SglSegment;
use nvme_core::spec::{Cid, Iova, Lba, Nsid, Sqe, nvm};
use nvme_core::{CommandData, CommandOutcome, Quiesced, SubmitError};

const NS: Nsid = Nsid(1);

impl World<'_> {
    /// Places a command if blocks, a buffer and a slot are free; returns whether it did.
    pub fn submit(&mut self, queue: usize, order: Order) -> Result<bool, Failure> {
        let Some((order, sqe, buffer, same)) = self.prepare(order) else {
            return Ok(false);
        };
        let (pages, segments);
        let data = match buffer {
            None => CommandData::None,
            Some((index, start, len)) => {
                let (offset, len) = (start as u64 * 8, len as u64 * 8);
                let iova = self.accounts.pool.iova(index).offset(offset);
                match order.form {
                    Form::Stretch => CommandData::Contiguous { iova, len },
                    Form::Table => {
                        pages = self.accounts.pool.pages(index);
                        CommandData::Pages {
                            offset,
                            len,
                            pages: &pages,
                        }
                    }
                    Form::Sgl => {
                        segments = halves(iova, len as u32);
                        CommandData::Sgl(&segments)
                    }
                }
            }
        };
        let id = self.accounts.next_id();
        let deadline_ns = self.now_ns + COMMAND_NS;
        let refuses = self.queues[queue].refuses();
        let room = self.queues[queue].in_flight() < self.queues[queue].depth();
        match self.queues[queue].submit(sqe, data, id, deadline_ns) {
            Ok(cid) => {
                let lba = order.lba;
                let more = || format!("{:?} x{}", order.verb, order.blocks);
                let event = Event::Placed {
                    queue,
                    id,
                    cid: cid.0,
                    lba,
                };
                self.trace.add(self.now_ns, event, more);
                if refuses {
                    return Err(Failure::new(
                        "refusal",
                        format!("queue {queue} refuses commands and took {id}"),
                    ));
                }
                self.placed += 1;
                let stamp = self.accounts.model.stamp();
                let record = Record {
                    order,
                    queue,
                    cid,
                    buffer,
                    deadline_ns,
                    same,
                    fault: None,
                    expired: false,
                    abortable: false,
                    cuts: self.accounts.cuts,
                    stamp,
                    laid: false,
                    ended: false,
                };
                self.accounts.placed(record);
                self.beware_of_echo(queue, cid)?;
                Ok(true)
            }
            Err(error) => {
                self.accounts.forget(&order, buffer);
                let full = error == SubmitError::QueueFull;
                self.trace
                    .add(self.now_ns, Event::NotPlaced { queue, full }, || "");
                match error {
                    SubmitError::QueueFull if !room => Ok(false),
                    SubmitError::Refused if refuses => Ok(false),
                    error => Err(Failure::new(
                        "refusal",
                        format!("queue {queue} refused {order:?}: {error:?}"),
                    )),
                }
            }
        }
    }

    /// Recovers if an identifier is used again while an echo of its last command may arrive: the
    /// two could not be told apart. A host that knew of the echo would reset the controller.
    fn beware_of_echo(&mut self, queue: usize, cid: Cid) -> Result<(), Failure> {
        if self.accounts.is_haunted(queue, cid) {
            return self.recover("an identifier came round too early");
        }
        Ok(())
    }

    #[allow(clippy::type_complexity)]
    fn prepare(
        &mut self,
        mut order: Order,
    ) -> Option<(Order, Sqe, Option<(usize, usize, usize)>, Option<bool>)> {
        let verb = order.verb;
        let writer = matches!(verb, Verb::Write | Verb::WriteThrough | Verb::Zero);
        if verb == Verb::Flush {
            let sqe = match self.sabotage {
                Sabotage::NoFlush => nvm::verify(NS, Lba(0), 1),
                _ => nvm::flush(NS),
            };
            return Some((order, sqe, None, None));
        }
        if verb == Verb::OutOfRange {
            order.lba = BLOCKS;
        } else {
            order.lba = self.accounts.model.lock(order.lba, order.blocks, writer)?;
        }
        let (lba, blocks) = (Lba(u64::from(order.lba)), order.blocks);
        let mut buffer = None;
        if verb != Verb::Zero {
            let bytes = u64::from(blocks) * BLOCK_BYTES;
            let Some(index) = self.accounts.pool.take(u64::from(order.offset) + bytes) else {
                self.accounts.forget(&order, None);
                return None;
            };
            buffer = Some((index, order.offset as usize / 8, bytes as usize / 8));
        }
        let mut same = None;
        let sqe = match verb {
            Verb::Read | Verb::OutOfRange | Verb::Flush => nvm::read(NS, lba, blocks),
            Verb::Write => nvm::write(NS, lba, blocks),
            Verb::WriteThrough => {
                let mut sqe = nvm::write(NS, lba, blocks);
                sqe.cdw12 |= nvm::FUA;
                sqe
            }
            Verb::Compare | Verb::CompareOther => {
                let certain = (order.lba..order.lba + blocks)
                    .all(|lba| self.accounts.model.certain(lba).is_some());
                same = certain.then_some(verb == Verb::Compare);
                nvm::compare(NS, lba, blocks)
            }
            Verb::Zero => nvm::write_zeroes(NS, lba, blocks),
        };
        if let Some((index, start, _)) = buffer {
            self.put_data(order, index, start);
        }
        Some((order, sqe, buffer, same))
    }

    /// Fills a buffer with the data that its command writes or compares.
    fn put_data(&self, order: Order, buffer: usize, start: usize) {
        let id = self.accounts.next_id();
        for block in 0..order.blocks {
            let lba = order.lba + block;
            let version = match order.verb {
                Verb::Write | Verb::WriteThrough | Verb::CompareOther => id,
                Verb::Compare => self.accounts.model.certain(lba).unwrap_or(0),
                _ => return,
            };
            let at = start + block as usize * BLOCK_WORDS;
            if let Some(words) = self.accounts.pool.words(buffer).slice(at, BLOCK_WORDS) {
                model::fill(words, version, lba);
            }
        }
    }

    /// Takes what has completed on `queue`; the host resets the controller when that is nonsense.
    pub fn poll(&mut self, queue: usize) -> Result<(), Failure> {
        let result = self.queues[queue].poll(&mut self.ended);
        self.settle_ends(queue, false)?;
        if let Err(fault) = result {
            self.trace.add(self.now_ns, Event::Nonsense { queue }, || {
                format!("{fault:?}")
            });
            if !self.disturbed {
                let text = format!("queue {queue} says {fault:?} and nothing was wrong");
                return Err(Failure::new("account", text));
            }
            if matches!(self.mode, Mode::Raising { .. }) {
                return Ok(());
            }
            return self.recover("nonsense in a completion queue");
        }
        Ok(())
    }

    /// Records the ends that a driver has reported.
    pub fn settle_ends(&mut self, queue: usize, proven: bool) -> Result<(), Failure> {
        if self.ended.is_empty() {
            return Ok(());
        }
        let mut ended = std::mem::take(&mut self.ended);
        self.sabotage.of_ends(&mut ended, &mut self.accounts);
        for end in &ended {
            let status = match end.outcome {
                CommandOutcome::Completed(status) => status.0,
                CommandOutcome::Aborted(_) => u16::MAX,
            };
            self.trace
                .add(self.now_ns, Event::Ended { id: end.id, status }, || {
                    format!("{:?}", end.outcome)
                });
            self.accounts.ended(queue, *end, proven)?;
        }
        ended.clear();
        self.ended = ended;
        Ok(())
    }

    /// Takes every command of `queue` from its driver on this proof.
    pub fn reclaim(&mut self, queue: usize, proof: &Quiesced<'_>) -> Result<(), Failure> {
        self.queues[queue].reclaim(proof, &mut self.ended);
        self.accounts.laid_to_rest(queue);
        self.settle_ends(queue, true)
    }

    /// Asks the driver of `queue` which commands are late.
    pub fn expire(&mut self, queue: usize) -> Result<(), Failure> {
        let due = self
            .accounts
            .next_deadline(queue)
            .is_some_and(|deadline| deadline <= self.now_ns);
        if !due || self.sabotage.ignores_deadlines() {
            let grain_ns = self.grain_ns(queue);
            return self.accounts.check_deadlines(queue, self.now_ns, grain_ns);
        }
        let mut late = std::mem::take(&mut self.late);
        self.queues[queue].expire(self.now_ns, &mut late, &mut self.ended);
        self.settle_ends(queue, false)?;
        let grain_ns = self.grain_ns(queue);
        for one in late.drain(..) {
            let id = match one {
                Late::Id(id) => id,
                Late::Cid(cid) => self.accounts.in_flight(queue, cid).unwrap_or(0),
            };
            self.trace.add(self.now_ns, Event::Expired { id }, || "");
            self.accounts.expired(id, self.now_ns, grain_ns)?;
            if !self.disturbed {
                let text =
                    format!("command {id} of queue {queue} was not answered and nothing was wrong");
                return Err(Failure::new("deadline", text));
            }
        }
        self.late = late;
        self.accounts.check_deadlines(queue, self.now_ns, grain_ns)
    }
}

/// Returns a stretch as two segments.
fn halves(iova: Iova, len: u32) -> [SglSegment; 2] {
    let half = len / 2;
    let segment = |iova, len| SglSegment::Data { iova, len };
    let second = iova.offset(u64::from(half));
    [segment(iova, half), segment(second, len - half)]
}

//! Gathers of a table that is striped over drives, any of which may fail: the rows on the other drives are read, and
//! the recovery of one drive does not wait for the others.
//!
//! No row is written, so each row has one content. The kernel's code is its real source, as in the other schedules of
//! rows.

mod launch;
mod member;

use super::{Counts, Run, STATIONS, atomics};
use crate::account::Failure;
use crate::fault::Kind;
use crate::memory::Memory;
use crate::run::{Arena, of_panic};
use crate::seed::Rng;
use crate::setup::{BLOCK_BYTES, BLOCKS, COMMAND_NS, pick};
use crate::trace::{Event, Trace};
use launch::StripeGather;
use member::{DriveGround, DriveMember};
use nvme_core::stripes::StripeLayout;
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::lanes::{Clock, LaunchTurn};
use nvme_gpu_kernel::rows::{BLOCK_THREADS, GatherLaunch, StripedMember, code, slot_bytes};
use nvme_sim::Fault;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// Launches of a seed, before the last one.
const LAUNCHES: usize = 6;
/// Number of launches under way at a time.
const AT_ONCE: usize = 2;
/// Number of turns of a schedule, and of turns within which everything must have ended after it.
const TURNS: u32 = 20_000;

struct StripeWorld<'a> {
    members: Vec<DriveMember<'a>>,
    /// The members, as a launch describes them.
    words: Vec<StripedMember>,
    memory: &'a Memory,
    rng: Rng,
    trace: Trace,
    counts: Counts,
    /// The clock that kernels read.
    clock: Clock,
    clock_ns: Rc<Cell<u64>>,
    rows: GatherLaunch,
    stripes: StripeLayout,
    stripe_shift: u32,
    /// Number of queues of each drive that blocks own, 0 or 1.
    owned: u32,
    /// Choices that seeds without such queues do not make.
    others: Rng,
    /// A word for each station.
    free: &'a [AtomicU32],
    launches: Vec<StripeGather>,
    faults: u32,
}

/// Runs a seed. With `lines` the trace comes as text, too.
pub fn run(arena: &mut Arena, seed: u64, lines: bool) -> Run {
    arena.0.reset();
    let memory = &arena.0;
    let run = catch_unwind(AssertUnwindSafe(|| run_on(memory, seed, lines)));
    run.unwrap_or_else(|panic| Run {
        failure: Some(of_panic(&*panic)),
        ..Run::default()
    })
}

fn run_on(memory: &Memory, seed: u64, lines: bool) -> Run {
    let mut rng = Rng::new(seed ^ 0x57A1_9E50);
    let count = pick(&mut rng, &[2, 3]);
    let mut grounds: Vec<DriveGround<'_>> = (0..count)
        .map(|number| DriveGround::new(memory, &mut rng, (number, seed)))
        .collect();
    grounds.iter_mut().for_each(DriveGround::describe);
    let now_ns = 1_000_000;
    let owned = u32::from(seed.is_multiple_of(3));
    let members: Vec<DriveMember<'_>> = grounds
        .iter()
        .map(|ground| ground.member(owned, now_ns))
        .collect();
    let stripe_shift = pick(&mut rng, &[11, 12]);
    let free = atomics(STATIONS as usize);
    let clock_ns = Rc::new(Cell::new(now_ns));
    let of_clock = clock_ns.clone();
    let mut world = StripeWorld {
        words: members.iter().map(|member| member.words).collect(),
        members,
        memory,
        trace: Trace::new(lines),
        counts: Counts::default(),
        clock: Rc::new(move || of_clock.get()),
        clock_ns,
        rows: draw_rows(&mut rng, count, stripe_shift),
        stripes: StripeLayout::shifted(stripe_shift, count).expect("some members"),
        stripe_shift,
        owned,
        others: Rng::new(seed ^ 0x0007_E125),
        free: &free,
        launches: Vec::new(),
        faults: 1 + rng.below(4) as u32,
        rng,
    };
    let failure = world.play().err();
    Run {
        failure,
        hash: world.trace.hash(),
        lines: world.trace.lines().to_vec(),
        counts: world.counts,
    }
}

/// Draws a table with rows that lie on several blocks, and on two drives.
fn draw_rows(rng: &mut Rng, members: u32, stripe_shift: u32) -> GatherLaunch {
    let (first_byte, row_bytes) = pick(rng, &[(0, 512), (96, 200), (40, 512), (0, 1024), (8, 700)]);
    let slot = slot_bytes(first_byte, row_bytes, BLOCK_BYTES.trailing_zeros());
    assert!(slot <= 1 << stripe_shift);
    let bytes = u64::from(members) * u64::from(BLOCKS) * BLOCK_BYTES;
    GatherLaunch {
        first_byte,
        row_bytes,
        rows: ((bytes - first_byte) / u64::from(row_bytes)).min(90),
        slot_bytes: slot as u32,
        block_shift: BLOCK_BYTES.trailing_zeros(),
        run_rows: pick(rng, &[1, 2, 4]),
        lanes: pick(rng, &[2, 5, 32]),
        station_count: STATIONS,
        timeout_ns: COMMAND_NS,
        ..GatherLaunch::default()
    }
}

impl StripeWorld<'_> {
    fn tell(&mut self, what: &'static str, number: u32, code: i32) {
        let event = Event::Rows { what, number, code };
        self.trace.add(self.now_ns(), event, || "");
    }

    fn now_ns(&self) -> u64 {
        let each = self.members.iter().map(|member| member.drive.now_ns);
        each.max().unwrap_or(0)
    }

    /// Lets the clock of every drive show the latest time of any; the drives work meanwhile.
    fn join_clocks(&mut self) {
        let now_ns = self.now_ns();
        for member in &mut self.members {
            while member.drive.now_ns < now_ns {
                member.drive.work(false);
                member.drive.sleep(now_ns - member.drive.now_ns);
            }
            member.drive.now_ns = now_ns;
        }
        self.clock_ns.set(now_ns);
    }

    fn play(&mut self) -> Result<(), Failure> {
        for member in &mut self.members {
            member.drive.reset()?;
        }
        self.join_clocks();
        let mut turn = 0;
        while turn < TURNS && !self.is_played() {
            self.turn()?;
            turn += 1;
        }
        for member in &mut self.members {
            member.drive.sim.disarm();
        }
        self.faults = 0;
        self.rest()?;
        // Faults that no step has come upon yet.
        for member in self.members.iter().filter(|member| member.is_faulty) {
            member.gate.report_trouble();
        }
        self.rest()?;
        for member in &mut self.members {
            member.is_faulty = false;
            member.statuses.clear();
        }
        // Everything is free again, and all rows can be read.
        self.launch((0..self.rows.rows as i64).collect(), 2);
        self.rest()
    }

    fn is_played(&self) -> bool {
        self.launches.len() >= LAUNCHES && self.under_way().is_empty()
    }

    /// Lets one of the actors take a step.
    fn turn(&mut self) -> Result<(), Failure> {
        let index = self.rng.below(self.members.len() as u64) as usize;
        match self.rng.below(64) {
            0..34 => self.step_one()?,
            34..44 => self.members[index].drive.work(false),
            44..47 => self.members[index].drive.work(true),
            47..54 => self.watch(index)?,
            54..57 => self.draw_launch(),
            57 => self.draw_fault(index),
            58..63 => self.sleep(index, 30_000),
            _ => self.sleep(index, COMMAND_NS / 16),
        }
        Ok(())
    }

    fn sleep(&mut self, index: usize, most_ns: u64) {
        let most_ns = self.rng.below(most_ns);
        self.members[index].drive.sleep(most_ns);
        self.join_clocks();
    }

    /// Lets time pass until the first of the drives has something to do. A sleep must not be longer: no thread runs
    /// during it, so commands that wait for a slot of a busy drive would pass their deadline while an idle drive
    /// sleeps.
    fn sleep_together(&mut self) {
        let wakes = self
            .members
            .iter()
            .map(|member| member.drive.wakes_ns(member.drive.longest_sleep_ns()));
        let first_ns = wakes.min().unwrap_or(0);
        for member in &mut self.members {
            member.drive.now_ns = member.drive.now_ns.max(first_ns);
        }
        self.join_clocks();
    }

    fn watch(&mut self, index: usize) -> Result<(), Failure> {
        if self.members[index].watch()? {
            self.join_clocks();
            self.counts.recoveries += 1;
            self.tell("recovery", index as u32, 0);
        }
        Ok(())
    }

    /// Returns the launches that have not ended.
    fn under_way(&self) -> Vec<usize> {
        let of = |index: &usize| self.launches[*index].is_under_way();
        (0..self.launches.len()).filter(of).collect()
    }

    fn step_one(&mut self) -> Result<(), Failure> {
        let under_way = self.under_way();
        if !under_way.is_empty() {
            let index = self.rng.below(under_way.len() as u64) as usize;
            self.step(under_way[index])?;
        }
        Ok(())
    }

    fn draw_launch(&mut self) {
        if self.launches.len() >= LAUNCHES || self.under_way().len() >= AT_ONCE {
            return;
        }
        let rows = self.rows.rows;
        let count = 1 + self.rng.below(70);
        let first = self.rng.below(rows);
        let rng = &mut self.rng;
        let mut id = |index| match rng.below(16) {
            0 => rows as i64 + rng.below(3) as i64,
            1 => -1,
            // Neighbours, and the same row once more.
            2..10 => ((first + index) % rows) as i64,
            10 => first as i64,
            _ => rng.below(rows) as i64,
        };
        let ids = (0..count).map(&mut id).collect();
        let blocks = 1 + self.rng.below(3) as u32;
        let rows_of_block = self.members.iter().map(DriveMember::slots).min();
        if self.owned != 0 && self.is_on_one_drive() && self.others.below(2) == 0 {
            self.launch_batched(ids, rows_of_block.unwrap_or(1).min(BLOCK_THREADS));
        } else {
            self.launch(ids, blocks);
        }
    }

    /// True if no row lies on two drives.
    fn is_on_one_drive(&self) -> bool {
        let bytes = u64::from(self.rows.row_bytes);
        bytes.is_power_of_two() && self.rows.first_byte.is_multiple_of(bytes)
    }

    fn draw_fault(&mut self, index: usize) {
        // One drive at least stays well.
        let others = self.members.iter().enumerate();
        let mut others = others.filter(|(other, _)| *other != index);
        if self.faults == 0 || others.all(|(_, member)| member.is_faulty) {
            return;
        }
        self.faults -= 1;
        let kinds = [
            Kind::Drop,
            Kind::Late,
            Kind::Status,
            Kind::Status,
            Kind::Delay,
            Kind::Reorder,
            Kind::Duplicate,
            Kind::WrongCid,
            Kind::WrongPhase,
            Kind::BadSqhd,
            Kind::Cfs,
        ];
        let kind = pick(&mut self.rng, &kinds);
        let (qid, value) = (1 + self.rng.below(2) as u16, self.rng.word());
        let member = &mut self.members[index];
        member.is_faulty = true;
        let fault = kind.armed(value);
        if let Some(Fault::Status(status)) = fault {
            member.statuses.push(status.code());
        }
        match fault {
            Some(fault) => member.drive.sim.arm(qid, fault),
            None => member.drive.sim.fail(),
        }
        self.tell("fault", kind as u32, index as i32);
    }

    /// Waits until everything has ended.
    fn rest(&mut self) -> Result<(), Failure> {
        for _ in 0..TURNS {
            for index in 0..self.members.len() {
                self.members[index].drive.work(false);
                self.watch(index)?;
            }
            for index in self.under_way() {
                while self.step(index)? == LaunchTurn::Ran {}
            }
            let is_free = |word: &AtomicU32| word.load(Order::Relaxed, Scope::Gpu) == 0;
            if self.under_way().is_empty() && self.members.iter().all(DriveMember::is_quiet) {
                return match self.free.iter().position(|word| !is_free(word)) {
                    None => Ok(()),
                    Some(station) => Err(Failure::new(
                        "station",
                        format!("station {station} belongs to nobody, and is not free"),
                    )),
                };
            }
            self.sleep_together();
        }
        let text = "nothing goes wrong any more, and it does not come to rest";
        Err(Failure::new("recovery", text))
    }

    /// Judges the code of a row that touches `members`: a drive without a fault fails none.
    fn judge_code(&mut self, code: i32, members: &[usize]) -> Result<(), String> {
        self.counts.rows += 1;
        let faulty = members.iter().find(|index| self.members[**index].is_faulty);
        match code {
            code::OK => {}
            code::OUT_OF_RANGE => return Err("the table has the row".to_owned()),
            _ if faulty.is_none() => return Err(format!("code {code}, and its drives are well")),
            1.. => {
                self.counts.failed += 1;
                // The status of a row on two drives says which command failed.
                let mut members = members.iter();
                let failed = members.find_map(|index| {
                    let statuses = &self.members[*index].statuses;
                    let at = statuses.iter().position(|one| i32::from(*one) == code);
                    at.map(|at| (*index, at))
                });
                let (index, at) = failed.ok_or_else(|| {
                    format!("status {code:#x}, and no command of its drives failed with it")
                })?;
                self.members[index].statuses.swap_remove(at);
            }
            code::TIMED_OUT => self.counts.lost += 1,
            _ => self.counts.gone += 1,
        }
        Ok(())
    }
}

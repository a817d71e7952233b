//! Shortens a schedule that fails to a short one that fails in the same way.

use crate::account::Failure;
use crate::plan::{Form, Op, Plan};
use crate::run::{Arena, Run, run};
use crate::sabotage::Sabotage;

/// Runs that shrinking may cost.
const RUNS: u32 = 3_000;

/// A failing plan, shortened as far as it still fails.
pub struct Shrunk {
    /// The plan.
    pub plan: Plan,
    /// A run of the plan, with its trace.
    pub run: Run,
    /// Number of runs that the search took.
    pub runs: u32,
}

struct Shrinker<'s> {
    arena: &'s mut Arena,
    sabotage: Sabotage,
    failure: &'s Failure,
    runs: u32,
}

impl Shrinker<'_> {
    /// Replaces `plan` by `smaller` if that fails in the same way.
    fn adopt(&mut self, plan: &mut Plan, smaller: Plan) -> bool {
        if self.runs >= RUNS {
            return false;
        }
        self.runs += 1;
        let failure = run(self.arena, &smaller, self.sabotage, false).failure;
        let same = failure.is_some_and(|failure| failure.is_like(self.failure));
        if same {
            *plan = smaller;
        }
        same
    }

    /// Removes operations: half of them at first, single ones in the end.
    fn fewer_ops(&mut self, plan: &mut Plan) {
        let mut size = plan.ops.len().div_ceil(2);
        while size > 0 {
            let mut at = 0;
            while at < plan.ops.len() {
                let mut smaller = plan.clone();
                let end = (at + size).min(smaller.ops.len());
                smaller.ops.drain(at..end);
                if !self.adopt(plan, smaller) {
                    at += size;
                }
            }
            size /= 2;
        }
    }

    fn fewer_traps(&mut self, plan: &mut Plan) {
        let mut at = 0;
        while at < plan.traps.len() {
            let mut smaller = plan.clone();
            smaller.traps.remove(at);
            if !self.adopt(plan, smaller) {
                at += 1;
            }
        }
    }

    fn fewer_commands(&mut self, plan: &mut Plan) {
        for commands in [0, plan.commands / 8, plan.commands / 2] {
            let smaller = Plan {
                commands,
                ..plan.clone()
            };
            if commands < plan.commands && self.adopt(plan, smaller) {
                return;
            }
        }
    }

    /// Tries small and aligned commands, traps that fire sooner, and no power cut at the end.
    fn simpler(&mut self, plan: &mut Plan) {
        let mut smaller = plan.clone();
        smaller.cut_at_end = false;
        self.adopt(plan, smaller);
        for at in 0..plan.traps.len() {
            let mut smaller = plan.clone();
            smaller.traps[at].after = 0;
            self.adopt(plan, smaller);
        }
        for at in 0..plan.ops.len() {
            let mut smaller = plan.clone();
            if let Op::Submit(_, order) | Op::Fill(_, order) = &mut smaller.ops[at] {
                (order.blocks, order.offset, order.form) = (1, 0, Form::Stretch);
                if smaller.ops[at] != plan.ops[at] {
                    self.adopt(plan, smaller);
                }
            }
        }
    }
}

/// Cuts `plan` down, which fails with `failure`.
pub fn shrink(arena: &mut Arena, plan: &Plan, sabotage: Sabotage, failure: &Failure) -> Shrunk {
    let mut plan = plan.clone();
    let mut shrinker = Shrinker {
        arena,
        sabotage,
        failure,
        runs: 0,
    };
    loop {
        let before = (plan.ops.len(), plan.traps.len(), plan.commands);
        shrinker.fewer_commands(&mut plan);
        shrinker.fewer_traps(&mut plan);
        shrinker.fewer_ops(&mut plan);
        shrinker.simpler(&mut plan);
        if before == (plan.ops.len(), plan.traps.len(), plan.commands) {
            break;
        }
    }
    let runs = shrinker.runs;
    let run = run(arena, &plan, sabotage, true);
    Shrunk { plan, run, runs }
}

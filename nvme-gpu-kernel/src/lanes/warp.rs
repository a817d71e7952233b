//! The lanes of a simulated warp: the runnable ones, and the results of their collectives. A collective that
//! some lanes never reach ends the launch with a panic, where a GPU would hang.

use super::lane::{CollectiveCall, LaunchLane, ShuffleSource};

/// Result of a shuffle from a lane that does not take part, which the manual leaves undefined.
const UNDEFINED: u32 = 0x5A5A_A5A5;

/// The lanes of a warp. A lane that has not ended is runnable, sleeps, or waits in its call for others. Each
/// mask has a bit for each lane, so that a collective costs only a few instructions beside the switches of
/// its lanes.
pub(super) struct LaneWarp {
    lanes: Vec<LaunchLane>,
    /// Lanes that have not ended.
    live: u32,
    /// Runnable lanes, which get their answer next.
    able: u32,
    /// Lanes that sleep until their time.
    asleep: u32,
    /// Lanes that wait for the other lanes of their call's mask.
    meeting: u32,
    /// Lanes that wait for the block.
    at_barrier: u32,
    answers: [u64; 32],
    until_ns: [u64; 32],
    /// Last call of each lane.
    calls: [CollectiveCall; 32],
}

/// Iterates over the numbers of the set bits.
fn bits(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (bit < 32).then_some(bit as usize)
    })
}

impl LaneWarp {
    pub fn new(lanes: Vec<LaunchLane>) -> Self {
        let all = u32::MAX >> (32 - lanes.len() as u32);
        Self {
            lanes,
            live: all,
            able: all,
            asleep: 0,
            meeting: 0,
            at_barrier: 0,
            answers: [0; 32],
            until_ns: [0; 32],
            calls: [CollectiveCall::SyncBlock; 32],
        }
    }

    /// Makes lanes runnable whose time has come.
    pub fn wake(&mut self, now_ns: u64) {
        let due = |mask, lane| mask | u32::from(self.until_ns[lane] <= now_ns) << lane;
        let due = bits(self.asleep).fold(0, due);
        self.asleep &= !due;
        self.answer_all(due, 0);
    }

    pub fn sleeps(&self) -> bool {
        self.asleep != 0
    }

    pub fn is_able(&self) -> bool {
        self.able != 0
    }

    pub fn has_ended(&self) -> bool {
        self.live == 0
    }

    /// True if all lanes wait for the block, or have ended.
    pub fn is_at_barrier(&self) -> bool {
        self.at_barrier == self.live
    }

    /// Ends the barrier, once all lanes of the block have reached it.
    pub fn pass_barrier(&mut self) {
        let all = std::mem::take(&mut self.at_barrier);
        self.answer_all(all, 0);
    }

    /// Runs the runnable lanes, up to `calls` times each.
    pub fn run(&mut self, calls: u32, pick: &mut dyn FnMut(u32) -> u32) {
        for _ in 0..calls {
            self.round(pick(32) as usize);
            self.meet();
            if !self.is_able() {
                self.converge();
            }
            if !self.is_able() {
                return;
            }
        }
    }

    /// Runs each runnable lane to its next call, from lane `first` on.
    fn round(&mut self, first: usize) {
        let below = (1 << (first % self.lanes.len())) - 1;
        let able = self.able;
        for at in bits(able & !below).chain(bits(able & below)) {
            let lane = &mut self.lanes[at];
            let bit = 1 << at;
            self.able &= !bit;
            let Some(call) = lane.resume(self.answers[at]) else {
                self.live &= !bit;
                continue;
            };
            self.calls[at] = call;
            match call {
                CollectiveCall::Sleep { ns } => {
                    self.until_ns[at] = lane.here.now_ns().saturating_add(u64::from(ns));
                    self.asleep |= bit;
                }
                CollectiveCall::SyncBlock => self.at_barrier |= bit,
                CollectiveCall::Beside { .. } => {}
                _ => self.meeting |= bit,
            }
        }
    }

    /// Returns the lanes that ask for the active ones.
    fn asking(&self) -> u32 {
        self.live & !(self.able | self.asleep | self.meeting | self.at_barrier)
    }

    fn answer_all(&mut self, lanes: u32, answer: u64) {
        self.able |= lanes;
        bits(lanes).for_each(|lane| self.answers[lane] = answer);
    }

    /// Ends the collectives that all lanes of their masks have reached.
    fn meet(&mut self) {
        let mut left = self.meeting;
        while left != 0 {
            let lane = left.trailing_zeros();
            left &= left - 1;
            let call = self.calls[lane as usize];
            let mask = call.mask().unwrap_or(0);
            assert!(mask >> lane & 1 == 1, "lane {lane} is not in its own mask");
            let peers = mask & self.live;
            if peers & !self.meeting == 0
                && bits(peers).all(|other| self.calls[other].is_like(&call))
            {
                left &= !peers;
                self.meeting &= !peers;
                self.answer(call, peers);
            }
        }
    }

    /// Returns the value that `lane` offers to `peers`, which have all reached the same collective.
    fn offered(&self, peers: u32, lane: u32) -> Option<u64> {
        if peers >> lane & 1 == 0 {
            return None;
        }
        match self.calls[lane as usize] {
            CollectiveCall::Shuffle { value, .. }
            | CollectiveCall::Exchange { value }
            | CollectiveCall::Joint { value, .. }
            | CollectiveCall::Same { value, .. } => Some(value),
            CollectiveCall::Ballot { mine, .. } => Some(mine.into()),
            _ => None,
        }
    }

    /// Answers the lanes `peers`, which have all reached `call`.
    fn answer(&mut self, call: CollectiveCall, peers: u32) {
        match call {
            CollectiveCall::Shuffle { .. } => {
                for lane in bits(peers) {
                    if let CollectiveCall::Shuffle { from, .. } = self.calls[lane] {
                        let value = self.offered(peers, from);
                        self.answers[lane] = value.unwrap_or(UNDEFINED.into());
                    }
                }
                self.able |= peers;
            }
            CollectiveCall::Ballot { .. } => {
                let yes = |lane: &usize| self.offered(peers, *lane as u32) == Some(1);
                let ballot = bits(peers).filter(yes).fold(0, |all, lane| all | 1 << lane);
                self.answer_all(peers, ballot);
            }
            CollectiveCall::Same { .. } => {
                let mut left = peers;
                while left != 0 {
                    let value = self.offered(peers, left.trailing_zeros());
                    let same = |lane: &usize| self.offered(peers, *lane as u32) == value;
                    let same = bits(left).filter(same).fold(0, |all, lane| all | 1 << lane);
                    self.answer_all(same, same.into());
                    left &= !same;
                }
            }
            CollectiveCall::Exchange { .. } => {
                let value = |lane| self.offered(peers, lane as u32);
                let all = std::array::from_fn(|lane| value(lane).unwrap_or(UNDEFINED.into()));
                bits(peers).for_each(|lane| self.lanes[lane].here.exchanged.set(all));
                self.able |= peers;
            }
            CollectiveCall::Joint { step, .. } => {
                let value = |lane| self.offered(peers, lane as u32).unwrap_or(0);
                (step.0)(&std::array::from_fn(value));
                self.able |= peers;
            }
            _ => self.answer_all(peers, 0),
        }
    }

    /// Converges lanes when none can run: those that ask for the active ones at the same location with the
    /// same key are together.
    fn converge(&mut self) {
        let asking = self.asking();
        let Some(first) = bits(asking).next() else {
            return;
        };
        let is_one = |lane: &usize| self.calls[*lane] == self.calls[first];
        let mask = bits(asking)
            .filter(is_one)
            .fold(0, |all, lane| all | 1 << lane);
        self.answer_all(mask, mask.into());
    }

    /// Describes the waits of the lanes, for a message: location and lanes.
    pub fn waits(&self) -> Option<String> {
        let mut places: Vec<(String, u32)> = Vec::new();
        for lane in bits(self.meeting | self.at_barrier | self.asking()) {
            let Some(place) = self.lanes[lane].here.place.get() else {
                continue;
            };
            let text = format!("{} at {place}", self.calls[lane].name());
            match places.iter_mut().find(|(other, _)| *other == text) {
                Some((_, mask)) => *mask |= 1 << lane,
                None => places.push((text, 1 << lane)),
            }
        }
        let texts = places
            .iter()
            .map(|(text, mask)| format!("lanes {mask:#x} in {text}"));
        let texts: Vec<String> = texts.collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }
}

impl CollectiveCall {
    fn name(&self) -> String {
        let name = match self {
            Self::Shuffle { how, .. } => match how {
                ShuffleSource::Index => "shfl.idx",
                ShuffleSource::Index64 => "shfl.idx of 64 bits",
                ShuffleSource::Butterfly => "shfl.bfly",
            },
            Self::Exchange { .. } => "exchange",
            Self::Joint { .. } => "a step of the warp",
            Self::Ballot { .. } => "vote.ballot",
            Self::Same { .. } => "match.any",
            Self::SyncWarp { .. } => "bar.warp",
            Self::SyncBlock => "barrier",
            Self::Beside { .. } => "activemask",
            Self::Sleep { .. } => "nanosleep",
        };
        match self.mask() {
            Some(mask) => format!("{name} of {mask:#x}"),
            None => name.to_owned(),
        }
    }

    /// Returns the mask of a warp's collective.
    fn mask(&self) -> Option<u32> {
        match self {
            Self::Shuffle { mask, .. }
            | Self::Ballot { mask, .. }
            | Self::Same { mask, .. }
            | Self::SyncWarp { mask } => Some(*mask),
            Self::Exchange { .. } | Self::Joint { .. } => Some(u32::MAX),
            Self::SyncBlock | Self::Beside { .. } | Self::Sleep { .. } => None,
        }
    }

    /// True if it is the same instruction with the same mask.
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Shuffle { how, .. }, Self::Shuffle { how: of, .. }) if how != of => false,
            (Self::Joint { step, .. }, Self::Joint { step: of, .. }) if step != of => false,
            _ => {
                core::mem::discriminant(self) == core::mem::discriminant(other)
                    && self.mask() == other.mask()
            }
        }
    }
}

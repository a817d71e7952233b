//! The lanes of a warp: which of them can run, and what collectives give to each.

use super::lane::{Call, Lane};

/// What a lane does.
#[derive(Clone, Copy)]
enum State {
    /// It can run, and gets this answer.
    Able(u64),
    /// It waits for others.
    Waits(Call),
    /// It sleeps until then.
    Sleeps(u64),
    Ended,
}

/// The lanes that run together.
pub(super) struct Warp {
    lanes: Vec<Lane>,
    states: Vec<State>,
}

impl Warp {
    pub fn new(lanes: Vec<Lane>) -> Self {
        let states = vec![State::Able(0); lanes.len()];
        Self { lanes, states }
    }

    fn lanes_of(&self, is_so: impl Fn(&State) -> bool) -> u32 {
        let bits = (0..).zip(&self.states);
        bits.fold(0, |mask, (lane, state)| {
            mask | u32::from(is_so(state)) << lane
        })
    }

    /// Sleepers whose time has come can run.
    pub fn wake(&mut self, now_ns: u64) {
        for state in &mut self.states {
            if matches!(state, State::Sleeps(until_ns) if *until_ns <= now_ns) {
                *state = State::Able(0);
            }
        }
    }

    pub fn sleeps(&self) -> bool {
        self.lanes_of(|state| matches!(state, State::Sleeps(_))) != 0
    }

    pub fn is_able(&self) -> bool {
        self.lanes_of(|state| matches!(state, State::Able(_))) != 0
    }

    pub fn has_ended(&self) -> bool {
        self.lanes_of(|state| !matches!(state, State::Ended)) == 0
    }

    /// All lanes wait for the block, or have ended.
    pub fn is_at_barrier(&self) -> bool {
        let passes = |state: &State| matches!(state, State::Ended | State::Waits(Call::SyncBlock));
        self.lanes_of(passes).count_ones() as usize == self.states.len()
    }

    /// All lanes of the block have come.
    pub fn pass_barrier(&mut self) {
        for state in &mut self.states {
            if matches!(state, State::Waits(Call::SyncBlock)) {
                *state = State::Able(0);
            }
        }
    }

    /// Lets the lanes run that can, up to `calls` times each.
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

    /// Each lane that can runs to its next call, from lane `first` on.
    fn round(&mut self, first: usize) {
        let count = self.lanes.len();
        for at in 0..count {
            let at = (first + at) % count;
            let State::Able(answer) = self.states[at] else {
                continue;
            };
            let lane = &mut self.lanes[at];
            self.states[at] = match lane.resume(answer) {
                Some(Call::Sleep { ns }) => {
                    State::Sleeps(lane.here.now_ns().saturating_add(u64::from(ns)))
                }
                Some(call) => State::Waits(call),
                None => State::Ended,
            };
        }
    }

    fn call(&self, lane: u32) -> Option<Call> {
        match self.states.get(lane as usize) {
            Some(State::Waits(call)) => Some(*call),
            _ => None,
        }
    }

    /// Ends the collectives that all lanes of their masks have called.
    fn meet(&mut self) {
        let live = self.lanes_of(|state| !matches!(state, State::Ended));
        let mut left = self.lanes_of(|state| matches!(state, State::Waits(_)));
        while left != 0 {
            let lane = left.trailing_zeros();
            left &= left - 1;
            let Some((call, mask)) = self.call(lane).and_then(|call| Some((call, call.mask()?)))
            else {
                continue;
            };
            assert!(mask >> lane & 1 == 1, "lane {lane} is not in its own mask");
            let peers = mask & live;
            let mut others = peers;
            let mut have_come = true;
            while others != 0 && have_come {
                let other = self.call(others.trailing_zeros());
                have_come = other.is_some_and(|other| other.is_like(&call));
                others &= others - 1;
            }
            if have_come {
                left &= !peers;
                self.answer(peers);
            }
        }
    }

    /// The lanes `peers` have all called the same.
    fn answer(&mut self, peers: u32) {
        let mut calls = [None; 32];
        for (lane, call) in calls.iter_mut().enumerate() {
            if peers >> lane & 1 == 1 {
                *call = self.call(lane as u32);
            }
        }
        let mut ballot = 0;
        for (lane, call) in calls.iter().enumerate() {
            if let Some(Call::Ballot { mine, .. }) = call {
                ballot |= u64::from(*mine) << lane;
            }
        }
        for (lane, call) in calls.iter().enumerate() {
            let Some(call) = call else { continue };
            let answer = match call {
                Call::Shuffle { from, .. } | Call::Butterfly { from, .. } => {
                    match calls[*from as usize] {
                        Some(Call::Shuffle { value, .. } | Call::Butterfly { value, .. }) => {
                            u64::from(value)
                        }
                        // Undefined: a lane that is not there.
                        _ => 0x5A5A_A5A5,
                    }
                }
                Call::Ballot { .. } => ballot,
                Call::Same { value, .. } => {
                    let like = |other: &Option<Call>| matches!(other, Some(Call::Same { value: of, .. }) if of == value);
                    let bits = calls.iter().enumerate();
                    bits.fold(0, |mask, (lane, other)| {
                        mask | u64::from(like(other)) << lane
                    })
                }
                _ => 0,
            };
            self.states[lane] = State::Able(answer);
        }
    }

    /// No lane can run: those that ask for the active ones at the same place with the same key are together.
    fn converge(&mut self) {
        let asks = |state: &State| matches!(state, State::Waits(Call::Beside { .. }));
        let asking = self.lanes_of(asks);
        if asking == 0 {
            return;
        }
        let call = self.call(asking.trailing_zeros());
        let is_one = |state: &State| matches!(state, State::Waits(of) if Some(*of) == call);
        let mask = self.lanes_of(is_one);
        for (lane, state) in self.states.iter_mut().enumerate() {
            if mask >> lane & 1 == 1 {
                *state = State::Able(u64::from(mask));
            }
        }
    }

    /// What the lanes wait for, for a message: where, and which of them.
    pub fn waits(&self) -> Option<String> {
        let mut places: Vec<(String, u32)> = Vec::new();
        for (lane, of) in self.lanes.iter().enumerate() {
            let (Some(call), Some(place)) = (self.call(lane as u32), of.here.place.get()) else {
                continue;
            };
            let text = format!("{} at {place}", call.name());
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

impl Call {
    fn name(&self) -> String {
        let name = match self {
            Self::Shuffle { .. } => "shfl.idx",
            Self::Butterfly { .. } => "shfl.bfly",
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

    /// The mask of a collective of a warp.
    fn mask(&self) -> Option<u32> {
        match self {
            Self::Shuffle { mask, .. }
            | Self::Butterfly { mask, .. }
            | Self::Ballot { mask, .. }
            | Self::Same { mask, .. }
            | Self::SyncWarp { mask } => Some(*mask),
            Self::SyncBlock | Self::Beside { .. } | Self::Sleep { .. } => None,
        }
    }

    /// Whether it is the same instruction with the same mask.
    fn is_like(&self, other: &Self) -> bool {
        core::mem::discriminant(self) == core::mem::discriminant(other)
            && self.mask() == other.mask()
    }
}

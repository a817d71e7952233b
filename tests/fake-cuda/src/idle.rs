//! How host threads that play kernels wait for others.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Turns of a wait in which a thread yields: about as long as a command takes on an idle machine.
const YIELDS: u32 = 32;
const NAP: Duration = Duration::from_micros(20);

/// Lets other threads run in turn `turn` of a wait. A thread that sleeps gets a busy processor sooner than one that asks
/// for it all the time, which the scheduler has wait for its share.
pub fn pause(turn: u32) {
    match turn {
        0..YIELDS => std::thread::yield_now(),
        _ => std::thread::sleep(NAP),
    }
}

/// Time in which a lane looks for an end and sleeps again.
const LOOK: Duration = Duration::from_nanos(200);

/// Returns what is to be called whenever all of the `lanes` lanes that a launch runs at a time sleep. They do not say what
/// they found: those that did nothing but look are back soon.
pub fn of_lanes(lanes: u32) -> impl Fn() {
    let soon = NAP.max(LOOK * lanes);
    let (turn, before) = (Cell::new(0u32), Cell::new(Instant::now()));
    move || {
        let is_back_soon = before.get().elapsed() < soon;
        turn.set(if is_back_soon { turn.get() + 1 } else { 0 });
        pause(turn.get());
        before.set(Instant::now());
    }
}

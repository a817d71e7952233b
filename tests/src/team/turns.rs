//! Several members in one thread of a model: loom allows five threads, and eight lanes write an entry.

use generator::{Generator, Gn};
use nvme_core::sync::spin;
use std::cell::Cell;

std::thread_local! {
    /// A member runs under [`in_turns`] now; it waits for others.
    static TURNS: Cell<bool> = const { Cell::new(false) };
    static WAITS: Cell<bool> = const { Cell::new(false) };
}

/// Runs each of `members` until it waits for others, then the next one, until all have ended. What they
/// do is ordered as one thread's; between threads everything is as ever.
pub fn in_turns(members: impl Iterator<Item = Box<dyn FnOnce()>>) {
    let mut members: Vec<_> = members.map(prepare).collect();
    while !members.is_empty() {
        for member in &mut members {
            loop {
                TURNS.set(true);
                member.resume();
                TURNS.set(false);
                if member.is_done() || WAITS.replace(false) {
                    break;
                }
                // The model switches threads, from within the member.
                leave();
            }
        }
        members.retain(|member| !member.is_done());
        spin();
    }
}

/// A member that begins when it is resumed. Made as loom makes its threads, whose way to switch it takes.
#[allow(deprecated)]
fn prepare(member: Box<dyn FnOnce()>) -> Generator<'static, Box<dyn FnOnce()>, ()> {
    let mut made = Gn::new(|| {
        if let Some(member) = generator::yield_::<Box<dyn FnOnce()>, ()>(()) {
            member();
        }
        generator::done!();
    });
    made.resume();
    made.set_para(member);
    made
}

/// Lets others run.
pub fn wait() {
    if TURNS.get() {
        WAITS.set(true);
        leave();
    } else {
        spin();
    }
}

/// Switches back to the coroutine that resumed this one, as loom itself does to switch threads.
#[allow(deprecated)]
fn leave() {
    generator::yield_with(());
}

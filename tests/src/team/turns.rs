//! Several members in one thread of a model: loom allows five threads, and eight lanes write an entry.

use generator::{Generator, Gn};
use nvme_core::sync::spin;
use std::cell::Cell;

std::thread_local! {
    /// True while a member runs under [`in_turns`].
    static TURNS: Cell<bool> = const { Cell::new(false) };
    /// True once that member waits for others.
    static WAITS: Cell<bool> = const { Cell::new(false) };
}

/// Runs each of `members` until it waits for others, then the next one, until all have ended. Their actions are ordered
/// as those of one thread; between threads nothing changes.
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

/// Returns a member that begins when it is resumed. It is made as loom makes its threads, and uses loom's way to
/// switch.
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

//! BAR 0 in a program: gone for good after an unbind, not accessible during a reset.
// UNSAFETY: reads of a mapped BAR; where it is gone, SIGBUS ends the child that reads.
#![allow(unsafe_code)]

use super::machine::{self, Child, Ended};
use super::node::{self, Node, PAGE};
use guest_tests::Outcome;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The version register.
const VS: usize = 8;
const MAPPERS: usize = 4;

fn version(bar: *mut u8) -> u32 {
    // SAFETY: `VS` lies inside the BAR that the caller mapped. If the BAR is gone, SIGBUS ends this child process,
    // which the test expects.
    unsafe { bar.wrapping_add(VS).cast::<u32>().read_volatile() }
}

/// Maps the BAR again and again until that is refused, then reads by the last mapping once the function is unbound.
fn mapper(node: &Node, unbound: &AtomicU64) -> i32 {
    let Ok(bytes) = node.info().map(|info| info.bar0_bytes) else {
        return 2;
    };
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let mut last = None;
    while let Ok(bar) = node::mapped(bytes, both, libc::MAP_SHARED, node.fd()) {
        version(bar);
        if let Some(old) = last.replace(bar) {
            // SAFETY: the mapping was made by this loop, and nothing else uses it.
            unsafe { libc::munmap(old as *mut _, bytes) };
        }
    }
    while unbound.load(Ordering::SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    match last {
        Some(bar) => {
            version(bar);
            3
        }
        None => 4,
    }
}

/// Unbinds while processes map the BAR: no process can access it afterwards.
pub fn race(address: &str, rounds: u64) -> Outcome {
    for round in 0..rounds {
        let node = Node::opened(address)?;
        let unbound = &machine::shared()?[0];
        let children: Result<Vec<Child>, String> = (0..MAPPERS)
            .map(|_| Child::run(|| mapper(&node, unbound)))
            .collect();
        let children = children?;
        std::thread::sleep(Duration::from_millis(20 + 13 * round));
        machine::unbind(address).map_err(|error| format!("unbind: {error}"))?;
        unbound.store(1, Ordering::SeqCst);
        for child in children {
            match child.end() {
                Some(Ended::Signal(libc::SIGBUS)) => {}
                Some(Ended::Exit(3)) => {
                    return Err(format!("round {round}: BAR 0 is mapped after the unbind"));
                }
                other => return Err(format!("round {round}: a mapper ended with {other:?}")),
            }
        }
        if node.info().err() != Some(libc::ENODEV) {
            return Err(format!(
                "round {round}: INFO of what is gone: {:?}",
                node.info()
            ));
        }
        machine::bind(address)?;
    }
    println!("{rounds} unbinds beside {MAPPERS} processes that map: no mapping is left");
    Ok(())
}

/// Reads registers without a pause while the function is reset, by the opener and by an administrator.
pub fn resets(address: &str, rounds: u64) -> Outcome {
    let node = Node::opened(address)?;
    let bar = node.bar().map_err(|errno| format!("mmap: errno {errno}"))?;
    let right = version(bar);
    let stop = AtomicBool::new(false);
    let at = bar as usize;
    let read = || {
        let (mut reads, mut wrong) = (0u64, 0u64);
        while !stop.load(Ordering::Relaxed) {
            reads += 1;
            wrong += u64::from(version(at as *mut u8) != right);
        }
        (reads, wrong)
    };
    let done = std::thread::scope(|scope| {
        let readers = [scope.spawn(read), scope.spawn(read)];
        let mut outcome = Ok(());
        for _ in 0..rounds {
            outcome = outcome.and(
                node.reset()
                    .map_err(|errno| format!("RESET: errno {errno}")),
            );
            let by_system = machine::reset(address).map_err(|error| format!("reset: {error}"));
            outcome = outcome.and(by_system);
        }
        stop.store(true, Ordering::Relaxed);
        outcome.map(|()| readers.map(|reader| reader.join().unwrap_or((0, 1))))
    });
    let (mut reads, mut wrong) = (0, 0);
    for (some, bad) in done? {
        reads += some;
        wrong += bad;
    }
    println!(
        "{reads} reads during {} resets, {wrong} of them of nothing",
        2 * rounds
    );
    match (reads, wrong) {
        (1.., 0) => Ok(()),
        _ => Err(format!(
            "{wrong} of {reads} reads while memory decoding was off"
        )),
    }
}

/// A child does not inherit its parent's BAR, and the parent's mapping is not changed.
pub fn fork(address: &str) -> Outcome {
    let node = Node::opened(address)?;
    let bar = node.bar().map_err(|errno| format!("mmap: errno {errno}"))?;
    let before = version(bar);
    let child = Child::run(|| (version(bar) == before) as i32)?;
    match (child.end(), version(bar) == before) {
        (Some(Ended::Signal(libc::SIGSEGV)), true) => {}
        other => return Err(format!("a child that reads the BAR: {other:?}")),
    }
    let private = node::mapped(PAGE, libc::PROT_READ, libc::MAP_PRIVATE, node.fd());
    match private {
        Err(libc::EINVAL) => Ok(()),
        other => Err(format!("a private mapping: {other:?}")),
    }
}

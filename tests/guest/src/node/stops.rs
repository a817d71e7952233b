//! Events that stop the function: resets by others, sleep, a reset that is missing, an end with commands under way.
// UNSAFETY: looks at an arena that a controller might have written.
#![allow(unsafe_code)]

use super::machine::{self, Child, Ended, is_master};
use super::node::{self, Node, PAGE, STOPPED};
use super::nvme::Nvme;
use guest_tests::Outcome;
use std::time::Duration;

pub fn failed(what: &'static str) -> impl Fn(i32) -> String {
    move |errno| format!("{what}: errno {errno}")
}

/// After `stop` the opener has got an event, and finds the controller disabled once the stop is over. The controller
/// can be enabled and reset.
pub fn stopped(address: &str, stop: impl FnOnce() -> Outcome) -> Outcome {
    let mut nvme = Nvme::start(Node::opened(address)?)?;
    let event = node::eventfd()?;
    nvme.node.watch(event_fd(&event)).map_err(failed("EVENT"))?;
    nvme.works()?;
    stop()?;
    if !node::heard(&event, 20) {
        return Err("no event".to_owned());
    }
    // The state of the first event may not be over yet.
    for _ in 0..3000 {
        if is_master(address)? {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let info = nvme.node.info().map_err(failed("INFO"))?;
    if info.flags & STOPPED == 0 || nvme.is_enabled() || !is_master(address)? {
        return Err(format!(
            "flags {:#x}, enabled: {}, a master: {}",
            info.flags,
            nvme.is_enabled(),
            is_master(address)?
        ));
    }
    nvme.ring_stale();
    nvme.enable()?;
    nvme.works()?;
    nvme.node.reset().map_err(failed("RESET"))?;
    let info = nvme.node.info().map_err(failed("INFO"))?;
    if info.flags & STOPPED != 0 || !is_master(address)? || nvme.is_enabled() {
        return Err(format!("after a reset: flags {:#x}", info.flags));
    }
    nvme.enable()?;
    nvme.works()
}

pub fn event_fd(event: &std::fs::File) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(event)
}

/// An administrator resets the function.
pub fn by_system(address: &str) -> Outcome {
    stopped(address, || {
        machine::reset(address).map_err(|error| format!("reset: {error}"))
    })?;
    println!("a reset by the system is told, and a reset of its own starts again");
    Ok(())
}

/// The machine's devices sleep and wake by the kernel's own suspend test.
pub fn by_sleep(address: &str) -> Outcome {
    stopped(address, || {
        machine::write("/sys/power/pm_test", "devices")
            .and_then(|()| machine::write("/sys/power/state", "freeze"))
            .map_err(|error| format!("sleep: {error}"))
    })?;
    println!("a sleep is told, and a reset starts again");
    Ok(())
}

/// Each opener gets its own events, however soon it opens the node after the last opener.
pub fn next_opener(address: &str, rounds: u64) -> Outcome {
    for round in 0..rounds {
        let ready = &machine::shared()?[0];
        let last = Child::run(|| {
            let held = Node::open(address).and_then(|node| {
                let event = node::eventfd().map_err(|_| 0)?;
                node.watch(event_fd(&event))?;
                Ok((node, event))
            });
            ready.store(
                1 + u64::from(held.is_err()),
                std::sync::atomic::Ordering::SeqCst,
            );
            std::thread::sleep(Duration::from_millis(30));
            0
        })?;
        while ready.load(std::sync::atomic::Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        // There is no pause: the second opener opens the node as soon as it can.
        let node = loop {
            match Node::open(address) {
                Err(libc::EBUSY) => {}
                other => break other.map_err(failed("open"))?,
            }
        };
        let event = node::eventfd()?;
        node.watch(event_fd(&event)).map_err(failed("EVENT"))?;
        if last.end() != Some(Ended::Exit(0)) {
            return Err(format!("round {round}: the last opener failed"));
        }
        machine::reset(address).map_err(|error| format!("reset: {error}"))?;
        if !node::heard(&event, 20) {
            return Err(format!("round {round}: the next opener hears nothing"));
        }
    }
    println!("{rounds} openers, each right after the last one, heard of their event");
    Ok(())
}

/// If the function has no reset, the controller is disabled instead: RESET reports it, and the next opener finds no
/// queues of the last one.
pub fn without_reset(address: &str) -> Outcome {
    machine::reset_methods(address, "\n").map_err(|error| format!("reset_method: {error}"))?;
    let outcome = without_any(address);
    let back = machine::reset_methods(address, "default");
    outcome.and(back.map_err(|error| format!("reset_method: {error}")))
}

fn without_any(address: &str) -> Outcome {
    machine::by_another(|| leave_enabled(address))?;
    if is_master(address)? {
        return Err("still a master after the close".to_owned());
    }
    let mut nvme = Nvme::start(Node::opened(address)?)?;
    nvme.works()
}

fn leave_enabled(address: &str) -> Outcome {
    let mut nvme = Nvme::start(Node::opened(address)?)?;
    nvme.works()?;
    match nvme.node.reset() {
        Err(libc::EOPNOTSUPP) => {}
        other => return Err(format!("RESET without a reset: {other:?}")),
    }
    if nvme.is_enabled() || !is_master(address)? {
        return Err("RESET has not disabled the controller, or it is no master".to_owned());
    }
    nvme.enable()?;
    nvme.works()
    // Ends with the controller enabled.
}

/// A handle that could not be returned does not exist: its memory is not mapped.
pub fn untold(address: &str) -> Outcome {
    let node = Node::opened(address)?;
    let memory = node::arena(PAGE)? as u64;
    let nowhere = 8u64;
    let mut ask = [48, memory, PAGE as u64, 0, 1 << 32, nowhere];
    let ended = node.call(node::MAP, ask.as_mut_ptr().expose_provenance() as u64);
    let info = node.info().map_err(failed("INFO"))?;
    if ended != Err(libc::EFAULT) || info.mappings != 0 {
        return Err(format!("{ended:?}, and {} mappings", info.mappings));
    }
    // The smallest handle, which it would have had.
    match node.unmap(1) {
        Err(libc::ENOENT) => Ok(()),
        other => Err(format!("UNMAP of it: {other:?}")),
    }
}

//! Errors of the bus (AER), which QEMU raises at the port above the function.
// UNSAFETY: reads a BAR that may be gone, in a child.
#![allow(unsafe_code)]

use super::machine::{self, Child, Ended, is_master};
use super::node::{self, Node, STOPPED};
use super::nvme::Nvme;
use super::stops::{event_fd, failed, stopped};
use guest_tests::Outcome;

/// Prints the line that the harness passes to QEMU's monitor.
fn raise(port: &str, error: &str) {
    println!("@monitor pcie_aer_inject_error {port} {error}");
}

/// Raises one that the opener hears of.
fn raised(nvme: &Nvme, port: &str, error: &str) -> Outcome {
    let event = node::eventfd()?;
    nvme.node.watch(event_fd(&event)).map_err(failed("EVENT"))?;
    raise(port, error);
    if !node::heard(&event, 20) {
        return Err("no event".to_owned());
    }
    match nvme.node.info().map_err(failed("INFO"))?.flags & STOPPED {
        0 => Err("INFO does not say that it was stopped".to_owned()),
        _ => Ok(()),
    }
}

/// The system recovers: the opener gets an event, finds its controller disabled, and continues; so does the next
/// opener.
pub fn recovered(address: &str, port: &str, error: &str) -> Outcome {
    machine::by_another(|| {
        stopped(address, || {
            raise(port, error);
            Ok(())
        })
    })?;
    Nvme::start(Node::awaited(address)?)?.works()?;
    println!("{error} at {port} is told, and the function works after it");
    Ok(())
}

/// The system does not recover: the opener gets an event, an access to the BAR fails, and a reset starts again.
pub fn lost(address: &str, port: &str, error: &str) -> Outcome {
    machine::by_another(|| not_recovered(address, port, error))?;
    Nvme::start(Node::awaited(address)?)?.works()?;
    println!(
        "{error} at {port}, from which the system has not recovered, is told, and a reset starts again"
    );
    Ok(())
}

/// The link below the port stays down: the opener gets an event, a reset ends with an error, and so does the next open.
pub fn dead(address: &str, port: &str, error: &str) -> Outcome {
    machine::by_another(|| {
        let mut nvme = Nvme::start(Node::opened(address)?)?;
        nvme.works()?;
        raised(&nvme, port, error)?;
        match nvme.node.reset() {
            Err(libc::ENODEV) => Ok(()),
            other => Err(format!("RESET of what is lost: {other:?}")),
        }
    })?;
    match Node::open(address) {
        Err(libc::ENODEV) => {}
        Err(errno) => return Err(format!("open of what is lost: errno {errno}")),
        Ok(_) => return Err("what is lost opens".to_owned()),
    }
    println!(
        "{error} at {port}, after which the link stays down, is told, and calls end with errors"
    );
    Ok(())
}

fn not_recovered(address: &str, port: &str, error: &str) -> Outcome {
    let mut nvme = Nvme::start(Node::opened(address)?)?;
    nvme.works()?;
    raised(&nvme, port, error)?;
    if is_master(address)? {
        return Err("still a master".to_owned());
    }
    let child = Child::run(|| match nvme.node.bar() {
        // SAFETY: the address is the first register of the BAR. If the BAR is gone, SIGBUS ends this child process.
        Ok(bar) => unsafe { bar.cast::<u32>().read_volatile() & 1 | 2 }.cast_signed(),
        Err(_) => 1,
    })?;
    match child.within(60) {
        Some(Ended::Signal(libc::SIGBUS)) => {}
        other => return Err(format!("a read of a BAR that is out of reach: {other:?}")),
    }
    nvme.node.reset().map_err(failed("RESET"))?;
    let info = nvme.node.info().map_err(failed("INFO"))?;
    if info.flags & STOPPED != 0 || !is_master(address)? {
        return Err(format!(
            "after a reset: flags {:#x}, or no master",
            info.flags
        ));
    }
    nvme.enable()?;
    nvme.works()
}

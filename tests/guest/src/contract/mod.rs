//! The promises of the trait `Device`, as checks that run on every transport: the simulator, its relay and vfio-user in
//! the tests of this package, VFIO and the module nvme_gpu in guests (`guest-tests contract`).

mod loss;
mod memory;
mod registers;

use crate::{Outcome, said};
use nvme_host::{Device, Error};
use std::sync::Arc;

/// A device under test.
pub struct Subject<'a> {
    /// Opens it.
    pub open: &'a dyn Fn() -> nvme_host::Result<Arc<dyn Device>>,
    /// True if nothing else can open the device while it is open.
    pub is_exclusive: bool,
    /// True if the controller cannot access memory from the moment it is unmapped. A server of vfio-user keeps memory
    /// in one file with memory that is still mapped.
    pub confines: bool,
    /// Removes the controller while it is used, and returns at once. `None`: the test uses the device's `leave`.
    pub lose: Option<&'a dyn Fn() -> Outcome>,
}

/// A check of an open device.
type Check = fn(&Arc<dyn Device>) -> Outcome;

const CHECKS: &[(&str, Check)] = &[
    ("names", names),
    ("registers", registers::run),
    ("doorbells", registers::doorbells),
    ("optional parts", optional),
    ("memory", memory::allocations),
    ("mappings", memory::mappings),
    ("mappings by several threads", memory::threads),
    ("unknown mappings", memory::unknown),
    ("reach", memory::reach),
    ("reset", memory::reset),
    ("memory of a peer", memory::peer),
];

/// Runs every check.
///
/// # Errors
/// The first promise that is not kept, with the name of its check.
pub fn run(subject: &Subject<'_>) -> Outcome {
    let device = (subject.open)().map_err(said)?;
    for (name, check) in CHECKS {
        check(&device).map_err(|cause| format!("{name}: {cause}"))?;
        println!("contract: {name}");
    }
    if subject.confines {
        memory::unmapped(&device).map_err(|cause| format!("unmapped memory: {cause}"))?;
        println!("contract: unmapped memory");
    }
    if subject.is_exclusive {
        match (subject.open)() {
            Ok(_) => return Err("exclusive: it was opened twice".to_owned()),
            Err(error) => println!("contract: exclusive: {error}"),
        }
    }
    require(device.gone().is_none(), "gone() before anything was lost")?;
    drop(device);
    // Again, and this time to its end.
    let device = (subject.open)().map_err(|error| format!("opened again: {}", said(error)))?;
    println!("contract: opened again");
    loss::run(&device, subject.lose).map_err(|cause| format!("loss: {cause}"))
}

fn names(device: &Arc<dyn Device>) -> Outcome {
    let (name, words) = (device.name(), device.describe());
    require(
        name.contains(':'),
        &format!("the name '{name}' has no kind"),
    )?;
    require(!words.is_empty(), "no description")?;
    require(
        device.name() == name && device.describe() == words,
        "they change",
    )?;
    device.guards_data();
    Ok(())
}

/// Checks the parts that a transport need not offer: it offers them, or its error says that it does not, with a remedy.
fn optional(device: &Arc<dyn Device>) -> Outcome {
    match device.interrupts(1) {
        Ok(vectors) if vectors.len() == 1 => {}
        Ok(vectors) => return Err(format!("{} vectors of 1", vectors.len())),
        Err(error) => refusal("interrupts", &error)?,
    }
    match device.controller_memory() {
        Ok(memory) => {
            let takes = memory.takes_submission_queues() || memory.takes_completion_queues();
            require(takes, "controller memory that takes no queue")?;
            let piece = memory.take(4096).map_err(said)?;
            require(
                piece.iova().0.is_multiple_of(4096),
                "a piece that is no page",
            )?;
        }
        Err(error) => refusal("controller memory", &error)?,
    }
    Ok(())
}

/// Checks an error: it says that there is no such part, and what to do.
fn refusal(what: &str, error: &Error) -> Outcome {
    let is_typed = matches!(
        error,
        Error::Usage { .. } | Error::Device { .. } | Error::Environment { .. }
    );
    require(is_typed, &format!("{what}: {error:?}"))?;
    require(!error.remedy().is_empty(), &format!("{what}: no remedy"))
}

fn require(holds: bool, otherwise: &str) -> Outcome {
    match holds {
        true => Ok(()),
        false => Err(otherwise.to_owned()),
    }
}

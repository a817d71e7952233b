//! A function that is pulled out of its slot under its opener.

use super::machine::{self, Child, Ended};
use super::node::{self, Node};
use super::nvme::Nvme;
use super::stops::{event_fd, failed};
use guest_tests::Outcome;

/// The opener gets an event, its calls end with an error, and an access to the BAR is a SIGBUS. Nothing waits for the
/// opener: `grace_ms` has its largest value.
pub fn run(address: &str, port: &str) -> Outcome {
    let opener = Child::run(|| match pulled_out(address, port) {
        // SIGBUS ends the process.
        Ok(nvme) => 2 + i32::from(nvme.is_enabled()),
        Err(cause) => {
            eprintln!("{cause}");
            1
        }
    })?;
    match opener.end() {
        Some(Ended::Signal(libc::SIGBUS)) => {}
        other => return Err(format!("the opener ended with {other:?}")),
    }
    println!("pulled out under its opener, which is told, and for which nothing waits");
    Ok(())
}

fn pulled_out(address: &str, port: &str) -> Result<Nvme, String> {
    let mut nvme = Nvme::start(Node::opened(address)?)?;
    nvme.works()?;
    let event = node::eventfd()?;
    nvme.node.watch(event_fd(&event)).map_err(failed("EVENT"))?;
    machine::cut_power(port)?;
    if !machine::is_absent(address)? {
        return Err("the function is still there".to_owned());
    }
    let remover = Child::run(|| i32::from(machine::remove(address).is_err()))?;
    // An unbind waits for a minute where the function is there.
    match remover.within(30) {
        Some(Ended::Exit(0)) => {}
        None => return Err("the removal waits for the opener".to_owned()),
        other => return Err(format!("the removal ended with {other:?}")),
    }
    if !node::heard(&event, 1) {
        return Err("no event".to_owned());
    }
    match nvme.node.info() {
        Err(libc::ENODEV) => Ok(nvme),
        other => Err(format!("INFO of what is gone: {other:?}")),
    }
}

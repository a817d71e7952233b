//! Checks who may open the node, and that an open that is refused changes nothing.

use super::machine::{NO_INTX, command, is_master};
use super::memory;
use super::node::{self, Node, STRICT};
use super::nvme::Nvme;
use guest_tests::Outcome;
use std::os::fd::AsRawFd;

/// Opening ends with `errno`, and the function is not changed: it is no master of the bus.
pub fn refused(address: &str, errno: i32) -> Outcome {
    for _ in 0..3 {
        match Node::open(address) {
            Err(found) if found == errno => {}
            Err(found) => return Err(format!("errno {found} instead of {errno}")),
            Ok(_) => return Err(format!("opened instead of errno {errno}")),
        }
        if is_master(address)? {
            return Err("a refused open has made the function a master of the bus".to_owned());
        }
    }
    println!("refused with errno {errno}; not a master of the bus");
    Ok(())
}

/// Opens, has a command answered, and closes: a master of the bus in between alone.
pub fn opens(address: &str, strict: bool) -> Outcome {
    if is_master(address)? {
        return Err("a master of the bus before it was opened".to_owned());
    }
    let node = Node::opened(address)?;
    let info = node
        .info()
        .map_err(|errno| format!("INFO: errno {errno}"))?;
    if (info.iommu == STRICT) != strict {
        return Err(format!("the IOMMU is of kind {}", info.iommu));
    }
    let mut nvme = Nvme::start(node)?;
    nvme.works()?;
    if command(address)? & NO_INTX == 0 {
        return Err("the function may raise its line".to_owned());
    }
    // The process ends the mapping of the BAR, which holds the file.
    println!("opened, and a command was answered");
    Ok(())
}

/// Pages of a program are not memory of a peer: a request to map them as such is refused.
pub fn no_peer(address: &str) -> Outcome {
    let node = Node::opened(address)?;
    let page = node::arena(node::PAGE)? as u64;
    let (pages, require_peer) = (0, 1);
    let ended = node.ask(pages, page, node::PAGE, -1, require_peer);
    let info = node
        .info()
        .map_err(|errno| format!("INFO: errno {errno}"))?;
    match (ended, info.mappings) {
        (Err(libc::EREMOTE), 0) => Ok(()),
        (other, mappings) => Err(format!("{other:?}, and {mappings} mappings")),
    }
}

/// Memory that the program may only read is not mapped, because the controller would write it.
pub fn read_only(address: &str) -> Outcome {
    let node = Node::opened(address)?;
    let memory = memory::memfd(node::PAGE)?;
    let shared = (libc::MAP_SHARED, memory.as_raw_fd());
    let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
    for (flags, fd) in [shared, private] {
        let page = node::mapped(node::PAGE, libc::PROT_READ, flags, fd);
        let page = page.map_err(|errno| format!("mmap: errno {errno}"))?;
        match node.map(page as u64, node::PAGE) {
            Err(libc::EFAULT) => {}
            other => return Err(format!("flags {flags:#x}: {other:?}")),
        }
    }
    Ok(())
}

/// Interrupts of the line that `action` is on in /proc/interrupts.
fn interrupts(action: &str) -> Result<u64, String> {
    let path = "/proc/interrupts";
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let line = text
        .lines()
        .find(|line| line.contains("IO-APIC") && line.contains(action));
    let line = line.ok_or_else(|| format!("{path}: no line of {action}:\n{text}"))?;
    println!("{}", line.trim());
    let counts = line.split_whitespace().skip(1);
    Ok(counts.map_while(|word| word.parse::<u64>().ok()).sum())
}

/// Commands whose completions are never consumed put no interrupt on the line of `action`, another function's.
pub fn line(address: &str, action: &str) -> Outcome {
    let mut nvme = Nvme::start(Node::opened(address)?)?;
    let before = interrupts(action)?;
    for _ in 0..4 {
        if nvme.identify(false) != Some(0) {
            return Err("Identify has failed".to_owned());
        }
    }
    // A line that nobody calms interrupts thousands of times in this time.
    std::thread::sleep(std::time::Duration::from_secs(1));
    let after = interrupts(action)?;
    match after - before {
        0 => Ok(()),
        more => Err(format!("{more} interrupts on the line of {action}")),
    }
}

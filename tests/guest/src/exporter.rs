//! The test module peer_exporter (tests/guest/exporter), which exports a BAR as a dma-buf, with right or wrong
//! addresses, and can revoke it on request; and how the module nvme_gpu handles that.
// UNSAFETY: ioctl takes raw pointers and gives descriptors that are ours.
#![allow(unsafe_code)]

use crate::{Outcome, peer};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Bytes of the BAR.
const BYTES: u64 = 16 << 20;
/// Calls of the exporter.
const EXPORT: u64 = 0x5601;
const REVOKE: u64 = 0x5602;
const FILL: u64 = 0x5603;
/// Request codes of nvme_gpu, from kmod/nvme_gpu_uapi.h.
const INFO: u64 = 0xC020_4EE0;
const MAP: u64 = 0xC030_4EE1;
const UNMAP: u64 = 0x4008_4EE2;
const RESET: u64 = 0x4EE3;
const EVENT: u64 = 0x4008_4EE4;
const REQUIRE_PEER: u64 = 1;
const PLACE_PEER: u64 = 1;
const REMAPPED: u64 = 1;
const REVOKED: u64 = 1 << 4;

/// The opened exporter.
pub struct Exporter(File);

impl Exporter {
    pub fn open() -> Result<Self, String> {
        open("/dev/peer-exporter").map(Self)
    }

    /// Exports the whole BAR as a dma-buf: with "good", "raw" or "nowhere" addresses, a "short" table, a "read-only"
    /// descriptor, or "unfilled" until it is filled.
    pub fn export(&self, kind: &str) -> Result<OwnedFd, String> {
        let kinds = ["good", "raw", "nowhere", "short", "read-only", "unfilled"];
        let number = kinds.iter().position(|known| *known == kind);
        let number = number.ok_or_else(|| format!("'{kind}' is no kind of export"))?;
        // SAFETY: the call takes a number.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), EXPORT as _, number) } {
            // SAFETY: the call has just created the descriptor, which nothing else owns.
            fd @ 0.. => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            _ => Err(format!("EXPORT: {}", io::Error::last_os_error())),
        }
    }

    /// Revokes the last export.
    pub fn revoke(&self) -> Outcome {
        self.call(REVOKE, "REVOKE")
    }

    /// Notes that the content of the last export is complete.
    fn fill(&self) -> Outcome {
        self.call(FILL, "FILL")
    }

    fn call(&self, number: u64, name: &str) -> Outcome {
        // SAFETY: the call takes no argument.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), number as _, 0) } {
            0 => Ok(()),
            _ => Err(format!("{name}: {}", io::Error::last_os_error())),
        }
    }
}

fn open(path: &str) -> Result<File, String> {
    let file = File::options().read(true).write(true).open(path);
    file.map_err(|error| format!("{path}: {error}"))
}

/// Returns the call's errno, 0 for none.
fn call(node: &File, number: u64, argument: &mut [u64; 8]) -> i32 {
    // SAFETY: the kernel reads and writes at most 48 bytes of the argument, and the list that a MAP names.
    match unsafe { libc::ioctl(node.as_raw_fd(), number as _, argument.as_mut_ptr()) } {
        0.. => 0,
        _ => io::Error::last_os_error().raw_os_error().unwrap_or(-1),
    }
}

/// Handle, place and flags of the one segment that a dma-buf is mapped at.
struct Found {
    handle: u64,
    bytes: u64,
    place: u64,
    flags: u64,
}

fn map(node: &File, buffer: &OwnedFd, flags: u64) -> Result<Found, i32> {
    let mut list = [0u64; 3];
    let list_at = list.as_mut_ptr().expose_provenance() as u64;
    let fd = buffer.as_raw_fd() as u64;
    let mut ask = [48 | 1 << 32, 0, 0, fd | flags << 32, 1 << 32, list_at, 0, 0];
    match call(node, MAP, &mut ask) {
        0 => {
            // SAFETY: the list lives; the read is volatile because the kernel wrote it behind the compiler's back.
            let list = unsafe { (&raw const list).read_volatile() };
            Ok(Found {
                handle: ask[4] & 0xFFFF_FFFF,
                bytes: list[1],
                place: list[2] & 0xFFFF_FFFF,
                flags: list[2] >> 32,
            })
        }
        errno => Err(errno),
    }
}

fn unmap(node: &File, handle: u64) -> i32 {
    let mut ask = [0; 8];
    ask[0] = 8 | handle << 32;
    call(node, UNMAP, &mut ask)
}

fn expect(what: &str, found: i32, wanted: i32) -> Outcome {
    match found == wanted {
        true => Ok(()),
        false => Err(format!("{what}: errno {found} instead of {wanted}")),
    }
}

/// Returns the flags of INFO.
fn info(node: &File) -> Result<u64, String> {
    let mut ask = [32, 0, 0, 0, 0, 0, 0, 0];
    expect("INFO", call(node, INFO, &mut ask), 0)?;
    Ok(ask[2] >> 32)
}

/// Returns whether the function may be a master of the bus.
fn masters(address: &str) -> Result<bool, String> {
    let path = format!("/sys/bus/pci/devices/{address}/config");
    let config = std::fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
    config
        .get(4)
        .map(|command| command & 4 != 0)
        .ok_or_else(|| format!("{path}: too short"))
}

/// Maps exports with good addresses, with those of the BAR, and with those of nothing; then an export is revoked.
pub fn run(address: &str) -> Outcome {
    let exporter = Exporter::open()?;
    let node = open(&format!("/dev/nvme-gpu-{address}"))?;
    for (kind, remapped) in [("good", 0), ("raw", REMAPPED)] {
        let buffer = exporter.export(kind)?;
        let found = map(&node, &buffer, REQUIRE_PEER).map_err(|e| format!("{kind}: errno {e}"))?;
        if (found.bytes, found.place, found.flags) != (BYTES, PLACE_PEER, remapped) {
            let Found {
                bytes,
                place,
                flags,
                ..
            } = found;
            return Err(format!(
                "{kind}: {bytes} bytes, place {place}, flags {flags}"
            ));
        }
        expect("UNMAP", unmap(&node, found.handle), 0)?;
        println!("{kind}: mapped in a peer, remapped: {}", remapped != 0);
    }
    let buffer = exporter.export("nowhere")?;
    let refused = map(&node, &buffer, 0).err().unwrap_or(0);
    expect("addresses of nothing", refused, libc::EREMOTEIO)?;
    println!("nowhere: refused");
    for (kind, errno) in [("short", libc::EREMOTEIO), ("read-only", libc::EACCES)] {
        let buffer = exporter.export(kind)?;
        let refused = map(&node, &buffer, REQUIRE_PEER).err().unwrap_or(0);
        expect(kind, refused, errno)?;
        println!("{kind}: refused");
    }
    content(&exporter, &node)?;
    let memory = peer::udmabuf(1 << 20)?;
    let refused = map(&node, &memory, REQUIRE_PEER).err().unwrap_or(0);
    expect("RAM where a peer is asked for", refused, libc::EREMOTE)?;
    println!("RAM where a peer is asked for: refused");
    for kind in ["good", "raw"] {
        taken_back(address, &exporter, &node, kind)?;
    }
    Ok(())
}

/// MAP waits for a buffer whose fence is not signalled yet, up to its deadline.
fn content(exporter: &Exporter, node: &File) -> Outcome {
    let buffer = exporter.export("unfilled")?;
    let refused = map(node, &buffer, REQUIRE_PEER).err().unwrap_or(0);
    expect("content that never comes", refused, libc::ETIMEDOUT)?;
    let found = std::thread::scope(|scope| {
        let mapping = scope.spawn(|| map(node, &buffer, REQUIRE_PEER));
        std::thread::sleep(std::time::Duration::from_millis(300));
        let was_waiting = !mapping.is_finished();
        exporter.fill()?;
        match (was_waiting, mapping.join()) {
            (true, Ok(Ok(found))) => Ok(found),
            (waited, other) => Err(format!(
                "content on its way: waited for: {waited}, mapped: {}",
                matches!(other, Ok(Ok(_)))
            )),
        }
    })?;
    println!("content on its way: waited for, and not for ever");
    expect("UNMAP", unmap(node, found.handle), 0)
}

/// The function is stopped when memory is taken back, and works again after a reset.
fn taken_back(address: &str, exporter: &Exporter, node: &File, kind: &str) -> Outcome {
    // SAFETY: the call takes numbers and returns a descriptor that this process owns.
    let event = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    if event < 0 {
        return Err(format!("eventfd: {}", io::Error::last_os_error()));
    }
    // SAFETY: the call has just created the descriptor, which nothing else owns.
    let event = unsafe { File::from_raw_fd(event) };
    let mut watch = [0; 8];
    watch[0] = 8 | (event.as_raw_fd() as u64) << 32;
    expect("EVENT", call(node, EVENT, &mut watch), 0)?;
    let buffer = exporter.export(kind)?;
    let found = map(node, &buffer, 0).map_err(|errno| format!("{kind}: errno {errno}"))?;
    if !masters(address)? || info(node)? & REVOKED != 0 {
        return Err("stopped before anything was taken back".to_owned());
    }
    exporter.revoke()?;
    if masters(address)? || info(node)? & REVOKED == 0 {
        return Err(format!("{kind}: not stopped after a revocation"));
    }
    let mut count = [0; 8];
    let heard = io::Read::read(&mut &event, &mut count);
    heard.map_err(|error| format!("{kind}: no event: {error}"))?;
    let again = map(node, &buffer, 0).err().unwrap_or(0);
    expect("a map of what was taken back", again, libc::ENODEV)?;
    expect("UNMAP of it", unmap(node, found.handle), 0)?;
    expect("RESET", call(node, RESET, &mut [0; 8]), 0)?;
    if !masters(address)? || info(node)? & REVOKED != 0 {
        return Err(format!("{kind}: still stopped after a reset"));
    }
    println!("{kind}: taken back, stopped, and going on after a reset");
    Ok(())
}

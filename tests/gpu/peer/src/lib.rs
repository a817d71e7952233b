//! An NVMe controller that is a GPU kernel: docs/tier3.md.
//!
//! It polls doorbells in the memory of the GPU that it runs on, fetches entries and lists from the driver's GPU, moves
//! data between that GPU's memory and a medium in its own, and posts completions. It shares only `nvme-spec`, the wire
//! types, with the driver. Warp 0 serves the properties and the admin queue, which lie in pinned host memory; each
//! other warp serves a share of the I/O queues.
//!
//! [`run`] is a warp's part: the kernel `nvme_peer` calls it, and host threads in tests, as warps of one lane.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![deny(missing_docs)]

mod admin;
mod command;
mod device;
mod io;
#[cfg(target_arch = "nvptx64")]
mod kernel;
mod transfer;

/// The kernel `nvme_peer` as PTX; `cargo xtask ptx --refresh` writes it.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../peer.ptx");

/// The most I/O queues of a controller.
pub const MAX_QUEUES: u32 = 128;
/// The most entries of a ring.
pub const MAX_ENTRIES: u32 = 1024;
/// MDTS: 2^8 pages of 4 KiB, 1 MiB.
pub const MDTS: u32 = 8;
/// Ranges of memory that a controller may reach.
pub const WINDOWS: usize = 4;
/// Bytes of the controller's own words of one queue, and of [`Shared`].
pub const QUEUE_BYTES: usize = 256;
/// Bytes of the page of properties and of the page of the admin doorbells, in pinned host memory.
pub const BAR_BYTES: usize = 2 * 4096;
/// Offset of the word in the page of properties that ends the kernel when it is not 0: no property lies there.
pub const STOP: usize = 0xFF8;

/// Effect of a fault on the commands that it strikes.
pub mod fault {
    /// No command has a fault.
    pub const NONE: u32 = 0;
    /// The command never completes.
    pub const DROP: u32 = 1;
    /// Completes after [`Plan::value`](super::Plan::value) nanoseconds.
    pub const DELAY: u32 = 2;
    /// Completes after the commands that are completed next.
    pub const REORDER: u32 = 3;
    /// Completes twice.
    pub const DUPLICATE: u32 = 4;
    /// The phase tag is visible before dwords 0 and 1 are.
    pub const TORN: u32 = 5;
    /// Moves nothing, and completes with status [`Plan::value`](super::Plan::value).
    pub const STATUS: u32 = 6;
    /// Completes with identifier [`Plan::value`](super::Plan::value).
    pub const WRONG_CID: u32 = 7;
    /// The completion has the phase tag of the pass before.
    pub const WRONG_PHASE: u32 = 8;
    /// The completion has the head [`Plan::value`](super::Plan::value).
    pub const WRONG_SQHD: u32 = 9;
    /// The controller stops with CSTS.CFS = 1, until it is reset.
    pub const FATAL: u32 = 10;
    /// The controller leaves: properties read as all ones.
    pub const GONE: u32 = 11;
}

/// The commands that a fault strikes, and its effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Plan {
    /// One of [`fault`].
    pub kind: u32,
    /// The fault strikes each command whose number is a multiple of this; 0 if it strikes none in this form.
    pub every: u32,
    /// The fault strikes the commands with these numbers, counted from 1 over all I/O queues; unused entries are 0.
    pub nth: [u32; 4],
    /// See [`fault`].
    pub value: u64,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Window {
    /// First byte.
    pub start: u64,
    /// Bytes; 0 for no window.
    pub bytes: u64,
}

/// Parameters of a launch. Addresses are those of the GPU that runs it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Args {
    /// [`BAR_BYTES`] of pinned host memory: the page of properties, then one whose first two words are the admin
    /// queue's doorbells.
    pub bar: u64,
    /// Doorbells of I/O queues, beginning with queue 0; in the memory of this GPU.
    pub doorbells: u64,
    /// A [`Shared`], then the words of queues 1 to `queues`, [`QUEUE_BYTES`] each; zeroed.
    pub own: u64,
    /// The medium, in this GPU's memory.
    pub medium: u64,
    /// Blocks of the medium.
    pub blocks: u64,
    /// The kernel ends after this time.
    pub timeout_ns: u64,
    /// Memory that the controller may access besides its own.
    pub windows: [Window; WINDOWS],
    /// The faults.
    pub plan: Plan,
    /// log2 of a block's bytes, 9 to 12.
    pub block_shift: u32,
    /// I/O queues, 1 to [`MAX_QUEUES`].
    pub queues: u32,
    /// CAP.DSTRD.
    pub dstrd: u32,
    /// Number of warps, warp 0 included: at least 2.
    pub warps: u32,
}
const _: () = assert!(size_of::<Args>() == 160);

/// Words that all warps share; [`Args::own`] begins with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Shared {
    /// Number of I/O commands fetched, modulo 2^32: their numbers for [`Plan`].
    pub commands: u32,
    /// [`fault::FATAL`] or [`fault::GONE`] when such a fault has struck.
    pub dead: u32,
    /// Doorbell values that no queue can have.
    pub bad_doorbells: u32,
    /// Number of times that a completion queue had no room for a completion.
    pub full: u32,
    /// Completions posted, modulo 2^32.
    pub posted: u32,
    /// Warps that ended because of the time.
    pub late: u32,
}
const _: () = assert!(size_of::<Shared>() <= QUEUE_BYTES);

/// Runs the part of warp `warp` in the launch.
///
/// # Safety
/// Every address in `args` is what [`Args`] says, and every lane of the warp calls it.
#[allow(unsafe_code, reason = "the contract is the caller's")]
#[inline(always)]
pub unsafe fn run(args: &Args, warp: u32) {
    let end_ns = device::now_ns() + args.timeout_ns;
    if warp == 0 {
        if device::lane() == 0 {
            admin::run(args, end_ns);
        }
    } else {
        io::run(args, warp - 1, end_ns);
    }
}

/// Returns whether all `bytes` bytes from `address` on may be accessed.
#[inline(always)]
fn is_reached(args: &Args, address: u64, bytes: u64) -> bool {
    let mut found = false;
    for window in &args.windows {
        let before = address.wrapping_sub(window.start);
        found |= before < window.bytes && bytes <= window.bytes - before;
    }
    found
}

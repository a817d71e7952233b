//! The NVMe driver core: `no_std`, no allocation, the same source on the host and in GPU kernels.
//!
//! From the bottom up:
//!
//! - [`spec`]: the crate `nvme-spec`, wire types and codes, nothing else. Shared with the simulator.
//! - [`sync`]: the atomics of the platform, each operation with an order and a scope.
//! - [`mem`]: rings, doorbells and lists over DMA memory.
//! - [`prp`], [`sgl`]: from a buffer to a command's data pointer.
//! - [`SubmissionQueue`], [`CompletionQueue`]: `push`, `ring`, `pop`.
//! - [`QueuePair`]: `submit`, `ring`, `poll`, with a table of the commands in flight.
//! - [`CollectiveQueue`]: a warp, a block or one thread owns a queue and acts together on it.
//! - [`BatchQueue`]: the same for one batch at a time; each member waits for one completion.
//! - [`SharedQueue`]: any thread submits and waits, from divergent code.
//! - [`handoff`]: the words that describe a queue to a kernel.
//! - [`bringup`], [`shutdown`], [`recovery`]: state machines without IO; time is an argument.
//! - [`transfer`]: splits a range of blocks into commands. [`stripes`]: the layout of a range over several
//!   drives.
//! - [`trace`]: binary events of a queue.
//!
//! A driver calls them in this order: [`bringup`] of the admin queue and the controller, queues, commands,
//! [`recovery`] when a deadline has passed, [`shutdown`]. Each module's page has the order of its calls.
//!
//! The core never reads a clock, sleeps, allocates, or panics on data from a device. Everything that needs an
//! operating system (mappings, files, threads) belongs to the host crates.
//!
//! # Submit and poll
//!
//! A queue pair is rings, doorbells, list memory and slots of the caller. Below, the last lines of the test stand
//! in for the controller.
//!
//! ```
//! use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
//! use nvme_core::spec::{Cqe, Iova, Lba, Nsid, PageSize, Qid, nvm};
//! use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
//! use nvme_core::{CommandData, ControllerIdentity, ListMemory, QueueMemory, QueuePair, CommandSlot};
//!
//! // Memory with the addresses at which the controller reaches it, and two doorbells.
//! let (entries, completions): ([SqCell; 4], [CqCell; 4]) = Default::default();
//! let lists: [AtomicU64; 8] = Default::default();
//! let (tail, head) = (AtomicU32::new(0), AtomicU32::new(0));
//! let memory = QueueMemory {
//!     sq: SqRing::new(&entries, Iova(0x1000)),
//!     cq: CqRing::new(&completions, Iova(0x2000)),
//!     sq_doorbell: DoorbellRegister::new(&tail),
//!     cq_doorbell: DoorbellRegister::new(&head),
//!     lists: ListMemory::new(DmaWords::new(&lists, Iova(0x3000)), PageSize::KIB4, 2),
//! };
//! let mut slots: [CommandSlot<&str>; 3] = core::array::from_fn(|_| CommandSlot::new());
//! let mut pair = QueuePair::new(&ControllerIdentity::new(), Qid(1), memory, &mut slots[..]);
//!
//! let data = CommandData::Contiguous { iova: Iova(0x10_0000), len: 4096 };
//! let deadline_ns = u64::MAX;
//! let cid = pair.submit(nvm::read(Nsid(1), Lba(0), 8), data, "its buffer", deadline_ns).unwrap();
//! pair.ring();
//! assert!(pair.poll().unwrap().is_none(), "it is in flight");
//!
//! // The controller fetches what the doorbell covers, moves the data and posts a completion.
//! assert_eq!(tail.load(Order::Acquire, Scope::Sys), 1);
//! let cid_fetched = entries[0].load().cid().0;
//! completions[0].post(Cqe { dw0: 0, dw1: 0, sqhd: 1, sqid: 1, cid: cid_fetched, phase_status: 1 });
//!
//! let completion = pair.poll().unwrap().expect("it has ended");
//! assert_eq!(completion.cid, cid);
//! assert_eq!(completion.result().unwrap(), (0, "its buffer"));
//! ```
//!
//! # Without an operating system
//!
//! Implement [`RegisterAccess`], or make a [`RegisterBlock`] of a mapped BAR0, and step [`bringup::BringupMachine`]
//! with your own clock. Below, an array stands in for the registers, and the end of the loop for a controller that
//! answers each admin command with success and zeros.
//!
//! ```
//! use core::cell::Cell;
//! use nvme_core::bringup::{BringupMachine, BringupConfig, BringupStep};
//! use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
//! use nvme_core::spec::register::offset;
//! use nvme_core::spec::{Cqe, Iova, PageSize, Qid};
//! use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
//! use nvme_core::{ControllerIdentity, ListMemory, QueueMemory, QueuePair, RegisterAccess, CommandSlot};
//!
//! struct Board {
//!     identity: ControllerIdentity,
//!     words: [Cell<u32>; 16],
//! }
//!
//! impl RegisterAccess for Board {
//!     fn identity(&self) -> &ControllerIdentity {
//!         &self.identity
//!     }
//!     fn read32(&self, offset: u32) -> u32 {
//!         self.words[offset as usize / 4].get()
//!     }
//!     fn read64(&self, offset: u32) -> u64 {
//!         u64::from(self.read32(offset)) | u64::from(self.read32(offset + 4)) << 32
//!     }
//!     fn write32(&self, at: u32, value: u32) {
//!         self.words[at as usize / 4].set(value);
//!         if at == offset::CC {
//!             self.words[offset::CSTS as usize / 4].set(value & 1); // ready when enabled
//!         }
//!     }
//!     fn write64(&self, offset: u32, value: u64) {
//!         self.write32(offset, value as u32);
//!         self.write32(offset + 4, (value >> 32) as u32);
//!     }
//! }
//!
//! let board = Board { identity: ControllerIdentity::new(), words: Default::default() };
//! board.words[0].set(0x0A01_003F); // CAP: 64 entries, contiguous queues, CSTS.RDY within 5 s
//! board.words[1].set(0x0000_0020); // CAP: the NVM command set, pages of 4 KiB
//!
//! let entries: [SqCell; 4] = Default::default();
//! let completions: [CqCell; 4] = Default::default();
//! let words: Vec<AtomicU64> = (0..512 + 8).map(|_| AtomicU64::new(0)).collect();
//! let (page, lists) = words.split_at(512);
//! let (tail, head) = (AtomicU32::new(0), AtomicU32::new(0));
//! let memory = QueueMemory {
//!     sq: SqRing::new(&entries, Iova(0x1000)),
//!     cq: CqRing::new(&completions, Iova(0x2000)),
//!     sq_doorbell: DoorbellRegister::new(&tail),
//!     cq_doorbell: DoorbellRegister::new(&head),
//!     lists: ListMemory::new(DmaWords::new(lists, Iova(0x3000)), PageSize::KIB4, 2),
//! };
//! let mut slots: [CommandSlot<()>; 3] = core::array::from_fn(|_| CommandSlot::new());
//! let mut admin = QueuePair::new(board.identity(), Qid::ADMIN, memory, &mut slots[..]);
//!
//! let page = DmaWords::new(page, Iova(0x4000));
//! let mut bringup = BringupMachine::new(&board, BringupConfig::default(), page).unwrap();
//! let (mut now_ns, mut posted) = (0, 0);
//! loop {
//!     match bringup.step(&board, &mut admin, now_ns).unwrap() {
//!         BringupStep::Ready => break,
//!         BringupStep::Disabled(proof) => bringup.enable(proof),
//!         BringupStep::HostMemory { .. } => bringup.host_memory(None),
//!         BringupStep::Wait { until_ns } => now_ns = until_ns,
//!     }
//!     // The controller's turn.
//!     while posted % 4 != tail.load(Order::Acquire, Scope::Sys) {
//!         let index = (posted % 4) as usize;
//!         let cid = entries[index].load().cid().0;
//!         let phase = u16::from(posted / 4 % 2 == 0);
//!         posted += 1;
//!         let sqhd = (posted % 4) as u16;
//!         completions[index].post(Cqe { dw0: 0, dw1: 0, sqhd, sqid: 0, cid, phase_status: phase });
//!     }
//! }
//! assert_eq!(bringup.info().queue_pairs, 1);
//! ```
#![cfg_attr(not(any(test, loom, tsan, feature = "spin-hook")), no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]
#![deny(missing_docs)]

#[cfg(target_endian = "big")]
compile_error!("NVMe is little endian and this driver shares memory with it as it is");

#[cfg(not(target_has_atomic = "64"))]
compile_error!(
    "nvme-core needs 64-bit atomic loads and stores: an entry's upper half is one of them. Build for a target \
     with them, as x86_64, aarch64 and riscv64gc are: `rustc --print cfg --target T` prints \
     target_has_atomic=\"64\""
);

mod batch_queue;
pub mod bringup;
mod collective;
mod command;
mod cq;
mod error;
pub mod group;
pub mod handoff;
mod inflight;
pub mod mem;
mod outcome;
pub mod prp;
mod queue_pair;
#[doc(hidden)]
pub mod queue_state;
mod quiesced;
pub mod recovery;
mod registers;
#[cfg(all(test, not(any(loom, tsan))))]
mod sequences;
pub mod sgl;
mod shared_queue;
pub mod shutdown;
mod sq;
pub mod stripes;
pub mod sync;
pub mod trace;
pub mod transfer;

pub use nvme_spec as spec;

pub use batch_queue::{BatchEnds, BatchQueue};
pub use collective::{CollectiveQueue, TaggedCompletion};
pub use command::MemberCommand;
pub use cq::CompletionQueue;
pub use error::{BringupError, ControllerFault, PointerError, SubmitError, WaitError};
pub use inflight::{CommandSlot, MAX_IN_FLIGHT};
pub use outcome::{AbortReason, CommandOutcome};
pub use queue_pair::{
    CommandCompletion, CommandData, ListMemory, QueueMemory, QueuePair, RejectedCommand,
};
pub use quiesced::{ClosedQueue, ControllerIdentity, Quiesced};
pub use registers::{RegisterAccess, RegisterBlock};
pub use shared_queue::{CommandToken, DrainResult, ResultCells, SharedQueue, WaitNeed};
pub use sq::SubmissionQueue;

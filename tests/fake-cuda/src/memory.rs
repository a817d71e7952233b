//! Memory and what the driver says of addresses. Answers are those of CUDA 13 on an H100.
// UNSAFETY: a C interface of raw pointers, whose callers keep the driver's rules.
#![allow(unsafe_code, non_snake_case)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the CUDA driver API documents them"
)]

use crate::captures;
use crate::{
    INVALID_CONTEXT, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, Status, current_context, device_of,
    export, fault, fault_number, lock,
};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

const NOT_SUPPORTED: Status = 801;
const ALREADY_REGISTERED: Status = 712;
const NOT_REGISTERED: Status = 713;
/// CU_MEMHOSTREGISTER_IOMEMORY.
const IO_MEMORY: c_uint = 4;
/// CU_MEMHOSTREGISTER_READ_ONLY.
const READ_ONLY: c_uint = 8;

/// What memory the driver knows by an address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Device,
    Managed,
    /// Of `cuMemHostAlloc`.
    Pinned,
    Registered,
    /// Memory of the host that a test calls a GPU's.
    Lent,
}

#[derive(Clone, Copy)]
struct Block {
    bytes: usize,
    kind: Kind,
    /// The GPU that it lies on, or whose context was current.
    device: c_int,
    is_read_only: bool,
    /// The first address on GPUs.
    on_gpu: u64,
}

/// By the first address.
static BLOCKS: Mutex<BTreeMap<u64, Block>> = Mutex::new(BTreeMap::new());
/// GPUs, and others whose memory they reach.
static PEERS: Mutex<BTreeSet<(c_int, c_int)>> = Mutex::new(BTreeSet::new());
/// A registration was refused, as `FAKE_CUDA=bar` asks.
static REFUSED: AtomicBool = AtomicBool::new(false);

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1).next_multiple_of(4096), 4096).expect("a layout")
}

/// The current GPU reaches memory of `other` from now on.
pub fn reach_peer(other: c_int) {
    lock(&PEERS).insert((device_of(current_context()), other));
}

/// The block that has the byte at `address`, and where it begins.
fn find(address: u64) -> Option<(u64, Block)> {
    let blocks = lock(&BLOCKS);
    let (&start, block) = blocks.range(..=address).next_back()?;
    (address - start < block.bytes as u64).then_some((start, *block))
}

fn add(start: u64, bytes: usize, kind: Kind, is_read_only: bool) -> Status {
    let mut blocks = lock(&BLOCKS);
    let overlaps =
        |(at, block): (&u64, &Block)| start < at + block.bytes as u64 && *at < start + bytes as u64;
    if blocks.iter().any(overlaps) {
        return ALREADY_REGISTERED;
    }
    let device = device_of(current_context());
    let block = Block {
        bytes,
        kind,
        device,
        is_read_only,
        on_gpu: start,
    };
    blocks.insert(start, block);
    SUCCESS
}

/// Takes the block that begins at `start` away, if it is one of `kinds`.
fn remove(start: u64, kinds: &[Kind]) -> Option<Block> {
    let mut blocks = lock(&BLOCKS);
    let is_one = blocks
        .get(&start)
        .is_some_and(|one| kinds.contains(&one.kind));
    is_one.then(|| blocks.remove(&start)).flatten()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(start: u64, bytes: usize, flags: c_uint) -> Status {
    if let Some(refused) = captures::refused() {
        return refused;
    }
    // The first registration is that of the doorbells.
    if flags & IO_MEMORY != 0 || fault("bar") && !REFUSED.swap(true, Ordering::Relaxed) {
        return INVALID_VALUE;
    }
    if fault("noregister") {
        return NOT_SUPPORTED;
    }
    if bytes == 0 || fault_number("register-limit").is_some_and(|limit| bytes > limit) {
        return INVALID_VALUE;
    }
    add(start, bytes, Kind::Registered, flags & READ_ONLY != 0)
}

/// How much of 64 GiB is not allocated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    const ALL: usize = 64 << 30;
    let blocks = lock(&BLOCKS);
    let allocated = blocks.values().filter(|block| block.kind == Kind::Device);
    let taken: usize = allocated.map(|block| block.bytes).sum();
    // SAFETY: the caller gives places for two numbers.
    unsafe { (*free, *total) = (ALL.saturating_sub(taken), ALL) };
    SUCCESS
}

/// How many registrations there are. Not of the driver: for tests.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_registered() -> c_uint {
    let blocks = lock(&BLOCKS);
    let registered = blocks
        .values()
        .filter(|block| block.kind == Kind::Registered);
    registered.count() as c_uint
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(start: u64) -> Status {
    if let Some(refused) = captures::refused() {
        return refused;
    }
    match remove(start, &[Kind::Registered]) {
        Some(_) => SUCCESS,
        None => NOT_REGISTERED,
    }
}

/// Of memory that the driver pinned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    to: *mut u64,
    host: u64,
    _: c_uint,
) -> Status {
    let is_pinned = |block: &Block| matches!(block.kind, Kind::Registered | Kind::Pinned);
    let Some((start, block)) = find(host).filter(|(_, block)| is_pinned(block)) else {
        return INVALID_VALUE;
    };
    // SAFETY: the caller gives a place for one address.
    unsafe { *to = block.on_gpu + (host - start) };
    SUCCESS
}

/// GPUs reach the memory that is registered at `start` by the address `at` from now on. Not of the driver: for tests of
/// machines where a GPU has memory of the host at other addresses than the host.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_map_at(start: u64, at: u64) -> Status {
    match lock(&BLOCKS).get_mut(&start) {
        Some(block) if block.kind == Kind::Registered => {
            block.on_gpu = at;
            SUCCESS
        }
        _ => NOT_REGISTERED,
    }
}

/// Memory of a test's own at `start` that counts as memory of GPU `device`; 0 bytes end that. Not of the driver: for tests
/// of libraries whose tensors lie in host memory.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_lend(start: u64, bytes: usize, device: c_int) {
    remove(start, &[Kind::Lent]);
    if bytes > 0 && add(start, bytes, Kind::Lent, false) == SUCCESS {
        lock(&BLOCKS)
            .entry(start)
            .and_modify(|block| block.device = device);
    }
}

/// What an attribute is: a number of 1, 4 or 8 bytes.
enum Attribute {
    Byte(u8),
    Number(u32),
    Long(u64),
}

impl Attribute {
    /// # Safety
    /// `to` has room for it.
    unsafe fn give(self, to: *mut c_void) {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::Byte(value) => to.cast::<u8>().write(value),
                Self::Number(value) => to.cast::<u32>().write_unaligned(value),
                Self::Long(value) => to.cast::<u64>().write_unaligned(value),
            }
        }
    }
}

/// The answer for an address, and whether it is one that has the attribute.
fn attribute(which: c_uint, address: u64) -> Option<(Attribute, Status)> {
    let found = find(address);
    let block = found.map(|(_, block)| block);
    let is_host = block.is_none_or(|one| !matches!(one.kind, Kind::Device | Kind::Lent));
    let known = |is_there: bool| match is_there {
        true => SUCCESS,
        false => INVALID_VALUE,
    };
    let is_known = known(block.is_some());
    let number = |of: &dyn Fn(Block) -> u32, none: u32| Attribute::Number(block.map_or(none, of));
    Some(match which {
        1 => {
            let context = block.map_or(0, |one| 8 + one.device as u64);
            (Attribute::Long(context), is_known)
        }
        2 => {
            let kind = |one: Block| match one.kind {
                Kind::Pinned | Kind::Registered => 1,
                Kind::Device | Kind::Managed | Kind::Lent => 2,
            };
            (number(&kind, 0), is_known)
        }
        3 => {
            let (mapped, status) = mapped(found, address);
            (Attribute::Long(mapped), status)
        }
        4 => {
            let host = if is_host { address } else { 0 };
            (Attribute::Long(host), known(is_host && block.is_some()))
        }
        7 => (
            Attribute::Long(found.map_or(0, |(start, _)| start)),
            is_known,
        ),
        8 => {
            let is_managed = block.is_some_and(|one| one.kind == Kind::Managed);
            (Attribute::Byte(is_managed.into()), is_known)
        }
        9 => (number(&|one| one.device as u32, -2i32 as u32), is_known),
        11 => (
            Attribute::Long(found.map_or(0, |(start, _)| start)),
            is_known,
        ),
        12 => (
            Attribute::Long(block.map_or(0, |one| one.bytes as u64)),
            is_known,
        ),
        13 => (Attribute::Byte(block.is_some().into()), is_known),
        16 => {
            let flags = |one: Block| if one.is_read_only { 1 } else { 3 };
            (number(&flags, 0), is_known)
        }
        _ => return None,
    })
}

/// The address by which kernels of the current context reach it, 0 where they do not.
fn mapped(found: Option<(u64, Block)>, address: u64) -> (u64, Status) {
    let Some((start, block)) = found else {
        return (0, INVALID_VALUE);
    };
    let context = current_context();
    if context == 0 {
        return (0, INVALID_CONTEXT);
    }
    let current = device_of(context);
    let reaches = block.device == current || lock(&PEERS).contains(&(current, block.device));
    match block.kind {
        Kind::Device | Kind::Lent if !reaches => (0, INVALID_VALUE),
        _ => (block.on_gpu + (address - start), SUCCESS),
    }
}

/// One attribute: memory that the driver does not know is an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    to: *mut c_void,
    which: c_uint,
    address: u64,
) -> Status {
    match attribute(which, address) {
        Some((value, SUCCESS)) => {
            // SAFETY: the caller gives a place for it.
            unsafe { value.give(to) };
            SUCCESS
        }
        Some((_, status)) => status,
        None => INVALID_VALUE,
    }
}

/// Several attributes: of memory that the driver does not know they are zeros, and GPU -2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    which: *const c_uint,
    to: *const *mut c_void,
    address: u64,
) -> Status {
    for index in 0..count as usize {
        // SAFETY: the caller gives `count` of each.
        let Some((value, _)) = attribute(unsafe { *which.add(index) }, address) else {
            return INVALID_VALUE;
        };
        // SAFETY: as above, with room for each.
        unsafe { value.give(*to.add(index)) };
    }
    SUCCESS
}

/// Memory of the host that counts as `kind`.
fn allocate(bytes: usize, kind: Kind) -> Option<u64> {
    let exported = (kind == Kind::Device)
        .then(|| export::allocate(bytes))
        .flatten();
    let start = exported.unwrap_or_else(|| {
        // SAFETY: the layout is not empty.
        unsafe { alloc(layout(bytes)) }.expose_provenance() as u64
    });
    // What was there before and was freed without a word of it, as memory that a test lent is.
    lock(&BLOCKS).retain(|at, block| {
        block.kind != Kind::Lent || *at + block.bytes as u64 <= start || start + bytes as u64 <= *at
    });
    (start != 0 && add(start, bytes, kind, false) == SUCCESS).then_some(start)
}

/// # Safety
/// `start` is of [`allocate`], with so many bytes, and was taken out of the blocks.
unsafe fn deallocate(start: u64, bytes: usize) {
    if export::free(start, bytes) {
        return;
    }
    // SAFETY: allocated with this layout, and freed once.
    unsafe {
        dealloc(
            std::ptr::with_exposed_provenance_mut(start as usize),
            layout(bytes),
        )
    };
}

/// Memory of the current GPU.
pub fn of_gpu(bytes: usize) -> Option<u64> {
    match fault("oom") {
        true => None,
        false => allocate(bytes, Kind::Device),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(to: *mut u64, bytes: usize) -> Status {
    if let Some(refused) = captures::refused() {
        return refused;
    }
    let Some(start) = of_gpu(bytes) else {
        return OUT_OF_MEMORY;
    };
    // SAFETY: the caller gives a place for one address.
    unsafe { *to = start };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocManaged(to: *mut u64, bytes: usize, _: c_uint) -> Status {
    if let Some(refused) = captures::refused() {
        return refused;
    }
    let Some(start) = allocate(bytes, Kind::Managed) else {
        return OUT_OF_MEMORY;
    };
    // SAFETY: the caller gives a place for one address.
    unsafe { *to = start };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(to: *mut u64, bytes: usize, _: c_uint) -> Status {
    if let Some(refused) = captures::refused() {
        return refused;
    }
    if fault("nohostalloc") {
        return NOT_SUPPORTED;
    }
    let Some(start) = allocate(bytes, Kind::Pinned) else {
        return OUT_OF_MEMORY;
    };
    // SAFETY: the caller gives a place for one address.
    unsafe { *to = start };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(start: u64) -> Status {
    if let Some(refused) = captures::refused() {
        return refused;
    }
    let Some(block) = remove(start, &[Kind::Pinned]) else {
        return INVALID_VALUE;
    };
    // SAFETY: allocated by `cuMemHostAlloc`.
    unsafe { deallocate(start, block.bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(start: u64) -> Status {
    if let Some(refused) = captures::refused() {
        return refused;
    }
    let Some(block) = remove(start, &[Kind::Device, Kind::Managed]) else {
        return INVALID_VALUE;
    };
    // SAFETY: allocated by `cuMemAlloc` or `cuMemAllocManaged`.
    unsafe { deallocate(start, block.bytes) };
    SUCCESS
}

/// Whether `bytes` bytes at `address` lie in one allocation of a GPU.
pub fn is_device(address: u64, bytes: usize) -> bool {
    find(address).is_some_and(|(start, block)| {
        matches!(block.kind, Kind::Device | Kind::Managed | Kind::Lent)
            && address + bytes as u64 <= start + block.bytes as u64
    })
}

/// Whether the `bytes` bytes of the host at `address` lie in one registration, or in none: the driver refuses
/// a copy of which a part is registered.
pub fn is_host(address: u64, bytes: usize) -> bool {
    let end = address + bytes as u64;
    let blocks = lock(&BLOCKS);
    let mut pinned = blocks
        .iter()
        .filter(|(_, block)| matches!(block.kind, Kind::Registered | Kind::Pinned));
    pinned.all(|(&start, block)| {
        let past = start + block.bytes as u64;
        end <= start || past <= address || start <= address && end <= past
    })
}

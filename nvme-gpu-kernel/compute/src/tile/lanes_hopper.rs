//! The counterpart of `hopper.rs` on the host, for lanes, by the PTX manual's sections "Parallel Synchronization and
//! Communication Instructions: mbarrier", "Tensors" and "Asynchronous Warpgroup Level Matrix Multiply-Accumulate
//! Instructions".
//!
//! Copies and products take place at different times: every second copy at once, the others when their barrier is
//! polled; products of odd warps at once, those of even warps when they are waited for. A kernel that relies on either
//! fails its test.
// UNSAFETY: loads and stores at addresses that the kernel vouches for, and sums that lanes own.
#![allow(unsafe_code)]

pub use super::descriptor::describe;

use super::DynamicShared;
use nvme_formats::{f32_of_bf16, f32_of_f16};
use nvme_gpu_kernel::arch;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// Limit of a wait in nanoseconds.
const LIMIT_NS: u64 = 10_000_000_000;

/// The content of a barrier. The manual leaves its layout open.
struct BarrierState {
    /// Parity of the current phase.
    parity: u64,
    /// Arrivals of each phase.
    expected: u64,
    /// Arrivals that the current phase still waits for.
    pending: u64,
    /// Bytes that the current phase still waits for; below 0 if they came before they were announced.
    bytes: i64,
}

/// Limit of the arrivals and of the bytes of a phase.
const MOST: u64 = (1 << 20) - 1;

impl BarrierState {
    /// Mark of an initialised barrier in its two upper bits, which unwritten shared memory does not have.
    const MARK: u64 = 0b10;

    fn of(word: u64) -> Self {
        assert_eq!(word >> 62, Self::MARK, "a barrier was not initialised");
        Self {
            parity: word >> 61 & 1,
            bytes: (word >> 40 & (2 * MOST + 1)) as i64 - MOST as i64,
            expected: word >> 20 & MOST,
            pending: word & MOST,
        }
    }

    /// Returns the word of the state, in the next phase if this one has ended.
    fn word(mut self) -> u64 {
        if self.pending == 0 && self.bytes == 0 {
            (self.parity, self.pending) = (self.parity ^ 1, self.expected);
        }
        let most = MOST as i64;
        assert!(
            (-most..=most).contains(&self.bytes),
            "a phase of {} bytes",
            self.bytes
        );
        let bytes = (self.bytes + most) as u64;
        Self::MARK << 62 | self.parity << 61 | bytes << 40 | self.expected << 20 | self.pending
    }
}

/// A barrier in 8 bytes of shared memory. Its phase ends when all expected arrivals and bytes have come.
#[derive(Clone, Copy)]
pub struct LaneBarrier(DynamicShared);

/// As kernels name it.
pub type SharedBarrier = LaneBarrier;

impl LaneBarrier {
    /// Returns the barrier at `at`, a multiple of 8.
    pub fn at(at: DynamicShared) -> Self {
        Self(at)
    }

    fn load(self) -> BarrierState {
        // SAFETY: `place` found it inside.
        BarrierState::of(unsafe { arch::load_u64(self.0.place(8)) })
    }

    fn store(self, state: BarrierState) {
        // SAFETY: as above.
        unsafe { arch::store_u64(self.0.place(8), state.word()) };
    }

    /// Initialises it, by one thread; the others see it after [`fence_barriers`] and a barrier of the block.
    pub fn init(self, arrivals: u32) {
        let arrivals = u64::from(arrivals);
        assert!((1..=MOST).contains(&arrivals), "{arrivals} arrivals");
        self.store(BarrierState {
            parity: 0,
            expected: arrivals,
            pending: arrivals,
            bytes: 0,
        });
    }

    /// Counts one arrival.
    pub fn arrive(self) {
        self.arrive_and_expect(0);
    }

    /// Counts one arrival, and adds `bytes` to the bytes to wait for.
    pub fn arrive_and_expect(self, bytes: u32) {
        let mut state = self.load();
        assert_ne!(state.pending, 0, "more arrivals than a phase expects");
        state.pending -= 1;
        state.bytes += i64::from(bytes);
        self.store(state);
    }

    /// Counts bytes that a copy has written.
    fn complete(self, bytes: u32) {
        let mut state = self.load();
        state.bytes -= i64::from(bytes);
        self.store(state);
    }

    /// Waits until the phase of this parity has ended; the first one has parity 0. A wait of [`LIMIT_NS`] traps.
    #[track_caller]
    pub fn wait(self, parity: u32) {
        let begin = arch::now_ns();
        while !self.has_ended(parity) {
            if arch::now_ns() - begin > LIMIT_NS {
                arch::trap();
            }
            arch::sleep_ns(0);
        }
    }

    fn has_ended(self, parity: u32) -> bool {
        arch::unit_of_block::<BulkCopies>().land(self);
        self.load().parity != u64::from(parity)
    }
}

/// Makes barriers that this thread initialised visible to the units that copy.
pub fn fence_barriers() {}

/// A map of a matrix of halves, as the stand-in of `cuTensorMapEncodeTiled` writes it: no manual has the GPU's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneTensorMap {
    /// Address of the first element.
    pub address: u64,
    /// Columns and rows.
    pub sizes: [u64; 2],
    /// Distance of two rows, in bytes.
    pub row_bytes: u64,
    /// Columns and rows of a box, swizzled by 128 bytes.
    pub boxes: [u32; 2],
}

impl LaneTensorMap {
    /// Returns the words of a `CUtensorMap`.
    pub fn words(&self) -> [u64; 16] {
        let [columns, rows] = self.sizes;
        let [width, height] = self.boxes.map(u64::from);
        let mut words = [0; 16];
        words[..6].copy_from_slice(&[self.address, columns, rows, self.row_bytes, width, height]);
        words
    }

    fn of_words(words: [u64; 6]) -> Self {
        let [address, columns, rows, row_bytes, width, height] = words;
        Self {
            address,
            sizes: [columns, rows],
            row_bytes,
            boxes: [width as u32, height as u32],
        }
    }
}

/// The address of a map.
#[derive(Clone, Copy)]
pub struct MapAddress(u64);

/// As kernels name it.
pub type TensorMap = MapAddress;

impl MapAddress {
    /// Returns the map at an address.
    ///
    /// # Safety
    /// The host has encoded a map there, at a multiple of 16, which stays until the launch has ended.
    pub unsafe fn at(address: u64) -> Self {
        Self(address)
    }

    /// Prefetches the map into the cache: a hint.
    pub fn prefetch(self) {}

    /// Starts to copy the box whose first element is `x` of row `y` to `to`, zeros for elements outside; the barrier
    /// counts its bytes. One thread calls it.
    pub fn load(self, to: DynamicShared, x: u32, y: u32, barrier: LaneBarrier) {
        // SAFETY: the caller of `at` vouched for the map.
        let words = [0, 8, 16, 24, 32, 40].map(|at| unsafe { arch::load_u64(self.0 + at) });
        let copy = BoxCopy {
            map: LaneTensorMap::of_words(words),
            to,
            first: [x, y],
            barrier,
        };
        arch::unit_of_block::<BulkCopies>().start(copy);
    }
}

/// A copy of a box.
#[derive(Clone, Copy)]
struct BoxCopy {
    map: LaneTensorMap,
    to: DynamicShared,
    /// Column and row of the first element.
    first: [u32; 2],
    barrier: LaneBarrier,
}

impl BoxCopy {
    fn perform(&self) {
        let to = self.to.address();
        assert!(
            to.is_multiple_of(128),
            "a swizzled box at {to:#x} of shared memory"
        );
        let [width, height] = self.map.boxes;
        let [x, y] = self.first.map(u64::from);
        for row in 0..height {
            let from = self.map.address + (y + u64::from(row)) * self.map.row_bytes + x * 2;
            for column in 0..width {
                let is_inside = x + u64::from(column) < self.map.sizes[0]
                    && y + u64::from(row) < self.map.sizes[1];
                let half = match is_inside {
                    // SAFETY: the host vouches for the matrix of the map; the element is inside.
                    true => unsafe { arch::load_u16(from + u64::from(column) * 2) },
                    false => 0,
                };
                let at = swizzled(to + (row * width + column) * 2);
                self.to.at_address(at).store_half(half);
            }
        }
        self.barrier.complete(width * height * 2);
    }
}

/// Returns the address at which the swizzle by 128 bytes puts what would be at `address`: bits 4 to 6 (16 bytes of a row
/// of 128) are exclusive-ored with bits 7 to 9, the row ("Swizzling modes").
fn swizzled(address: u32) -> u32 {
    address ^ (address >> 3 & 0x70)
}

/// The copies of a block that have not taken place yet.
#[derive(Default)]
struct BulkCopies {
    pending: RefCell<Vec<BoxCopy>>,
    begun: Cell<u32>,
}

impl BulkCopies {
    fn start(&self, copy: BoxCopy) {
        self.begun.set(self.begun.get() + 1);
        match self.begun.get() % 2 {
            0 => copy.perform(),
            _ => self.pending.borrow_mut().push(copy),
        }
    }

    /// Performs the copies that `barrier` counts.
    fn land(&self, barrier: LaneBarrier) {
        let is_due = |copy: &mut BoxCopy| copy.barrier.0.at == barrier.0.at;
        let mut pending = self.pending.borrow_mut();
        pending
            .extract_if(.., is_due)
            .for_each(|copy| copy.perform());
    }
}

/// Releases registers of the warpgroup, down to `N` a thread. Every warp of the warpgroup calls it.
#[track_caller]
pub fn fewer_registers<const N: u32>() {
    arch::sync_warp(arch::FULL);
}

/// Waits until the warpgroup gets `N` registers a thread. Every warp of the warpgroup calls it.
#[track_caller]
pub fn more_registers<const N: u32>() {
    arch::sync_warp(arch::FULL);
}

/// A product of a warpgroup, as one of its lanes knows it.
#[derive(Clone, Copy)]
struct GroupProduct {
    /// Address of the lane's sums.
    sums: u64,
    a: u64,
    b: u64,
    is_f16: bool,
    /// The rows of `b` run along `k`.
    b_by_k: bool,
    /// Number of the warp in its warpgroup, which has rows 16 times that and on of `a`.
    warp: u32,
    shared: DynamicShared,
}

/// The products of a lane that have not taken place yet.
#[derive(Default)]
struct GroupProducts {
    /// The current group.
    open: RefCell<Vec<GroupProduct>>,
    /// Groups that were committed, the oldest first.
    groups: RefCell<VecDeque<Vec<GroupProduct>>>,
    /// The last fence came after the last wait.
    is_fenced: Cell<bool>,
}

/// Orders earlier writes to accumulators before the first product. Every thread of the warpgroup calls it.
#[track_caller]
pub fn wgmma_fence() {
    arch::sync_warp(arch::FULL);
    let products = arch::unit_of_lane::<GroupProducts>();
    products.is_fenced.set(true);
}

/// Commits a group of products.
#[track_caller]
pub fn wgmma_commit() {
    arch::sync_warp(arch::FULL);
    let products = arch::unit_of_lane::<GroupProducts>();
    let group = products.open.take();
    products.groups.borrow_mut().push_back(group);
}

/// Waits for all groups of products but the last `LEFT`.
#[track_caller]
pub fn wgmma_wait<const LEFT: u32>() {
    arch::sync_warp(arch::FULL);
    while let Some(mut product) = next_product(LEFT as usize) {
        arch::joint((&raw mut product).expose_provenance() as u64, add_products);
    }
    let products = arch::unit_of_lane::<GroupProducts>();
    products.is_fenced.set(false);
}

/// Takes the oldest of the lane's products that are not in the last `left` groups.
fn next_product(left: usize) -> Option<GroupProduct> {
    let products = arch::unit_of_lane::<GroupProducts>();
    let mut groups = products.groups.borrow_mut();
    while groups.len() > left {
        match groups.front_mut() {
            Some(group) if !group.is_empty() => return Some(group.remove(0)),
            _ => groups.pop_front(),
        };
    }
    None
}

/// Adds the product of 64 x 16 and 16 x 256 bf16; `B_BY_K` is 1 if the rows of `b` run along `k`. Every thread of the
/// warpgroup calls it; the sums are there after [`wgmma_wait`].
#[track_caller]
pub fn wgmma_bf16<const B_BY_K: u32>(sums: &mut [[f32; 4]; 32], a: u64, b: u64) {
    begin_product(sums, (a, b), B_BY_K == 1, false);
}

/// As [`wgmma_bf16`] with f16.
#[track_caller]
pub fn wgmma_f16<const B_BY_K: u32>(sums: &mut [[f32; 4]; 32], a: u64, b: u64) {
    begin_product(sums, (a, b), B_BY_K == 1, true);
}

#[track_caller]
fn begin_product(sums: &mut [[f32; 4]; 32], (a, b): (u64, u64), b_by_k: bool, is_f16: bool) {
    let warp = arch::thread() / 32 % 4;
    let mut product = GroupProduct {
        sums: core::ptr::from_mut(sums).expose_provenance() as u64,
        a,
        b,
        is_f16,
        b_by_k,
        warp,
        // SAFETY: the descriptors name it; what is read through them is checked.
        shared: unsafe { DynamicShared::dynamic() },
    };
    {
        let products = arch::unit_of_lane::<GroupProducts>();
        // The lane may have written its sums since the last wait.
        assert!(products.is_fenced.get(), "a product without wgmma.fence");
        if warp.is_multiple_of(2) {
            products.open.borrow_mut().push(product);
        }
    }
    if warp % 2 == 1 {
        arch::joint((&raw mut product).expose_provenance() as u64, add_products);
    }
}

/// Computes the 16 rows of a warp, whose lanes have their [`GroupProduct`] at the addresses `all`.
fn add_products(all: &[u64; 32]) {
    // SAFETY: each lane waits with its product on its stack, which nothing else accesses meanwhile.
    let lane = |at: usize| unsafe { *(all[at] as usize as *const GroupProduct) };
    let first = lane(0);
    let is_one = |at| (lane(at).a, lane(at).b) == (first.a, first.b);
    assert!(
        (1..32).all(is_one),
        "lanes of a warp have different descriptors"
    );
    let wide = if first.is_f16 {
        f32_of_f16
    } else {
        f32_of_bf16
    };
    let load = |descriptor: OperandDescriptor, row, term, by_k| {
        let at = descriptor.address_of(row, term, by_k);
        wide(first.shared.at_address(at).half())
    };
    let (of_a, of_b) = (
        OperandDescriptor::of(first.a),
        OperandDescriptor::of(first.b),
    );
    let (mut a, mut b, mut sums) = ([[0.0; 16]; 16], [[0.0; 256]; 16], [[0.0; 256]; 16]);
    for (row, terms) in (first.warp * 16..).zip(&mut a) {
        for (k, term) in (0..).zip(terms) {
            *term = load(of_a, row, k, false);
        }
    }
    for (k, columns) in (0..).zip(&mut b) {
        for (column, term) in (0..).zip(columns) {
            *term = load(of_b, column, k, first.b_by_k);
        }
    }
    for (a, sums) in a.iter().zip(&mut sums) {
        for (a, b) in a.iter().zip(&b) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    for at in 0..all.len() {
        // SAFETY: the sums are the lane's own, which the kernel leaves alone until it has waited.
        let to = unsafe { &mut *(lane(at).sums as usize as *mut [[f32; 4]; 32]) };
        let (group, pair) = (at / 4, at % 4 * 2);
        for (j, to) in to.iter_mut().enumerate() {
            for (index, to) in to.iter_mut().enumerate() {
                *to += sums[group + index / 2 * 8][j * 8 + pair + index % 2];
            }
        }
    }
}

/// An operand in shared memory ("Matrix Descriptor Format"), swizzled by 128 bytes.
#[derive(Clone, Copy)]
struct OperandDescriptor {
    start: u32,
    leading: u32,
    stride: u32,
}

impl OperandDescriptor {
    fn of(descriptor: u64) -> Self {
        let field = |bit: u32| (descriptor >> bit & 0x3FFF) as u32 * 16;
        assert_eq!(descriptor >> 62, 1, "an operand without a swizzle of 128");
        assert_eq!(descriptor >> 49 & 7, 0, "an operand with a base offset");
        Self {
            start: field(0),
            leading: field(16),
            stride: field(32),
        }
    }

    /// Returns the address of term `k` of row `row` of `a`, or of column `row` of `b` ("Strides"). Lines of 128 bytes, in
    /// groups of eight, have 64 terms of a row each or, if `by_k`, one term of 64 rows.
    fn address_of(self, row: u32, k: u32, by_k: bool) -> u32 {
        let offset = match by_k {
            false => row % 8 * 128 + row / 8 * self.stride + k * 2,
            true => k % 8 * 128 + k / 8 * self.stride + row % 64 * 2 + row / 64 * self.leading,
        };
        swizzled(self.start + offset)
    }
}

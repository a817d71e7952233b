//! Calls that are mostly right, from several threads over one opener after the other. Meanwhile processes are killed,
//! the function is reset and unbound, and memory changes below the mappings.
// UNSAFETY: system calls on an arena that is used for nothing else.
#![allow(unsafe_code)]

use super::machine::{self, Child, Ended};
use super::memory;
use super::node::{self, EVENT, MAP, Node, PAGE};
use super::nvme::Nvme;
use guest_tests::Outcome;
use nvme_units::SplitMix;
use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const THREADS: u64 = 4;
const ARENA: usize = 8 << 20;
const ARENA_PAGES: u64 = (ARENA / PAGE) as u64;

/// Number of times that each call must succeed.
const ENOUGH: u64 = 10;
/// Names of the calls; for each one the test counts successes and failures.
const NAMES: [&str; 8] = [
    "pages", "dma-buf", "unmap", "info", "event", "reset", "mmap", "junk",
];

/// State that the threads of one process share.
struct Ground {
    node: Node,
    arena: u64,
    list: u64,
    handles: Mutex<VecDeque<u32>>,
    counts: &'static [AtomicU64; PAGE / 8],
}

impl Ground {
    fn new(address: &str, counts: &'static [AtomicU64; PAGE / 8]) -> Result<Self, String> {
        let node = Node::awaited(address)?;
        let arena = node::arena(ARENA)? as u64;
        let list = node::arena(16 * PAGE)? as u64;
        Ok(Self {
            node,
            arena,
            list,
            handles: Mutex::default(),
            counts,
        })
    }

    fn keep(&self, handle: u32) {
        if let Ok(mut handles) = self.handles.lock() {
            handles.push_back(handle);
        }
    }

    fn map(&self, dice: &mut SplitMix, kind: u64, fd: u64) -> Result<(), i32> {
        let first = dice.below(ARENA_PAGES);
        let most = if dice.below(8) == 0 { ARENA_PAGES } else { 16 };
        let flags = u64::from(dice.below(20) == 0);
        let places = if dice.below(6) == 0 { 0 } else { 1 };
        let list = match dice.below(30) {
            0 => self.arena + dice.below(ARENA as u64),
            1 => 8,
            _ => self.list,
        };
        let mut ask = [
            48 | kind << 32,
            self.arena + first * PAGE as u64,
            (1 + dice.below(most)) * PAGE as u64,
            fd | flags << 32,
            places << 32,
            list,
        ];
        if dice.below(40) == 0 {
            let word = dice.below(6) as usize;
            ask[word] ^= 1 << dice.below(64);
            // The kernel may write to the arena and the list, which the calls name, and to nothing else.
            if word == 4 || word == 5 {
                ask[4] = places << 32;
                ask[5] = list;
            }
        }
        self.node
            .call(MAP, ask.as_mut_ptr().expose_provenance() as u64)?;
        self.keep(ask[4] as u32);
        Ok(())
    }

    fn map_buffer(&self, dice: &mut SplitMix) -> Result<(), i32> {
        let memory = memory::memfd((1 + dice.below(64)) as usize * PAGE).map_err(|_| -1)?;
        let buffer = memory::udmabuf(&memory).map_err(|_| -1)?;
        self.map(dice, 1, buffer.as_raw_fd() as u64)
    }

    fn unmap(&self, dice: &mut SplitMix) -> Result<(), i32> {
        let known = self
            .handles
            .lock()
            .ok()
            .and_then(|mut handles| handles.pop_front());
        match known {
            Some(handle) if dice.below(10) > 0 => self.node.unmap(handle),
            _ => self.node.unmap(dice.below(70_000) as u32),
        }
    }

    fn watch(&self, dice: &mut SplitMix) -> Result<(), i32> {
        match dice.below(3) {
            0 => self.node.watch(-1),
            1 => self.node.watch(0),
            _ => self
                .node
                .watch(node::eventfd().map_err(|_| -1)?.as_raw_fd()),
        }
    }

    /// Maps a part of the BAR, moves it or reads it, and unmaps it.
    fn touch(&self, dice: &mut SplitMix) -> Result<(), i32> {
        let bytes = (1 + dice.below(5)) as usize * PAGE;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let bar = node::mapped(bytes, both, libc::MAP_SHARED, self.node.fd())?;
        let mut at = bar.cast::<libc::c_void>();
        // SAFETY: the mapping was made by this call. If the BAR is gone, SIGBUS ends the process.
        unsafe {
            if dice.below(2) == 0 {
                at.cast::<u32>().add(2).read_volatile();
            }
            if dice.below(4) == 0 {
                let moved = libc::mremap(at, bytes, bytes, libc::MREMAP_MAYMOVE);
                at = if moved == libc::MAP_FAILED { at } else { moved };
            }
            libc::munmap(at, bytes);
        }
        Ok(())
    }

    /// Changes the memory below the mappings.
    fn shuffle(&self, dice: &mut SplitMix) {
        let first = dice.below(ARENA_PAGES);
        let pages = (1 + dice.below(64)).min(ARENA_PAGES - first);
        let at = (self.arena + first * PAGE as u64) as *mut libc::c_void;
        let bytes = pages as usize * PAGE;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the range lies inside the arena, which holds no Rust value.
        unsafe {
            match dice.below(5) {
                0 => libc::madvise(at, bytes, libc::MADV_DONTNEED),
                1 => libc::mprotect(at, bytes, libc::PROT_READ),
                2 => libc::mprotect(at, bytes, both),
                3 => i32::from(libc::mmap(at, bytes, both, flags, -1, 0) == libc::MAP_FAILED),
                _ => libc::madvise(at, bytes, libc::MADV_HUGEPAGE),
            }
        };
    }

    fn junk(&self, dice: &mut SplitMix) -> Result<(), i32> {
        let mut words = [0u64; 16];
        words.fill_with(|| dice.next_word());
        // The list of a MAP that is right by chance.
        (words[4], words[5]) = (1 << 32, self.list);
        let number = EVENT & !0xC03F_00FF
            | dice.below(4) << 30
            | dice.below(64) << 16
            | (0xE0 + dice.below(8));
        match dice.below(3) {
            0 => self.node.call(number, dice.next_word()),
            _ => self
                .node
                .call(number, words.as_mut_ptr().expose_provenance() as u64),
        }
    }

    fn play(&self, seed: u64) {
        let mut dice = SplitMix::new(seed);
        loop {
            let (what, end) = match dice.below(100) {
                0..=34 => (0, self.map(&mut dice, 0, 0)),
                35..=44 => (1, self.map_buffer(&mut dice)),
                45..=74 => (2, self.unmap(&mut dice)),
                75..=79 => (3, self.node.info().map(drop)),
                80..=84 => (4, self.watch(&mut dice)),
                85 => (5, self.node.reset()),
                86..=91 => (6, self.touch(&mut dice)),
                92..=95 => {
                    self.shuffle(&mut dice);
                    continue;
                }
                _ => (7, self.junk(&mut dice)),
            };
            self.counts[2 * what + usize::from(end.is_err())].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Runs one process: its threads make calls until it is killed.
fn generation(address: &str, seed: u64, counts: &'static [AtomicU64; PAGE / 8]) -> i32 {
    let ground = match Ground::new(address, counts) {
        Ok(ground) => ground,
        Err(cause) => {
            eprintln!("{cause}");
            return 3;
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let ground = &ground;
            scope.spawn(move || ground.play(seed ^ thread << 32));
        }
    });
    0
}

/// Returns whether one of the calls has hardly ever succeeded. The last one does not count, since it is wrong on
/// purpose.
fn is_little(counts: &[AtomicU64; PAGE / 8]) -> bool {
    let meant = 0..NAMES.len() - 1;
    let succeeded = |at: usize| counts[2 * at].load(Ordering::Relaxed);
    meant.into_iter().any(|at| succeeded(at) < ENOUGH)
}

/// Acts as an administrator until the generation is to end.
fn disturb(address: &str, dice: &mut SplitMix) {
    let end = Instant::now() + Duration::from_millis(300 + dice.below(3000));
    while Instant::now() < end {
        if dice.below(20) == 0 {
            // Refused while another reset has the lock.
            let _ = machine::reset(address);
        }
        if dice.below(10) == 0 {
            drop(Node::open(address));
        }
        std::thread::sleep(Duration::from_millis(30));
    }
}

pub fn run(address: &str, seconds: u64) -> Outcome {
    let counts = machine::shared()?;
    let before = machine::pins()?;
    let mut dice = SplitMix::new(seconds);
    let begin = Instant::now();
    let (mut kills, mut unbinds) = (0, 0);
    let wanted = Duration::from_secs(seconds);
    // A busy machine gets more time, but not without a limit.
    while begin.elapsed() < wanted || (is_little(counts) && begin.elapsed() < 4 * wanted) {
        let seed = dice.next_word();
        let child = Child::run(|| generation(address, seed, counts))?;
        disturb(address, &mut dice);
        let unbinds_now = dice.below(4) == 0;
        if unbinds_now {
            machine::unbind(address).map_err(|error| format!("unbind: {error}"))?;
            unbinds += 1;
        }
        child.kill();
        kills += 1;
        match child.end() {
            // A BAR that is gone, or the kill.
            Some(Ended::Signal(libc::SIGKILL | libc::SIGBUS)) => {}
            other => return Err(format!("a process ended with {other:?}")),
        }
        if unbinds_now {
            machine::bind(address)?;
        }
    }
    let shown: Vec<String> = NAMES
        .iter()
        .enumerate()
        .map(|(at, name)| {
            let of = |which: usize| counts[2 * at + which].load(Ordering::Relaxed);
            format!("{name} {}/{}", of(0), of(1))
        })
        .collect();
    println!(
        "{kills} kills, {unbinds} unbinds; succeeded/failed: {}",
        shown.join(", ")
    );
    if is_little(counts) {
        return Err(format!("fewer than {ENOUGH} calls of a kind succeeded"));
    }
    let node = Node::awaited(address)?;
    match node.info() {
        Ok(info) if info.mappings == 0 => {}
        other => return Err(format!("INFO of a new opener: {other:?}")),
    }
    if machine::pins()? != before {
        return Err(format!("{} pages stay pinned", machine::pins()? - before));
    }
    Nvme::start(node)?.works()
}

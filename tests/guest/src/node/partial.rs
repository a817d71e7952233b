//! A MAP that fails half-way leaves nothing behind: no page pinned or counted, no address that the controller can
//! access, no handle.
//!
//! Kernel memory runs out at every step of a MAP: a cgroup limits the caller's pages. A kernel that injects faults
//! (CONFIG_FAULT_INJECTION) also fails each allocation in turn.
// UNSAFETY: writes to memory that it has mapped, and changes mappings of it.
#![allow(unsafe_code)]

use super::limits;
use super::machine::{self, Child};
use super::memory;
use super::node::{self, Node, PAGE};
use super::nvme::{self, Nvme};
use guest_tests::Outcome;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const BYTES: usize = 8 << 20;
const PAGES: usize = BYTES / PAGE;
/// Pages whose entries are in one table of the IOMMU.
const TABLE: usize = 512;
/// Pages of kernel memory that are enough for any MAP.
const MOST_BUDGET: usize = 400;
/// Steps at which the memory must have run out: the tables of the IOMMU alone are more.
const FEWEST: usize = 4;
const FILLING: u8 = 0xA5;
const CGROUP: &str = "/sys/fs/cgroup/partial";

/// Words that a child and its parent share.
const STATE: usize = 0;
const ENDED: usize = 1;
const HANDLE: usize = 2;
const IOVA: usize = 3;
/// Values of the first.
const READY: u64 = 1;
const GO: u64 = 2;
const DONE: u64 = 3;
const LEAVE: u64 = 4;

type Words = &'static [AtomicU64; PAGE / 8];

/// The memory to map, and its address in this process.
struct Subject {
    name: &'static str,
    seen: *mut u8,
    buffer: Option<File>,
}

impl Subject {
    fn map(&self, node: &Node) -> Result<(u32, u64), i32> {
        match &self.buffer {
            Some(buffer) => node.map_buffer(buffer.as_raw_fd()),
            None => node.map(self.seen as u64, BYTES),
        }
    }

    fn is_counted(&self) -> bool {
        self.buffer.is_none()
    }
}

fn subjects() -> Result<[Subject; 3], String> {
    let pages = memory::memfd(BYTES)?;
    let file = memory::memfd(BYTES)?;
    Ok([
        Subject {
            name: "scattered pages",
            seen: memory::scattered(&pages, BYTES)?,
            buffer: None,
        },
        Subject {
            name: "huge pages at an odd offset",
            seen: memory::in_huge_pages(BYTES)?,
            buffer: None,
        },
        Subject {
            name: "a dma-buf",
            seen: memory::scattered(&file, BYTES)?,
            buffer: Some(memory::udmabuf(&file)?),
        },
    ])
}

/// The controller, and what held before the MAP that fails.
struct Bench {
    nvme: Nvme,
    words: Words,
    pins: i64,
    mappings: u32,
}

impl Bench {
    /// Counts the pages that the controller can access from the address on. It looks at the first and the last page of
    /// each table.
    fn reached(&mut self, subject: &Subject, iova: u64) -> Result<usize, String> {
        let mut reached = 0;
        for page in (0..PAGES)
            .step_by(TABLE)
            .flat_map(|at| [at, at + TABLE - 1])
        {
            let at = subject.seen.wrapping_add(page * PAGE);
            // SAFETY: the page belongs to the subject, and nothing else uses it.
            unsafe { at.write_bytes(FILLING, PAGE) };
            // The status is not checked: QEMU's controller reports success for bytes that did not arrive.
            let to = iova + (page * PAGE) as u64;
            self.nvme.identify_to(to, true).ok_or("no answer")?;
            // SAFETY: the page belongs to the subject; the read is volatile because a controller may have written it.
            let is_changed =
                (0..PAGE).any(|byte| unsafe { at.add(byte).read_volatile() } != FILLING);
            reached += usize::from(is_changed);
        }
        Ok(reached)
    }

    /// Checks that nothing is left of a MAP.
    fn is_clean(&mut self, subject: &Subject, iova: u64) -> Outcome {
        let pins = machine::pins()? - self.pins;
        let info = self.nvme.node.info();
        let mappings = info
            .map_err(|errno| format!("INFO: errno {errno}"))?
            .mappings;
        let reached = self.reached(subject, iova)?;
        match (pins, mappings == self.mappings, reached) {
            (0, true, 0) => Ok(()),
            _ => Err(format!(
                "{pins} pages stay pinned, {mappings} mappings, {reached} pages are reached"
            )),
        }
    }

    /// Maps and unmaps the subject, and returns its address, which the next MAP of it gets again.
    fn whole(&mut self, subject: &Subject) -> Result<u64, String> {
        let (handle, iova) = subject
            .map(&self.nvme.node)
            .map_err(|errno| format!("MAP: errno {errno}"))?;
        let reached = self.reached(subject, iova)?;
        if reached != 2 * PAGES / TABLE {
            return Err(format!("{reached} pages of a mapping are reached"));
        }
        self.unmap(handle)?;
        self.is_clean(subject, iova)?;
        Ok(iova)
    }

    fn unmap(&self, handle: u32) -> Outcome {
        let unmapped = self.nvme.node.unmap(handle);
        unmapped.map_err(|errno| format!("UNMAP: errno {errno}"))
    }

    /// Runs one MAP in a child that has `budget` pages of kernel memory; returns its handle and address, or its errno.
    fn attempt(&self, subject: &Subject, budget: usize) -> Result<Result<(u32, u64), i32>, String> {
        let words = self.words;
        for word in words {
            word.store(0, Ordering::SeqCst);
        }
        fs::create_dir(CGROUP).map_err(|error| format!("{CGROUP}: {error}"))?;
        let child = Child::run(|| match confined(&self.nvme.node, subject, words) {
            Ok(()) => 0,
            Err(cause) => {
                eprintln!("{cause}");
                1
            }
        })?;
        let limit = |text: &str| {
            let path = format!("{CGROUP}/memory.max");
            machine::write(&path, text).map_err(|error| format!("{path}: {error}"))
        };
        let is = |state| reached_state(&child, words, state);
        is(READY)?;
        limit(&(budget * PAGE).to_string())?;
        words[STATE].store(GO, Ordering::SeqCst);
        is(DONE)?;
        limit("max")?;
        let of = |word: usize| words[word].load(Ordering::SeqCst);
        let ended = match of(ENDED) as i32 {
            0 => Ok((of(HANDLE) as u32, of(IOVA))),
            errno => Err(errno),
        };
        // The child still lives, and its memory with it.
        let pinned = machine::pinned_by(&child.number().to_string())?;
        words[STATE].store(LEAVE, Ordering::SeqCst);
        child.end();
        fs::remove_dir(CGROUP).map_err(|error| format!("{CGROUP}: {error}"))?;
        match (ended.is_err() || !subject.is_counted(), pinned) {
            (true, 0) => Ok(ended),
            (false, kib) if kib == BYTES as u64 / 1024 => Ok(ended),
            _ => Err(format!(
                "{ended:?}, and its process has {pinned} KiB pinned"
            )),
        }
    }

    /// The memory runs out later and later, until there is enough.
    fn exhaust(&mut self, subject: &Subject) -> Outcome {
        let iova = self.whole(subject)?;
        for budget in 0..MOST_BUDGET {
            let at = |cause| format!("with {budget} pages of kernel memory: {cause}");
            match self.attempt(subject, budget).map_err(at)? {
                Err(libc::ENOMEM) => self.is_clean(subject, iova).map_err(at)?,
                Err(errno) => return Err(at(format!("errno {errno}"))),
                Ok(_) if budget < FEWEST => return Err(at("it is enough".to_owned())),
                Ok((handle, now)) if now == iova => {
                    self.unmap(handle)?;
                    self.is_clean(subject, iova)?;
                    println!(
                        "{}: nothing stays with 0 to {} pages of kernel memory",
                        subject.name,
                        budget - 1
                    );
                    return Ok(());
                }
                Ok((_, now)) => return Err(at(format!("at {now:#x} instead of {iova:#x}"))),
            }
        }
        Err(format!(
            "{MOST_BUDGET} pages of kernel memory are not enough"
        ))
    }

    /// Makes each allocation of a MAP fail in turn, if the kernel supports that.
    fn inject(&mut self, subject: &Subject) -> Outcome {
        let path = "/proc/thread-self/fail-nth";
        let open = || File::options().read(true).write(true).open(path);
        if open().is_err() {
            return Ok(());
        }
        let broken = |error| format!("{path}: {error}");
        let iova = self.whole(subject)?;
        for nth in 1..10_000 {
            // The file cannot seek, so it is opened for each number.
            let mut file = open().map_err(broken)?;
            file.write_all(nth.to_string().as_bytes()).map_err(broken)?;
            let ended = subject.map(&self.nvme.node);
            let mut left = [0; 16];
            let read = file.read(&mut left);
            file.write_all(b"0").map_err(broken)?;
            let left = String::from_utf8_lossy(&left[..read.map_err(broken)?]);
            match ended {
                // An allocation that it can do without.
                Ok((handle, _)) => self.unmap(handle)?,
                Err(libc::ENOMEM) => {}
                Err(errno) => return Err(format!("allocation {nth} fails: errno {errno}")),
            }
            self.is_clean(subject, iova)
                .map_err(|cause| format!("allocation {nth} fails: {cause}"))?;
            if left.trim() != "0" {
                println!(
                    "{}: nothing stays when one of {} allocations fails",
                    subject.name,
                    nth - 1
                );
                return Ok(());
            }
        }
        Err("a MAP has more allocations than can be".to_owned())
    }
}

/// Waits until the child has reached a state.
fn reached_state(child: &Child, words: Words, state: u64) -> Outcome {
    for _ in 0..6000 {
        if words[STATE].load(Ordering::SeqCst) == state {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill();
    Err(format!("a child has not come to state {state} within 60 s"))
}

/// The child's part. Its memory is limited, so it must not fault in any page: everything that it needs is there before.
fn confined(node: &Node, subject: &Subject, words: Words) -> Outcome {
    // The limit has room for the whole memory and for the controller's queues.
    limits::confine((BYTES + nvme::PAGES * PAGE) as u64)?;
    memory::touch(subject.seen, BYTES)?;
    let broken = |error| format!("{CGROUP}: {error}");
    machine::write("/proc/self/oom_score_adj", "-1000").map_err(broken)?;
    machine::write(&format!("{CGROUP}/cgroup.procs"), "0").map_err(broken)?;
    // The way through the calls, which ends with an error.
    if node.map(0, 0) != Err(libc::EINVAL) {
        return Err("a MAP of nothing".to_owned());
    }
    let wait = |state| {
        while words[STATE].load(Ordering::SeqCst) != state {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    words[STATE].store(READY, Ordering::SeqCst);
    wait(GO);
    match subject.map(node) {
        Ok((handle, iova)) => {
            words[HANDLE].store(u64::from(handle), Ordering::SeqCst);
            words[IOVA].store(iova, Ordering::SeqCst);
        }
        Err(errno) => words[ENDED].store(errno as u64, Ordering::SeqCst),
    }
    words[STATE].store(DONE, Ordering::SeqCst);
    wait(LEAVE);
    Ok(())
}

/// Maps memory with a page of another kind in its middle: the error is EFAULT, and nothing stays mapped.
fn interrupted(bench: &Bench) -> Outcome {
    const MANY: usize = 64;
    let start = node::arena(MANY * PAGE)?;
    let empty = memory::memfd(0)?;
    let at = start.wrapping_add(MANY / 2 * PAGE);
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let put = |prot, flags, fd| {
        // SAFETY: the page belongs to the arena, which holds no Rust value.
        let put = unsafe { libc::mmap(at.cast(), PAGE, prot, flags | libc::MAP_FIXED, fd, 0) };
        match put == libc::MAP_FAILED {
            true => Err(format!("mmap: errno {}", node::errno())),
            false => Ok(()),
        }
    };
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let (shared, bar) = (libc::MAP_SHARED, bench.nvme.node.fd());
    let middles: [(&str, &dyn Fn() -> Outcome); 4] = [
        ("a page of BAR 0", &|| put(both, shared, bar)),
        ("a page that is read alone", &|| {
            put(libc::PROT_READ, anonymous, -1)
        }),
        ("the end of a file", &|| {
            put(both, shared, empty.as_raw_fd())
        }),
        ("a hole", &|| {
            // SAFETY: the page belongs to the arena, which holds no Rust value.
            match unsafe { libc::munmap(at.cast(), PAGE) } {
                0 => Ok(()),
                _ => Err(format!("munmap: errno {}", node::errno())),
            }
        }),
    ];
    let node = &bench.nvme.node;
    let before = (machine::pins()?, machine::pinned_by("self")?);
    for (name, change) in middles {
        change()?;
        match node.map(start as u64, MANY * PAGE) {
            Err(libc::EFAULT) => {}
            other => return Err(format!("{name} in the middle: {other:?}")),
        }
        if (machine::pins()?, machine::pinned_by("self")?) != before {
            return Err(format!("{name} in the middle: pages stay pinned"));
        }
    }
    put(both, anonymous, -1)?;
    let (handle, _) = node
        .map(start as u64, MANY * PAGE)
        .map_err(|errno| format!("without anything in the middle: errno {errno}"))?;
    bench.unmap(handle)
}

/// Runs all parts. The memory controller of cgroups is on, also below [`CGROUP`].
pub fn run(address: &str) -> Outcome {
    let subjects = subjects()?;
    let nvme = Nvme::start(Node::opened(address)?)?;
    let info = nvme
        .node
        .info()
        .map_err(|errno| format!("INFO: errno {errno}"))?;
    let mut bench = Bench {
        nvme,
        words: machine::shared()?,
        pins: machine::pins()?,
        mappings: info.mappings,
    };
    interrupted(&bench)?;
    for subject in &subjects {
        let of = |cause| format!("{}: {cause}", subject.name);
        bench.exhaust(subject).map_err(of)?;
        bench.inject(subject).map_err(of)?;
    }
    bench.nvme.works()
}

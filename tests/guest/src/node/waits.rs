//! Calls whose argument is memory that another thread or process provides later must not delay other processes.
// UNSAFETY: userfaultfd by system calls, over memory of this module that nothing else uses.
#![allow(unsafe_code)]

use super::fuse::SlowFile;
use super::machine::{self, Child, Ended};
use super::node::{self, EVENT, INFO, MAP, Node, PAGE, UNMAP};
use guest_tests::Outcome;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::Duration;

const API: u64 = 0xC018_AA3F;
const REGISTER: u64 = 0xC020_AA00;
const ZEROPAGE: u64 = 0xC020_AA04;
const API_VERSION: u64 = 0xAA;
const MODE_MISSING: u64 = 1;

/// A page that is absent until it is provided.
struct Absent {
    page: u64,
    by: Provider,
}

enum Provider {
    Faults(File),
    Server(SlowFile),
}

impl Absent {
    /// Provides the page by a thread of this process, which gets its page faults.
    fn by_faults() -> Result<Self, String> {
        // SAFETY: the call takes flags, and returns a descriptor that this process owns.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as i32;
        if fd < 0 {
            return Err(format!("userfaultfd: errno {}", node::errno()));
        }
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = node::mapped(PAGE, both, flags, -1).map_err(|errno| format!("mmap: {errno}"))?;
        // SAFETY: the call has just created the descriptor, which nothing else owns.
        let faults = unsafe { File::from_raw_fd(fd) };
        call(&faults, API, &mut [API_VERSION, 0, 0, 0])?;
        let page = page as u64;
        call(&faults, REGISTER, &mut [page, PAGE as u64, MODE_MISSING, 0])?;
        Ok(Self {
            page,
            by: Provider::Faults(faults),
        })
    }

    /// Provides the page by a process that serves a file system.
    fn by_server() -> Result<Self, String> {
        let file = SlowFile::mount("/tmp/slow")?;
        Ok(Self {
            page: file.page()?,
            by: Provider::Server(file),
        })
    }

    /// Waits until a call is likely to wait for the page, or is known to.
    fn settle(&self) -> Outcome {
        let Provider::Server(file) = &self.by else {
            std::thread::sleep(Duration::from_millis(300));
            return Ok(());
        };
        for _ in 0..6000 {
            if file.is_asked() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err("nobody asks for the page".to_owned())
    }

    fn provide(&self) -> Outcome {
        match &self.by {
            Provider::Faults(faults) => call(faults, ZEROPAGE, &mut [self.page, PAGE as u64, 0, 0]),
            Provider::Server(file) => {
                file.provide();
                Ok(())
            }
        }
    }
}

fn call(faults: &File, number: u64, argument: &mut [u64; 4]) -> Outcome {
    // SAFETY: the kernel reads and writes the structure.
    match unsafe { libc::ioctl(faults.as_raw_fd(), number as _, argument.as_mut_ptr()) } {
        0.. => Ok(()),
        _ => Err(format!(
            "call {number:#x} of userfaultfd: errno {}",
            node::errno()
        )),
    }
}

/// A second opener is refused at once, and another misc device opens.
fn others_go_on(address: &str) -> Outcome {
    let second = Child::run(|| (Node::open(address).err() == Some(libc::EBUSY)) as i32)?;
    match second.within(20) {
        Some(Ended::Exit(1)) => {}
        other => return Err(format!("a second opener: {other:?}")),
    }
    let misc = Child::run(|| File::open("/dev/cpu_dma_latency").is_ok() as i32)?;
    match misc.within(20) {
        Some(Ended::Exit(1)) => Ok(()),
        other => Err(format!("an open of another device: {other:?}")),
    }
}

/// One call waits for memory; other calls and an unbind do not wait for it.
fn held_up(
    address: &str,
    what: &str,
    make: fn() -> Result<Absent, String>,
    ask: impl Fn(&Node, u64) -> Result<(), i32> + Sync,
) -> Outcome {
    let absent = make()?;
    let node = Node::opened(address)?;
    let page = absent.page;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| ask(&node, page));
        let outcome = (|| {
            absent.settle()?;
            others_go_on(address)?;
            node.info()
                .map_err(|errno| format!("INFO beside it: errno {errno}"))?;
            let unbinding = Child::run(|| i32::from(machine::unbind(address).is_err()))?;
            match unbinding.within(60) {
                Some(Ended::Exit(0)) => Ok(()),
                other => Err(format!("an unbind: {other:?}")),
            }
        })();
        let was_waiting = !waiting.is_finished();
        absent.provide()?;
        let ended = waiting.join().map_err(|_| "the call panicked".to_owned())?;
        outcome.map_err(|cause| format!("{what} waits: {cause}"))?;
        if !was_waiting || ended.is_ok() {
            return Err(format!(
                "{what}: it waited: {was_waiting}, and ended with {ended:?}"
            ));
        }
        println!("{what} waits for its memory: nobody else does, and it ends with {ended:?}");
        Ok(())
    })?;
    machine::bind(address)
}

/// Tests each kind of memory in each argument of a call.
pub fn run(address: &str) -> Outcome {
    for (by, make) in [
        (
            "userfaultfd",
            Absent::by_faults as fn() -> Result<Absent, String>,
        ),
        ("FUSE", Absent::by_server),
    ] {
        for (what, number) in [
            ("INFO", INFO),
            ("MAP", MAP),
            ("UNMAP", UNMAP),
            ("EVENT", EVENT),
        ] {
            let what = format!("{what} by {by}");
            held_up(address, &what, make, |node, page| node.call(number, page))?;
        }
        // The pages are pinned, which waits for their content.
        let what = format!("MAP of such memory by {by}");
        held_up(address, &what, make, |node, page| {
            node.map(page, PAGE).map(drop)
        })?;
        // The memory is mapped, but its address cannot be written to the caller.
        let what = format!("the list of MAP by {by}");
        held_up(address, &what, make, |node, page| {
            let memory = node::arena(PAGE).map_err(|_| 0)? as u64;
            let mut ask = [48, memory, PAGE as u64, 0, 1 << 32, page];
            node.call(MAP, ask.as_mut_ptr().expose_provenance() as u64)
        })?;
    }
    Ok(())
}

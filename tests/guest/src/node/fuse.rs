//! A page of a file whose content a process of this test provides only when the test wants: a file system in user space
//! with one file.
// UNSAFETY: mount and unmount take names and flags.
#![allow(unsafe_code)]

use super::machine::{self, Child};
use super::node::{self, PAGE};
use guest_tests::Outcome;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// linux/fuse.h: requests that a file with one mapping needs an answer to.
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const HEADER: usize = 16;
/// The kernel asks for a buffer of at least that many bytes.
const REQUEST: usize = 8192 + 1024;

/// A mounted file of one page, whose content is held back.
pub struct SlowFile {
    place: String,
    server: Child,
    /// Nonzero once the page may be provided.
    open: &'static AtomicU64,
    /// Number of times that the page was requested.
    asked: &'static AtomicU64,
}

impl SlowFile {
    pub fn mount(place: &str) -> Result<Self, String> {
        let path = "/dev/fuse";
        let device = File::options().read(true).write(true).open(path);
        let device = device.map_err(|error| format!("{path}: {error}"))?;
        File::create(place).map_err(|error| format!("{place}: {error}"))?;
        let number = device.as_raw_fd();
        let options = format!("fd={number},rootmode=100600,user_id=0,group_id=0");
        let [at, options] = [place.to_owned(), options].map(|text| CString::new(text).ok());
        let (Some(at), Some(options)) = (at, options) else {
            return Err(format!("{place}: a zero in the name"));
        };
        let kind = c"fuse";
        // SAFETY: the names end with zeros, and the other arguments are flags.
        let mounted = unsafe {
            let data = options.as_ptr().cast();
            libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, data)
        };
        if mounted != 0 {
            return Err(format!("mount of {place}: errno {}", node::errno()));
        }
        let [open, asked, ..] = machine::shared()?;
        let server = Child::run(|| serve(&device, open, asked))?;
        // From here on only the child has the device, so a process that waits for the device is released when the child
        // ends.
        Ok(Self {
            place: place.to_owned(),
            server,
            open,
            asked,
        })
    }

    /// Maps the page into this process; it is absent until it is provided.
    pub fn page(&self) -> Result<u64, String> {
        let failed = |error| format!("{}: {error}", self.place);
        let file = File::open(&self.place).map_err(failed)?;
        // The kernel knows no size, and so no page, before it has asked for the attributes.
        let bytes = file.metadata().map_err(failed)?.len();
        if bytes != PAGE as u64 {
            return Err(format!("{} has {bytes} bytes", self.place));
        }
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let page = node::mapped(PAGE, both, libc::MAP_PRIVATE, file.as_raw_fd());
        Ok(page.map_err(|errno| format!("mmap of {}: errno {errno}", self.place))? as u64)
    }

    /// True if a thread waits for the page.
    pub fn is_asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst) > 0
    }

    pub fn provide(&self) {
        self.open.store(1, Ordering::SeqCst);
    }
}

impl Drop for SlowFile {
    fn drop(&mut self) {
        self.server.kill();
        if let Ok(at) = CString::new(self.place.as_str()) {
            // SAFETY: a name that ends with a zero.
            unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

/// Answers the kernel until it unmounts; a read is not answered before `open`.
fn serve(mut device: &File, open: &AtomicU64, asked: &AtomicU64) -> i32 {
    let mut request = vec![0; REQUEST];
    loop {
        let Ok(bytes) = device.read(&mut request) else {
            return 0;
        };
        let Some(head) = request.get(..bytes).filter(|head| head.len() >= 40) else {
            return 1;
        };
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
        let answer = match word(4) {
            INIT => init_answer(),
            GETATTR => attributes(),
            // Neither a handle nor a flag: each open forgets the page.
            OPEN => vec![0; 16],
            READ => {
                asked.fetch_add(1, Ordering::SeqCst);
                while open.load(Ordering::SeqCst) == 0 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                vec![0; PAGE]
            }
            FLUSH | RELEASE => Vec::new(),
            // The two requests to forget an inode expect no answer.
            2 | 42 => continue,
            _ => {
                if send(device, &head[8..16], -libc::ENOSYS, &[]).is_err() {
                    return 1;
                }
                continue;
            }
        };
        if send(device, &head[8..16], 0, &answer).is_err() {
            return 1;
        }
    }
}

fn send(mut device: &File, number: &[u8], error: i32, body: &[u8]) -> Outcome {
    let mut all = Vec::with_capacity(HEADER + body.len());
    all.extend_from_slice(&((HEADER + body.len()) as u32).to_le_bytes());
    all.extend_from_slice(&error.to_le_bytes());
    all.extend_from_slice(number);
    all.extend_from_slice(body);
    device.write_all(&all).map_err(|error| error.to_string())
}

/// Returns the answer to INIT: version 7.31, no read-ahead, no options.
fn init_answer() -> Vec<u8> {
    let mut answer = vec![0; 64];
    answer[0] = 7;
    answer[4] = 31;
    // Bytes of one write, which the kernel wants to be a page at least.
    answer[20..24].copy_from_slice(&(PAGE as u32).to_le_bytes());
    answer
}

/// Returns a regular file of one page, for a minute.
fn attributes() -> Vec<u8> {
    let mut answer = vec![0; 104];
    answer[0] = 60;
    // The inode, its size, mode and links.
    answer[16] = 1;
    answer[24..32].copy_from_slice(&(PAGE as u64).to_le_bytes());
    answer[76..80].copy_from_slice(&0o100_600u32.to_le_bytes());
    answer[80] = 1;
    answer
}

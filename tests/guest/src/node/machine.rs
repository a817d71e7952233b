//! Reads and changes the state of a function in sysfs; starts processes of a test.
// UNSAFETY: fork, waitpid, and memory that processes share; a child of a test that has one thread runs a closure and
// ends.
#![allow(unsafe_code)]

use super::node::{self, PAGE};
use guest_tests::Outcome;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use std::{fs, io};

/// Bits of the command register.
pub const MASTER: u16 = 1 << 2;
pub const NO_INTX: u16 = 1 << 10;

fn device(address: &str, file: &str) -> String {
    format!("/sys/bus/pci/devices/{address}/{file}")
}

pub fn write(path: &str, text: &str) -> io::Result<()> {
    // fs::write() would create a missing file.
    let mut file = fs::File::options().write(true).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

/// Returns the command register.
pub fn command(address: &str) -> Result<u16, String> {
    let path = device(address, "config");
    let config = fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
    match config.get(4..6) {
        Some(bytes) => Ok(u16::from_le_bytes([bytes[0], bytes[1]])),
        None => Err(format!("{path}: too short")),
    }
}

pub fn is_master(address: &str) -> Result<bool, String> {
    Ok(command(address)? & MASTER != 0)
}

/// True if the function is no longer there: its configuration reads as ones.
pub fn is_absent(address: &str) -> Result<bool, String> {
    Ok(command(address)? == u16::MAX)
}

/// Switches off the power of the slot below `port`, as if the card were pulled: no driver is informed. (QEMU removes
/// the device in the slot once the registers say that it has no power.)
pub fn cut_power(port: &str) -> Outcome {
    const EXPRESS: u8 = 0x10;
    const SLOT_CONTROL: usize = 0x18;
    let path = device(port, "config");
    let config = fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
    let byte = |at: usize| config.get(at).copied().unwrap_or(0);
    let mut at = usize::from(byte(0x34));
    while at != 0 && byte(at) != EXPRESS {
        at = usize::from(byte(at + 1));
    }
    if at == 0 {
        return Err(format!("{port} has no PCI Express capability"));
    }
    let control = u16::from_le_bytes([byte(at + SLOT_CONTROL), byte(at + SLOT_CONTROL + 1)]);
    // The indicator is off, and the power.
    let off = control | 3 << 8 | 1 << 10;
    let file = fs::File::options().write(true).open(&path);
    file.and_then(|file| {
        std::os::unix::fs::FileExt::write_all_at(
            &file,
            &off.to_le_bytes(),
            (at + SLOT_CONTROL) as u64,
        )
    })
    .map_err(|error| format!("{path}: {error}"))
}

/// Makes the system note that the function is no longer there, as a driver of the slot does.
pub fn remove(address: &str) -> io::Result<()> {
    write(&device(address, "remove"), "1")
}

/// Resets the function as an administrator does.
pub fn reset(address: &str) -> io::Result<()> {
    write(&device(address, "reset"), "1")
}

/// Names the methods by which the function may be reset; none for "\n".
pub fn reset_methods(address: &str, names: &str) -> io::Result<()> {
    write(&device(address, "reset_method"), names)
}

pub fn unbind(address: &str) -> io::Result<()> {
    write("/sys/bus/pci/drivers/nvme_gpu/unbind", address)
}

/// Gives the function to the module again.
pub fn bind(address: &str) -> Result<(), String> {
    let all = write(&device(address, "driver_override"), "nvme_gpu\n")
        .and_then(|()| write("/sys/bus/pci/drivers_probe", address));
    all.map_err(|error| format!("binding {address}: {error}"))
}

/// Numbers that processes of a test share.
pub fn shared() -> Result<&'static [AtomicU64; PAGE / 8], String> {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let page = node::mapped(PAGE, both, flags, -1).map_err(|errno| format!("mmap: {errno}"))?;
    // SAFETY: a whole page of zeros, never unmapped.
    Ok(unsafe { &*page.cast() })
}

/// Number of times that an event of the kernel has occurred.
pub struct Count(String);

impl Count {
    /// Counts the event of this folder of tracefs from now on.
    pub fn of(folder: &str) -> Result<Self, String> {
        let path = format!("{folder}/trigger");
        write(&path, "hist:keys=common_pid").map_err(|error| format!("{path}: {error}"))?;
        Ok(Self(folder.to_owned()))
    }

    /// Ends the count.
    pub fn so_far(self) -> Result<u64, String> {
        let path = format!("{}/hist", self.0);
        let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let hits = text
            .lines()
            .find_map(|line| line.trim().strip_prefix("Hits:"));
        let hits = hits.and_then(|rest| rest.trim().parse().ok());
        let end = write(&format!("{}/trigger", self.0), "!hist:keys=common_pid");
        end.map_err(|error| format!("{path}: {error}"))?;
        hits.ok_or_else(|| format!("{path} has no count:\n{text}"))
    }
}

/// Pages that are pinned in the whole machine.
pub fn pins() -> Result<i64, String> {
    // Each processor counts for itself until it is asked.
    write("/proc/sys/vm/stat_refresh", "1").map_err(|error| format!("stat_refresh: {error}"))?;
    let path = "/proc/vmstat";
    let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let of = |name: &str| -> Result<i64, String> {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let value = line.and_then(|rest| rest.trim().parse().ok());
        value.ok_or_else(|| format!("{path}: no {name}"))
    };
    Ok(of("nr_foll_pin_acquired ")? - of("nr_foll_pin_released ")?)
}

/// Returns the memory in KiB that a process has pinned; `process` is its number or `self`.
pub fn pinned_by(process: &str) -> Result<u64, String> {
    let path = format!("/proc/{process}/status");
    let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let word = line.and_then(|rest| rest.split_whitespace().next());
    word.and_then(|word| word.parse().ok())
        .ok_or_else(|| format!("{path} has no VmPin"))
}

/// Runs a part of a test in a separate process, whose mappings end with it.
pub fn by_another(part: impl FnOnce() -> Outcome) -> Outcome {
    let child = Child::run(|| match part() {
        Ok(()) => 0,
        Err(cause) => {
            eprintln!("{cause}");
            1
        }
    })?;
    match child.end() {
        Some(Ended::Exit(0)) => Ok(()),
        _ => Err("a part of the test failed".to_owned()),
    }
}

/// A process that runs a closure.
pub struct Child(i32);

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ended {
    Exit(i32),
    Signal(i32),
}

impl Child {
    /// Forks; the child ends with the closure's number.
    pub fn run(closure: impl FnOnce() -> i32) -> Result<Self, String> {
        // SAFETY: a test forks before it starts threads, or its child makes system calls alone.
        match unsafe { libc::fork() } {
            0 => {
                let code = closure();
                // SAFETY: the call ends the process.
                unsafe { libc::_exit(code) }
            }
            -1 => Err(format!("fork: errno {}", node::errno())),
            pid => Ok(Self(pid)),
        }
    }

    pub fn number(&self) -> i32 {
        self.0
    }

    fn wait(&self, flags: i32) -> Option<Ended> {
        let mut status = 0;
        // SAFETY: the call writes one integer.
        match unsafe { libc::waitpid(self.0, &mut status, flags) } {
            0 => None,
            _ if libc::WIFEXITED(status) => Some(Ended::Exit(libc::WEXITSTATUS(status))),
            _ => Some(Ended::Signal(libc::WTERMSIG(status))),
        }
    }

    pub fn end(self) -> Option<Ended> {
        self.wait(0)
    }

    /// Returns how the process ended within `seconds` seconds; None if it has not ended.
    pub fn within(&self, seconds: u64) -> Option<Ended> {
        for _ in 0..seconds * 100 {
            if let Some(ended) = self.wait(libc::WNOHANG) {
                return Some(ended);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    pub fn kill(&self) {
        // SAFETY: the process is a child that was not waited for, so its number still belongs to it.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
    }
}

//! System calls for facts that files do not show: the backing file of a loop device, and whether two threads
//! share their open files.
// UNSAFETY: ioctl takes a raw pointer, here to a structure of this module; kcmp takes numbers alone.
#![allow(unsafe_code)]

use super::super::SysfsHost;
use super::asking::ask;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

/// linux/loop.h
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
/// linux/kcmp.h
const KCMP_FILES: libc::c_ulong = 2;

/// struct loop_info64 of linux/loop.h; only its first numbers are read.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    rest: [u64; 26],
}

/// The file that a loop device lies on, whatever it is called in which mount namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoopBacking {
    /// The number of its file system.
    pub device: (u32, u32),
    /// The number of the backing block device, if it is one.
    pub disk: Option<(u32, u32)>,
}

impl LoopBacking {
    fn of(info: &LoopInfo) -> Self {
        let pair = |number: u64| (libc::major(number), libc::minor(number));
        Self {
            device: pair(info.device),
            disk: (info.rdevice != 0).then(|| pair(info.rdevice)),
        }
    }
}

/// Returns the file or device behind the loop device `name`; none where it cannot be opened, or does not
/// answer.
pub(super) fn backing(host: &SysfsHost, name: &str) -> Option<LoopBacking> {
    let path = host.path(format!("dev/{name}"));
    ask(move || {
        let mut options = File::options();
        let options = options.read(true).custom_flags(libc::O_NONBLOCK);
        status(&options.open(path)?)
    })?
    .ok()
}

fn status(file: &File) -> io::Result<LoopBacking> {
    let mut info = LoopInfo {
        device: 0,
        inode: 0,
        rdevice: 0,
        rest: [0; 26],
    };
    let at = std::ptr::from_mut(&mut info);
    // SAFETY: the kernel writes a structure of this size, which is a local variable.
    match unsafe { libc::ioctl(file.as_raw_fd(), LOOP_GET_STATUS64 as _, at) } {
        0 => Ok(LoopBacking::of(&info)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// True if the threads `one` and `other` share one table of open files; false if the kernel does not answer.
pub(super) fn share_files(one: u32, other: u32) -> bool {
    // SAFETY: the call takes numbers and compares.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_FILES, 0, 0) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_loop_device_are_those_of_files() {
        assert_eq!(size_of::<LoopInfo>(), 232, "struct loop_info64");
        let info = |rdevice| LoopInfo {
            device: libc::makedev(259, 1),
            inode: 12,
            rdevice,
            rest: [0; 26],
        };
        let of_file = LoopBacking::of(&info(0));
        assert_eq!((of_file.device, of_file.disk), ((259, 1), None));
        let of_disk = LoopBacking::of(&info(libc::makedev(259, 700)));
        assert_eq!(of_disk.disk, Some((259, 700)));
    }

    #[test]
    fn what_is_no_loop_device_says_nothing() {
        assert!(status(&File::open("/dev/null").unwrap()).is_err());
        assert_eq!(backing(&SysfsHost::at("/nonexistent"), "loop0"), None);
    }

    #[test]
    fn threads_share_files_and_processes_do_not() {
        let own = std::process::id();
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .spawn()
            .unwrap();
        let shared = share_files(own, child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!shared, "another process");
    }
}

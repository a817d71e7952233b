//! Open files of all processes, and all mounts, read once for the examination of several controllers. Reading is
//! repeated while processes come and go: a user that moves from one process to another must be seen once.

use super::super::SysfsHost;
use super::calls::share_files;
use super::holder::{RunningProcess, UnseenUse};
use super::node::{DeviceNode, NodeIdentity, PathTarget, look};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The PID namespace that every process of a machine is in (PROC_PID_INIT_INO of Linux).
const EVERY_PROCESS: &str = "pid:[4026531836]";
/// PF_KTHREAD of Linux: a thread of the kernel, which has no files.
const KERNEL_THREAD: u64 = 0x0020_0000;
/// Files that may fail to answer in time before other files that may lie on the same file system are skipped:
/// each one that does not answer costs the whole deadline and leaves a blocked thread.
const MOST_SILENT: u32 = 3;

/// A file system that is mounted.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MountedSystem {
    /// Number of the mounted device: `259:1`.
    pub number: String,
    /// Source of the mount: `/dev/nvme0n1p1`.
    pub source: Option<String>,
    /// Mount point.
    pub at: String,
}

/// Open nodes, mounts and swap of a machine.
#[derive(Default)]
pub struct UsageCensus {
    /// Mounts, each with a process of its mount namespace; none for the namespace of this program.
    pub(super) mounts: BTreeMap<MountedSystem, Option<RunningProcess>>,
    /// Partitions and files that hold swap.
    pub(super) swaps: Vec<String>,
    pub(super) unseen: BTreeSet<UnseenUse>,
    open: BTreeMap<NodeIdentity, BTreeSet<RunningProcess>>,
    /// Processes for which a path may name another file: one of each other mount namespace, and those with a root of
    /// their own.
    pub(super) views: Vec<u32>,
    /// Mount namespaces that were read.
    namespaces: BTreeSet<PathBuf>,
    /// Processes whose files this program may not examine.
    closed: u32,
    /// Open files whose file system does not answer.
    silent: u32,
}

impl UsageCensus {
    /// Reads /proc. This process itself is left out.
    pub fn take(host: &SysfsHost) -> Self {
        let mut census = Self::default();
        if !census.mounts_of(host, "proc/self", None) {
            census.unseen.insert(UnseenUse::Mounts);
        }
        census.limits(host);
        census.swaps = swaps(host);
        let own = host.link_name("proc/self");
        for name in host.names("proc") {
            if let Ok(id) = name.parse()
                && own.as_ref() != Some(&name)
            {
                census.process(host, id);
            }
        }
        if census.closed > 0 {
            let count = census.closed;
            census.unseen.insert(UnseenUse::Files { count });
        }
        if census.silent > 0 {
            let count = census.silent;
            census.unseen.insert(UnseenUse::Silent { count });
        }
        census
    }

    /// Returns the processes that have `node` open.
    pub(super) fn openers(&self, host: &SysfsHost, node: &DeviceNode) -> BTreeSet<RunningProcess> {
        let identities = node.identities(host);
        let found = identities.iter().filter_map(|one| self.open.get(one));
        found.flatten().cloned().collect()
    }

    /// Returns the processes that have a BAR of the function called `name` open or mapped.
    pub(super) fn bar_openers(&self, name: &str) -> BTreeSet<RunningProcess> {
        let found = self.open.get(&NodeIdentity::Bar(name.to_owned()));
        found.cloned().unwrap_or_default()
    }

    /// Records which processes and mounts this program cannot see from its namespaces.
    fn limits(&mut self, host: &SysfsHost) {
        let namespace = fs::read_link(host.path("proc/self/ns/pid"));
        if namespace.is_ok_and(|name| name != Path::new(EVERY_PROCESS)) {
            self.unseen.insert(UnseenUse::Container);
        }
        let table = host.text("proc/self/mountinfo").unwrap_or_default();
        let hides = table.lines().any(|line| {
            let is_proc = line.split(' ').nth(4) == Some("/proc");
            let options = line.rsplit([' ', ',']);
            let mut hidden = options.filter_map(|word| word.strip_prefix("hidepid="));
            is_proc && hidden.any(|value| !matches!(value, "0" | "off" | "1" | "noaccess"))
        });
        if hides && !rustix::process::geteuid().is_root() {
            self.unseen.insert(UnseenUse::Processes);
        }
    }

    fn process(&mut self, host: &SysfsHost, id: u32) {
        let folder = format!("proc/{id}");
        let stat = host.text(format!("{folder}/stat")).unwrap_or_default();
        // The name may hold anything, also spaces and brackets.
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let mut fields = fields.split_whitespace();
        let is_ended = fields.next() == Some("Z");
        let flags = fields.nth(5).and_then(|text| text.parse().ok());
        if flags.is_some_and(|flags: u64| flags & KERNEL_THREAD != 0) {
            return;
        }
        let name = host.text(format!("{folder}/comm")).unwrap_or_default();
        let process = RunningProcess { id, name };
        self.mounts_of(host, &folder, Some(&process));
        let root = fs::read_link(host.path(format!("{folder}/root")));
        if root.is_ok_and(|root| root != Path::new("/")) {
            self.views.push(id);
        }
        if !is_ended {
            self.mappings(host, &folder, &process);
            if !self.files_of(host, &folder, &process) {
                return;
            }
        }
        // Other threads may have their own file table and mounts, and may outlive a first
        // thread that has ended. A disk that only such a thread has open would otherwise look free.
        for thread in host.names(format!("{folder}/task")) {
            let Ok(number) = thread.parse::<u32>() else {
                continue;
            };
            if number == id {
                continue;
            }
            let folder = format!("{folder}/task/{thread}");
            self.mounts_of(host, &folder, Some(&process));
            if is_ended || !share_files(id, number) {
                self.files_of(host, &folder, &process);
            }
            if is_ended {
                self.mappings(host, &folder, &process);
            }
        }
    }

    /// Reads the open files of a thread; false if this program may not examine them.
    fn files_of(&mut self, host: &SysfsHost, folder: &str, process: &RunningProcess) -> bool {
        let gone = |error: &io::Error| {
            error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
        };
        match fs::read_dir(host.path(format!("{folder}/fd"))) {
            Ok(entries) => {
                for entry in entries.flatten() {
                    self.descriptor(host, folder, &entry.path(), process);
                }
            }
            Err(error) if gone(&error) => {}
            Err(_) => {
                self.closed += 1;
                return false;
            }
        }
        true
    }

    /// Returns the identity of the file at `path` as a node; `name` is its name for the system.
    fn identify(&mut self, host: &SysfsHost, path: &Path, name: &Path) -> Option<NodeIdentity> {
        // A socket or a pipe: socket:[123].
        if !name.is_absolute() {
            return None;
        }
        let is_near = name.starts_with(host.path("dev")) || name.starts_with(host.path("sys"));
        if !is_near && self.silent >= MOST_SILENT {
            self.silent += 1;
            return None;
        }
        match look(path) {
            PathTarget::Silent => {
                self.silent += 1;
                None
            }
            found => NodeIdentity::of(host, found, name),
        }
    }

    fn descriptor(
        &mut self,
        host: &SysfsHost,
        folder: &str,
        path: &Path,
        process: &RunningProcess,
    ) {
        let Ok(name) = fs::read_link(path) else {
            return;
        };
        if name == Path::new("anon_inode:[io_uring]") {
            return self.registered(host, folder, path, process);
        }
        if let Some(identity) = self.identify(host, path, &name) {
            self.open
                .entry(identity)
                .or_default()
                .insert(process.clone());
        }
    }

    /// Files that were registered with an io_uring stay open without a descriptor: `    0: /dev/nvme0n1`.
    fn registered(
        &mut self,
        host: &SysfsHost,
        folder: &str,
        path: &Path,
        process: &RunningProcess,
    ) {
        let number = path.file_name().unwrap_or_default().to_string_lossy();
        let text = host.text(format!("{folder}/fdinfo/{number}"));
        for line in text.unwrap_or_default().lines() {
            let Some((slot, name)) = line.trim().split_once(": ") else {
                continue;
            };
            if slot.bytes().all(|byte| byte.is_ascii_digit()) {
                // Linux before 6.10 gives the last part alone.
                let name = host.path("dev").join(name.trim());
                if let Some(identity) = self.identify(host, &name, &name) {
                    self.open
                        .entry(identity)
                        .or_default()
                        .insert(process.clone());
                }
            }
        }
    }

    /// Finds nodes and BARs that the process has mapped: a mapping outlives the descriptor.
    fn mappings(&mut self, host: &SysfsHost, folder: &str, process: &RunningProcess) {
        let table = host.text(format!("{folder}/maps")).unwrap_or_default();
        for line in table.lines() {
            // 7f0000000000-7f0000001000 rw-s 00000000 00:05 1234    /dev/nvme0n1
            let Some((front, name)) = line.find('/').map(|at| line.split_at(at)) else {
                continue;
            };
            let name = Path::new(name);
            let may_be = name.starts_with(host.path("dev")) || name.starts_with(host.path("sys"));
            if !may_be || name.starts_with(host.path("dev/shm")) {
                continue;
            }
            let range = front.split(' ').next().unwrap_or_default();
            let path = host.path(format!("{folder}/map_files/{range}"));
            let path = if path.exists() { path } else { name.to_owned() };
            if let Some(identity) = self.identify(host, &path, name) {
                self.open
                    .entry(identity)
                    .or_default()
                    .insert(process.clone());
            }
        }
    }

    /// Reads the mounts of a process, unless the mounts of its namespace are known; returns false if there is no table.
    fn mounts_of(&mut self, host: &SysfsHost, folder: &str, of: Option<&RunningProcess>) -> bool {
        let namespace = || fs::read_link(host.path(format!("{folder}/ns/mnt"))).ok();
        let before = namespace();
        if before
            .as_ref()
            .is_some_and(|one| self.namespaces.contains(one))
        {
            return true;
        }
        let Some(table) = host.text(format!("{folder}/mountinfo")) else {
            return false;
        };
        // The namespace counts as known only once its table was read: if the process has ended or moved to another one
        // meanwhile, the next process of the namespace is read.
        if let Some(known) = before.filter(|one| namespace().as_ref() == Some(one)) {
            self.namespaces.insert(known);
        }
        for mount in table.lines().filter_map(mount) {
            self.mounts.entry(mount).or_insert_with(|| of.cloned());
        }
        self.views.extend(of.map(|process| process.id));
        true
    }
}

/// Parses a line of mountinfo: `36 35 98:0 /root /mnt options ... - ext4 /dev/root options`.
fn mount(line: &str) -> Option<MountedSystem> {
    let mut fields = line.split(' ');
    let (number, at) = (fields.nth(2)?, fields.nth(1)?);
    let source = fields.skip_while(|field| *field != "-").nth(2);
    Some(MountedSystem {
        number: number.to_owned(),
        source: source.map(unescape),
        at: unescape(at),
    })
}

fn swaps(host: &SysfsHost) -> Vec<String> {
    let table = host.text("proc/swaps").unwrap_or_default();
    let names = table.lines().skip(1);
    names
        .filter_map(|line| line.split_whitespace().next())
        .map(unescape)
        .collect()
}

/// Undoes the octal escapes of mountinfo.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|code| u8::from_str_radix(code, 8).ok());
        match code {
            Some(code) => {
                whole.push(char::from(code));
                whole.push_str(&part[3..]);
            }
            None => {
                whole.push('\\');
                whole.push_str(part);
            }
        }
    }
    whole
}

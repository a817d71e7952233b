//! Who uses the disks of a controller: mounts, swap, RAID, LVM and other device mapper targets.

use super::{Function, Host};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;

/// A use of a disk that a change of driver would end.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum User {
    /// A file system of it is mounted.
    Mounted {
        /// The block device.
        device: String,
        /// Where.
        at: String,
    },
    /// It holds swap space in use.
    Swap {
        /// The block device.
        device: String,
    },
    /// A RAID array, a logical volume, an encrypted volume, ... lies on it.
    Held {
        /// The block device.
        device: String,
        /// What lies on it, in words.
        by: String,
    },
    /// The kernel was started with it as its root.
    Root {
        /// The block device.
        device: String,
    },
    /// Something else has it open for itself alone (ZFS, bcache, a virtual machine, ...).
    Claimed {
        /// The block device.
        device: String,
    },
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted { device, at } if is_system(at) => {
                write!(f, "{device} is mounted at {at}: it is the boot disk")
            }
            Self::Mounted { device, at } => write!(f, "{device} is mounted at {at}"),
            Self::Swap { device } => write!(f, "{device} holds swap"),
            Self::Held { device, by } => write!(f, "{device} is part of {by}"),
            Self::Root { device } => {
                write!(
                    f,
                    "{device} is the root of this system: it is the boot disk"
                )
            }
            Self::Claimed { device } => write!(f, "{device} is in use (opened exclusively)"),
        }
    }
}

fn is_system(at: &str) -> bool {
    matches!(at, "/" | "/usr" | "/boot" | "/boot/efi" | "/efi")
}

impl Host {
    /// The block devices of a controller that Linux's driver has: nvme0n1, nvme0n2.
    pub fn disks(&self, function: &Function) -> Vec<String> {
        let Some(controller) = &function.controller else {
            return Vec::new();
        };
        let folder = format!("sys/bus/pci/devices/{}/nvme/{controller}", function.address);
        let mut disks: Vec<String> = self
            .names(folder)
            .iter()
            .filter_map(|name| disk(name))
            .collect();
        disks.dedup();
        disks
    }

    /// Everything that uses the disks of a controller.
    pub fn users(&self, function: &Function) -> Vec<User> {
        let mut found = BTreeSet::new();
        let mut seen = BTreeSet::new();
        for disk in self.disks(function) {
            self.users_of(&disk, &mut seen, &mut found);
        }
        found.into_iter().collect()
    }

    /// Everything that uses a block device, such as nvme0n1 or one of its partitions.
    pub fn users_of_disk(&self, device: &str) -> Vec<User> {
        let mut found = BTreeSet::new();
        self.users_of(device, &mut BTreeSet::new(), &mut found);
        found.into_iter().collect()
    }

    /// The users of a block device, of its partitions and of what lies on them.
    fn users_of(&self, device: &str, seen: &mut BTreeSet<String>, found: &mut BTreeSet<User>) {
        if !seen.insert(device.to_owned()) {
            return;
        }
        let before = found.len();
        for at in self.mounts(device) {
            let device = device.to_owned();
            found.insert(User::Mounted { device, at });
        }
        if self.is_swap(device) {
            let device = device.to_owned();
            found.insert(User::Swap { device });
        }
        if self.is_root(device) {
            let device = device.to_owned();
            found.insert(User::Root { device });
        }
        let folder = format!("sys/class/block/{device}");
        for holder in self.names(format!("{folder}/holders")) {
            let by = self.describe_holder(&holder);
            let device = device.to_owned();
            found.insert(User::Held { device, by });
            // What is mounted from there says best what would be lost.
            self.users_of(&holder, seen, found);
        }
        let mut parts = self.names(&folder);
        parts.retain(|name| self.exists(format!("{folder}/{name}/partition")));
        for part in &parts {
            self.users_of(part, seen, found);
        }
        if found.len() == before && self.is_claimed(device) {
            let device = device.to_owned();
            found.insert(User::Claimed { device });
        }
    }

    fn mounts(&self, device: &str) -> Vec<String> {
        let number = self.text(format!("sys/class/block/{device}/dev"));
        let table = self.text("proc/self/mountinfo").unwrap_or_default();
        let mount = |line: &str| {
            // 36 35 98:0 /root /mnt options ... - ext4 /dev/root options
            let mut fields = line.split(' ');
            let (which, at) = (fields.nth(2)?, fields.nth(1)?);
            let source = fields.skip_while(|field| *field != "-").nth(2);
            // btrfs has a number of its own there, but names the device.
            let named = source.and_then(|source| source.strip_prefix("/dev/")) == Some(device);
            (named || Some(which) == number.as_deref()).then(|| unescape(at))
        };
        table.lines().filter_map(mount).collect()
    }

    fn is_swap(&self, device: &str) -> bool {
        let table = self.text("proc/swaps").unwrap_or_default();
        let name = |line: &str| {
            line.split_whitespace()
                .next()?
                .strip_prefix("/dev/")
                .map(str::to_owned)
        };
        table
            .lines()
            .skip(1)
            .filter_map(name)
            .any(|name| name == device)
    }

    fn is_root(&self, device: &str) -> bool {
        let line = self.text("proc/cmdline").unwrap_or_default();
        let mut roots = line
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("root=/dev/"));
        roots.any(|root| root == device)
    }

    fn describe_holder(&self, holder: &str) -> String {
        let about = |what: &str| self.text(format!("sys/class/block/{holder}/{what}"));
        let name = about("dm/name").unwrap_or_else(|| holder.to_owned());
        match about("dm/uuid")
            .as_deref()
            .and_then(|uuid| uuid.split('-').next())
        {
            Some("LVM") => format!("the logical volume {name} (LVM)"),
            Some("CRYPT") => format!("the encrypted volume {name}"),
            Some("mpath") => format!("the multipath device {name}"),
            Some(_) => format!("the device mapper target {name}"),
            None if holder.starts_with("md") => match about("md/level") {
                Some(level) => format!("the RAID array {holder} ({level})"),
                None => format!("the RAID array {holder}"),
            },
            None => name,
        }
    }

    /// Whether someone holds the block device for himself. Needs the right to open it.
    fn is_claimed(&self, device: &str) -> bool {
        let mut options = OpenOptions::new();
        let options = options
            .read(true)
            .custom_flags(libc::O_EXCL | libc::O_NONBLOCK);
        let opened = options.open(self.path(format!("dev/{device}")));
        matches!(opened, Err(error) if error.kind() == io::ErrorKind::ResourceBusy)
    }
}

/// The disk behind an entry of a controller's folder: itself, or the head that joins several paths.
fn disk(name: &str) -> Option<String> {
    let rest = name.strip_prefix("nvme")?;
    let (numbers, namespace) = rest.split_once('n')?;
    let subsystem = numbers.split('c').next()?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(subsystem) && is_number(namespace)).then(|| format!("nvme{subsystem}n{namespace}"))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::sysfs::testing::Tree;

    const BDF: &str = "0000:01:00.0";

    fn tree() -> Tree {
        let tree = Tree::new();
        tree.controller(BDF, "nvme", 7);
        tree.disk(
            BDF,
            "nvme0n1",
            "259:0",
            &[("nvme0n1p1", "259:1"), ("nvme0n1p2", "259:2")],
        );
        tree.file(
            "proc/self/mountinfo",
            "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n",
        );
        tree.file(
            "proc/swaps",
            "Filename Type Size Used Priority\n/dev/sda2 partition 9 0 -2\n",
        );
        tree
    }

    fn users(tree: &Tree) -> Vec<String> {
        let function = tree.host().function(BDF.parse().unwrap()).unwrap();
        tree.host()
            .users(&function)
            .iter()
            .map(User::to_string)
            .collect()
    }

    #[test]
    fn a_disk_that_is_not_used_has_no_users() {
        assert!(users(&tree()).is_empty());
        let tree = Tree::new();
        tree.controller(BDF, "vfio-pci", 7);
        assert!(users(&tree).is_empty());
    }

    #[test]
    fn a_mounted_partition_is_named_with_its_place() {
        let tree = tree();
        let line = "36 21 259:1 / /srv/my\\040data rw,noatime shared:1 - ext4 /dev/root rw\n";
        tree.file("proc/self/mountinfo", line);
        assert_eq!(users(&tree), ["nvme0n1p1 is mounted at /srv/my data"]);
    }

    #[test]
    fn a_mount_that_hides_its_number_is_found_by_name() {
        let tree = tree();
        tree.file(
            "proc/self/mountinfo",
            "36 21 0:31 /@ /home rw - btrfs /dev/nvme0n1p2 rw\n",
        );
        assert_eq!(users(&tree), ["nvme0n1p2 is mounted at /home"]);
    }

    #[test]
    fn the_boot_disk_is_called_that() {
        let tree = tree();
        tree.file(
            "proc/self/mountinfo",
            "36 21 259:1 / /boot/efi rw - vfat /dev/nvme0n1p1 rw\n",
        );
        assert_eq!(
            users(&tree),
            ["nvme0n1p1 is mounted at /boot/efi: it is the boot disk"]
        );
        let tree = self::tree();
        tree.file("proc/cmdline", "quiet root=/dev/nvme0n1p2 ro\n");
        assert_eq!(
            users(&tree),
            ["nvme0n1p2 is the root of this system: it is the boot disk"]
        );
    }

    #[test]
    fn swap_is_a_use() {
        let tree = tree();
        tree.file(
            "proc/swaps",
            "Filename Type\n/dev/nvme0n1p2 partition 9 0 -2\n",
        );
        assert_eq!(users(&tree), ["nvme0n1p2 holds swap"]);
    }

    #[test]
    fn a_raid_member_is_a_use_and_so_is_what_lies_on_the_array() {
        let tree = tree();
        tree.file("sys/class/block/nvme0n1p1/holders/md0/x", "");
        tree.file("sys/class/block/md0/dev", "9:0\n");
        tree.file("sys/class/block/md0/md/level", "raid1\n");
        tree.file(
            "proc/self/mountinfo",
            "36 21 9:0 / /srv rw - ext4 /dev/md0 rw\n",
        );
        let expected = [
            "md0 is mounted at /srv",
            "nvme0n1p1 is part of the RAID array md0 (raid1)",
        ];
        assert_eq!(users(&tree), expected);
    }

    #[test]
    fn logical_encrypted_and_multipath_volumes_are_uses() {
        for (uuid, words) in [
            (
                "LVM-abc",
                "nvme0n1 is part of the logical volume vg-data (LVM)",
            ),
            (
                "CRYPT-LUKS2-abc",
                "nvme0n1 is part of the encrypted volume vg-data",
            ),
            (
                "mpath-abc",
                "nvme0n1 is part of the multipath device vg-data",
            ),
            (
                "DMRAID-abc",
                "nvme0n1 is part of the device mapper target vg-data",
            ),
        ] {
            let tree = tree();
            tree.file("sys/class/block/nvme0n1/holders/dm-0/x", "");
            tree.file("sys/class/block/dm-0/dm/name", "vg-data\n");
            tree.file("sys/class/block/dm-0/dm/uuid", uuid);
            assert_eq!(users(&tree), [words]);
        }
    }

    #[test]
    fn holders_in_a_circle_end() {
        let tree = tree();
        tree.file("sys/class/block/nvme0n1/holders/dm-0/x", "");
        tree.file("sys/class/block/dm-0/holders/nvme0n1/x", "");
        assert_eq!(users(&tree).len(), 2);
    }

    #[test]
    fn paths_of_one_namespace_are_one_disk() {
        assert_eq!(disk("nvme0n1"), Some("nvme0n1".to_owned()));
        assert_eq!(disk("nvme3c12n4"), Some("nvme3n4".to_owned()));
        for name in [
            "nvme0",
            "ng0n1",
            "nvme0n",
            "nvme0n1p1",
            "model",
            "nvmexn1",
            "power",
        ] {
            assert_eq!(disk(name), None, "{name}");
        }
    }
}

//! Uses of a controller in words: each with the action that ends the use, and the damage of ignoring it.

use super::super::PciAddress;
use std::fmt;

/// A running program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunningProcess {
    /// Number of the process.
    pub id: u32,
    /// Name of the process, as the kernel has it: at most 15 bytes.
    pub name: String,
}

impl fmt::Display for RunningProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            "" => write!(f, "process {}", self.id),
            name => write!(f, "{name} (pid {})", self.id),
        }
    }
}

impl RunningProcess {
    /// Formats several for a message: "dd (pid 12), fio (pid 13)"; "another process" when none is
    /// visible.
    pub fn list(all: &[Self]) -> String {
        match all {
            [] => "another process".to_owned(),
            all => crate::words::listed(all),
        }
    }
}

/// A use of a controller or of its disks that a change of driver, or a write past the kernel, would break.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceHolder {
    /// A file system on the device is mounted.
    Mounted {
        /// The block device.
        device: String,
        /// Mount point.
        at: String,
        /// A process of the mount namespace, if that is not the namespace of this program.
        of: Option<RunningProcess>,
    },
    /// The device holds swap space in use.
    Swap {
        /// The block device.
        device: String,
        /// The file that is the swap space, if the device holds a file system.
        file: Option<String>,
    },
    /// A RAID array, a logical volume, an encrypted volume, ... lies on it.
    Stacked {
        /// The block device.
        device: String,
        /// The array or volume, in words.
        by: String,
    },
    /// The kernel was started with it as its root.
    Root {
        /// The block device.
        device: String,
    },
    /// Something has the device open exclusively: ZFS, a cluster, a mount that no process sees.
    Claimed {
        /// The block device.
        device: String,
        /// Content that udev found on the device: "zfs_member, tank".
        content: Option<String>,
    },
    /// A loop device lies on it, or on a file of a file system on it.
    Loop {
        /// The loop device.
        name: String,
        /// File or device behind it.
        file: String,
    },
    /// The kernel exports the device: nvmet, LIO, a USB gadget.
    Exported {
        /// The block device or controller.
        device: String,
        /// User of the device, in words.
        by: String,
        /// The file of configfs that ends it with a 0.
        switch: Option<String>,
    },
    /// A program has a node of the device open.
    Open {
        /// The node.
        node: String,
        /// The program.
        process: RunningProcess,
    },
    /// The controller is a physical function with virtual ones.
    VirtualFunctions {
        /// The physical function.
        address: PciAddress,
        /// Their number.
        count: u32,
    },
    /// A namespace of the controller is in use through another controller of the subsystem.
    Shared {
        /// The disk of the other controller.
        disk: String,
        /// The other controller.
        controller: String,
        /// The use.
        holder: Box<DeviceHolder>,
    },
}

fn is_system(at: &str) -> bool {
    matches!(at, "/" | "/usr" | "/boot" | "/boot/efi" | "/efi")
}

impl fmt::Display for DeviceHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted { device, at, of } => {
                write!(f, "{device} is mounted at {at}")?;
                match of {
                    Some(process) => write!(f, " in the mount namespace of {process}"),
                    None if is_system(at) => f.write_str(": it is the boot disk"),
                    None => Ok(()),
                }
            }
            Self::Swap { device, file: None } => write!(f, "{device} holds swap"),
            Self::Swap {
                device,
                file: Some(file),
            } => write!(f, "{device} holds the swap file {file}"),
            Self::Stacked { device, by } => write!(f, "{device} is part of {by}"),
            Self::Root { device } => {
                write!(
                    f,
                    "{device} is the root of this system: it is the boot disk"
                )
            }
            Self::Claimed { device, content } => {
                write!(f, "{device} is in use (opened exclusively")?;
                match content {
                    Some(content) => write!(f, "; on it: {content})"),
                    None => f.write_str(")"),
                }
            }
            Self::Loop { name, file } => write!(f, "{name} is a loop device over {file}"),
            Self::Exported { device, by, .. } => write!(f, "{device} is exported by {by}"),
            Self::Open { node, process } => write!(f, "{node} is open in {process}"),
            Self::VirtualFunctions { address, count } => {
                let plural = if *count == 1 { "" } else { "s" };
                write!(f, "{address} has {count} virtual function{plural}")
            }
            Self::Shared {
                disk,
                controller,
                holder,
            } => write!(
                f,
                "{holder} ({disk} of {controller} is a namespace that both controllers share)"
            ),
        }
    }
}

impl DeviceHolder {
    /// Returns the action that ends the use, as a clause.
    pub fn remedy(&self) -> String {
        match self {
            Self::Mounted {
                at,
                of: Some(process),
                ..
            } => format!("`nsenter -t {} -m umount {at}`", process.id),
            Self::Mounted { at, .. } if is_system(at) => "use another drive".to_owned(),
            Self::Mounted { at, .. } => format!("unmount {at}"),
            Self::Swap { device, file } => {
                let device = format!("/dev/{device}");
                format!("`swapoff {}`", file.as_ref().unwrap_or(&device))
            }
            Self::Stacked { device, by } => format!("take {device} out of {by}"),
            Self::Root { .. } => "use another drive".to_owned(),
            Self::Claimed { device, .. } => format!("end what has {device} open"),
            Self::Loop { name, .. } => format!("`losetup -d /dev/{name}`"),
            Self::Exported {
                switch: Some(switch),
                ..
            } => format!("`echo 0 > {switch}`"),
            Self::Exported { device, .. } => format!("end the export of {device}"),
            Self::Open { process, .. } => format!("end {process}"),
            Self::VirtualFunctions { address, .. } => {
                format!("`echo 0 > /sys/bus/pci/devices/{address}/sriov_numvfs`")
            }
            Self::Shared { holder, .. } => holder.remedy(),
        }
    }

    /// Returns the damage to the use if it is ignored, as a clause.
    pub fn damage(&self) -> String {
        match self {
            Self::Mounted { at, .. } => {
                format!("the file system at {at} loses its disk, and what it has not written yet")
            }
            Self::Swap { .. } => "programs whose memory is in that swap space end".to_owned(),
            Self::Stacked { device, by } => format!("{by} loses {device}"),
            Self::Root { .. } => "this system loses its root".to_owned(),
            Self::Claimed { device, .. } => format!("what has {device} open loses it"),
            Self::Loop { name, .. } => format!("{name} loses what it lies on"),
            Self::Exported { by, .. } => format!("{by} answers with errors"),
            Self::Open { node, process } => format!("{process} loses {node}"),
            Self::VirtualFunctions { address, count } => {
                format!("the {count} virtual functions of {address} lose their controller")
            }
            Self::Shared { holder, .. } => holder.damage(),
        }
    }

    /// True if the user is a program with an open node: it may end, and may have the node open for a moment only, as
    /// udev does.
    pub fn is_program(&self) -> bool {
        match self {
            Self::Open { .. } => true,
            Self::Shared { holder, .. } => holder.is_program(),
            _ => false,
        }
    }
}

/// A part of the system that could not be examined for uses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnseenUse {
    /// There is no table of mounts: /proc is not mounted.
    Mounts,
    /// Open files of processes of other users.
    Files {
        /// Number of processes.
        count: u32,
    },
    /// Processes that /proc does not list.
    Processes,
    /// Processes and mounts outside the container that this program runs in.
    Container,
    /// Exclusive use of a block device whose node cannot be opened.
    Exclusive {
        /// The block device.
        device: String,
        /// Error of the operating system.
        cause: String,
    },
    /// Exports by a part of the kernel whose configfs cannot be read.
    Exports {
        /// The module.
        by: &'static str,
    },
    /// File behind a loop device or an export of the kernel: in this mount namespace its path does not exist,
    /// or lies on a file system that does not answer.
    Path {
        /// The loop device, or the export, in words.
        of: String,
        /// The path.
        path: String,
    },
    /// Open files of a file system that does not answer.
    Silent {
        /// Their number.
        count: u32,
    },
    /// Use of the controller by a driver other than Linux's nvme, vfio-pci and nvme_gpu.
    Driver {
        /// The driver.
        name: String,
    },
}

impl fmt::Display for UnseenUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounts => f.write_str("mounts and processes (/proc is not readable)"),
            Self::Files { count } => {
                write!(f, "what {count} processes of other users have open")
            }
            Self::Processes => f.write_str("processes of other users (hidepid of /proc)"),
            Self::Container => f.write_str("processes and mounts outside this container"),
            Self::Exclusive { device, cause } => {
                write!(f, "whether {device} is open exclusively ({cause})")
            }
            Self::Exports { by } => {
                write!(
                    f,
                    "what {by} exports (its folder in /sys/kernel/config is not readable)"
                )
            }
            Self::Path { of, path } => write!(
                f,
                "what {of} lies on (in this mount namespace, nothing answers at {path})"
            ),
            Self::Silent { count } => write!(
                f,
                "what {count} open files are, whose file system does not answer"
            ),
            Self::Driver { name } => write!(f, "what the driver {name} does with it"),
        }
    }
}

impl UnseenUse {
    /// Returns the action that would make it visible, as a clause.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Mounts => "mount /proc",
            Self::Files { .. } | Self::Processes | Self::Exclusive { .. } => {
                "run this command as root"
            }
            Self::Container => "run this command on the machine itself",
            Self::Exports { .. } => {
                "`mount -t configfs none /sys/kernel/config`, and run this as root"
            }
            Self::Path { .. } => {
                "end that loop device or export, or run this command where its path is known (`nsenter -m`)"
            }
            Self::Silent { .. } => "bring back or unmount the file systems that do not answer",
            Self::Driver { .. } => "take that driver away first",
        }
    }
}

//! Checks whether Linux's own drivers use the same namespaces through another controller of the subsystem, since a
//! drive with several ports can be bound to VFIO on one and mounted on another.

use crate::error::Result;
use crate::sysfs::{CommandScope, SysfsHost};
use nvme_core::spec::identify::IdentifyController;

/// Refuses `scope` of the subsystem that `identify` is of while Linux uses it through another controller.
///
/// # Errors
/// As [`DeviceUsage::refuse`](crate::sysfs::DeviceUsage::refuse).
pub fn refuse(
    host: &SysfsHost,
    name: &str,
    identify: &IdentifyController,
    scope: CommandScope,
) -> Result<()> {
    for subsystem in names(identify) {
        let usage = host.usage_of_subsystem(&subsystem, scope);
        usage.refuse(&format!("the NVM subsystem of {name}"), "")?;
    }
    Ok(())
}

/// Returns the names that Linux may use for the subsystem: its SUBNQN, or a name that Linux derives from other
/// fields for controllers without one, and for those whose own name it does not trust.
fn names(identify: &IdentifyController) -> Vec<String> {
    let end = identify.subnqn.iter().position(|byte| *byte == 0);
    let own = &identify.subnqn[..end.unwrap_or(identify.subnqn.len())];
    let own = String::from_utf8_lossy(own).trim_end().to_owned();
    let made = format!(
        "nqn.2014.08.org.nvmexpress:{:04x}{:04x}{}{}",
        identify.vid,
        identify.ssvid,
        String::from_utf8_lossy(&identify.sn),
        String::from_utf8_lossy(&identify.mn),
    );
    let made = made.trim_end().to_owned();
    [own, made]
        .into_iter()
        .filter(|name| !name.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sysfs::testing::Tree;
    use zerocopy::FromZeros;

    const MADE: &str = "nqn.2014.08.org.nvmexpress:144d144dS1                  Fast SSD";

    fn identify(subnqn: &str) -> Box<IdentifyController> {
        let mut identify = IdentifyController::new_box_zeroed().unwrap();
        (identify.vid, identify.ssvid) = (0x144D, 0x144D);
        identify.sn = *b"S1                  ";
        identify.mn = *b"Fast SSD                                ";
        identify.subnqn[..subnqn.len()].copy_from_slice(subnqn.as_bytes());
        identify
    }

    fn tree(subsystem: &str) -> Tree {
        let tree = Tree::new();
        tree.file(
            "proc/self/mountinfo",
            "36 1 259:0 / /srv rw - ext4 /dev/nvme0n1 rw\n",
        );
        tree.file("sys/class/nvme/nvme0/subsysnqn", format!("{subsystem}\n"));
        tree.file("sys/class/nvme/nvme0/nvme0n1/nsid", "1\n");
        tree.file("sys/class/block/nvme0n1/dev", "259:0\n");
        tree
    }

    #[test]
    fn a_namespace_that_linux_has_mounted_is_not_changed() {
        for (told, known) in [
            ("nqn.test:a", "nqn.test:a"),
            ("", MADE),
            ("nqn.test:a", MADE),
        ] {
            let tree = tree(known);
            let refuse = |scope| refuse(&tree.host(), "vfio:0000:01:00.0", &identify(told), scope);
            for scope in [CommandScope::Namespace(1), CommandScope::Subsystem] {
                let error = refuse(scope).unwrap_err();
                let said = format!("{error}: {}", error.remedy());
                assert!(said.contains("nvme0n1 is mounted at /srv"), "{said}");
                assert!(said.ends_with(": unmount /srv"), "{said}");
            }
            refuse(CommandScope::Namespace(2)).unwrap();
        }
        let other = tree("nqn.test:b");
        refuse(
            &other.host(),
            "vfio:0000:01:00.0",
            &identify("nqn.test:a"),
            CommandScope::Subsystem,
        )
        .unwrap();
    }
}

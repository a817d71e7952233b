//! Block devices that Linux makes of others (RAID, LVM, encryption, loop devices), and the disks below them.

use super::{PciAddress, SysfsHost};
use std::path::{Path, PathBuf};

/// Most devices on the way from a block device to a disk. The kernel allows fewer.
const MOST_LEVELS: usize = 16;

/// Layers and disks below a block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockLayers {
    /// The devices above the disks, in words, from the top; none for a disk and for its partitions.
    pub layers: Vec<String>,
    /// The disks, each once.
    pub disks: Vec<LayeredDisk>,
}

/// A disk or partition below a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayeredDisk {
    /// The kernel's name of it, such as nvme0n1p2.
    pub name: String,
    /// The address of the NVMe controller that it is a namespace of; `None` for a disk of another kind.
    pub controller: Option<PciAddress>,
}

impl SysfsHost {
    /// Returns what lies below the block device with this major and minor number; nothing for a number that no block
    /// device has.
    pub fn block_layers(&self, (major, minor): (u32, u32)) -> BlockLayers {
        let mut found = BlockLayers::default();
        let link = self.path(format!("sys/dev/block/{major}:{minor}"));
        if let Ok(place) = std::fs::canonicalize(link) {
            self.below(&place, &mut found, MOST_LEVELS);
        }
        found
    }

    fn below(&self, place: &Path, found: &mut BlockLayers, levels: usize) {
        // A partition of a RAID array or loop device has the layers of the whole device.
        let place = match place.join("partition").exists() {
            true if place.parent().is_some_and(is_layer) => place.parent().unwrap_or(place),
            _ => place,
        };
        let Some(name) = place.file_name().and_then(|name| name.to_str()) else {
            return;
        };
        let below = slaves(place);
        if !is_layer(place) {
            let disk = LayeredDisk {
                name: name.to_owned(),
                controller: self.controller_above(place),
            };
            if !found.disks.contains(&disk) {
                found.disks.push(disk);
            }
            return;
        }
        let layer = self.layer(name);
        if !found.layers.contains(&layer) {
            found.layers.push(layer);
        }
        for one in below {
            if let Ok(place) = std::fs::canonicalize(one)
                && levels > 0
            {
                self.below(&place, found, levels - 1);
            }
        }
    }

    /// Returns the NVMe controller that the place of a disk is below. A namespace with several paths is below its
    /// subsystem instead, which names its controllers.
    fn controller_above(&self, place: &Path) -> Option<PciAddress> {
        let nvme = |place: &Path| {
            let names = place.iter().filter_map(|name| name.to_str());
            let address = names.rev().find_map(|name| name.parse().ok())?;
            self.function(address)?.is_nvme().then_some(address)
        };
        nvme(place).or_else(|| {
            let is_subsystem = |place: &&Path| {
                let kind = place.parent().and_then(Path::file_name);
                kind.is_some_and(|kind| kind == "nvme-subsystem")
            };
            let subsystem = place.ancestors().find(is_subsystem)?;
            let entries = std::fs::read_dir(subsystem).ok()?.flatten();
            let mut links: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
            links.retain(|link| link.is_symlink());
            links.sort();
            let places = links
                .iter()
                .filter_map(|link| std::fs::canonicalize(link).ok());
            places.into_iter().find_map(|place| nvme(&place))
        })
    }

    /// Returns a device above disks in words.
    pub(super) fn layer(&self, device: &str) -> String {
        let about = |what: &str| self.text(format!("sys/class/block/{device}/{what}"));
        let name = about("dm/name").unwrap_or_else(|| device.to_owned());
        let uuid = about("dm/uuid");
        match uuid.as_deref().and_then(|uuid| uuid.split('-').next()) {
            Some("LVM") => format!("the logical volume {name} (LVM)"),
            Some("CRYPT") => format!("the encrypted volume {name}"),
            Some("mpath") => format!("the multipath device {name}"),
            Some(_) => format!("the device mapper target {name}"),
            None if device.starts_with("md") => match about("md/level") {
                Some(level) => format!("the RAID array {device} ({level})"),
                None => format!("the RAID array {device}"),
            },
            None => match about("loop/backing_file") {
                Some(file) => format!("the loop device {device} of {file}"),
                None => name,
            },
        }
    }
}

fn slaves(place: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(place.join("slaves")) else {
        return Vec::new();
    };
    let mut all: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    all.sort();
    all
}

/// True for a device above others. A loop device lists none: it lies on a file.
fn is_layer(place: &Path) -> bool {
    place.join("loop").exists() || !slaves(place).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sysfs::testing::Tree;

    const ONE: &str = "0000:02:00.0";
    const OTHER: &str = "0000:03:00.0";

    /// Two drives, a RAID array of a namespace and a partition, and an encrypted volume and a logical volume on it.
    fn machine() -> Tree {
        let tree = Tree::new();
        for (address, number) in [(ONE, 0), (OTHER, 1)] {
            tree.controller(address, "nvme", 7);
            let disk = format!("sys/devices/pci0000:00/{address}/nvme/nvme{number}/nvme{number}n1");
            tree.block(&disk, &format!("259:{number}"), &[]);
        }
        let second = format!("sys/devices/pci0000:00/{OTHER}/nvme/nvme1/nvme1n1");
        let part = format!("{second}/nvme1n1p2");
        tree.block(&part, "259:9", &[]);
        tree.file(&format!("{part}/partition"), "2\n");
        let first = format!("sys/devices/pci0000:00/{ONE}/nvme/nvme0/nvme0n1");
        let array = "sys/devices/virtual/block/md0";
        tree.block(array, "9:0", &[&first, &part]);
        tree.file(&format!("{array}/md/level"), "raid0\n");
        tree.block(&format!("{array}/md0p1"), "259:20", &[]);
        tree.file(&format!("{array}/md0p1/partition"), "1\n");
        for (name, number, dm, uuid, below) in [
            ("dm-0", "253:0", "secret", "CRYPT-LUKS2-1", array),
            (
                "dm-1",
                "253:1",
                "vg-data",
                "LVM-abc",
                "sys/devices/virtual/block/dm-0",
            ),
        ] {
            let place = format!("sys/devices/virtual/block/{name}");
            tree.block(&place, number, &[below]);
            tree.file(&format!("{place}/dm/name"), format!("{dm}\n"));
            tree.file(&format!("{place}/dm/uuid"), format!("{uuid}\n"));
        }
        tree
    }

    fn disks(layers: &BlockLayers) -> Vec<(&str, Option<String>)> {
        let one = |disk: &LayeredDisk| disk.controller.map(|address| address.to_string());
        let all = layers.disks.iter();
        all.map(|disk| (disk.name.as_str(), one(disk))).collect()
    }

    #[test]
    fn layers_are_named_from_the_top_and_disks_with_their_controllers() {
        let tree = machine();
        let both = [
            ("nvme0n1", Some(ONE.to_owned())),
            ("nvme1n1p2", Some(OTHER.to_owned())),
        ];
        let array = tree.host().block_layers((9, 0));
        assert_eq!(array.layers, ["the RAID array md0 (raid0)"]);
        assert_eq!(disks(&array), both);
        let part = tree.host().block_layers((259, 20));
        assert_eq!(part, array);
        let volume = tree.host().block_layers((253, 1));
        assert_eq!(
            volume.layers,
            [
                "the logical volume vg-data (LVM)",
                "the encrypted volume secret",
                "the RAID array md0 (raid0)"
            ]
        );
        assert_eq!(disks(&volume), both);
        let disk = tree.host().block_layers((259, 9));
        assert!(disk.layers.is_empty());
        assert_eq!(disks(&disk), both[1..]);
        assert_eq!(tree.host().block_layers((8, 0)), BlockLayers::default());
    }

    #[test]
    fn other_disks_have_no_controller_and_a_namespace_with_several_paths_has_one_of_its_subsystem()
    {
        let tree = machine();
        let disk = "sys/devices/pci0000:00/0000:00:1f.2/ata1/host0/block/sda";
        tree.block(disk, "8:0", &[]);
        let array = "sys/devices/virtual/block/md1";
        tree.block(array, "9:1", &[disk]);
        let found = tree.host().block_layers((9, 1));
        assert_eq!(disks(&found), [("sda", None)]);
        let subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0";
        tree.block(&format!("{subsystem}/nvme0n1"), "259:30", &[]);
        let controller = format!("../../../pci0000:00/{ONE}/nvme/nvme0");
        tree.link(&format!("{subsystem}/nvme0"), &controller);
        let found = tree.host().block_layers((259, 30));
        assert_eq!(disks(&found), [("nvme0n1", Some(ONE.to_owned()))]);
    }

    #[test]
    fn a_ring_of_devices_and_a_loop_device_end() {
        let tree = Tree::new();
        let (a, b) = (
            "sys/devices/virtual/block/dm-0",
            "sys/devices/virtual/block/dm-1",
        );
        tree.block(a, "253:0", &[b]);
        tree.block(b, "253:1", &[a]);
        let found = tree.host().block_layers((253, 0));
        assert_eq!((found.layers.len(), found.disks.len()), (2, 0));
        let place = "sys/devices/virtual/block/loop0";
        tree.block(place, "7:0", &[]);
        tree.file(&format!("{place}/loop/backing_file"), "/images/disk\n");
        let found = tree.host().block_layers((7, 0));
        assert_eq!(found.layers, ["the loop device loop0 of /images/disk"]);
        assert!(found.disks.is_empty());
        tree.block(&format!("{place}/loop0p1"), "259:40", &[]);
        tree.file(&format!("{place}/loop0p1/partition"), "1\n");
        assert_eq!(tree.host().block_layers((259, 40)), found);
    }
}

//! A fixture of sysfs and procfs for each kind of use of a disk.

mod paths;

use super::*;
use crate::sysfs::testing::Tree;
use std::fs;

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

fn usage(tree: &Tree) -> DeviceUsage {
    let function = tree.host().function(BDF.parse().unwrap()).unwrap();
    tree.host().usage(&function)
}

fn users(tree: &Tree) -> Vec<String> {
    let usage = usage(tree);
    assert_eq!(usage.unseen, [], "everything is seen");
    usage.holders.iter().map(DeviceHolder::to_string).collect()
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

/// Adds a second controller nvme1 of the subsystem of nvme0, with a disk.
fn second(tree: &Tree, disk: &str, nsid: &str, wwid: &str) {
    let own = format!("sys/bus/pci/devices/{BDF}/nvme/nvme0");
    for (folder, disk, nsid, wwid) in [
        (own.as_str(), "nvme0n1", "1\n", "eui.01\n"),
        ("sys/class/nvme/nvme0", "nvme0n1", "1\n", "eui.01\n"),
        ("sys/class/nvme/nvme1", disk, nsid, wwid),
    ] {
        tree.file(&format!("{folder}/subsysnqn"), "nqn.2026-01.test:a\n");
        tree.file(&format!("{folder}/{disk}/nsid"), nsid);
        tree.file(&format!("{folder}/{disk}/wwid"), wwid);
    }
    tree.file(&format!("sys/class/block/{disk}/dev"), "259:9\n");
    tree.file(&format!("dev/{disk}"), "");
}

#[test]
fn a_mount_in_another_namespace_is_named_with_a_process_of_it() {
    let tree = tree();
    tree.process(77, "sleep", &[]);
    let line = "36 21 259:1 / /mnt rw - ext4 /dev/nvme0n1p1 rw\n";
    tree.file("proc/77/mountinfo", line);
    let said = "nvme0n1p1 is mounted at /mnt in the mount namespace of sleep (pid 77)";
    assert_eq!(users(&tree), [said]);
    assert_eq!(usage(&tree).remedies(), "`nsenter -t 77 -m umount /mnt`");
    // The same namespace is read once.
    let tree = self::tree();
    tree.link("proc/self/ns/mnt", "mnt:[1]");
    tree.process(77, "sleep", &[]);
    tree.link("proc/77/ns/mnt", "mnt:[1]");
    tree.file("proc/77/mountinfo", line);
    assert!(users(&tree).is_empty());
}

#[test]
fn a_program_with_a_node_open_is_named() {
    for node in ["dev/nvme0n1", "dev/nvme0n1p2", "dev/ng0n1", "dev/nvme0"] {
        let tree = tree();
        tree.process(12, "dd", &["dev/null", "pipe:[9]", node]);
        assert_eq!(users(&tree), [format!("/{node} is open in dd (pid 12)")]);
        assert_eq!(usage(&tree).remedies(), "end dd (pid 12)");
    }
    let tree = tree();
    tree.process(12, "dd", &["dev/nvme1n1", "dev/ng0n12", "dev/nvme01"]);
    assert!(users(&tree).is_empty(), "other disks");
}

#[test]
fn this_program_and_threads_of_the_kernel_are_no_users() {
    let tree = tree();
    tree.process(12, "nvme-gpu", &["dev/nvme0n1"]);
    fs::remove_dir_all(tree.host().path("proc/self")).unwrap();
    tree.link("proc/self", "12");
    assert!(users(&tree).is_empty());
    let tree = self::tree();
    tree.file("proc/2/comm", "kthreadd\n");
    tree.file("proc/2/stat", "2 (kth) readd) S 0 0 0 0 -1 2129984 0 0\n");
    tree.file("proc/2/fd", "not readable");
    assert!(users(&tree).is_empty());
}

#[test]
fn threads_of_a_process_whose_first_thread_ended_are_looked_at() {
    let tree = tree();
    tree.process(12, "db", &[]);
    tree.file("proc/12/stat", "12 (db) Z 1 12 12 0 -1 4194304 0 0\n");
    let link = tree.name("dev/nvme0n1");
    tree.link("proc/12/task/13/fd/4", &link);
    assert_eq!(users(&tree), ["/dev/nvme0n1 is open in db (pid 12)"]);
}

/// Thread numbers above those that Linux gives, so that the test does not examine threads of this machine.
const THREADS: (u32, u32) = (5_000_001, 5_000_002);

#[test]
fn files_of_a_thread_alone_are_open_and_so_are_its_mounts() {
    let (first, other) = THREADS;
    let tree = tree();
    tree.process(first, "db", &["dev/null"]);
    let link = tree.name("dev/nvme0n1");
    tree.link(&format!("proc/{first}/task/{other}/fd/4"), &link);
    let said = format!("/dev/nvme0n1 is open in db (pid {first})");
    assert_eq!(users(&tree), [said]);

    let tree = self::tree();
    tree.process(first, "db", &[]);
    let line = "36 21 259:1 / /mnt rw - ext4 /dev/nvme0n1p1 rw\n";
    tree.file(&format!("proc/{first}/task/{other}/mountinfo"), line);
    let said = format!("nvme0n1p1 is mounted at /mnt in the mount namespace of db (pid {first})");
    assert_eq!(users(&tree), [said]);
}

#[test]
fn a_mount_namespace_is_known_once_its_table_was_read() {
    let tree = tree();
    for id in [77, 78] {
        tree.process(id, "sleep", &[]);
        tree.link(&format!("proc/{id}/ns/mnt"), "mnt:[5]");
    }
    // The first process of the namespace ends while it is looked at.
    fs::remove_file(tree.host().path("proc/77/mountinfo")).unwrap();
    let line = "36 21 259:1 / /mnt rw - ext4 /dev/nvme0n1p1 rw\n";
    tree.file("proc/78/mountinfo", line);
    let said = "nvme0n1p1 is mounted at /mnt in the mount namespace of sleep (pid 78)";
    assert_eq!(users(&tree), [said]);
}

#[test]
fn a_node_that_is_mapped_or_registered_is_open() {
    let tree = tree();
    tree.process(12, "db", &[]);
    let name = tree.name("dev/nvme0n1p1");
    tree.file(
        "proc/12/maps",
        format!("7f00-7f01 rw-s 00000000 00:05 12    {name}\n7f02-7f03 r--p 00000000 00:05 1 /usr/lib/x\n"),
    );
    assert_eq!(users(&tree), ["/dev/nvme0n1p1 is open in db (pid 12)"]);
    let tree = self::tree();
    tree.process(12, "fio", &["anon_inode:[io_uring]"]);
    for text in ["nvme0n1", &tree.name("dev/nvme0n1")] {
        let text = format!("SqMask: 0x7\nUserFiles:\t1\n    0: {text}\nUserBufs: 0\n");
        tree.file("proc/12/fdinfo/3", text);
        assert_eq!(users(&tree), ["/dev/nvme0n1 is open in fio (pid 12)"]);
    }
}

#[test]
fn nodes_of_other_drivers_are_looked_at() {
    for (node, file) in [
        ("dev/vfio/7", "sys/class/vfio/7/dev"),
        ("dev/vfio/noiommu-7", "sys/class/vfio/noiommu-7/dev"),
        (
            "dev/vfio/devices/vfio3",
            "sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3/dev",
        ),
        ("dev/nvme-gpu-0000:01:00.0", "sys/class/nvme_gpu/x/dev"),
        ("dev/uio0", "sys/bus/pci/devices/0000:01:00.0/uio/uio0/dev"),
    ] {
        let tree = Tree::new();
        tree.controller(BDF, "vfio-pci", 7);
        tree.file(file, "511:0\n");
        tree.process(33, "qemu", &["dev/vfio/vfio", node]);
        assert_eq!(users(&tree), [format!("/{node} is open in qemu (pid 33)")]);
    }
    let tree = Tree::new();
    tree.controller(BDF, "", 7);
    tree.process(
        33,
        "spdk",
        &["sys/devices/pci0000:00/0000:01:00.0/resource0"],
    );
    assert_eq!(
        users(&tree),
        ["a BAR of 0000:01:00.0 is open in spdk (pid 33)"]
    );
}

#[test]
fn loop_devices_on_the_disk_and_on_its_files_are_users() {
    let tree = tree();
    tree.file(
        "sys/class/block/loop0/loop/backing_file",
        tree.name("dev/nvme0n1"),
    );
    tree.file("sys/class/block/loop0/dev", "7:0\n");
    tree.file(
        "proc/self/mountinfo",
        "36 21 7:0 / /mnt rw - ext4 /dev/loop0 rw\n",
    );
    let said = [
        "loop0 is mounted at /mnt".to_owned(),
        format!("loop0 is a loop device over {}", tree.name("dev/nvme0n1")),
    ];
    assert_eq!(users(&tree), said);
    let tree = self::tree();
    tree.file("sys/class/block/loop1/loop/backing_file", "/srv/a/image\n");
    tree.file("srv/a/image", "");
    tree.file(
        "proc/self/mountinfo",
        "1 1 8:1 / / rw - ext4 /dev/sda1 rw\n36 1 259:1 / /srv rw - ext4 /dev/nvme0n1p1 rw\n",
    );
    let said = [
        "nvme0n1p1 is mounted at /srv",
        "loop1 is a loop device over /srv/a/image",
    ];
    assert_eq!(users(&tree), said);
    // Another file system is mounted over the folder.
    tree.file(
        "proc/self/mountinfo",
        "36 1 259:1 / /srv rw - ext4 /dev/nvme0n1p1 rw\n37 36 8:2 / /srv/a rw - ext4 /dev/sda2 rw\n",
    );
    assert_eq!(users(&tree), ["nvme0n1p1 is mounted at /srv"]);
}

#[test]
fn a_swap_file_is_a_use() {
    let tree = tree();
    tree.file(
        "proc/self/mountinfo",
        "36 1 259:2 / /srv rw - ext4 /dev/nvme0n1p2 rw\n",
    );
    tree.file(
        "proc/swaps",
        "Filename Type\n/srv/swap\\040file file 9 0 -2\n",
    );
    let said = [
        "nvme0n1p2 is mounted at /srv",
        "nvme0n1p2 holds the swap file /srv/swap file",
    ];
    assert_eq!(users(&tree), said);
    assert_eq!(
        usage(&tree).remedies(),
        "`swapoff /srv/swap file`; unmount /srv"
    );
}

#[test]
fn exports_of_the_kernel_are_uses() {
    for (folder, file, what) in [
        (
            "nvmet/subsystems/x/namespaces/1",
            "device_path",
            "dev/nvme0n1",
        ),
        ("nvmet/subsystems/x/passthru", "device_path", "dev/nvme0"),
        ("target/core/iblock_0/disk", "udev_path", "dev/nvme0n1p2"),
        (
            "usb_gadget/g/functions/mass_storage.0/lun.0",
            "file",
            "dev/nvme0n1",
        ),
    ] {
        let tree = tree();
        let folder = format!("sys/kernel/config/{folder}");
        tree.file(&format!("{folder}/{file}"), tree.name(what));
        tree.file(what, "");
        let name = what.trim_start_matches("dev/");
        let by = folder.trim_start_matches("sys/kernel/config/");
        assert_eq!(
            users(&tree),
            [format!("{name} is exported by the kernel ({by})")]
        );
        if file == "device_path" {
            tree.file(&format!("{folder}/enable"), "1\n");
            assert_eq!(
                usage(&tree).remedies(),
                format!("`echo 0 > /{folder}/enable`")
            );
            tree.file(&format!("{folder}/enable"), "0\n");
            assert!(users(&tree).is_empty(), "it is off");
        }
    }
    let tree = tree();
    tree.file("sys/module/nvmet/refcnt", "1\n");
    let unseen = usage(&tree).list_unseen();
    assert!(unseen.starts_with("what nvmet exports"), "{unseen}");
    tree.file("sys/kernel/config/nvmet/subsystems/none", "");
    assert!(users(&tree).is_empty(), "it is seen");
}

#[test]
fn members_of_bcache_and_of_btrfs_are_uses() {
    let tree = tree();
    tree.file("sys/class/block/nvme0n1p1/bcache/state", "");
    tree.file("sys/fs/btrfs/0a1b/devices/nvme0n1p2/x", "");
    let said = [
        "nvme0n1p1 is part of a bcache",
        "nvme0n1p2 is part of the btrfs file system 0a1b",
    ];
    assert_eq!(users(&tree), said);
}

#[test]
fn virtual_functions_are_a_use() {
    let tree = tree();
    let file = format!("sys/bus/pci/devices/{BDF}/sriov_numvfs");
    tree.file(&file, "0\n");
    assert!(users(&tree).is_empty());
    tree.file(&file, "2\n");
    assert_eq!(users(&tree), ["0000:01:00.0 has 2 virtual functions"]);
    let remedy = "`echo 0 > /sys/bus/pci/devices/0000:01:00.0/sriov_numvfs`";
    assert_eq!(usage(&tree).remedies(), remedy);
}

#[test]
fn a_namespace_in_use_through_another_controller_is_a_use() {
    let tree = tree();
    second(&tree, "nvme1n1", "1\n", "eui.01\n");
    assert!(users(&tree).is_empty());
    tree.file(
        "proc/self/mountinfo",
        "36 1 259:9 / /srv rw - ext4 /dev/nvme1n1 rw\n",
    );
    let said =
        "nvme1n1 is mounted at /srv (nvme1n1 of nvme1 is a namespace that both controllers share)";
    assert_eq!(users(&tree), [said]);
    // The same disk by its other name.
    let usage = tree.host().usage_of_disk("nvme0n1p1");
    assert_eq!(usage.list(), said);
    for (nsid, wwid) in [("2\n", "eui.01\n"), ("1\n", "eui.02\n")] {
        let tree = self::tree();
        second(&tree, "nvme1n1", nsid, wwid);
        tree.file(
            "proc/self/mountinfo",
            "36 1 259:9 / /srv rw - ext4 /dev/nvme1n1 rw\n",
        );
        assert!(users(&tree).is_empty(), "another namespace");
    }
}

#[test]
fn a_subsystem_is_judged_by_its_name_and_namespace() {
    let tree = tree();
    second(&tree, "nvme1n1", "1\n", "eui.01\n");
    tree.file(
        "proc/self/mountinfo",
        "36 1 259:9 / /srv rw - ext4 /dev/nvme1n1 rw\n",
    );
    let of = |name: &str, scope| tree.host().usage_of_subsystem(name, scope).holders.len();
    let name = "nqn.2026-01.test:a";
    assert_eq!(of(name, CommandScope::Namespace(1)), 1);
    assert_eq!(of(name, CommandScope::Subsystem), 1);
    assert_eq!(of(name, CommandScope::Namespace(2)), 0);
    assert_eq!(of("nqn.2026-01.test:b", CommandScope::Subsystem), 0);
}

#[test]
fn a_partition_is_in_use_with_its_disk() {
    let tree = tree();
    tree.process(12, "dd", &["dev/nvme0n1"]);
    let of = |name: &str| tree.host().usage_of_disk(name).list();
    assert_eq!(of("nvme0n1p1"), "/dev/nvme0n1 is open in dd (pid 12)");
    tree.file(
        "proc/self/mountinfo",
        "36 1 259:2 / /srv rw - ext4 /dev/nvme0n1p2 rw\n",
    );
    assert!(
        !of("nvme0n1p1").contains("/srv"),
        "its neighbour is none of its business"
    );
}

#[test]
fn what_cannot_be_looked_at_is_told_and_refused() {
    let refused = |tree: &Tree| {
        let error = usage(tree).refuse("0000:01:00.0", "").unwrap_err();
        assert!(matches!(error, Error::Environment { .. }), "{error}");
        format!("{error}: {}", error.remedy())
    };
    let tree = tree();
    tree.process(12, "dd", &[]);
    fs::remove_dir(tree.host().path("proc/12/fd")).unwrap();
    assert!(users(&tree).is_empty(), "a process that has ended");
    tree.file("proc/12/fd", "not readable");
    let said = refused(&tree);
    assert!(
        said.contains("what 1 processes of other users have open"),
        "{said}"
    );
    assert!(said.ends_with("run this command as root"), "{said}");

    let tree = self::tree();
    tree.link("proc/self/ns/pid", "pid:[4026532000]");
    let said = refused(&tree);
    assert!(said.contains("outside this container"), "{said}");
    tree.link("proc/self/ns/pid", "pid:[4026531836]");
    assert!(users(&tree).is_empty());

    let tree = self::tree();
    fs::remove_file(tree.host().path("dev/nvme0n1p1")).unwrap();
    let said = refused(&tree);
    assert!(
        said.contains("whether nvme0n1p1 is open exclusively"),
        "{said}"
    );

    let tree = self::tree();
    fs::remove_dir_all(tree.host().path("proc")).unwrap();
    assert!(refused(&tree).contains("/proc is not readable"));
}

#[test]
fn a_long_list_is_cut() {
    let tree = tree();
    for id in 0..11 {
        tree.process(100 + id, "dd", &["dev/nvme0n1"]);
    }
    let error = usage(&tree).refuse("it", "; or not").unwrap_err();
    assert!(
        error.to_string().ends_with("dd (pid 107); and 3 more"),
        "{error}"
    );
    assert!(error.remedy().ends_with("and 3 more; or not"), "{error}");
}

#[test]
fn what_udev_found_names_an_exclusive_user() {
    let tree = tree();
    let known = "S:disk/by-id/x\nE:ID_FS_TYPE=zfs_member\nE:ID_FS_LABEL=tank\n";
    tree.file("run/udev/data/b259:1", known);
    let content = blocks::content(&tree.host(), "nvme0n1p1");
    assert_eq!(content.as_deref(), Some("zfs_member, tank"));
    let device = "nvme0n1p1".to_owned();
    let said = DeviceHolder::Claimed { device, content }.to_string();
    assert_eq!(
        said,
        "nvme0n1p1 is in use (opened exclusively; on it: zfs_member, tank)"
    );
}

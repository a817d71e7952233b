//! Paths that the kernel names: of loop devices and of exports, in whatever mount namespace.

use super::*;

#[test]
fn what_is_not_at_its_path_here_may_be_on_the_disk() {
    let unseen = |tree: &Tree| {
        let usage = usage(tree);
        assert_eq!(usage.holders, []);
        usage.list_unseen()
    };
    let tree = tree();
    tree.file("sys/class/block/loop3/loop/backing_file", "/in/a/container");
    tree.file("sys/class/block/zram0/backing_dev", "none\n");
    assert_eq!(
        unseen(&tree),
        "what loop3 lies on (in this mount namespace, nothing answers at /in/a/container)"
    );
    tree.file("in/a/container", "");
    assert_eq!(unseen(&tree), "", "a file of another file system");

    let tree = self::tree();
    let export = "sys/kernel/config/nvmet/subsystems/x/namespaces/1/device_path";
    tree.file(export, "/dev/of-a-container\n");
    assert_eq!(
        unseen(&tree),
        "what the kernel (nvmet/subsystems/x/namespaces/1) lies on (in this mount namespace, nothing answers at \
         /dev/of-a-container)"
    );
    tree.file("dev/of-a-container", "");
    assert_eq!(unseen(&tree), "");
}

#[test]
fn a_file_is_of_the_file_system_whose_number_it_has() {
    use std::os::unix::fs::MetadataExt;
    let tree = tree();
    tree.file("by/another/name", "");
    let number = fs::metadata(tree.name("by/another/name")).unwrap().dev();
    let (major, minor) = (libc::major(number), libc::minor(number));
    tree.file(
        "proc/self/mountinfo",
        format!("36 1 {major}:{minor} / /srv rw - btrfs /dev/nvme0n1p1 rw\n"),
    );
    let export = "sys/kernel/config/target/core/fileio_0/disk/udev_path";
    tree.file(export, tree.name("by/another/name"));
    let said = [
        "nvme0n1p1 is mounted at /srv",
        "nvme0n1p1 is exported by the kernel (target/core/fileio_0/disk)",
    ];
    assert_eq!(users(&tree), said);
}

#[test]
fn an_export_by_a_path_of_a_container_is_found_there() {
    use std::os::unix::fs::MetadataExt;
    let tree = tree();
    tree.process(77, "podman", &[]);
    tree.file("proc/77/root/srv/image", "");
    let image = tree.name("proc/77/root/srv/image");
    let number = fs::metadata(image).unwrap().dev();
    let (major, minor) = (libc::major(number), libc::minor(number));
    tree.file(
        "proc/self/mountinfo",
        format!("36 1 {major}:{minor} / /mnt rw - ext4 /dev/nvme0n1p1 rw\n"),
    );
    let export = "sys/kernel/config/nvmet/subsystems/x/namespaces/1/device_path";
    tree.file(export, "/srv/image\n");
    let said = [
        "nvme0n1p1 is mounted at /mnt",
        "nvme0n1p1 is exported by the kernel (nvmet/subsystems/x/namespaces/1)",
    ];
    // First no device has that path here, then another device has it.
    let found = usage(&tree).holders;
    assert_eq!(
        found
            .iter()
            .map(DeviceHolder::to_string)
            .collect::<Vec<_>>(),
        said
    );
    tree.link("srv/image", "/dev/null");
    assert_eq!(users(&tree), said);
    // Once the container's process has ended, nothing shows that mount.
    fs::remove_dir_all(tree.host().path("proc/77")).unwrap();
    assert_eq!(users(&tree), said[..1]);
}

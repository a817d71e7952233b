//! `bind` and `unbind` over fixtures of sysfs, where no kernel acts.

use super::*;
use crate::sysfs::testing::Tree;
use std::time::Duration;

const BDF: &str = "0000:01:00.0";

fn address() -> PciAddress {
    BDF.parse().unwrap()
}

fn tree(driver: &str) -> Tree {
    let tree = Tree::new();
    tree.controller(BDF, driver, 7);
    tree.file("sys/bus/pci/drivers/vfio-pci/bind", "");
    tree.file("sys/bus/pci/drivers/vfio-pci/unbind", "");
    tree.file("sys/bus/pci/drivers_probe", "");
    tree
}

/// Writes the record that `bind` would have made, with `before` as the driver before.
fn is_ours(tree: &Tree, before: &str) {
    let host = tree.host();
    let record = BindingRecord {
        before: Some(before.to_owned()),
        binding: host.binding(address()),
        ..BindingRecord::default()
    };
    host.remember(address(), &record).unwrap();
}

fn error(result: Result<impl std::fmt::Debug>) -> String {
    let error = result.unwrap_err();
    format!("{error}: {}", error.remedy())
}

#[test]
fn what_vfio_does_not_take_gets_its_driver_back() {
    // No kernel acts on the fixture, so the controller stays with nvme.
    let tree = tree("nvme");
    let said = error(tree.host().bind(address(), LendingDriver::Vfio, false));
    assert!(said.contains("not taken by vfio-pci"), "{said}");
    let line = format!("{BDF}\n");
    assert_eq!(tree.text("sys/bus/pci/drivers/nvme/unbind"), line);
    assert_eq!(tree.text("sys/bus/pci/drivers_probe"), line);
    let folder = format!("sys/bus/pci/devices/{BDF}");
    let wish = tree.text(&format!("{folder}/driver_override"));
    assert_eq!(wish, "\n", "the wish is taken back");
    assert!(!tree.host().exists(record::place(address())));
}

#[test]
fn a_controller_of_vfio_is_bound_already() {
    let tree = tree("vfio-pci");
    let bound = tree
        .host()
        .bind(address(), LendingDriver::Vfio, false)
        .unwrap();
    assert_eq!(
        (bound.before.as_deref(), bound.group),
        (Some("vfio-pci"), Some(7))
    );
    assert!(bound.in_the_way.is_empty());
    assert_eq!(tree.text("sys/bus/pci/drivers/vfio-pci/unbind"), "");
}

#[test]
fn a_controller_in_use_keeps_its_driver() {
    let tree = tree("nvme");
    tree.disk(BDF, "nvme0n1", "259:0", &[]);
    tree.file(
        "proc/self/mountinfo",
        "36 21 259:0 / /srv rw - ext4 /dev/nvme0n1 rw\n",
    );
    let said = error(tree.host().bind(address(), LendingDriver::Vfio, false));
    assert!(
        said.contains("in use: nvme0n1 is mounted at /srv: unmount /srv; or add --force"),
        "{said}"
    );
    assert_eq!(tree.text("sys/bus/pci/drivers/nvme/unbind"), "");
}

#[test]
fn every_reason_not_to_bind_is_told() {
    let tree = Tree::new();
    let said = error(tree.host().bind(address(), LendingDriver::Vfio, false));
    assert!(said.contains("no PCI function"), "{said}");
    tree.function(BDF, &Tree::config(1, 2, 0x02_00_00), "e1000", 7);
    let said = error(tree.host().bind(address(), LendingDriver::Vfio, false));
    assert!(said.contains("its class is 020000"), "{said}");
    tree.controller(BDF, "nvme", 7);
    let said = error(tree.host().bind(address(), LendingDriver::Vfio, false));
    assert!(said.contains("modprobe vfio_pci"), "{said}");
    fs::remove_file(
        tree.host()
            .path(format!("sys/bus/pci/devices/{BDF}/iommu_group")),
    )
    .unwrap();
    let said = error(tree.host().bind(address(), LendingDriver::Vfio, false));
    assert!(said.contains("IOMMU is off"), "{said}");
}

#[test]
fn others_of_the_group_are_named() {
    let tree = tree("vfio-pci");
    tree.function(
        "0000:00:01.0",
        &Tree::config(1, 2, 0x06_04_00),
        "pcieport",
        7,
    );
    tree.function("0000:02:00.0", &Tree::config(1, 2, 0x02_00_00), "e1000", 7);
    let bound = tree
        .host()
        .bind(address(), LendingDriver::Vfio, false)
        .unwrap();
    let other = "0000:02:00.0".parse().unwrap();
    assert_eq!(bound.in_the_way, [(other, "e1000".to_owned())]);
}

#[test]
fn the_module_leaves_the_type_of_the_group_as_it_is() {
    let tree = tree("vfio-pci");
    is_ours(&tree, "nvme");
    tree.file("sys/bus/pci/drivers/nvme/bind", "");
    let said = error(tree.host().bind(address(), LendingDriver::Module, false));
    assert!(
        said.contains("nvme_gpu is not loaded: load it: `modprobe nvme_gpu`"),
        "{said}"
    );
    tree.file("sys/bus/pci/drivers/nvme_gpu/bind", "");
    tree.file("sys/kernel/iommu_groups/7/type", "DMA-FQ\n");
    // No kernel acts on the fixture: vfio-pci does not take the controller, so `bind` restores the driver.
    let said = error(tree.host().bind(address(), LendingDriver::Module, false));
    assert!(said.contains("not taken by nvme_gpu"), "{said}");
    assert_eq!(tree.text("sys/kernel/iommu_groups/7/type"), "DMA-FQ\n");
    let line = format!("{BDF}\n");
    assert_eq!(tree.text("sys/bus/pci/drivers/vfio-pci/unbind"), line);
    assert!(
        !tree.host().exists(record::place(address())),
        "it went back to the driver before both"
    );
    let node = LendingDriver::Module.node(address(), Some(7));
    assert_eq!(node, format!("/dev/nvme-gpu-{BDF}"));
}

#[test]
fn giving_back_goes_to_the_driver_before() {
    let tree = tree("vfio-pci");
    is_ours(&tree, "nvme");
    tree.file("sys/bus/pci/drivers/nvme/bind", "");
    tree.host().unbind(address(), false).unwrap();
    let line = format!("{BDF}\n");
    assert_eq!(tree.text("sys/bus/pci/drivers/vfio-pci/unbind"), line);
    assert_eq!(tree.text("sys/bus/pci/drivers_probe"), line);
    assert!(!tree.host().exists(record::place(address())));
}

#[test]
fn what_had_no_driver_before_gets_none() {
    let tree = tree("vfio-pci");
    is_ours(&tree, "");
    tree.host().unbind(address(), false).unwrap();
    assert_eq!(
        tree.text("sys/bus/pci/drivers_probe"),
        "",
        "not offered to others"
    );
}

#[test]
fn users_are_found_by_name_or_number() {
    let tree = Tree::new();
    tree.file(
        "etc/passwd",
        "root:x:0:0::/root:/bin/sh\nanna:x:1000:100::/home/anna:/bin/sh\n",
    );
    let host = tree.host();
    assert_eq!(host.user_id("anna").unwrap(), 1000);
    assert_eq!(host.user_id("1234").unwrap(), 1234);
    assert!(error(host.user_id("ann")).contains("no user 'ann'"));
    assert!(error(host.give_nodes(address(), 7, 0)).contains("dev/vfio/7"));
}

#[test]
fn a_function_with_a_node_of_its_own_is_given_with_it() {
    let tree = Tree::new();
    let host = tree.host();
    assert_eq!(host.vfio_node(address()), None);
    tree.file(&format!("sys/bus/pci/devices/{BDF}/vfio-dev/vfio3/dev"), "");
    let own = host.vfio_node(address()).unwrap();
    assert!(own.ends_with("dev/vfio/devices/vfio3"));
    tree.file("dev/vfio/7", "");
    let id = std::os::unix::fs::MetadataExt::uid(&fs::metadata(host.path("dev")).unwrap());
    host.give_nodes(address(), 7, id).unwrap();
    tree.file("dev/vfio/devices/vfio3", "");
    host.give_nodes(address(), 7, id).unwrap();
}

#[test]
fn only_what_vfio_has_is_given_back() {
    let said = error(tree("nvme").host().unbind(address(), false));
    assert!(
        said.contains("bound to nvme, not to vfio-pci or nvme_gpu"),
        "{said}"
    );
}

#[test]
fn a_function_that_something_else_gave_to_vfio_is_left_there() {
    let tree = tree("vfio-pci");
    tree.file("sys/bus/pci/drivers/nvme_gpu/bind", "");
    let left = |tree: &Tree| {
        for said in [
            error(tree.host().unbind(address(), false)),
            error(tree.host().bind(address(), LendingDriver::Module, false)),
        ] {
            assert!(
                said.contains("by something else than `nvme-gpu bind`"),
                "{said}"
            );
            assert!(said.contains("libvirt"), "{said}");
        }
        assert_eq!(tree.text("sys/bus/pci/drivers/vfio-pci/unbind"), "");
    };
    left(&tree);
    // This project bound the function once, and another program has bound it since: sysfs has a new link.
    is_ours(&tree, "nvme");
    let record = tree.host().recorded(address()).unwrap();
    let stale = BindingRecord {
        binding: record.binding.map(|inode| inode + 1),
        ..record
    };
    tree.host().remember(address(), &stale).unwrap();
    left(&tree);
    tree.host().unbind(address(), true).unwrap();
    let line = format!("{BDF}\n");
    assert_eq!(tree.text("sys/bus/pci/drivers/vfio-pci/unbind"), line);
}

#[test]
fn a_running_program_keeps_its_controller() {
    for (driver, node, lender) in [
        ("vfio-pci", "dev/vfio/7", LendingDriver::Module),
        ("nvme_gpu", "dev/nvme-gpu-0000:01:00.0", LendingDriver::Vfio),
    ] {
        let tree = tree(driver);
        is_ours(&tree, "nvme");
        tree.file("sys/bus/pci/drivers/nvme_gpu/bind", "");
        tree.process(33, "bench", &[node]);
        let unbound = tree.host().unbind(address(), false);
        let unbound = unbound.map(|unbound| unbound.driver);
        for said in [
            error(unbound),
            error(tree.host().bind(address(), lender, false)),
        ] {
            assert!(
                said.contains(&format!("/{node} is open in bench (pid 33): end bench")),
                "{said}"
            );
            assert!(
                said.ends_with("; or add --force, which breaks that use"),
                "{said}"
            );
        }
        assert_eq!(
            tree.text(&format!("sys/bus/pci/drivers/{driver}/unbind")),
            ""
        );
        let unbound = tree.host().unbind(address(), true).unwrap();
        assert_eq!(unbound.broken, [format!("bench (pid 33) loses /{node}")]);
    }
}

#[test]
fn force_says_what_it_breaks() {
    let tree = tree("nvme");
    tree.disk(BDF, "nvme0n1", "259:0", &[]);
    let line = "36 21 259:0 / /srv rw - ext4 /dev/nvme0n1 rw\n";
    tree.file("proc/self/mountinfo", line);
    let said = error(tree.host().bind(address(), LendingDriver::Vfio, true));
    assert!(said.contains("not taken by vfio-pci"), "{said}");
    let unbound = tree.text("sys/bus/pci/drivers/nvme/unbind");
    assert_eq!(unbound, format!("{BDF}\n"), "it was taken all the same");
    let function = tree.host().function(address()).unwrap();
    let mut hold = DiskHold::of(&tree.host(), &function, true).unwrap();
    let broken = hold.judge_again(&tree.host(), &function, true).unwrap();
    let said = "the file system at /srv loses its disk, and what it has not written yet";
    assert_eq!(broken, [said]);
}

#[test]
fn a_use_that_begins_after_the_first_judgement_is_found() {
    let tree = tree("nvme");
    tree.disk(BDF, "nvme0n1", "259:0", &[]);
    let host = tree.host();
    let function = host.function(address()).unwrap();
    let mut hold = DiskHold::of(&host, &function, false).unwrap();
    tree.process(12, "dd", &["dev/nvme0n1"]);
    let said = error(hold.judge_again(&host, &function, false));
    assert!(
        said.contains("/dev/nvme0n1 is open in dd (pid 12)"),
        "{said}"
    );
}

#[test]
fn a_program_that_looks_for_a_moment_is_waited_for() {
    let tree = tree("nvme");
    tree.disk(BDF, "nvme0n1", "259:0", &[]);
    tree.process(12, "(udev-worker)", &["dev/nvme0n1"]);
    let host = tree.host();
    let function = host.function(address()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(120));
            fs::remove_dir_all(host.path("proc/12")).unwrap();
        });
        let patience = Duration::from_secs(600);
        DiskHold::within(&host, &function, false, patience).unwrap();
    });
}

#[test]
fn what_cannot_be_seen_is_not_taken_for_free() {
    let tree = tree("nvme");
    tree.process(12, "dd", &[]);
    fs::remove_dir(tree.host().path("proc/12/fd")).unwrap();
    tree.file("proc/12/fd", "not readable");
    let said = error(tree.host().bind(address(), LendingDriver::Vfio, false));
    assert!(
        said.contains("cannot be told without seeing what 1 processes"),
        "{said}"
    );
    assert!(said.contains("run this command as root"), "{said}");
    let tree = self::tree("pciback");
    let said = error(tree.host().bind(address(), LendingDriver::Vfio, false));
    assert!(
        said.contains("what the driver pciback does with it"),
        "{said}"
    );
    assert_eq!(tree.text("sys/bus/pci/drivers/pciback/unbind"), "");
}

#[test]
fn the_wish_of_before_comes_back() {
    let tree = tree("nvme");
    let wish = format!("sys/bus/pci/devices/{BDF}/driver_override");
    tree.file(&wish, "nvme\n");
    let function = tree.host().function(address()).unwrap();
    let record = tree.host().record_before(&function);
    tree.host().remember(address(), &record).unwrap();
    tree.host().move_to(&function, LendingDriver::Vfio).unwrap();
    assert_eq!(tree.text(&wish), "vfio-pci\n");
    tree.host().give_back(address()).unwrap();
    assert_eq!(tree.text(&wish), "nvme\n");
}

#[test]
fn neighbours_that_are_not_in_the_way_are_neighbours() {
    let tree = tree("vfio-pci");
    let bridge = Tree::config(1, 2, 0x06_04_00);
    tree.function("0000:00:01.0", &bridge, "pcieport", 7);
    tree.controller("0000:02:00.0", "vfio-pci", 7);
    let function = tree.host().function(address()).unwrap();
    let neighbours = tree.host().neighbours(&function);
    assert_eq!(GroupNeighbour::list(&neighbours), "0000:02:00.0 (vfio-pci)");
    assert!(tree.host().in_the_way(&function).is_empty());
}

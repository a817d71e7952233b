//! A test for each finding, over fixtures of sysfs.

use super::super::examine;
use super::*;
use nvme_driver::sysfs::testing::Tree;

const BDF: &str = "0000:02:00.0";
const BRIDGE: &str = "0000:00:01.0";

fn found(tree: &Tree, check: &str) -> String {
    examine(&tree.host()).find(BDF, check)
}

fn with(driver: &str) -> Tree {
    let tree = Tree::new();
    tree.controller(BDF, driver, 7);
    tree
}

/// Returns the configuration space of the controller with a PCI Express capability.
fn express(capable: u32, trained: u16, control: u16, control2: u16) -> Vec<u8> {
    let mut bytes = Tree::config(0x144D, 0xA80A, nvme_driver::pci::CLASS_NVME);
    bytes[6] = 0x10;
    bytes[0x34] = 0x80;
    bytes[0x80] = 0x10;
    bytes[0x88..0x8A].copy_from_slice(&control.to_le_bytes());
    bytes[0x8C..0x90].copy_from_slice(&capable.to_le_bytes());
    bytes[0x92..0x94].copy_from_slice(&trained.to_le_bytes());
    bytes[0xA8..0xAA].copy_from_slice(&control2.to_le_bytes());
    bytes
}

#[test]
fn the_driver_and_what_uses_it_are_told() {
    assert_eq!(found(&with("vfio-pci"), "driver"), "Ok: vfio-pci: -");
    assert!(found(&with(""), "driver").starts_with("Note: none: `nvme-gpu bind 0000:02:00.0`"));
    let tree = with("nvme");
    assert!(found(&tree, "driver").starts_with("Note: nvme; nothing uses its disks"));
    tree.disk(BDF, "nvme0n1", "259:0", &[]);
    tree.file("proc/swaps", "Filename\n/dev/nvme0n1 partition\n");
    assert!(found(&tree, "driver").starts_with("Warning: in use: nvme0n1 holds swap"));
    let tree = with("vfio-pci");
    tree.process(12, "qemu", &["dev/vfio/7"]);
    let said = found(&tree, "driver");
    assert!(
        said.starts_with("Warning: in use: /dev/vfio/7 is open in qemu (pid 12)"),
        "{said}"
    );
    let tree = with("nvme");
    tree.link("proc/self/ns/pid", "pid:[4026532000]");
    assert!(found(&tree, "driver").contains("as far as is seen: not processes"));
}

#[test]
fn the_type_of_the_group_is_told_and_matters_to_neither_way() {
    for driver in ["nvme", "nvme_gpu"] {
        let tree = with(driver);
        assert!(found(&tree, "group type").starts_with("no finding"));
        let kind = "sys/kernel/iommu_groups/7/type";
        for (text, said) in [
            ("DMA\n", "Ok: DMA (strict): "),
            ("DMA-FQ\n", "Ok: DMA-FQ (lazy): "),
            ("identity\n", "Ok: identity (not translated): "),
            ("odd\n", "Ok: odd: "),
        ] {
            tree.file(kind, text);
            let found = found(&tree, "group type");
            assert!(found.starts_with(said), "{found}");
        }
    }
}

#[test]
fn a_shared_group_names_the_others() {
    let tree = with("nvme");
    assert_eq!(found(&tree, "group"), "Ok: 7, isolated: -");
    tree.function("0000:03:00.0", &Tree::config(1, 2, 0x02_00_00), "e1000", 7);
    assert!(found(&tree, "group").contains("shared with 0000:03:00.0 (e1000)"));
    let ways = |tree: &Tree| {
        let topology = crate::topology::MachineTopology::of(&tree.host());
        format!("{:?}", topology.controllers)
    };
    tree.file("sys/bus/pci/drivers/vfio-pci/bind", "");
    tree.file("sys/bus/pci/drivers/nvme_gpu/bind", "");
    tree.file("dev/vfio/vfio", "");
    let said = ways(&tree);
    assert_eq!(
        said.matches("shared with 0000:03:00.0 (e1000)").count(),
        2,
        "{said}"
    );
    let tree = with("vfio-pci");
    tree.function(
        "0000:03:00.0",
        &Tree::config(1, 2, 0x02_00_00),
        "vfio-pci",
        7,
    );
    let said = found(&tree, "group");
    assert!(
        said.starts_with("Note: 7 is shared with 0000:03:00.0 (vfio-pci): not isolated"),
        "{said}"
    );
    let tree = with("nvme");
    let link = format!("sys/bus/pci/devices/{BDF}/iommu_group");
    fs::remove_file(tree.host().path(link)).unwrap();
    assert!(found(&tree, "group").starts_with("Missing: in no IOMMU group"));
}

#[test]
fn bridges_that_isolate_and_those_that_do_not() {
    let tree = Tree::new();
    tree.place(BRIDGE, &[]);
    tree.place(BDF, &[BRIDGE]);
    tree.controller(BDF, "nvme", 7);
    let mut bridge = Tree::config(0x8086, 1, 0x06_04_00);
    tree.function(BRIDGE, &bridge, "pcieport", 3);
    assert!(found(&tree, "ACS").starts_with("Unknown"));
    bridge.resize(4096, 0);
    tree.function(BRIDGE, &bridge, "pcieport", 3);
    assert!(found(&tree, "ACS").starts_with("Note: bridge 0000:00:01.0 does not isolate"));
    bridge[0x100..0x108].copy_from_slice(&[0x0D, 0, 1, 0, 0x1F, 0, 0x1D, 0]);
    tree.function(BRIDGE, &bridge, "pcieport", 3);
    assert!(found(&tree, "ACS").starts_with("Ok: every bridge isolates"));
    assert!(found(&with("nvme"), "ACS").starts_with("no finding"));
}

#[test]
fn rights_are_looked_at_when_it_is_bound() {
    assert!(found(&with("nvme"), "rights").starts_with("no finding"));
    let tree = with("vfio-pci");
    assert!(found(&tree, "rights").starts_with("Missing: there is no /dev/vfio/7"));
    tree.file("dev/vfio/7", "");
    assert!(found(&tree, "rights").starts_with("Ok"), "the file is ours");
    assert!(may_open((5, 9, 0o600), 5, &[]) && !may_open((5, 9, 0o600), 6, &[9]));
    assert!(may_open((5, 9, 0o660), 6, &[8, 9]) && !may_open((5, 9, 0o660), 6, &[8]));
    assert!(may_open((5, 9, 0o666), 6, &[]) && !may_open((5, 9, 0o464), 6, &[8]));
    assert!(may_open((5, 9, 0), 0, &[]));
}

#[test]
fn a_link_below_its_best_is_a_warning() {
    let tree = with("nvme");
    assert!(found(&tree, "link").starts_with("no finding"));
    tree.function(BDF, &express(0x44, 0x44, 0, 0), "nvme", 7);
    assert_eq!(found(&tree, "link"), "Ok: generation 4, x4: -");
    tree.function(BDF, &express(0x44, 0x23, 0, 0), "nvme", 7);
    let slow = found(&tree, "link");
    assert!(
        slow.starts_with(
            "Warning: generation 3, x2, though the controller can do generation 4, x4"
        )
    );
    tree.function(BDF, &express(0x44, 0x44, 0, 0)[..64], "nvme", 7);
    assert!(found(&tree, "link").starts_with("Unknown"));
}

#[test]
fn bar0_has_room_for_doorbells_or_is_missing() {
    let tree = with("nvme");
    assert_eq!(
        found(&tree, "BAR0"),
        "Ok: 16 KiB, doorbells of up to 1535 queue pairs: -"
    );
    let file = format!("sys/bus/pci/devices/{BDF}/resource");
    tree.file(&file, "0xfebf0000 0xfebf0fff 0x40200\n");
    assert!(found(&tree, "BAR0").starts_with("Missing: only 4096 bytes"));
    tree.file(&file, "0x0 0x0 0x0\n");
    assert!(found(&tree, "BAR0").starts_with("Missing: has no address"));
}

#[test]
fn the_controller_memory_buffer_is_told_by_linux_driver() {
    assert!(found(&with("vfio-pci"), "CMB").contains("nvme-gpu regs"));
    let tree = with("nvme");
    assert!(found(&tree, "CMB").starts_with("Note: the controller has no"));
    let file = format!("sys/bus/pci/devices/{BDF}/nvme/nvme0/cmb");
    tree.file(&file, "cmbloc : 0x00000002\ncmbsz  : 0x0000401f\n");
    assert_eq!(
        found(&tree, "CMB"),
        "Ok: 16 KiB, takes queues: --rings cmb: -"
    );
    tree.file(&file, "cmbloc : 0x00000002\ncmbsz  : 0x00004018\n");
    assert!(found(&tree, "CMB").starts_with("Note: the controller memory buffer takes no"));
}

#[test]
fn orderings_that_are_allowed_are_named() {
    let tree = with("nvme");
    tree.function(BDF, &express(0x44, 0x44, 0, 0), "nvme", 7);
    assert!(found(&tree, "ordering").starts_with("Ok"));
    tree.function(BDF, &express(0x44, 0x44, 0x10, 0x100), "nvme", 7);
    let both = found(&tree, "ordering");
    assert!(
        both.contains("relaxed ordering and ID-based ordering"),
        "{both}"
    );
}

#[test]
fn ways_to_reset_are_listed() {
    let tree = with("nvme");
    assert!(found(&tree, "reset").starts_with("no finding"));
    let file = format!("sys/bus/pci/devices/{BDF}/reset_method");
    tree.file(&file, "flr bus\n");
    assert_eq!(found(&tree, "reset"), "Ok: flr bus: -");
    tree.file(&file, "\n");
    assert!(found(&tree, "reset").starts_with("Note"));
}

//! Machines of `fixtures/`: their topology, and the text that a person reads.

mod fixture;

use super::*;
use nvme_driver::sysfs::testing::Tree;
use proptest::prelude::*;

/// Name, description and expected text of a machine.
macro_rules! machine {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!("fixtures/", $name, ".txt")),
            include_str!(concat!("fixtures/", $name, ".out")),
        )
    };
}

/// Name, description and expected text of each machine.
const MACHINES: [(&str, &str, &str); 8] = [
    machine!("desktop"),
    machine!("switch"),
    machine!("switch-acs"),
    machine!("switch-user"),
    machine!("sockets"),
    machine!("no-iommu"),
    machine!("downtrained"),
    machine!("server-epyc"),
];

fn of(name: &str) -> MachineTopology {
    let (_, text, _) = MACHINES.iter().find(|one| one.0 == name).unwrap();
    MachineTopology::of(&fixture::build(text).host())
}

fn only_path(name: &str) -> PeerPath {
    let topology = of(name);
    assert_eq!(topology.paths.len(), 1, "{topology}");
    topology.paths.into_iter().next().unwrap()
}

fn allowed(path: &PeerPath, tier: usize) -> (FeatureVerdict, FeatureVerdict) {
    let tier = &path.tiers[tier];
    (tier.vfio.allowed, tier.kmod.allowed)
}

/// With NVME_GPU_WRITE_EXPECTED set, the expected texts are written instead.
#[test]
fn each_machine_has_its_text() {
    for (name, text, expected) in MACHINES {
        let tree = fixture::build(text);
        let found = MachineTopology::of(&tree.host()).to_string();
        if std::env::var_os("NVME_GPU_WRITE_EXPECTED").is_some() {
            let file = format!(
                "{}/src/topology/fixtures/{name}.out",
                env!("CARGO_MANIFEST_DIR")
            );
            std::fs::write(file, found).unwrap();
            continue;
        }
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn a_path_is_as_near_as_what_both_are_below() {
    for (name, relation, route) in [
        (
            "desktop",
            PathRelation::SameRootComplex,
            TurningPoint::RootComplex,
        ),
        ("switch", PathRelation::SameSwitch, TurningPoint::Switch),
        (
            "switch-acs",
            PathRelation::SameSwitch,
            TurningPoint::RootComplex,
        ),
        (
            "switch-user",
            PathRelation::SameSwitch,
            TurningPoint::Unknown,
        ),
        (
            "sockets",
            PathRelation::AcrossNodes,
            TurningPoint::RootComplex,
        ),
        (
            "server-epyc",
            PathRelation::SameNode,
            TurningPoint::RootComplex,
        ),
    ] {
        let path = only_path(name);
        assert_eq!((path.relation, path.route), (relation, route), "{name}");
    }
}

#[test]
fn the_slowest_link_counts_where_transfers_turn_round() {
    let slowest = |name: &str| {
        let slowest = only_path(name).slowest.unwrap();
        (slowest.address, slowest.link.trained.unwrap().lanes)
    };
    // The switch's link to the root complex, of 2 lanes, counts only when transfers cross it.
    assert_eq!(slowest("switch"), ("0000:04:00.0".to_owned(), 4));
    assert_eq!(slowest("switch-acs"), ("0000:01:00.0".to_owned(), 2));
    let path = only_path("downtrained");
    let link = path.slowest.unwrap().link;
    assert!(link.is_downtrained());
    assert_eq!(link.possible.unwrap().generation, 4);
}

#[test]
fn each_tier_says_what_it_lacks() {
    let (yes, no, unknown) = (
        FeatureVerdict::Yes,
        FeatureVerdict::No,
        FeatureVerdict::Unknown,
    );
    // Stock driver 580 and a professional GPU below a switch, the module without protection.
    let path = only_path("switch");
    assert_eq!(allowed(&path, 0), (no, yes));
    assert_eq!(allowed(&path, 1), (no, unknown));
    assert_eq!(allowed(&path, 2), (no, unknown));
    assert_eq!(allowed(&path, 3), (no, no));
    // An old driver registers BARs for sure; a GeForce exports no memory.
    let path = only_path("desktop");
    assert_eq!(allowed(&path, 0), (yes, yes));
    assert_eq!(allowed(&path, 1), (yes, yes));
    assert_eq!(allowed(&path, 2), (no, no));
    assert!(path.tiers[2].kmod.why.contains("GeForce"));
    assert!(path.tiers[2].vfio.why.contains("kmod:BDF"));
    let path = only_path("no-iommu");
    assert_eq!(allowed(&path, 0), (no, no));
    assert!(path.tiers[0].vfio.why.contains("IOMMU is off"));
    let path = only_path("sockets");
    assert!(path.tiers[2].kmod.why.contains("one socket to the other"));
}

#[test]
fn a_machine_without_devices_says_so() {
    let topology = MachineTopology::of(&Tree::new().host());
    assert!(topology.to_string().starts_with("no NVMe controller"));
    assert!(!topology.iommu && topology.paths.is_empty());
}

/// Returns bytes that hostile or broken firmware may put into a file of sysfs.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(Vec::new()),
        Just(b"-1\n".to_vec()),
        Just(b"18446744073709551616 GT/s".to_vec()),
        Just(vec![0xFF; 4096]),
        Just(vec![b'9'; 70_000]),
        proptest::collection::vec(any::<u8>(), 0..300),
        // Capabilities that point anywhere.
        proptest::collection::vec(any::<u8>(), 4096..4097),
    ]
}

const FILES: [&str; 14] = [
    "config",
    "resource",
    "numa_node",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "nvme/nvme0/model",
    "reset_method",
    "../../../../proc/driver/nvidia/version",
    "../../../../proc/self/mountinfo",
    "../../../../sys/kernel/iommu_groups/14/type",
    "../../../../sys/module/nvme_gpu/parameters/unsafe",
    "driver_override",
];

const ODD_LINKS: [&str; 4] = [
    "driver",
    "iommu_group",
    "../0000:01:00.0",
    "../0000:00:01.0",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// No content of a file causes a panic, and the reported topology stays consistent.
    #[test]
    fn hostile_files_are_taken_as_they_are(
        machine in 0..MACHINES.len(),
        changes in proptest::collection::vec((0..64usize, 0..FILES.len(), garbage()), 1..12),
        links in proptest::collection::vec((0..64usize, 0..ODD_LINKS.len(), ".{0,12}"), 0..3),
        folder in "[0-9a-f:.]{1,12}",
    ) {
        let tree = fixture::build(MACHINES[machine].1);
        let host = tree.host();
        let names = host.names("sys/bus/pci/devices");
        let of = |index: usize| format!("sys/bus/pci/devices/{}", names[index % names.len()]);
        for (which, file, content) in &changes {
            // If a folder has the file's name, nothing is changed.
            let path = host.path(format!("{}/{}", of(*which), FILES[*file]));
            let _ = std::fs::write(path, content);
        }
        for (which, name, target) in &links {
            let path = host.path(format!("{}/{}", of(*which), ODD_LINKS[*name]));
            let _ = std::fs::remove_file(&path);
            let _ = std::os::unix::fs::symlink(target, path);
        }
        let _ = std::fs::create_dir(host.path(format!("sys/bus/pci/devices/{folder}")));
        let topology = MachineTopology::of(&host);
        let text = topology.to_string();
        for device in &topology.devices {
            prop_assert!(text.contains(&device.address), "{text}");
            if let Some(parent) = &device.parent {
                prop_assert!(topology.device(parent).is_some());
            }
        }
        for path in &topology.paths {
            prop_assert_eq!(path.tiers.len(), 4);
            prop_assert!(path.tiers.iter().all(|tier| !tier.vfio.why.is_empty() && !tier.kmod.why.is_empty()));
        }
    }
}

/// A GPU whose memory is the host's has nothing to gain from tier 2, wherever it is.
#[test]
fn tier_1_is_the_way_of_a_gpu_that_shares_memory() {
    let (_, text, _) = MACHINES.iter().find(|one| one.0 == "switch").unwrap();
    let tree = fixture::build(text);
    let host = tree.host();
    let plain = MachineTopology::of(&host);
    let gpu = plain.paths[0].gpu.clone();
    for (sharing, verdict, why) in [
        (
            MemorySharing::Integrated,
            FeatureVerdict::No,
            "the GPU is integrated: its memory is the host's",
        ),
        (
            MemorySharing::HostPageTables,
            FeatureVerdict::Unknown,
            "by the processor's page tables",
        ),
    ] {
        let shared = MachineTopology::with(&host, &SharedMemoryGpus::one(&gpu, sharing));
        for (before, path) in plain.paths.iter().zip(&shared.paths) {
            assert_eq!(path.tiers[..2], before.tiers[..2]);
            if path.gpu == gpu {
                assert_eq!(path.tiers[2].kmod.allowed, verdict, "{shared}");
                let said = &path.tiers[2].kmod.why;
                assert!(
                    said.contains(why) && said.contains("tier 1 is the way"),
                    "{said}"
                );
            } else {
                assert_eq!(path, before);
            }
        }
    }
}

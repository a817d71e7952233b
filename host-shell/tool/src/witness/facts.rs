//! The machine, the controller, the GPU and the path between them, as a witness file describes them.

use super::record::{RecordController, RecordMachine};
use super::redact::RedactedWords;
use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::identify::{IdentifyNamespace, PrintableText};
use nvme_host::sysfs::SysfsHost;
use nvme_host::topology::MachineTopology;
use nvme_host::{Controller as Opened, Result};

/// Models of controllers that are programs.
const PROGRAMS: [&str; 3] = ["QEMU", "nvme-gpu", "SPDK"];

/// Returns the PCI address in `vfio:BDF` and `kmod:BDF`.
pub fn address_of(device: &str) -> Option<String> {
    let (kind, rest) = device.split_once(':')?;
    let address = rest.split('?').next()?;
    let address: nvme_host::sysfs::PciAddress = address.parse().ok()?;
    matches!(kind, "vfio" | "kmod").then(|| address.to_string())
}

pub fn machine(host: &SysfsHost) -> RecordMachine {
    let processor = host.text("proc/cpuinfo").unwrap_or_default();
    let model = processor
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let is_node = |name: &&String| {
        name.strip_prefix("node")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    let nodes = host.names("sys/devices/system/node");
    RecordMachine {
        kernel: kernel(&host.text("proc/sys/kernel/osrelease").unwrap_or_default()),
        processor: model
            .map_or("not known", |(_, model)| model.trim())
            .to_owned(),
        cores: std::thread::available_parallelism().map_or(1, usize::from) as u64,
        numa_nodes: nodes.iter().filter(is_node).count().max(1) as u64,
    }
}

/// Reduces a kernel's release to numbers and words of distributions: its builder may have added names of people
/// and machines.
fn kernel(release: &str) -> String {
    const WORDS: [&str; 14] = [
        "aarch64",
        "amd64",
        "arch",
        "arm64",
        "aws",
        "azure",
        "cloud",
        "default",
        "gcp",
        "generic",
        "lowlatency",
        "lts",
        "pve",
        "x86_64",
    ];
    const WITH_NUMBERS: [&str; 5] = ["bpo", "deb", "el", "fc", "rc"];
    let is_public = |token: &str| {
        let word = token.trim_end_matches(|c: char| c.is_ascii_digit());
        word.is_empty() || WORDS.contains(&token) || word != token && WITH_NUMBERS.contains(&word)
    };
    let parts = release.split('-').map(|part| {
        let all = part.split(['.', '+']).all(is_public);
        // Of the first part the numbers stay.
        let end = part.find(|c: char| !c.is_ascii_digit() && c != '.');
        if all {
            part
        } else {
            &part[..end.unwrap_or(part.len())]
        }
    });
    let kept: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
    kept.join("-")
}

/// Returns the controller behind `device`, and true if it is a simulator. Names that identify it are added to
/// `secrets`.
pub fn controller(
    opened: &Opened,
    nsid: Nsid,
    device: &str,
    topology: &MachineTopology,
    secrets: &mut RedactedWords,
) -> Result<(RecordController, bool)> {
    let (identify, info) = (opened.identify(), opened.info());
    secrets.add(Some(&PrintableText(&identify.sn).to_string()));
    secrets.add(Some(&PrintableText::of_nqn(&identify.subnqn).to_string()));
    names_of(&opened.identify_namespace(nsid)?, secrets);
    let namespace = opened.usable_namespace(nsid)?;
    let found = address_of(device).and_then(|address| topology.device(&address).cloned());
    let way = device.split(':').next().unwrap_or_default().to_owned();
    let model = PrintableText(&identify.mn).to_string();
    let is_program = matches!(way.as_str(), "sim" | "vfio-user")
        || PROGRAMS.iter().any(|name| model.contains(name));
    let controller = RecordController {
        way,
        model,
        firmware: PrintableText(&identify.fr).to_string(),
        nvme: format!(
            "{}.{}.{}",
            info.version >> 16,
            info.version >> 8 & 0xFF,
            info.version & 0xFF
        ),
        pci_id: found.as_ref().map(|one| one.id.clone()),
        mdts_bytes: info.max_transfer,
        block_bytes: u64::from(namespace.block_bytes),
        blocks: namespace.blocks,
        queue_pairs: u64::from(info.queue_pairs),
        iommu_group_type: found
            .as_ref()
            .and_then(|one| one.group.as_ref()?.kind.clone()),
        link: found.and_then(|one| one.link).map(Into::into),
    };
    Ok((controller, is_program))
}

/// Collects the globally unique names of a namespace.
fn names_of(namespace: &IdentifyNamespace, secrets: &mut RedactedWords) {
    let hex = |bytes: &[u8]| {
        let is_there = bytes.iter().any(|byte| *byte != 0);
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        is_there.then_some(digits)
    };
    secrets.add(hex(&namespace.nguid).as_deref());
    secrets.add(hex(&namespace.eui64).as_deref());
}

/// Returns GPU `index` and its path to the controller.
#[cfg(feature = "cuda")]
pub fn gpu(
    index: u32,
    device: &str,
    topology: &MachineTopology,
    host: &SysfsHost,
) -> Result<(super::record::RecordGpu, Option<super::record::PathFacts>)> {
    use super::record::{PathFacts, RecordGpu};
    use nvme_host::Error;
    use nvme_host::cuda::GpuFacts;
    let facts = GpuFacts::all()?.into_iter().find(|one| one.index == index);
    let facts = facts.ok_or_else(|| {
        Error::usage(
            format!("there is no GPU {index}"),
            "name one that `nvidia-smi` lists",
        )
    })?;
    let driver = nvme_host::doctor::nvidia_driver(host);
    let found = topology.device(&facts.address);
    let drive = address_of(device);
    let path = topology
        .paths
        .iter()
        .find(|path| path.gpu == facts.address && Some(&path.controller) == drive.as_ref());
    let word = |value: serde_json::Result<serde_json::Value>| {
        let value = value.unwrap_or_default();
        value.as_str().unwrap_or_default().to_owned()
    };
    let path = path.map(|path| PathFacts {
        relation: word(serde_json::to_value(path.relation)),
        route: word(serde_json::to_value(path.route)),
        slowest_gb_per_s: path
            .slowest
            .as_ref()
            .and_then(|slowest| slowest.link.trained?.gb_per_s),
    });
    let gpu = RecordGpu {
        model: facts.name,
        driver: driver.as_ref().map(|one| one.0.clone()),
        open_modules: driver.map(|one| one.1),
        cuda: facts.cuda,
        capability: format!("{}.{}", facts.capability.0, facts.capability.1),
        writes_ordering: i64::from(facts.writes_ordering),
        flush_options: i64::from(facts.flush_options),
        dma_buf: facts.dma_buf,
        link: found.and_then(|one| one.link).map(Into::into),
    };
    Ok((gpu, path))
}

#[cfg(test)]
mod tests {
    use super::kernel;

    #[test]
    fn a_kernel_is_named_as_its_distribution_does() {
        for (release, named) in [
            ("6.12.95+deb13-amd64", "6.12.95+deb13-amd64"),
            ("6.17.0-14-generic", "6.17.0-14-generic"),
            ("6.19.14-300.fc44.x86_64", "6.19.14-300.fc44.x86_64"),
            ("6.12.9-molly-amd64", "6.12.9-amd64"),
            ("6.18.44-straylight.v2", "6.18.44"),
            ("6.18.44-fc-lab2", "6.18.44"),
            ("6.18.44+molly", "6.18.44"),
            ("7.0.0-rc1", "7.0.0-rc1"),
            ("", ""),
        ] {
            assert_eq!(kernel(release), named);
        }
    }
}

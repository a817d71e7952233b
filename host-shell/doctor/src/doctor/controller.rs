//! Findings about one controller: driver, group, rights, link, BAR and other facts that decide how it can be
//! used. Each finding has a remedy and changes nothing; a fact that cannot be read without root is unknown,
//! and never good.

use super::finding::{DoctorFinding, FindingSeverity, SubjectFindings};
use nvme_core::spec::register::Cmbsz;
use nvme_driver::pci::PcieLink;
use nvme_driver::sysfs::{GroupNeighbour, LendingDriver, SysfsFunction, SysfsHost, UsageCensus};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// ACS: source validation, request redirect, completion redirect, upstream forwarding.
const ISOLATES: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 4;

pub fn examine(
    host: &SysfsHost,
    function: &SysfsFunction,
    census: &UsageCensus,
) -> Vec<DoctorFinding> {
    let mut notes = SubjectFindings::about(function.address);
    driver(host, function, census, &mut notes);
    group(host, function, &mut notes);
    translation(host, function, &mut notes);
    acs(host, function, &mut notes);
    rights(host, function, &mut notes);
    link(function, &mut notes);
    bar0(function, &mut notes);
    memory_buffer(host, function, &mut notes);
    ordering(function, &mut notes);
    reset(host, function, &mut notes);
    notes.all
}

fn driver(
    host: &SysfsHost,
    function: &SysfsFunction,
    census: &UsageCensus,
    notes: &mut SubjectFindings,
) {
    let address = function.address;
    let usage = host.usage_seen(function, census);
    if !usage.holders.is_empty() {
        return notes.add(
            "driver",
            FindingSeverity::Warning,
            format!("in use: {}", usage.list()),
            format!("use another controller, or first: {}", usage.remedies()),
        );
    }
    let unseen = match usage.unseen.is_empty() {
        true => String::new(),
        false => format!(" as far as is seen: not {}", usage.list_unseen()),
    };
    match function.driver.as_deref() {
        Some(name) if LendingDriver::of(name).is_some() => notes.ok("driver", name),
        Some(driver) => notes.add(
            "driver",
            FindingSeverity::Note,
            format!("{driver}; nothing uses its disks{unseen}"),
            format!("`nvme-gpu bind {address}` as root"),
        ),
        None => notes.add(
            "driver",
            FindingSeverity::Note,
            "none",
            format!("`nvme-gpu bind {address}` as root"),
        ),
    }
}

fn group(host: &SysfsHost, function: &SysfsFunction, notes: &mut SubjectFindings) {
    let Some(number) = function.group else {
        return notes.add(
            "group",
            FindingSeverity::Missing,
            "in no IOMMU group",
            "switch the IOMMU on (see there)",
        );
    };
    let others = host.neighbours(function);
    let list = GroupNeighbour::list(&others);
    if others.is_empty() {
        return notes.ok("group", format!("{number}, isolated"));
    }
    if others.iter().any(GroupNeighbour::is_in_the_way) {
        return notes.add(
            "group",
            FindingSeverity::Missing,
            format!("{number} is shared with {list}"),
            "use another slot, or give all of them to vfio-pci",
        );
    }
    notes.add(
        "group",
        FindingSeverity::Note,
        format!("{number} is shared with {list}: not isolated"),
        "nothing, if one program may have all of them; else use another slot",
    );
}

/// Examines the IOMMU's translation for the kernel's drivers. VFIO and the module nvme_gpu set up another
/// translation.
fn translation(host: &SysfsHost, function: &SysfsFunction, notes: &mut SubjectFindings) {
    let Some(group) = function.group else {
        return;
    };
    let kind = host.text(format!("sys/kernel/iommu_groups/{group}/type"));
    let text = match kind.as_deref().map_or("", str::trim) {
        "" => return,
        "DMA" => "DMA (strict)",
        "DMA-FQ" => "DMA-FQ (lazy)",
        "identity" => "identity (not translated)",
        other => other,
    };
    notes.ok(
        "group type",
        format!("{text}: VFIO and the module nvme_gpu translate in their own way, whatever it is"),
    );
}

/// Examines the bridges: those that do not isolate put functions into one group; those that do send peers' transfers up
/// to the root complex.
fn acs(host: &SysfsHost, function: &SysfsFunction, notes: &mut SubjectFindings) {
    let bridges: Vec<SysfsFunction> = function
        .bridges
        .iter()
        .filter_map(|address| host.function(*address))
        .collect();
    if bridges.is_empty() {
        return;
    }
    if bridges.iter().any(|bridge| bridge.config.bytes < 4096) {
        return notes.add(
            "ACS",
            FindingSeverity::Unknown,
            "the bridges' capabilities can be read by root only",
            "run this as root",
        );
    }
    let without = bridges.iter().find(|bridge| {
        bridge
            .config
            .acs
            .is_none_or(|acs| acs & ISOLATES != ISOLATES)
    });
    match without {
        Some(bridge) => notes.add(
            "ACS",
            FindingSeverity::Note,
            format!(
                "bridge {} does not isolate what is below it",
                bridge.address
            ),
            "good for peer-to-peer; for isolation use a slot below another root port",
        ),
        None => notes.ok(
            "ACS",
            "every bridge isolates; peers reach each other through the root complex",
        ),
    }
}

fn rights(host: &SysfsHost, function: &SysfsFunction, notes: &mut SubjectFindings) {
    let (Some("vfio-pci"), Some(group)) = (function.driver.as_deref(), function.group) else {
        return;
    };
    let path = host.path(format!("dev/vfio/{group}"));
    let Ok(node) = fs::metadata(&path) else {
        return notes.add(
            "rights",
            FindingSeverity::Missing,
            format!("there is no /dev/vfio/{group}"),
            "in a container: pass the node through; else see the system's log",
        );
    };
    let owner = (node.uid(), node.gid(), node.mode());
    let user = rustix::process::geteuid().as_raw();
    let groups: Vec<u32> = rustix::process::getgroups()
        .unwrap_or_default()
        .into_iter()
        .chain([rustix::process::getegid()])
        .map(|group| group.as_raw())
        .collect();
    if may_open(owner, user, &groups) {
        notes.ok("rights", format!("this user may open /dev/vfio/{group}"));
    } else {
        notes.add(
            "rights",
            FindingSeverity::Missing,
            format!(
                "user {user} may not open /dev/vfio/{group}, which belongs to user {}",
                owner.0
            ),
            format!("as root: `chown {user} /dev/vfio/{group}`"),
        );
    }
}

/// True if a user may read and write a node of `(user, group, mode)`.
fn may_open(owner: (u32, u32, u32), user: u32, groups: &[u32]) -> bool {
    let (owner, group, mode) = owner;
    let bits = match () {
        () if user == 0 => return true,
        () if user == owner => mode >> 6,
        () if groups.contains(&group) => mode >> 3,
        () => mode,
    };
    bits & 6 == 6
}

fn link(function: &SysfsFunction, notes: &mut SubjectFindings) {
    let Some(express) = function.config.express else {
        if function.config.bytes <= 64 {
            notes.add(
                "link",
                FindingSeverity::Unknown,
                "capabilities can be read by root only",
                "run this as root",
            );
        }
        return;
    };
    let (Some(capable), Some(trained)) = (express.capable, express.trained) else {
        return;
    };
    let words = |link: PcieLink| format!("generation {}, x{}", link.generation, link.lanes);
    if trained.generation < capable.generation || trained.lanes < capable.lanes {
        notes.add(
            "link",
            FindingSeverity::Warning,
            format!("{}, though the controller can do {}", words(trained), words(capable)),
            "use a slot with all lanes wired, seat the device again, look at the slot's setting in the firmware",
        );
    } else {
        notes.ok("link", words(trained));
    }
}

fn bar0(function: &SysfsFunction, notes: &mut SubjectFindings) {
    match function.resource(0) {
        Some(bar) if bar.bytes >= 8192 => {
            // Doorbells of 4 bytes from 1000h on, two per pair, the admin queue's among them.
            let pairs = (bar.bytes - 4096) / 8 - 1;
            let text = format!("{} KiB, doorbells of up to {pairs} queue pairs", bar.bytes >> 10);
            notes.ok("BAR0", text);
        }
        Some(bar) => notes.add(
            "BAR0",
            FindingSeverity::Missing,
            format!("only {} bytes: no doorbells can be mapped", bar.bytes),
            "use another controller",
        ),
        None => notes.add(
            "BAR0",
            FindingSeverity::Missing,
            "has no address",
            "look for PCI errors in the system's log; `pci=realloc` on the kernel's command line may help",
        ),
    }
}

fn memory_buffer(host: &SysfsHost, function: &SysfsFunction, notes: &mut SubjectFindings) {
    let address = function.address;
    let unknown =
        || format!("`nvme-gpu regs --device vfio:{address}` shows CMBSZ once it is bound");
    let Some(controller) = &function.controller else {
        return notes.add(
            "CMB",
            FindingSeverity::Unknown,
            "told by the controller's registers only",
            unknown(),
        );
    };
    let folder = format!("sys/bus/pci/devices/{address}/nvme/{controller}");
    let text = host.text(format!("{folder}/cmb")).unwrap_or_default();
    let size = text
        .lines()
        .find_map(|line| line.strip_prefix("cmbsz"))
        .and_then(|rest| rest.split("0x").nth(1))
        .and_then(|digits| u32::from_str_radix(digits.trim(), 16).ok());
    // Linux leaves the file out for controllers without.
    match size.map(Cmbsz).filter(|size| size.bytes() > 0) {
        None => notes.add(
            "CMB",
            FindingSeverity::Note,
            "the controller has no controller memory buffer",
            "nothing has to be done: rings lie in host memory",
        ),
        Some(size) if size.sqs() || size.cqs() => notes.ok(
            "CMB",
            format!("{} KiB, takes queues: --rings cmb", size.bytes() >> 10),
        ),
        Some(_) => notes.add(
            "CMB",
            FindingSeverity::Note,
            "the controller memory buffer takes no queues",
            "nothing has to be done: rings lie in host memory",
        ),
    }
}

fn ordering(function: &SysfsFunction, notes: &mut SubjectFindings) {
    let Some(express) = function.config.express else {
        return;
    };
    let mut on = Vec::new();
    if express.relaxed_ordering {
        on.push("relaxed ordering");
    }
    if express.id_based_ordering {
        on.push("ID-based ordering");
    }
    if on.is_empty() {
        return notes.ok("ordering", "relaxed and ID-based ordering are off");
    }
    let address = function.address;
    notes.add(
        "ordering",
        FindingSeverity::Note,
        format!("the controller may use {}", on.join(" and ")),
        format!(
            "nothing for data in host memory; with a GPU, should data ever arrive after its completion: \
             `setpci -s {address} CAP_EXP+8.w=0:10 CAP_EXP+28.w=0:300`"
        ),
    );
}

fn reset(host: &SysfsHost, function: &SysfsFunction, notes: &mut SubjectFindings) {
    let address = function.address;
    let Some(methods) = host.text(format!("sys/bus/pci/devices/{address}/reset_method")) else {
        return;
    };
    match methods.trim() {
        "" => notes.add(
            "reset",
            FindingSeverity::Note,
            "the function cannot be reset alone",
            "nothing has to be done: the controller is disabled and enabled instead",
        ),
        methods => notes.ok("reset", methods),
    }
}

#[cfg(test)]
mod tests;

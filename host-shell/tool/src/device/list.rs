//! `list`: the NVMe controllers of this machine.

use crate::common::{OutputForm, output, visible};
use clap::Args;
use nvme_host::Result;
use nvme_host::sysfs::{SysfsFunction, SysfsHost, UsageCensus};
use serde_json::{Value, json};

/// List the NVMe controllers on PCIe: driver, IOMMU group, model, disks and who uses them
#[derive(Args)]
pub struct ListCommand {
    #[command(flatten)]
    form: OutputForm,
}

impl ListCommand {
    pub fn run(self) -> Result<()> {
        let all = controllers(&SysfsHost::here());
        if self.form.json {
            return output::json(&json!({ "controllers": all }));
        }
        if all.is_empty() {
            return output::print("no NVMe controller on PCIe");
        }
        let lines: Vec<String> = all.iter().map(to_text).collect();
        output::print(&lines.join("\n"))
    }
}

fn controllers(host: &SysfsHost) -> Vec<Value> {
    let controllers = host.controllers();
    let census = UsageCensus::take(host);
    let of = |one| to_json(host, one, &census);
    controllers.iter().map(of).collect()
}

fn to_json(host: &SysfsHost, function: &SysfsFunction, census: &UsageCensus) -> Value {
    let config = &function.config;
    let link = config.express.and_then(|express| express.trained);
    let usage = host.usage_seen(function, census);
    let users: Vec<String> = usage.holders.iter().map(ToString::to_string).collect();
    let not_seen: Vec<String> = usage.unseen.iter().map(ToString::to_string).collect();
    json!({
        "address": function.address.to_string(),
        "driver": function.driver,
        "iommu_group": function.group,
        "id": format!("{:04x}:{:04x}", config.vendor, config.device),
        "model": function.model,
        "serial": function.serial,
        "link": link.map(|link| json!({ "generation": link.generation, "lanes": link.lanes })),
        "disks": host.disks(function),
        "users": users,
        "not_seen": not_seen,
    })
}

fn to_text(one: &Value) -> String {
    let text = |name: &str| visible::line(one[name].as_str().unwrap_or("-"));
    let list = |name: &str| {
        let parts = one[name]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str);
        visible::line(&parts.collect::<Vec<_>>().join(", "))
    };
    // Without Linux's driver the model is unknown.
    let model = one["model"]
        .as_str()
        .map_or_else(|| text("id"), visible::line);
    let group = one["iommu_group"].as_u64();
    let group = group.map_or("no IOMMU group".to_owned(), |group| {
        format!("group {group}")
    });
    let mut line = format!(
        "{}  {:<9} {group:<9} {model}",
        text("address"),
        text("driver")
    );
    for (before, what) in [
        ("  disks: ", list("disks")),
        ("  in use: ", list("users")),
        ("  not seen: ", list("not_seen")),
    ] {
        if !what.is_empty() {
            line.push_str(before);
            line.push_str(&what);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::testing::{ADDRESS, Machine};

    #[test]
    fn a_controller_is_found_with_what_uses_it() {
        let machine = Machine::new("nvme");
        let folder = format!("sys/bus/pci/devices/{ADDRESS}/nvme/nvme0");
        machine.file(&format!("{folder}/model"), b"Fast SSD  \n");
        machine.file(&format!("{folder}/serial"), b"S1\n");
        machine.file(&format!("{folder}/nvme0n1/dev"), b"259:0\n");
        machine.file("sys/class/block/nvme0n1/dev", b"259:0\n");
        machine.file("proc/swaps", b"Filename Type\n/dev/nvme0n1 partition\n");
        let found = controllers(&machine.host());
        assert_eq!(found.len(), 1);
        let one = &found[0];
        assert_eq!(
            (&one["address"], &one["driver"]),
            (&ADDRESS.into(), &"nvme".into())
        );
        assert_eq!(
            (&one["iommu_group"], &one["id"]),
            (&7.into(), &"144d:a80a".into())
        );
        assert_eq!(
            (&one["model"], &one["serial"]),
            (&"Fast SSD".into(), &"S1".into())
        );
        assert_eq!(one["disks"], json!(["nvme0n1"]));
        assert!(one["link"].is_null(), "{one}");
        assert!(!one["users"].as_array().unwrap().is_empty(), "{one}");
        assert!(controllers(&SysfsHost::at("/nowhere")).is_empty());
    }

    #[test]
    fn a_line_tells_what_is_known() {
        let one = json!({ "address": "0000:01:00.0", "driver": "nvme", "iommu_group": 7, "id": "144d:a80a",
            "model": "Fast SSD", "disks": ["nvme0n1"], "users": ["nvme0n1 holds swap"],
            "not_seen": [] });
        let line = "0000:01:00.0  nvme      group 7   Fast SSD  disks: nvme0n1  in use: nvme0n1 holds swap";
        assert_eq!(to_text(&one), line);
        let one = json!({ "address": "0000:01:00.0", "driver": null, "iommu_group": null, "id": "144d:a80a",
            "model": null, "disks": [], "users": [], "not_seen": ["processes"] });
        assert_eq!(
            to_text(&one),
            "0000:01:00.0  -         no IOMMU group 144d:a80a  not seen: processes"
        );
    }
}

//! `bind` and `unbind`: a controller to vfio-pci, and back.

use crate::common::output;
use clap::Args;
use nvme_host::sysfs::{Address, Host};
use nvme_host::{Error, Result};
use serde_json::json;

/// Give a controller to vfio-pci, for --device vfio:BDF; refused while its disks are in use. Needs root
#[derive(Args)]
pub struct Bind {
    /// PCI address, as `nvme-gpu list` shows it
    address: String,
    /// Let this user open the device: /dev/vfio/GROUP becomes his
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Give a controller back to the driver that it had before. Needs root
#[derive(Args)]
pub struct Unbind {
    /// PCI address, as `nvme-gpu list` shows it
    address: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn parse(text: &str) -> Result<Address> {
    text.parse()
        .map_err(|cause: String| Error::usage(cause, "`nvme-gpu list` shows the controllers"))
}

impl Bind {
    pub fn run(self) -> Result<()> {
        let host = Host::here();
        let address = parse(&self.address)?;
        // A name of no driver is found before anything changes.
        let user = self
            .user
            .as_deref()
            .map(|name| host.user_id(name))
            .transpose()?;
        let bound = host.bind(address)?;
        if let Some(id) = user {
            host.give_node(bound.group, id)?;
        }
        let in_the_way: Vec<String> = bound
            .in_the_way
            .iter()
            .map(|(address, driver)| format!("{address} ({driver})"))
            .collect();
        if self.json {
            return output::json(&json!({
                "address": address.to_string(),
                "driver": "vfio-pci",
                "driver_before": bound.before,
                "iommu_group": bound.group,
                "in_the_way": in_the_way,
            }));
        }
        let mut text = format!("{address}: vfio-pci, /dev/vfio/{}", bound.group);
        if !in_the_way.is_empty() {
            text.push_str(&format!(
                "\nthe group cannot be used before these lose their driver too: {}",
                in_the_way.join(", ")
            ));
        }
        output::print(&text)
    }
}

impl Unbind {
    pub fn run(self) -> Result<()> {
        let address = parse(&self.address)?;
        let driver = Host::here().unbind(address)?;
        if self.json {
            return output::json(&json!({ "address": address.to_string(), "driver": driver }));
        }
        let driver = driver.as_deref().unwrap_or("no driver");
        output::print(&format!("{address}: {driver}"))
    }
}

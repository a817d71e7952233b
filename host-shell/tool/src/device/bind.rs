//! `bind` and `unbind`: a controller to vfio-pci, and back.

use crate::common::output;
use clap::Args;
use nvme_host::sysfs::{Address, Bound, Host};
use nvme_host::{Error, Result};
use serde_json::{Value, json};

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
        let address = parse(&self.address)?;
        let bound = self.on(&Host::here(), address)?;
        match self.json {
            true => output::json(&to_json(address, &bound)),
            false => output::print(&to_text(address, &bound)),
        }
    }

    fn on(&self, host: &Host, address: Address) -> Result<Bound> {
        // A name of no driver is found before anything changes.
        let user = self.user.as_deref();
        let user = user.map(|name| host.user_id(name)).transpose()?;
        let bound = host.bind(address)?;
        if let Some(id) = user {
            host.give_node(bound.group, id)?;
        }
        Ok(bound)
    }
}

fn in_the_way(bound: &Bound) -> Vec<String> {
    let others = bound.in_the_way.iter();
    others
        .map(|(address, driver)| format!("{address} ({driver})"))
        .collect()
}

fn to_json(address: Address, bound: &Bound) -> Value {
    json!({
        "address": address.to_string(),
        "driver": "vfio-pci",
        "driver_before": bound.before,
        "iommu_group": bound.group,
        "in_the_way": in_the_way(bound),
    })
}

fn to_text(address: Address, bound: &Bound) -> String {
    let mut text = format!("{address}: vfio-pci, /dev/vfio/{}", bound.group);
    let in_the_way = in_the_way(bound);
    if !in_the_way.is_empty() {
        text.push_str(&format!(
            "\nthe group cannot be used before these lose their driver too: {}",
            in_the_way.join(", ")
        ));
    }
    text
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::testing::{ADDRESS, Machine};

    fn bind(user: Option<String>) -> (Bind, Address) {
        let bind = Bind {
            address: ADDRESS.to_owned(),
            user,
            json: false,
        };
        let address = parse(&bind.address).unwrap();
        (bind, address)
    }

    #[test]
    fn the_node_of_the_group_goes_to_the_user() {
        let machine = Machine::new("vfio-pci");
        let me = rustix::process::getuid().as_raw().to_string();
        let (bind, address) = bind(Some(me));
        let bound = bind.on(&machine.host(), address).unwrap();
        assert_eq!(
            to_text(address, &bound),
            format!("{ADDRESS}: vfio-pci, /dev/vfio/7")
        );
        let object = to_json(address, &bound);
        assert_eq!(object["driver_before"], "vfio-pci");
        assert_eq!(object["iommu_group"], 7);
    }

    #[test]
    fn an_unknown_user_is_refused_before_anything_changes() {
        let machine = Machine::new("nvme");
        let (bind, address) = bind(Some("nemo".to_owned()));
        let error = bind.on(&machine.host(), address).unwrap_err();
        assert_eq!(error.to_string(), "there is no user 'nemo'");
        assert!(parse("one").is_err());
    }

    #[test]
    fn others_of_the_group_are_in_the_text() {
        let bound = Bound {
            before: None,
            group: 9,
            in_the_way: vec![("0000:00:01.0".parse().unwrap(), "e1000".to_owned())],
        };
        let text = to_text(parse(ADDRESS).unwrap(), &bound);
        assert!(text.ends_with("too: 0000:00:01.0 (e1000)"), "{text}");
    }
}

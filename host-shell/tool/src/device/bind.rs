//! `bind` and `unbind`: a controller to vfio-pci or to the module nvme_gpu, and back.

use crate::common::{OutputForm, output, say};
use clap::Args;
use nvme_host::sysfs::{BindResult, LendingDriver, PciAddress, SysfsHost};
use nvme_host::{Error, Result};
use serde_json::{Value, json};

/// Give a controller to vfio-pci (--device vfio:BDF) or to the module nvme_gpu (kmod:BDF). Refused while anything uses
/// it: mounts, swap, RAID, LVM, loop devices, exports, programs that have a node of it open. Needs root
#[derive(Args)]
pub struct BindCommand {
    /// PCI address, as `nvme-gpu list` shows it
    address: String,
    /// Driver to bind to
    #[arg(long, value_name = "NAME", default_value = "vfio-pci", value_parser = ["vfio-pci", "nvme_gpu"])]
    driver: String,
    /// User that may open the device (owner of /dev/vfio/GROUP)
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Take it even if it is in use or that cannot be seen; what breaks is printed
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    form: OutputForm,
}

/// Give a controller back to its former driver. Refused while a program has it open, and when `bind` did not take it.
/// Needs root
#[derive(Args)]
pub struct UnbindCommand {
    /// PCI address, as `nvme-gpu list` shows it
    address: String,
    /// Give it back even if a program has it open or `bind` did not take it
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    form: OutputForm,
}

fn parse(text: &str) -> Result<PciAddress> {
    text.parse()
        .map_err(|cause: String| Error::usage(cause, "`nvme-gpu list` shows the controllers"))
}

impl BindCommand {
    pub fn run(self) -> Result<()> {
        let address = parse(&self.address)?;
        let lender = LendingDriver::of(&self.driver).unwrap_or_default();
        let bound = self.on(&SysfsHost::here(), address, lender)?;
        warn_of(&bound.broken);
        match self.form.json {
            true => output::json(&to_json(address, lender, &bound)),
            false => output::print(&to_text(address, lender, &bound)),
        }
    }

    fn on(
        &self,
        host: &SysfsHost,
        address: PciAddress,
        lender: LendingDriver,
    ) -> Result<BindResult> {
        if lender == LendingDriver::Module && self.user.is_some() {
            return Err(Error::usage(
                "--user cannot be used with --driver nvme_gpu: the module asks for CAP_SYS_RAWIO, whoever owns its node",
                "leave --user out, or use vfio-pci",
            ));
        }
        // A name of no driver is found before anything changes.
        let user = self.user.as_deref();
        let user = user.map(|name| host.user_id(name)).transpose()?;
        let bound = host.bind(address, lender, self.force)?;
        if let (Some(id), Some(group)) = (user, bound.group) {
            host.give_nodes(address, group, id)?;
        }
        Ok(bound)
    }
}

/// Prints the uses that were broken by force.
fn warn_of(broken: &[String]) {
    for one in broken {
        say::warn(|| format!("warning: taken by force: {one}"));
    }
}

fn in_the_way(bound: &BindResult) -> Vec<String> {
    let others = bound.in_the_way.iter();
    others
        .map(|(address, driver)| format!("{address} ({driver})"))
        .collect()
}

fn to_json(address: PciAddress, lender: LendingDriver, bound: &BindResult) -> Value {
    json!({
        "address": address.to_string(),
        "driver": lender.name(),
        "driver_before": bound.before,
        "iommu_group": bound.group,
        "in_the_way": in_the_way(bound),
        "broken": bound.broken,
    })
}

fn to_text(address: PciAddress, lender: LendingDriver, bound: &BindResult) -> String {
    let node = lender.node(address, bound.group);
    let mut text = format!("{address}: {}, {node}", lender.name());
    let in_the_way = in_the_way(bound);
    if !in_the_way.is_empty() {
        text.push_str(&format!(
            "\nthe group cannot be used before these lose their driver too: {}",
            in_the_way.join(", ")
        ));
    }
    text
}

impl UnbindCommand {
    pub fn run(self) -> Result<()> {
        let address = parse(&self.address)?;
        let unbound = SysfsHost::here().unbind(address, self.force)?;
        warn_of(&unbound.broken);
        if self.form.json {
            return output::json(&json!({
                "address": address.to_string(),
                "driver": unbound.driver,
                "broken": unbound.broken,
            }));
        }
        let driver = unbound.driver.as_deref().unwrap_or("no driver");
        output::print(&format!("{address}: {driver}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::testing::{ADDRESS, Machine};

    fn bind(user: Option<String>) -> (BindCommand, PciAddress) {
        let bind = BindCommand {
            address: ADDRESS.to_owned(),
            driver: "vfio-pci".to_owned(),
            user,
            force: false,
            form: OutputForm { json: false },
        };
        let address = parse(&bind.address).unwrap();
        (bind, address)
    }

    #[test]
    fn the_node_of_the_group_goes_to_the_user() {
        let machine = Machine::new("vfio-pci");
        let me = rustix::process::getuid().as_raw().to_string();
        let (bind, address) = bind(Some(me));
        let bound = bind
            .on(&machine.host(), address, LendingDriver::Vfio)
            .unwrap();
        assert_eq!(
            to_text(address, LendingDriver::Vfio, &bound),
            format!("{ADDRESS}: vfio-pci, /dev/vfio/7")
        );
        let object = to_json(address, LendingDriver::Vfio, &bound);
        assert_eq!(object["driver_before"], "vfio-pci");
        assert_eq!(object["iommu_group"], 7);
    }

    #[test]
    fn an_unknown_user_is_refused_before_anything_changes() {
        let machine = Machine::new("nvme");
        let (bind, address) = bind(Some("nemo".to_owned()));
        let error = bind
            .on(&machine.host(), address, LendingDriver::Vfio)
            .unwrap_err();
        assert_eq!(error.to_string(), "there is no user 'nemo'");
        assert!(parse("one").is_err());
        let error = bind
            .on(&machine.host(), address, LendingDriver::Module)
            .unwrap_err();
        assert!(
            error.to_string().starts_with("--user cannot be used"),
            "{error}"
        );
    }

    #[test]
    fn others_of_the_group_are_in_the_text() {
        let bound = BindResult {
            before: None,
            group: Some(9),
            in_the_way: vec![("0000:00:01.0".parse().unwrap(), "e1000".to_owned())],
            broken: Vec::new(),
        };
        let text = to_text(parse(ADDRESS).unwrap(), LendingDriver::Vfio, &bound);
        assert!(text.ends_with("too: 0000:00:01.0 (e1000)"), "{text}");
    }
}

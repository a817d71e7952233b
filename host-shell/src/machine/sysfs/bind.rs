//! Gives a controller to vfio-pci or to the module nvme_gpu, and back.
//!
//! Invariant: a controller whose disks are in use keeps its driver, and one that the new driver does not
//! take gets its driver back.

use super::{Address, Function, Host};
use crate::error::{Error, Result};
use std::fs;
use std::io;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

/// A driver of the kernel that lends a controller to a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lender {
    /// vfio-pci, for `vfio:BDF`.
    #[default]
    Vfio,
    /// This project's module nvme_gpu, for `kmod:BDF`.
    Module,
}

impl Lender {
    const ALL: [Self; 2] = [Self::Vfio, Self::Module];

    /// Its name as a driver.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vfio => "vfio-pci",
            Self::Module => "nvme_gpu",
        }
    }

    /// The node by which a program opens the controller at `address`.
    pub fn node(self, address: Address, group: Option<u32>) -> String {
        match (self, group) {
            (Self::Vfio, Some(group)) => format!("/dev/vfio/{group}"),
            (Self::Vfio, None) => "/dev/vfio".to_owned(),
            (Self::Module, _) => format!("/dev/nvme-gpu-{address}"),
        }
    }

    /// The lender whose name as a driver is `name`.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }
}

/// What [`Host::bind`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The driver before.
    pub before: Option<String>,
    /// The IOMMU group, as in /dev/vfio/GROUP; none without an IOMMU.
    pub group: Option<u32>,
    /// Other functions of the group that keep VFIO from using it, with their drivers.
    pub in_the_way: Vec<(Address, String)>,
}

impl Host {
    /// Binds the controller at `address` to `lender`. Needs root.
    ///
    /// For the module, the group of the controller is set to strict translation, if it has no other type already
    /// that the module accepts.
    ///
    /// # Errors
    /// [`Error::Usage`] when something uses its disks, which is named; [`Error::Device`] when it
    /// cannot be bound; [`Error::File`] without the rights.
    pub fn bind(&self, address: Address, lender: Lender) -> Result<Bound> {
        let function = self.nvme(address)?;
        if function.group.is_none() && lender == Lender::Vfio {
            return Err(Error::environment(
                format!("{address} is in no IOMMU group: the IOMMU is off"),
                "switch it on (`nvme-gpu doctor` says how)",
            ));
        }
        let users = self.users(&function);
        if !users.is_empty() {
            let list: Vec<String> = users.iter().map(ToString::to_string).collect();
            return Err(Error::usage(
                format!("{address} is in use: {}", list.join("; ")),
                "unmount it, or take it out of what uses it, first",
            ));
        }
        let bound = Bound {
            before: function.driver.clone(),
            group: function.group,
            in_the_way: match lender {
                Lender::Vfio => self.in_the_way(&function),
                Lender::Module => Vec::new(),
            },
        };
        let name = lender.name();
        if function.driver.as_deref() == Some(name) {
            return Ok(bound);
        }
        if !self.exists(format!("sys/bus/pci/drivers/{name}")) {
            let module = name.replace('-', "_");
            return Err(Error::environment(
                format!("the driver {name} is not loaded"),
                format!("load it: `modprobe {module}`"),
            ));
        }
        // From one lender to the other: the driver before is known already.
        if function.driver.as_deref().and_then(Lender::of).is_none() {
            self.remember(address, function.driver.as_deref())?;
        }
        let result =
            self.move_to(&function, Some(lender), name)
                .and_then(|()| match self.driver(address) {
                    Some(driver) if driver == name => Ok(()),
                    _ => Err(Error::environment(
                        format!("{address} was not taken by {name}"),
                        "see the system's log (`dmesg | tail`)",
                    )),
                });
        if result.is_err() {
            // Best effort: the first error is the one to tell.
            let _ = self.give_back(address);
        }
        result.map(|()| bound)
    }

    /// Gives the controller at `address` back to the driver that it had before [`bind`](Self::bind), or
    /// to the one that the kernel chooses. The driver's name, or none when it has none now.
    ///
    /// # Errors
    /// As [`bind`](Self::bind), also when it is bound to none of the [lenders](Lender).
    pub fn unbind(&self, address: Address) -> Result<Option<String>> {
        let function = self.nvme(address)?;
        if function.driver.as_deref().and_then(Lender::of).is_none() {
            let driver = function.driver.as_deref().unwrap_or("no driver");
            return Err(Error::usage(
                format!("{address} is bound to {driver}, not to vfio-pci or nvme_gpu"),
                "nothing is to be done",
            ));
        }
        self.give_back(address)
    }

    /// The number of the user called `name`, or that number itself.
    ///
    /// # Errors
    /// [`Error::Usage`] when no driver has that name.
    pub fn user_id(&self, name: &str) -> Result<u32> {
        let table = self.text("etc/passwd").unwrap_or_default();
        let id = |line: &str| {
            let mut fields = line.split(':');
            let found = fields.next()? == name;
            found.then(|| fields.nth(1)?.parse().ok()).flatten()
        };
        let known = table.lines().find_map(id).or_else(|| name.parse().ok());
        known.ok_or_else(|| {
            Error::usage(
                format!("there is no user '{name}'"),
                "name one of /etc/passwd, or a number",
            )
        })
    }

    /// Makes user `id` the owner of the nodes that VFIO has for the function at `address`: that of IOMMU group `group`,
    /// and its own one where there is one, for iommufd.
    pub fn give_nodes(&self, address: Address, group: u32, id: u32) -> Result<()> {
        let group = self.path(format!("dev/vfio/{group}"));
        let own = self.vfio_node(address).filter(|path| path.exists());
        for path in [Some(group), own].into_iter().flatten() {
            chown(&path, Some(id), None).map_err(Error::file("give away", &path))?;
        }
        Ok(())
    }

    /// VFIO's own node for the function at `address`, where the kernel names one; it need not be there.
    pub(crate) fn vfio_node(&self, address: Address) -> Option<PathBuf> {
        let folder = format!("sys/bus/pci/devices/{address}/vfio-dev");
        let name = self.names(folder).into_iter().next()?;
        Some(self.path(format!("dev/vfio/devices/{name}")))
    }

    /// The NVMe controller at `address`.
    ///
    /// # Errors
    /// [`Error::Environment`] when nothing is there, [`Error::Usage`] when it is something else.
    pub(crate) fn nvme(&self, address: Address) -> Result<Function> {
        let list = "`nvme-gpu list` shows the controllers";
        let function = self.function(address).ok_or_else(|| {
            Error::environment(format!("there is no PCI function {address}"), list)
        })?;
        if function.is_nvme() {
            Ok(function)
        } else {
            let class = function.config.class;
            Err(Error::usage(
                format!("{address} is no NVMe controller: its class is {class:06x}"),
                list,
            ))
        }
    }

    /// Functions that share the group and have a driver other than vfio-pci. Bridges do no harm.
    pub fn in_the_way(&self, function: &Function) -> Vec<(Address, String)> {
        let Some(group) = function.group else {
            return Vec::new();
        };
        let others = self.group(group).into_iter().filter_map(|other| {
            let driver = other.driver?;
            let harmless = matches!(driver.as_str(), "vfio-pci" | "pcieport" | "pci-stub");
            let is_other = other.address != function.address && !harmless;
            is_other.then_some((other.address, driver))
        });
        others.collect()
    }

    fn driver(&self, address: Address) -> Option<String> {
        self.link_name(format!("sys/bus/pci/devices/{address}/driver"))
    }

    fn give_back(&self, address: Address) -> Result<Option<String>> {
        let function = self.nvme(address)?;
        let before = self.text(memory(address));
        match before.as_deref() {
            // It had no driver before.
            Some("") => {
                self.release(&function)?;
                self.write(
                    format!("sys/bus/pci/devices/{address}/driver_override"),
                    "\n",
                )?;
            }
            Some(driver) => self.move_to(&function, None, driver)?,
            None => self.move_to(&function, None, "")?,
        }
        let _ = fs::remove_file(self.path(memory(address)));
        Ok(self.driver(address))
    }

    /// Takes the function from its driver and offers it to the one that `wish` (or its identity)
    /// names, then to `driver` by name if no other driver has taken it.
    fn move_to(&self, function: &Function, wish: Option<Lender>, driver: &str) -> Result<()> {
        let address = function.address;
        let folder = format!("sys/bus/pci/devices/{address}");
        // A line feed takes the wish back.
        let name = wish.map_or("", Lender::name);
        self.write(format!("{folder}/driver_override"), &format!("{name}\n"))?;
        self.release(function)?;
        if wish == Some(Lender::Module) {
            self.translate_strictly(function)?;
        }
        self.write("sys/bus/pci/drivers_probe", &format!("{address}\n"))?;
        let free = self.driver(address).is_none();
        if free && !driver.is_empty() {
            self.write(
                format!("sys/bus/pci/drivers/{driver}/bind"),
                &format!("{address}\n"),
            )?;
        }
        Ok(())
    }

    /// Has the group of a function without a driver translate, and forget addresses when they are unmapped.
    fn translate_strictly(&self, function: &Function) -> Result<()> {
        const STRICT: &str = "DMA";
        let Some(group) = function.group else {
            return Ok(());
        };
        let path = format!("sys/kernel/iommu_groups/{group}/type");
        if self.text(&path).is_none_or(|kind| kind.trim() == STRICT) {
            return Ok(());
        }
        self.write(&path, STRICT).map_err(|error| {
            Error::environment(
                format!("IOMMU group {group} cannot be set to strict translation: {error}"),
                "take the drivers of the other devices of the group away first, or boot with iommu.strict=1",
            )
        })
    }

    fn release(&self, function: &Function) -> Result<()> {
        let address = function.address;
        match self.driver(address) {
            Some(driver) => self.write(
                format!("sys/bus/pci/drivers/{driver}/unbind"),
                &format!("{address}\n"),
            ),
            None => Ok(()),
        }
    }

    fn remember(&self, address: Address, driver: Option<&str>) -> Result<()> {
        let path = self.path(memory(address));
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, driver.unwrap_or_default()))
            .map_err(|source| refused(&path, source))
    }

    fn write(&self, path: impl AsRef<Path>, text: &str) -> Result<()> {
        let path = self.path(path);
        let opened = fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&path);
        opened
            .and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()))
            .map_err(|source| refused(&path, source))
    }
}

fn refused(path: &Path, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::PermissionDenied => Error::environment(
            format!("no permission to write {}", path.display()),
            "run this command as root",
        ),
        _ => Error::file("write", path)(source),
    }
}

/// Where the driver before is remembered, until the next start of the machine.
fn memory(address: Address) -> String {
    format!("run/nvme-gpu/{address}.driver")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::sysfs::testing::Tree;

    const BDF: &str = "0000:01:00.0";

    fn address() -> Address {
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

    fn error(result: Result<impl std::fmt::Debug>) -> String {
        let error = result.unwrap_err();
        format!("{error}: {}", error.remedy())
    }

    #[test]
    fn what_vfio_does_not_take_gets_its_driver_back() {
        // No kernel acts on a made-up tree: the controller stays with nvme.
        let tree = tree("nvme");
        let said = error(tree.host().bind(address(), Lender::Vfio));
        assert!(said.contains("not taken by vfio-pci"), "{said}");
        let line = format!("{BDF}\n");
        assert_eq!(tree.text("sys/bus/pci/drivers/nvme/unbind"), line);
        assert_eq!(tree.text("sys/bus/pci/drivers_probe"), line);
        let folder = format!("sys/bus/pci/devices/{BDF}");
        let wish = tree.text(&format!("{folder}/driver_override"));
        assert_eq!(wish, "\n", "the wish is taken back");
        assert!(!tree.host().exists(memory(address())));
    }

    #[test]
    fn a_controller_of_vfio_is_bound_already() {
        let tree = tree("vfio-pci");
        let bound = tree.host().bind(address(), Lender::Vfio).unwrap();
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
        let said = error(tree.host().bind(address(), Lender::Vfio));
        assert!(
            said.contains("in use: nvme0n1 is mounted at /srv: unmount it"),
            "{said}"
        );
        assert_eq!(tree.text("sys/bus/pci/drivers/nvme/unbind"), "");
    }

    #[test]
    fn every_reason_not_to_bind_is_told() {
        let tree = Tree::new();
        let said = error(tree.host().bind(address(), Lender::Vfio));
        assert!(said.contains("no PCI function"), "{said}");
        tree.function(BDF, &Tree::config(1, 2, 0x02_00_00), "e1000", 7);
        let said = error(tree.host().bind(address(), Lender::Vfio));
        assert!(said.contains("its class is 020000"), "{said}");
        tree.controller(BDF, "nvme", 7);
        let said = error(tree.host().bind(address(), Lender::Vfio));
        assert!(said.contains("modprobe vfio_pci"), "{said}");
        fs::remove_file(
            tree.host()
                .path(format!("sys/bus/pci/devices/{BDF}/iommu_group")),
        )
        .unwrap();
        let said = error(tree.host().bind(address(), Lender::Vfio));
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
        let bound = tree.host().bind(address(), Lender::Vfio).unwrap();
        let other = "0000:02:00.0".parse().unwrap();
        assert_eq!(bound.in_the_way, [(other, "e1000".to_owned())]);
    }

    #[test]
    fn the_module_gets_a_group_of_strict_translation() {
        let tree = tree("vfio-pci");
        tree.file(&memory(address()), "nvme");
        tree.file("sys/bus/pci/drivers/nvme/bind", "");
        let said = error(tree.host().bind(address(), Lender::Module));
        assert!(
            said.contains("nvme_gpu is not loaded: load it: `modprobe nvme_gpu`"),
            "{said}"
        );
        tree.file("sys/bus/pci/drivers/nvme_gpu/bind", "");
        tree.file("sys/kernel/iommu_groups/7/type", "DMA-FQ\n");
        // No kernel acts on a made-up tree: the controller is not taken, and is given back.
        let said = error(tree.host().bind(address(), Lender::Module));
        assert!(said.contains("not taken by nvme_gpu"), "{said}");
        assert_eq!(tree.text("sys/kernel/iommu_groups/7/type"), "DMA");
        let line = format!("{BDF}\n");
        assert_eq!(tree.text("sys/bus/pci/drivers/vfio-pci/unbind"), line);
        assert!(
            !tree.host().exists(memory(address())),
            "it went back to the driver before both"
        );
        let node = Lender::Module.node(address(), Some(7));
        assert_eq!(node, format!("/dev/nvme-gpu-{BDF}"));
    }

    #[test]
    fn giving_back_goes_to_the_driver_before() {
        let tree = tree("vfio-pci");
        tree.file(&memory(address()), "nvme");
        tree.file("sys/bus/pci/drivers/nvme/bind", "");
        tree.host().unbind(address()).unwrap();
        let line = format!("{BDF}\n");
        assert_eq!(tree.text("sys/bus/pci/drivers/vfio-pci/unbind"), line);
        assert_eq!(tree.text("sys/bus/pci/drivers_probe"), line);
        assert!(!tree.host().exists(memory(address())));
    }

    #[test]
    fn what_had_no_driver_before_gets_none() {
        let tree = tree("vfio-pci");
        tree.file(&memory(address()), "");
        tree.host().unbind(address()).unwrap();
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
        let said = error(tree("nvme").host().unbind(address()));
        assert!(
            said.contains("bound to nvme, not to vfio-pci or nvme_gpu"),
            "{said}"
        );
    }
}

//! Exports of the kernel to other machines, from configfs: nvmet, LIO and USB gadgets.

use super::super::SysfsHost;
use super::holder::{DeviceHolder, UnseenUse};
use std::collections::BTreeSet;

/// A part of the kernel that exports block devices.
struct KernelExporter {
    /// Kernel module of the exporter.
    module: &'static str,
    /// Folder of the exporter in configfs.
    root: &'static str,
    /// The folders of its exports under that, with `*` for any name.
    folders: &'static str,
    /// File with the path of the exported device.
    path: &'static str,
    /// The file that says whether the export is active.
    switch: Option<&'static str>,
}

const CONFIG: &str = "sys/kernel/config";

const EXPORTERS: [KernelExporter; 4] = [
    KernelExporter {
        module: "nvmet",
        root: "nvmet",
        folders: "subsystems/*/namespaces/*",
        path: "device_path",
        switch: Some("enable"),
    },
    KernelExporter {
        module: "nvmet",
        root: "nvmet",
        folders: "subsystems/*/passthru",
        path: "device_path",
        switch: Some("enable"),
    },
    KernelExporter {
        module: "target_core_mod",
        root: "target",
        folders: "core/*/*",
        path: "udev_path",
        switch: None,
    },
    KernelExporter {
        module: "usb_f_mass_storage",
        root: "usb_gadget",
        folders: "*/functions/*/*",
        path: "file",
        switch: None,
    },
];

/// A path that the kernel exports.
pub(super) struct ExportedPath {
    pub path: String,
    by: String,
    switch: Option<String>,
}

impl ExportedPath {
    /// Returns the use of `device`, which the path leads to.
    pub fn holder(&self, device: &str) -> DeviceHolder {
        DeviceHolder::Exported {
            device: device.to_owned(),
            by: self.by.clone(),
            switch: self.switch.clone(),
        }
    }

    /// Returns the finding that the target of the path could not be examined.
    pub fn unseen(&self) -> UnseenUse {
        UnseenUse::Path {
            of: self.by.clone(),
            path: self.path.clone(),
        }
    }
}

/// Returns all exports; directories that cannot be read are added to `unseen`.
pub(super) fn exports(host: &SysfsHost, unseen: &mut BTreeSet<UnseenUse>) -> Vec<ExportedPath> {
    let mut found = Vec::new();
    for exporter in &EXPORTERS {
        let root = format!("{CONFIG}/{}", exporter.root);
        if std::fs::read_dir(host.path(&root)).is_err() {
            if host.exists(format!("sys/module/{}", exporter.module)) {
                unseen.insert(UnseenUse::Exports {
                    by: exporter.module,
                });
            }
            continue;
        }
        for folder in expand(host, &root, exporter.folders) {
            let Some(path) = host.text(format!("{folder}/{}", exporter.path)) else {
                if host.exists(format!("{folder}/{}", exporter.path)) {
                    unseen.insert(UnseenUse::Exports {
                        by: exporter.module,
                    });
                }
                continue;
            };
            let switch = exporter.switch.map(|name| format!("{folder}/{name}"));
            let is_off = switch
                .as_ref()
                .and_then(|switch| host.text(switch))
                .is_some_and(|text| text.trim() == "0");
            if !path.is_empty() && !is_off {
                let name = folder.strip_prefix(CONFIG).unwrap_or(&folder);
                found.push(ExportedPath {
                    path,
                    by: format!("the kernel ({})", name.trim_start_matches('/')),
                    switch: switch.map(|switch| format!("/{switch}")),
                });
            }
        }
    }
    found
}

/// Returns the folders under `root` that `pattern` names.
fn expand(host: &SysfsHost, root: &str, pattern: &str) -> Vec<String> {
    let mut found = vec![root.to_owned()];
    for part in pattern.split('/') {
        let below = |folder: &String| match part {
            "*" => host.names(folder),
            name => vec![name.to_owned()],
        };
        let next = found.iter().flat_map(|folder| {
            let names = below(folder);
            names
                .into_iter()
                .map(move |name| format!("{folder}/{name}"))
        });
        found = next.collect();
    }
    found
}

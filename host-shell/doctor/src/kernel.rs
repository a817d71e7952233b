//! Configuration of the running kernel.

use nvme_driver::sysfs::SysfsHost;
use std::fs;

/// Largest configuration in bytes that is read: those of kernels have a quarter of that.
const MOST: usize = 2 << 20;

/// Returns the release of the running kernel: 6.12.9-amd64.
pub fn release(host: &SysfsHost) -> String {
    host.text("proc/sys/kernel/osrelease").unwrap_or_default()
}

/// State of an option in the kernel's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionState {
    /// The option is built in, or a module.
    In,
    /// The option is not set.
    Out,
    /// No configuration can be read.
    Unknown,
}

/// Returns the state of `option`, such as `CONFIG_PCI_P2PDMA`.
pub fn has(host: &SysfsHost, option: &str) -> OptionState {
    let Some(text) = configuration(host) else {
        return OptionState::Unknown;
    };
    let is_set = |line: &str| {
        let value = line
            .strip_prefix(option)
            .and_then(|rest| rest.strip_prefix('='));
        value.is_some_and(|value| matches!(value.trim(), "y" | "m"))
    };
    match text.lines().any(is_set) {
        true => OptionState::In,
        false => OptionState::Out,
    }
}

/// Returns the configuration: from the running kernel, or from the file that the distribution put beside the kernel or
/// its modules.
fn configuration(host: &SysfsHost) -> Option<String> {
    let packed = fs::read(host.path("proc/config.gz")).ok();
    if let Some(text) = packed.and_then(|bytes| unpacked(&bytes)) {
        return Some(text);
    }
    let release = release(host);
    // A name of several parts is none of a kernel.
    if release.is_empty() || release.contains('/') {
        return None;
    }
    host.text(format!("boot/config-{release}"))
        .or_else(|| host.text(format!("lib/modules/{release}/config")))
}

/// Returns the content of a gzip file: a header with optional fields by its flags, then deflated data.
fn unpacked(bytes: &[u8]) -> Option<String> {
    const EXTRA: u8 = 1 << 2;
    const NAME: u8 = 1 << 3;
    const COMMENT: u8 = 1 << 4;
    const CHECKSUM: u8 = 1 << 1;
    let [0x1F, 0x8B, 8, flags, _, _, _, _, _, _, rest @ ..] = bytes else {
        return None;
    };
    let mut rest = rest;
    if flags & EXTRA != 0 {
        let length = u16::from_le_bytes(rest.get(..2)?.try_into().ok()?);
        rest = rest.get(2 + usize::from(length)..)?;
    }
    for text in [NAME, COMMENT] {
        if flags & text != 0 {
            let end = rest.iter().position(|byte| *byte == 0)?;
            rest = &rest[end + 1..];
        }
    }
    if flags & CHECKSUM != 0 {
        rest = rest.get(2..)?;
    }
    let text = miniz_oxide::inflate::decompress_to_vec_with_limit(rest, MOST).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_driver::sysfs::testing::Tree;

    const TEXT: &str =
        "# CONFIG_IOMMUFD is not set\nCONFIG_PCI_P2PDMA=y\nCONFIG_VFIO=m\nCONFIG_NR_CPUS=64\n";

    /// Returns a file of gzip's with a name in its header.
    fn packed(text: &str) -> Vec<u8> {
        let mut bytes = vec![0x1F, 0x8B, 8, 8, 0, 0, 0, 0, 0, 3];
        bytes.extend(b"config\0");
        bytes.extend(miniz_oxide::deflate::compress_to_vec(text.as_bytes(), 6));
        bytes.extend([0; 8]);
        bytes
    }

    fn check(host: &SysfsHost) {
        assert_eq!(has(host, "CONFIG_PCI_P2PDMA"), OptionState::In);
        assert_eq!(has(host, "CONFIG_VFIO"), OptionState::In);
        assert_eq!(has(host, "CONFIG_IOMMUFD"), OptionState::Out);
        assert_eq!(has(host, "CONFIG_PCI"), OptionState::Out);
        assert_eq!(has(host, "CONFIG_NR_CPUS"), OptionState::Out);
    }

    #[test]
    fn the_configuration_is_found_in_each_of_its_places() {
        let tree = Tree::new();
        assert_eq!(has(&tree.host(), "CONFIG_VFIO"), OptionState::Unknown);
        tree.file("proc/sys/kernel/osrelease", "6.12.9\n");
        tree.file("lib/modules/6.12.9/config", TEXT);
        check(&tree.host());
        let tree = Tree::new();
        tree.file("proc/sys/kernel/osrelease", "6.12.9\n");
        tree.file("boot/config-6.12.9", TEXT);
        check(&tree.host());
        let tree = Tree::new();
        tree.file("proc/config.gz", packed(TEXT));
        check(&tree.host());
    }

    #[test]
    fn what_is_no_configuration_is_unknown() {
        let good = packed(TEXT);
        for length in 0..good.len() - 8 {
            // Cut at any length, the data are no gzip file, or end early.
            let _ = unpacked(&good[..length]);
        }
        assert_eq!(unpacked(b"CONFIG_PCI_P2PDMA=y"), None);
        let bomb = packed(&"x".repeat(MOST + 1));
        assert_eq!(unpacked(&bomb), None);
        for flags in 0..=255 {
            let mut odd = good.clone();
            odd[3] = flags;
            let _ = unpacked(&odd);
        }
        let tree = Tree::new();
        tree.file("proc/sys/kernel/osrelease", "../../etc/passwd\n");
        tree.file("boot/config-", TEXT);
        assert_eq!(has(&tree.host(), "CONFIG_VFIO"), OptionState::Unknown);
    }
}

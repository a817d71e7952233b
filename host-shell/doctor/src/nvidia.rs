//! NVIDIA GPUs and the loaded driver: facts from files of the system, and conclusions from published sources.

use nvme_driver::sysfs::{SysfsFunction, SysfsHost};

const NVIDIA: u16 = 0x10DE;
/// The first driver that no longer registers every mapped BAR: open-gpu-kernel-modules, issue 732.
const REGRESSION: (u32, u32) = (550, 54);
/// Driver version that, by issue 1324 of open-gpu-kernel-modules, exports addresses of BAR1 that the
/// IOMMU does not map.
const RAW_ADDRESSES: (u32, u32) = (595, 84);

/// Finds the GPUs of this machine.
pub fn find(host: &SysfsHost) -> Vec<SysfsFunction> {
    let mut all = host.functions();
    all.retain(is_gpu);
    all
}

/// True if the function is an NVIDIA GPU.
pub fn is_gpu(function: &SysfsFunction) -> bool {
    function.config.vendor == NVIDIA && function.config.class >> 16 == 0x03
}

/// Returns the name that the driver gives the GPU.
pub fn model(host: &SysfsHost, gpu: &SysfsFunction) -> Option<String> {
    let file = format!("proc/driver/nvidia/gpus/{}/information", gpu.address);
    let text = host.text(file)?;
    let model = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(model.trim().to_owned()).filter(|model| !model.is_empty())
}

/// True if peers can see all of a GPU's memory: BAR1 has its largest size.
pub fn is_whole(gpu: &SysfsFunction) -> Option<bool> {
    let bar = gpu.config.resizable.iter().find(|bar| bar.bar == 1)?;
    Some(bar.current == bar.largest)
}

/// Support for GPUDirect RDMA that NVIDIA states for a GPU of this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuProduct {
    /// A GeForce: GPUDirect RDMA is available on Tesla and Quadro GPUs (CUDA's guide to GPUDirect RDMA, overview).
    GeForce,
    /// A GPU of another product line.
    Professional,
    /// The driver gives the GPU no name.
    Unnamed,
}

impl GpuProduct {
    /// Returns the support of a GPU.
    pub fn of(host: &SysfsHost, gpu: &SysfsFunction) -> Self {
        match model(host, gpu) {
            None => Self::Unnamed,
            Some(model) if model.contains("GeForce") => Self::GeForce,
            Some(_) => Self::Professional,
        }
    }
}

/// The NVIDIA driver that is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvidiaDriver {
    /// 580.159.04
    pub version: String,
    /// The open kernel modules.
    pub open: bool,
}

impl NvidiaDriver {
    /// Returns the loaded driver; `None` when none is loaded.
    pub fn loaded(host: &SysfsHost) -> Option<Self> {
        let text = host.text("proc/driver/nvidia/version")?;
        let line = text
            .lines()
            .find(|line| line.starts_with("NVRM version:"))?;
        let is_version = |word: &&str| {
            let starts = word.starts_with(|c: char| c.is_ascii_digit());
            starts && word.contains('.')
        };
        Some(Self {
            version: line.split_whitespace().find(is_version)?.to_owned(),
            open: line.contains("Open Kernel Module"),
        })
    }

    /// Parses the major and minor number; 0 for text that is no number.
    fn number(&self) -> (u32, u32) {
        let mut numbers = self
            .version
            .split('.')
            .map(|part| part.parse().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    }

    /// True if the driver certainly registers a mapped BAR with a GPU: those before 550.54 do.
    pub fn registers_bars(&self) -> bool {
        self.number() < REGRESSION
    }

    /// Compares the driver with the one that is reported to export addresses that no IOMMU maps.
    pub fn raw_addresses(&self) -> RawAddresses {
        match self.number() {
            _ if !self.open => RawAddresses::NotOpen,
            number if number < RAW_ADDRESSES => RawAddresses::Earlier,
            number if number == RAW_ADDRESSES => RawAddresses::Reported,
            _ => RawAddresses::Later,
        }
    }
}

/// A driver beside the one of open-gpu-kernel-modules' issue 1324, which is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawAddresses {
    /// The proprietary modules, which the report excludes.
    NotOpen,
    /// An earlier driver, without such a report.
    Earlier,
    /// The reported driver.
    Reported,
    /// A later driver, which may or may not contain a correction.
    Later,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_with_the_reported_ones() {
        let of = |version: &str, open| NvidiaDriver {
            version: version.to_owned(),
            open,
        };
        for (version, open, expected) in [
            ("580.159.04", true, RawAddresses::Earlier),
            ("595.71.05", true, RawAddresses::Earlier),
            ("595.84", true, RawAddresses::Reported),
            ("595.84", false, RawAddresses::NotOpen),
            ("600.1", true, RawAddresses::Later),
            ("nonsense", true, RawAddresses::Earlier),
        ] {
            assert_eq!(of(version, open).raw_addresses(), expected, "{version}");
        }
    }
}

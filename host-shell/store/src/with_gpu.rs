//! Parts of a store that is opened with a GPU: queues that the GPU drives, or a host thread that moves rows for
//! it.

use super::options::{DataPath, GdsUse, StoreOptions};
use nvme_core::bringup::NamespaceInfo;
use nvme_cuda::{
    GdsFile, Gpu, GpuAccess, GpuRows, HostPinning, HostRows, QueueReserve, QueueTier, RowsOptions,
    TierRequest,
};
use nvme_driver::controller::Controller;
use nvme_driver::device::Device;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Parts from which queues for the caller's kernels are created.
pub(crate) struct ForKernels {
    pub access: Arc<GpuAccess>,
    pub info: NamespaceInfo,
    /// Queue pairs that were kept for kernels of the caller.
    pub reserve: Arc<QueueReserve>,
    pub timeout: Duration,
}

/// A file that cuFile reads for the GPU.
pub(crate) struct ByCuFile {
    pub file: GdsFile,
    /// True if nothing else may read the file in place of cuFile.
    pub is_required: bool,
    /// Error of the first read that cuFile refused, so that host threads carried it out.
    refused: Mutex<Option<String>>,
}

impl ByCuFile {
    /// Records that host threads carry out a read that cuFile refused with `error`.
    pub fn note(&self, error: &Error) {
        lock(&self.refused).get_or_insert_with(|| error.to_string());
    }

    /// Returns the data path, with cuFile's share in it.
    pub fn shown(&self, shown: DataPath) -> DataPath {
        let way = self.file.way().name();
        match &*lock(&self.refused) {
            None => DataPath {
                path: format!("{}; reads into GPU memory by cuFile ({way})", shown.path),
                ..shown
            },
            Some(refused) => DataPath {
                why: format!(
                    "cuFile ({way}) refused a read, which host threads carried out ({refused}); {}",
                    shown.why
                ),
                ..shown
            },
        }
    }
}

/// The access of a store's GPU to a drive.
#[derive(Default)]
pub(super) struct GpuDrive {
    gpu: Option<Arc<Gpu>>,
    /// Access of the GPU's kernels to the queues.
    pub access: Option<Arc<GpuAccess>>,
    /// Reason why its kernels have no queues, where a host thread moves all rows for the GPU.
    why: Option<String>,
}

impl GpuDrive {
    /// Creates the host thread's access to the GPU for moving rows.
    pub fn host_rows(&self) -> Option<HostRows> {
        self.gpu.as_ref().map(HostRows::new)
    }
}

/// # Errors
/// [`Error::Usage`] if cuFile is required, since cuFile reads only files.
pub(super) fn check_drive(options: &StoreOptions) -> Result<()> {
    match options.gds {
        GdsUse::Require => Err(Error::usage(
            "gds=require is for files: this process drives the controller itself",
            "open a file, or use gds=off",
        )),
        _ => Ok(()),
    }
}

/// Returns the file at `path` for cuFile, and the data path that it then has.
///
/// # Errors
/// cuFile's reason for not accepting the file, if the user requires cuFile.
pub(super) fn by_cufile(
    path: &Path,
    options: &StoreOptions,
    gpu: Option<&Arc<Gpu>>,
    shown: DataPath,
) -> Result<(Option<ByCuFile>, DataPath)> {
    let Some(gpu) = gpu.filter(|_| options.gds != GdsUse::Off) else {
        return Ok((None, shown));
    };
    let is_required = options.gds == GdsUse::Require;
    match GdsFile::open(gpu, path, false) {
        Ok(file) => {
            let by_cufile = ByCuFile {
                file,
                is_required,
                refused: Mutex::default(),
            };
            Ok((Some(by_cufile), shown))
        }
        Err(error) if is_required => Err(error),
        Err(error) => {
            let why = format!("cuFile was refused ({error}); {}", shown.why);
            Ok((None, DataPath { why, ..shown }))
        }
    }
}

/// Returns the access of the GPU of `options` to the device, if there is a GPU. If the driver registers no host memory,
/// kernels reach no queues, and a host thread moves rows, unless the options ask for a tier or for queues for kernels.
///
/// # Errors
/// The errors of [`GpuAccess::find`], and an error for a GPU that cannot access host memory.
pub(super) fn reach(device: &Arc<dyn Device>, options: &StoreOptions) -> Result<GpuDrive> {
    let (Some(gpu), Some(of_gpu)) = (gpu(options)?, options.gpu) else {
        return Ok(GpuDrive::default());
    };
    let _guest = gpu.enter()?;
    let queues = of_gpu.rows.queues.saturating_add(options.queues);
    let queues = queues.saturating_add(of_gpu.rows.owned);
    let queues = queues.saturating_add(options.kernel_queues);
    let queues = u16::try_from(queues).unwrap_or(u16::MAX);
    let auto = TierRequest::Auto {
        gpu_memory: device.reaches_peers(),
    };
    let wanted = options.tier.map_or(auto, TierRequest::Exactly);
    let found = GpuAccess::find(&gpu, Arc::clone(device), queues, wanted);
    let may_do_without = options.tier.is_none() && options.kernel_queues == 0;
    let (access, why) = match found {
        Ok(access) => (Some(Arc::new(access)), None),
        Err(error) => match gpu.check_pins()? {
            HostPinning::Allocates(why) if may_do_without => (None, Some(why)),
            _ => return Err(error),
        },
    };
    Ok(GpuDrive {
        gpu: Some(gpu),
        access,
        why,
    })
}

/// Returns the GPU of `options`, when there is one.
pub(super) fn gpu(options: &StoreOptions) -> Result<Option<Arc<Gpu>>> {
    let index = options.gpu.map(|of_gpu| of_gpu.index);
    index.map(Gpu::open).transpose()
}

/// Lends `queues` queues to the GPU, and as many more for blocks as the `others` leave.
pub(super) fn rows(
    access: Option<&Arc<GpuAccess>>,
    controller: &Controller,
    info: NamespaceInfo,
    (queues, others): (u32, u32),
    options: &StoreOptions,
) -> Result<Option<Arc<GpuRows>>> {
    let (Some(access), Some(of_gpu)) = (access, options.gpu) else {
        return Ok(None);
    };
    if queues == 0 {
        return Err(Error::usage(
            "the controller grants one queue pair, which leaves none for the GPU",
            "use a controller with more queues (simulator: queues=16)",
        ));
    }
    let entries = of_gpu.rows.entries.max(2).next_power_of_two();
    let lent = RowsOptions {
        queues,
        entries: entries.min(controller.info().capabilities.max_entries),
        ..of_gpu.rows
    }
    .within(controller, others);
    let rows = GpuRows::create(controller, access, info, lent, options.timeout)?;
    Ok(Some(Arc::new(rows)))
}

/// Describes the data path of a drive with a GPU.
pub(super) fn path(reached: &GpuDrive, path: DataPath) -> DataPath {
    if let Some(why) = &reached.why {
        return DataPath {
            why: format!(
                "the driver registers no memory of the host ({why}), so that the GPU reaches no queues: a host thread \
                 moves rows for it, through memory that the driver allocates"
            ),
            ..path
        };
    }
    let Some(access) = &reached.access else {
        return path;
    };
    DataPath {
        data: "gpu",
        tier: Some(access.tier().number()),
        why: format!(
            "{}; the GPU copies rows out of slots in {} to their places",
            access.describe(),
            match access.tier() {
                QueueTier::GpuMemory | QueueTier::GpuRings => "its memory",
                _ => "pinned memory",
            }
        ),
        ..path
    }
}

/// Describes the data path of a file with a GPU.
///
/// # Errors
/// A data path for a GPU to which no host memory can be mapped: each gather would fail.
pub(super) fn path_by_host(gpu: Option<&Arc<Gpu>>, path: DataPath) -> Result<DataPath> {
    let Some(gpu) = gpu else { return Ok(path) };
    let memory = match gpu.check_pins()? {
        HostPinning::Allocates(why) => {
            format!("memory that the driver allocates, since it registers none ({why})")
        }
        _ => "pinned memory".to_owned(),
    };
    Ok(DataPath {
        why: format!(
            "{}; for a GPU a host thread moves rows through {memory}: bind the drive to vfio-pci for reads that the \
             GPU submits",
            path.why
        ),
        ..path
    })
}

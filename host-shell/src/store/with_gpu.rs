//! What a store that is opened with a GPU has besides: queues in its hands, or a host thread that moves rows for it.

use super::options::{DataPath, Gds, StoreOptions};
use crate::controller::Controller;
use crate::cuda::{Access, GdsFile, Gpu, GpuRows, RowsOptions, Tier, TierRequest};
use crate::device::Device;
use crate::error::{Error, Result};
use nvme_core::bringup::NamespaceInfo;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// What queues for kernels of the caller's are made of.
pub(crate) struct ForKernels {
    pub access: Arc<Access>,
    pub info: NamespaceInfo,
    /// Queue pairs that were kept for them.
    pub kept: u32,
    pub timeout: Duration,
}

/// A file that cuFile reads for the GPU.
pub(crate) struct ByCuFile {
    pub file: GdsFile,
    /// Nothing else may read it in its place.
    pub is_required: bool,
}

/// # Errors
/// [`Error::Usage`] where cuFile is required: it reads files.
pub(super) fn check_drive(options: &StoreOptions) -> Result<()> {
    match options.gds {
        Gds::Require => Err(Error::usage(
            "gds=require is for files: this process drives the controller itself",
            "open a file, or use gds=off",
        )),
        _ => Ok(()),
    }
}

/// The file at `path` as cuFile has it, and what carries its data then.
///
/// # Errors
/// Why cuFile does not take it, where it is required.
pub(super) fn by_cufile(
    path: &Path,
    options: &StoreOptions,
    gpu: Option<&Arc<Gpu>>,
    shown: DataPath,
) -> Result<(Option<ByCuFile>, DataPath)> {
    let Some(gpu) = gpu.filter(|_| options.gds != Gds::Off) else {
        return Ok((None, shown));
    };
    let is_required = options.gds == Gds::Require;
    match GdsFile::open(gpu, path, false) {
        Ok(file) => {
            let way = file.way().name();
            let path = format!("{}; reads into GPU memory by cuFile ({way})", shown.path);
            Ok((
                Some(ByCuFile { file, is_required }),
                DataPath { path, ..shown },
            ))
        }
        Err(error) if is_required => Err(error),
        Err(error) => {
            let why = format!("cuFile was refused ({error}); {}", shown.why);
            Ok((None, DataPath { why, ..shown }))
        }
    }
}

/// The device as the GPU of `options` reaches it, when there is one.
pub(super) fn reach(
    device: &Arc<dyn Device>,
    options: &StoreOptions,
) -> Result<Option<Arc<Access>>> {
    let (Some(gpu), Some(of_gpu)) = (gpu(options)?, options.gpu) else {
        return Ok(None);
    };
    let _guest = gpu.enter()?;
    let queues = of_gpu.rows.queues.saturating_add(options.queues);
    let queues = queues.saturating_add(options.kernel_queues);
    let queues = u16::try_from(queues).unwrap_or(u16::MAX);
    let auto = TierRequest::Auto {
        gpu_memory: device.reaches_peers(),
    };
    let wanted = options.tier.map_or(auto, TierRequest::Exactly);
    let access = Access::find(&gpu, Arc::clone(device), queues, wanted)?;
    Ok(Some(Arc::new(access)))
}

/// The GPU of `options`, when there is one.
pub(super) fn gpu(options: &StoreOptions) -> Result<Option<Arc<Gpu>>> {
    let index = options.gpu.map(|of_gpu| of_gpu.index);
    index.map(Gpu::open).transpose()
}

/// Lends `queues` queues to the GPU.
pub(super) fn rows(
    access: Option<&Arc<Access>>,
    controller: &Controller,
    info: NamespaceInfo,
    queues: u32,
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
    };
    let rows = GpuRows::create(controller, access, info, lent, options.timeout)?;
    Ok(Some(Arc::new(rows)))
}

/// What carries the data with a GPU beside the CPU's queues.
pub(super) fn path(access: Option<&Access>, path: DataPath) -> DataPath {
    let Some(access) = access else { return path };
    DataPath {
        data: "gpu",
        tier: Some(access.tier().number()),
        why: format!(
            "{}; the GPU copies rows out of slots in {} to their places",
            access.describe(),
            match access.tier() {
                Tier::GpuMemory | Tier::GpuRings => "its memory",
                _ => "pinned memory",
            }
        ),
        ..path
    }
}

/// What carries the data of a file with a GPU.
pub(super) fn path_by_host(options: &StoreOptions, path: DataPath) -> DataPath {
    if options.gpu.is_none() {
        return path;
    }
    DataPath {
        why: format!(
            "{}; for a GPU a host thread moves rows through pinned memory: bind the drive to vfio-pci for reads \
             that the GPU submits",
            path.why
        ),
        ..path
    }
}

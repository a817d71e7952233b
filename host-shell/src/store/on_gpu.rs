//! A GPU that gathers rows of a store by itself, from and to its own memory, on the caller's stream.
// UNSAFETY: requests hold addresses of GPU memory, for which the caller vouches.
#![allow(unsafe_code)]

use super::options::{DataPath, StoreOptions};
use super::table::Table;
use crate::controller::Controller;
use crate::cuda::{Access, Gpu, GpuRows, Pending, Request, RowTable, RowsOptions, TierRequest};
use crate::device::Device;
use crate::error::{Error, Result};
use nvme_core::bringup::NamespaceInfo;
use std::sync::Arc;

/// The device as the GPU of `options` reaches it, when there is one.
pub(super) fn reach(
    device: &Arc<dyn Device>,
    options: &StoreOptions,
) -> Result<Option<Arc<Access>>> {
    let Some(of_gpu) = options.gpu else {
        return Ok(None);
    };
    let gpu = Gpu::open(of_gpu.index)?;
    let _guest = gpu.enter()?;
    let queues = of_gpu.rows.queues.saturating_add(options.queues);
    let queues = u16::try_from(queues).unwrap_or(u16::MAX);
    let auto = TierRequest::Auto { gpu_memory: false };
    let access = Access::find(&gpu, Arc::clone(device), queues, auto)?;
    Ok(Some(Arc::new(access)))
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
            "{}; the GPU copies rows out of pinned slots to their places",
            access.describe()
        ),
        ..path
    }
}

impl Table {
    /// Gathers rows on a GPU: puts it into `stream`, a `CUstream` of the store's GPU (0 is the default one), and
    /// returns before it runs. Ids, output and row status lie in GPU memory, or in memory of the host that the GPU
    /// reaches.
    ///
    /// It sees every write of the store that had returned before it begins on the GPU. The caller's context and
    /// capture mode stay as they are; the stream may be captured.
    ///
    /// # Safety
    /// The addresses in `request` are valid on the GPU for what it says until the gather has ended, and for as
    /// long as a graph that captured it may be launched.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store without a GPU, of several members, or with rows that no slot holds;
    /// [`Error::Environment`] with the driver's answer.
    pub unsafe fn gather_on_gpu(&self, request: &Request, stream: u64) -> Result<Pending> {
        let [member] = &self.space.members[..] else {
            return Err(Error::usage(
                "a GPU gathers from one device, not from a stripe",
                "open the devices one by one, or gather on the CPU",
            ));
        };
        let rows = member.rows.as_ref().ok_or_else(|| {
            Error::usage(
                format!("{} was opened without a GPU", member.path.device),
                "set `gpu` in the options of a drive (sim:, vfio:, vfio-user:)",
            )
        })?;
        let row_bytes = u32::try_from(self.row_bytes()).map_err(|_| {
            Error::usage(
                format!("rows of {} bytes", self.row_bytes()),
                "use rows of 124 KiB at most",
            )
        })?;
        let table = RowTable {
            first_byte: self.offset(),
            rows: self.rows(),
            row_bytes,
        };
        // SAFETY: the caller's.
        unsafe { rows.gather(&table, request, stream) }
    }
}

#[cfg(test)]
mod tests {
    use crate::store::status::RowStatus;
    use nvme_gpu_kernel::rows::code;

    /// The kernel's numbers are in a crate that a build without CUDA lacks.
    #[test]
    fn rows_end_with_the_same_numbers_on_a_gpu_and_on_the_cpu() {
        for (status, code) in [
            (RowStatus::OutOfRange, code::OUT_OF_RANGE),
            (RowStatus::TimedOut, code::TIMED_OUT),
            (RowStatus::Gone, code::GONE),
            (RowStatus::NotRun, code::NOT_RUN),
        ] {
            assert_eq!(status.code(), code);
        }
        assert_eq!(crate::store::status::OK, code::OK);
    }
}

//! Two GPUs in one process: each with its own store, under a context of the caller that stays current.
// UNSAFETY: calls into the driver library, as a user's program makes them.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::by_host::{DRIVE, STRIPE};
use crate::gather::{Drive, Job, dice, text};
use crate::limits::limit;
use crate::report::{End, Outcome, Report};
use cudarc::driver::sys::{self, CUresult};
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::Gpu;
use std::ptr::null_mut;
use std::sync::Arc;

pub fn all(report: &mut Report, bench: &Bench) {
    report.case("two-gpus", |_| {
        let other = match bench.gpu.index() {
            0 => 1,
            _ => 0,
        };
        match Gpu::open(other) {
            Ok(other) => both(&bench.gpu, &other).into(),
            Err(error) => End::Skipped(text(error)),
        }
    });
}

fn check(call: &str, result: CUresult) -> Outcome<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(format!("{call}: {other:?}")),
    }
}

/// Returns the context of the calling thread.
fn current() -> Outcome<sys::CUcontext> {
    let mut context = null_mut();
    // SAFETY: the call writes one handle.
    check("cuCtxGetCurrent", unsafe {
        sys::cuCtxGetCurrent(&mut context)
    })?;
    Ok(context)
}

/// The user's reference to the primary context of a GPU, which is current from now on.
struct Users {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

impl Users {
    fn of(gpu: &Gpu) -> Outcome<Self> {
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: each writes one handle; released on drop.
        unsafe {
            check(
                "cuDeviceGet",
                sys::cuDeviceGet(&mut device, gpu.index() as i32),
            )?;
            check(
                "cuDevicePrimaryCtxRetain",
                sys::cuDevicePrimaryCtxRetain(&mut context, device),
            )?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
        }
        Ok(Self { device, context })
    }

    /// # Errors
    /// An error if a call of ours left another context current.
    fn is_current(&self, after: &str) -> Outcome<()> {
        match current()? == self.context {
            true => Ok(()),
            false => Err(format!("{after} left another context than the caller's")),
        }
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        // SAFETY: the context was retained once, in `of`; no context is current any more.
        let _ = unsafe {
            sys::cuCtxSetCurrent(null_mut());
            sys::cuDevicePrimaryCtxRelease_v2(self.device)
        };
    }
}

fn both(one: &Arc<Gpu>, two: &Arc<Gpu>) -> Outcome<String> {
    let mut rows = 0;
    for (user, device) in [(one, DRIVE), (two, DRIVE), (two, STRIPE)] {
        let users = Users::of(user)?;
        let open = |gpu| Drive::open_on(gpu, device, limit());
        let drives = [open(one)?, open(two)?];
        users.is_current("opening a store")?;
        let mut throw = dice(4);
        for _ in 0..20 {
            let job = |drive: &Drive, throw: &mut dyn FnMut(u64) -> u64| {
                let table = drive.table(96, 512);
                let ids = (0..300).map(|_| throw(table.rows) as i64).collect();
                Job::new(drive, table, ids, true, 0)
            };
            let jobs = [job(&drives[0], &mut throw)?, job(&drives[1], &mut throw)?];
            users.is_current("memory")?;
            let pending = [
                jobs[0].start(&drives[0], &drives[0].stream)?,
                jobs[1].start(&drives[1], &drives[1].stream)?,
            ];
            users.is_current("a gather")?;
            for ((job, drive), pending) in jobs.iter().zip(&drives).zip(pending) {
                pending.wait(limit()).map_err(text)?;
                let codes = job.check(drive)?;
                if codes.iter().any(|code| *code != code::OK) {
                    return Err(format!("rows failed: {codes:?}"));
                }
                rows += codes.len();
            }
            drop(jobs);
            users.is_current("freeing memory")?;
        }
        drop(drives);
        users.is_current("closing a store")?;
    }
    Ok(format!("{rows} rows to two GPUs at the same time"))
}

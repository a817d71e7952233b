//! Queues of a store's drive for kernels that the caller launches. The store only reserves and creates them; what
//! those kernels write is not ordered with the store's own calls.

use super::Store;
use super::with_gpu::ForKernels;
use nvme_cuda::{KernelQueues, KernelQueuesOptions};
use nvme_driver::error::{Error, Result};

impl Store {
    /// Creates queue pairs, result cells and a buffer for the caller's kernels, which submit commands themselves
    /// (docs/link-the-core.md): at most as many queue pairs as [`kernel_queues`](super::StoreOptions::kernel_queues)
    /// reserved, in all that exist at a time.
    ///
    /// Writes of kernels are not ordered with calls of this store, and its row cache does not see them. The device
    /// stays open until the queues are dropped, too.
    ///
    /// # Errors
    /// [`Error::Usage`] for a file or a stripe, without a GPU, for a store that is for reading only, and for more queue
    /// pairs than are left; [`Error::Environment`] without memory.
    pub fn kernel_queues(&self, options: KernelQueuesOptions) -> Result<KernelQueues> {
        let [member] = &self.space.members[..] else {
            return Err(not_a_drive());
        };
        let (Some(kernels), Some(controller)) = (&member.kernels, &member.controller) else {
            return Err(not_a_drive());
        };
        if let Some((cause, remedy)) = &member.read_only {
            let cause = format!("{cause}, and kernels send what they like");
            return Err(Error::usage(cause, *remedy));
        }
        let ForKernels {
            access,
            info,
            reserve,
            timeout,
        } = kernels;
        KernelQueues::create(controller, access, *info, (options, reserve), *timeout)
    }
}

fn not_a_drive() -> Error {
    Error::usage(
        "kernels submit commands to one drive of a store that was opened with a GPU",
        "open one drive (sim:, vfio:, vfio-user:) with a GPU",
    )
}

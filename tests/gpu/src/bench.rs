//! The GPU with the kernels loaded, and the modes of using them.

use crate::audit::Sampling;
use crate::limits::finish;
use crate::report::Options;
use nvme_gpu_kernel::work::LaunchArguments;
use nvme_host::cuda::{Gpu, Kernel, QueueKernels, Stream};
use std::sync::Arc;

/// One GPU, for all tests.
pub struct Bench {
    pub gpu: Arc<Gpu>,
    pub kernels: QueueKernels,
    pub stream: Stream,
    /// Factor on every deadline, because checking tools slow kernels down.
    pub patience: u64,
    /// Commands of each cell of the matrix.
    pub commands: u64,
    /// The controllers that the protocol auditor watches.
    pub audited: Sampling,
}

impl Bench {
    /// Opens the GPU and compiles the kernels for it.
    pub fn open(options: &Options) -> Result<Self, String> {
        let open = || -> nvme_host::Result<Self> {
            let gpu = Gpu::open(options.gpu)?;
            Ok(Self {
                kernels: QueueKernels::load(&gpu)?,
                stream: Stream::new(&gpu)?,
                gpu,
                patience: options.patience,
                commands: options.commands,
                audited: Sampling::new(options.commands),
            })
        };
        open().map_err(|error| error.to_string())
    }

    /// Waits for the kernel in the stream. One that does not end, or dies, ends the program.
    pub fn wait(&self) {
        finish(&self.stream);
    }

    /// Returns the largest number of blocks of one warp that the GPU holds at a time: a thread of these kernels has
    /// more than 128 registers, of which a multiprocessor has 65,536.
    pub fn resident_warps(&self) -> Result<u32, String> {
        let count = self.gpu.multiprocessors().map_err(|e| e.to_string())?;
        Ok(count * 16)
    }
}

/// The threads that submit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One thread owns a queue.
    Owner,
    /// One warp does.
    Warp,
    /// One block of 128 threads owns each queue.
    Block,
    /// Any thread submits, in full warps.
    Shared,
    /// Any thread submits, one of each warp, with three tokens each.
    Divergent,
}

impl Mode {
    pub const ALL: [Self; 5] = [
        Self::Owner,
        Self::Warp,
        Self::Block,
        Self::Shared,
        Self::Divergent,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Warp => "warp",
            Self::Block => "block",
            Self::Shared => "shared",
            Self::Divergent => "divergent",
        }
    }

    pub fn kernel(self) -> Kernel {
        match self {
            Self::Owner => Kernel::Owner,
            Self::Warp => Kernel::Warp,
            Self::Block => Kernel::Block,
            Self::Shared => Kernel::Shared,
            Self::Divergent => Kernel::Tokens,
        }
    }

    /// Returns grid and block for `queues` queues, and sets the fields of the launch that depend on them.
    pub fn shape(self, queues: u32, launch: &mut LaunchArguments) -> (u32, u32) {
        launch.lanes = 32;
        match self {
            Self::Owner => {
                launch.depth = 32;
                (queues, 1)
            }
            Self::Warp => {
                launch.depth = 64;
                (queues, 32)
            }
            Self::Block => {
                launch.depth = 192;
                (queues, 128)
            }
            Self::Shared => (queues * 4, 128),
            Self::Divergent => {
                launch.depth = 3;
                launch.lanes = 1;
                (queues * 8, 128)
            }
        }
    }
}

/// Path of doorbells to the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Tier 0: doorbells are words of host memory, passed on by a thread.
    Relayed,
    /// Tier 1: the controller's own doorbells; data in pinned host memory.
    Pinned,
    /// Tier 2: the same with data in GPU memory, moved by the copy engine.
    GpuMemory,
}

impl Tier {
    pub const ALL: [Self; 3] = [Self::Pinned, Self::Relayed, Self::GpuMemory];

    pub fn name(self) -> &'static str {
        match self {
            Self::Relayed => "tier0",
            Self::Pinned => "tier1",
            Self::GpuMemory => "tier2",
        }
    }
}

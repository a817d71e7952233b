//! The selection of experts alone: for programs that compute the experts elsewhere.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use nvme_compute_kernel::experts::{ChosenExpert, MOST_EXPERTS, reference};
use nvme_host::{Error, Result};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
pub use gpu::Router;
#[cfg(feature = "cuda")]
pub use nvme_compute_kernel::experts::RouteParameters;

/// Selects the `choices` experts with the largest of each token's `experts` logits, and their weights: by
/// threads of the CPU. Weights are the softmax over the chosen ones, or with `over_all` over all.
///
/// # Errors
/// [`Error::Usage`] for numbers of experts that cannot be, and logits that are no whole tokens.
pub fn route(
    logits: &[f32],
    experts: u32,
    choices: u32,
    over_all: bool,
) -> Result<Vec<ChosenExpert>> {
    check(experts, choices)?;
    if !logits.len().is_multiple_of(experts as usize) {
        return Err(Error::usage(
            format!(
                "the number of logits, {}, is not a multiple of {experts}, the number of experts",
                logits.len()
            ),
            "use as many logits as experts for each token",
        ));
    }
    let each = logits.par_chunks(experts as usize);
    let each = each.map(|logits| reference::route(logits, choices as usize, over_all));
    Ok(each.flatten().collect())
}

/// # Errors
/// [`Error::Usage`] for impossible numbers of experts.
fn check(experts: u32, choices: u32) -> Result<()> {
    match choices > 0 && choices <= experts && experts <= MOST_EXPERTS {
        true => Ok(()),
        false => Err(Error::usage(
            format!("{choices} experts cannot be chosen of {experts}"),
            format!("use {MOST_EXPERTS} experts at most, and 1 of them or more"),
        )),
    }
}

#[cfg(feature = "cuda")]
mod gpu {
    use super::{ChosenExpert, Result, check};
    use nvme_compute::extents::{optional, product};
    use nvme_compute_kernel::experts::RouteParameters;
    use nvme_compute_kernel::{BLOCK_THREADS, EXPERTS_PTX, kernel};
    use nvme_host::cuda::{Gpu, KernelArgument as Memory, KernelFunction, Module};
    use std::sync::Arc;

    /// Blocks of a launch at most.
    const MOST_BLOCKS: u64 = 2048;

    /// The kernel that chooses experts, for one GPU. It stays loaded when this is dropped.
    pub struct Router {
        module: Module,
        route: KernelFunction,
    }

    impl Router {
        /// Loads the kernel.
        ///
        /// # Errors
        /// The errors of [`Module::embedded`].
        pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
            let module = Module::embedded(gpu, EXPERTS_PTX.as_bytes())?;
            let route = module.function(kernel::MOE_ROUTE)?;
            Ok(Self { module, route })
        }

        /// Enqueues the choice in `stream`, a `CUstream` of the GPU, and returns before it runs. The stream may be
        /// captured.
        ///
        /// # Safety
        /// The memory that `route` names is valid on the GPU until the stream has done it, and for as long as a graph
        /// that captured it may be launched; nothing else writes it meanwhile.
        ///
        /// # Errors
        /// [`Error::Usage`](nvme_host::Error::Usage) for numbers of experts that cannot be, and addresses that are no
        /// multiple of 4; [`Error::Device`](nvme_host::Error::Device) with the driver's answer.
        pub unsafe fn route(&self, route: &RouteParameters, stream: u64) -> Result<()> {
            check(route.experts, route.choices)?;
            let threads = u64::from(route.tokens) * 32;
            let blocks = threads.div_ceil(BLOCK_THREADS.into()).min(MOST_BLOCKS) as u32;
            if blocks == 0 {
                return Ok(());
            }
            let logits = product(&[route.tokens, route.experts]);
            let chosen = product(&[
                route.tokens,
                route.choices,
                size_of::<ChosenExpert>() as u32 / 4,
            ]);
            let probabilities = optional(route.probabilities, logits);
            self.module.gpu().judge_apart(
                stream,
                &[
                    Memory::read("logits", route.logits, logits, 4),
                    Memory::written("chosen", route.chosen, chosen, 4),
                    Memory::written("probabilities", route.probabilities, probabilities, 4),
                ],
            )?;
            // SAFETY: the kernel takes one `RouteParameters` and stays loaded; the caller vouches for the addresses.
            unsafe {
                self.module
                    .launch_in(stream, self.route, blocks, BLOCK_THREADS, route)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_has_its_own_choice() {
        let logits = [1.0, 3.0, 2.0, -1.0, -1.0, -2.0];
        let chosen = route(&logits, 3, 2, false).unwrap();
        let experts: Vec<u32> = chosen.iter().map(|one| one.expert).collect();
        assert_eq!(experts, [1, 2, 0, 1]);
        assert!((chosen[2].weight - 0.5).abs() < 1e-6);
        assert!(route(&logits, 4, 2, false).is_err());
        assert!(route(&logits, 3, 4, false).is_err());
        assert!(route(&logits, 3, 0, false).is_err());
        assert!(route(&[], 5000, 1, false).is_err());
        assert!(route(&[], 3, 1, true).unwrap().is_empty());
    }
}

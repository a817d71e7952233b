//! The number of keys of a sequence, which lies in GPU memory.
// UNSAFETY: a load at an address that the host vouches for.
#![allow(unsafe_code)]

use super::FlashParameters;

/// Returns the number of valid keys of a sequence.
///
/// # Safety
/// All memory that [`FlashParameters::counts`] names is allocated and stays so while the kernel runs.
#[inline(always)]
pub unsafe fn keys_of(job: &FlashParameters, sequence: u32) -> u32 {
    if job.counts == 0 {
        return job.key_tokens;
    }
    let count = (job.counts + u64::from(sequence) * 4) as usize as *const u32;
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let count = unsafe { *count };
    if count < job.key_tokens {
        count
    } else {
        job.key_tokens
    }
}

//! Deadlines of waits for a GPU. When one passes, the program ends: a test that gave up and continued would free memory
//! under a kernel that still runs.

use crate::report::Progress;
use nvme_host::Error;
use nvme_host::cuda::Stream;
use std::sync::OnceLock;
use std::time::Duration;

static LIMITS: OnceLock<(Duration, Progress)> = OnceLock::new();

/// Sets the limit of this program, once, and the progress that is told when it gives up.
pub fn set(limit: Duration, progress: Progress) {
    // The program calls it once; unit tests have no kernels.
    let _ = LIMITS.set((limit, progress));
}

/// Returns the longest that an operation, or a command without a fault, may take.
pub fn limit() -> Duration {
    LIMITS
        .get()
        .map_or(Duration::from_secs(60), |limits| limits.0)
}

/// Fails the test that runs and ends the program, since what did not end still uses its memory.
pub fn give_up(why: &str) -> ! {
    match LIMITS.get() {
        Some((_, progress)) => progress.give_up(why),
        None => panic!("{why}"),
    }
}

/// Waits for the work in `stream`.
pub fn finish(stream: &Stream) {
    finish_within(stream, limit());
}

/// Waits for the work in `stream`, which may take `limit`.
pub fn finish_within(stream: &Stream, limit: Duration) {
    if let Err(error) = stream.wait(limit, || Ok(())) {
        give_up(&error.to_string());
    }
}

/// Returns an error in words. One that says that an operation has not ended ends the program.
pub fn text(error: Error) -> String {
    let text = format!("{error} ({})", error.remedy());
    if matches!(error, Error::Unfinished { .. }) {
        give_up(&text);
    }
    text
}

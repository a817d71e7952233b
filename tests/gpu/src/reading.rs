//! Common parts of the tests of kernels that read by themselves: each fault of a controller, and graphs.

use crate::bench::Bench;
use crate::gather::fault_timeout;
use crate::limits::{give_up, limit};
use crate::report::Outcome;
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::RowFailures;
use std::time::{Duration, Instant};

/// Time for which a controller that is gone has to stay gone.
const GONE: Duration = Duration::from_secs(3);
/// Status that the planned faults give to a command: Unrecovered Read Error.
const STATUS: i32 = 0x281;

/// Returns `fault` as an option of the simulator, with its delay, and the deadline of a command under it.
pub fn planned(bench: &Bench, fault: &str) -> (String, Duration) {
    let timeout = fault_timeout(bench, fault);
    let late = format!("{}ms", timeout.as_millis() * 4);
    (fault.replace("LATE", &late), timeout)
}

/// Launches under the fault `name`, until one has failed and the next one has not, or until a controller that is gone
/// has answered nothing for long enough. A launch that returns has checked that failures are marked and that nothing is
/// wrong.
///
/// `of_status` is the largest number of parts of a launch that fail by one command's status, `all` the number that fail
/// when the controller is gone, `what` their name.
pub fn until_whole(
    name: &str,
    (of_status, all): (u64, u64),
    what: &str,
    mut launch: impl FnMut() -> Outcome<RowFailures>,
) -> Outcome<String> {
    // Faults that the protocol allows, or that the queue sees through.
    let is_harmless = matches!(name, "reordered" | "torn-cqe");
    let (begin, mut failed) = (Instant::now(), 0);
    loop {
        let failures = launch()?;
        failed += failures.rows;
        match (name, failures.first.map(|(_, code)| code)) {
            ("status", Some(code)) if code != STATUS || failures.rows > of_status => {
                return Err(format!("{failures:?}"));
            }
            (_, Some(_)) if is_harmless => return Err(format!("{failures:?}")),
            ("all-ones", Some(code::GONE)) if failures.rows >= all && begin.elapsed() > GONE => {
                return Ok(format!(
                    "{failed} {what} failed, and all of a controller that is gone"
                ));
            }
            _ => {}
        }
        if failures.rows == 0 && (failed > 0 || is_harmless || name == "duplicate") {
            return Ok(format!("{failed} {what} failed, then none"));
        }
        if begin.elapsed() > limit() {
            return Err(format!(
                "{failed} {what} failed after {:?}: {failures:?}",
                limit()
            ));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until `ended` launches of a graph have ended, by the count that `count` returns.
pub fn wait_for(ended: u32, count: impl Fn() -> u32) -> Outcome<()> {
    let begin = Instant::now();
    while count() < ended {
        if begin.elapsed() > limit() {
            give_up(&format!("launch {ended} does not end"));
        }
        std::thread::yield_now();
    }
    Ok(())
}

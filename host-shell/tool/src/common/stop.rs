//! Ctrl-C and the signals that end a command like it.

use nvme_host::{Error, Result, exit};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Returns the flag that Ctrl-C, SIGTERM and SIGHUP set; a second Ctrl-C ends the process at once. A signal
/// that was ignored when the process began, as under nohup, stays ignored.
pub fn stop_flag() -> Arc<AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    Arc::clone(FLAG.get_or_init(|| {
        let flag = Arc::new(AtomicBool::new(false));
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        // Without a handler this signal would end the process. With it, a write beyond the limit of file sizes returns
        // an error, after which the incomplete file is removed.
        let _ = signal_hook::flag::register(libc::SIGXFSZ, Arc::default());
        let ignored = ignored_signals();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if ignored & 1 << (signal - 1) != 0 {
                continue;
            }
            // The order matters: the second signal must find the flag set. Without handlers a signal ends the process
            // without a shutdown, which is the system's default.
            let _ = signal_hook::flag::register_conditional_shutdown(
                signal,
                i32::from(exit::INTERRUPTED),
                Arc::clone(&flag),
            );
            let _ = signal_hook::flag::register(signal, Arc::clone(&flag));
        }
        flag
    }))
}

/// Returns the signals that the process was started with as ignored, a bit each, from bit 0 for signal 1 on.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Returns an error once Ctrl-C was pressed, for loops between commands.
pub fn check_stop() -> Result<()> {
    if stop_flag().load(Ordering::Relaxed) {
        Err(Error::Interrupted)
    } else {
        Ok(())
    }
}

//! Another `cargo xtask` beside this one, with its output in a file until it is asked for.

use crate::process::{Failure, target_dir};
use crate::tools::on_path;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

pub struct Background {
    name: String,
    child: Child,
    log: PathBuf,
    began: Instant,
}

/// How one ended.
pub struct Done {
    pub success: bool,
    /// What it printed.
    pub text: String,
    pub seconds: f64,
}

impl Background {
    /// Starts this program with `words`. It gets the processor time that what runs beside it leaves.
    pub fn start(name: &str, words: &[&str]) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::new(format!("{name}: this program's own path: {error}")))?;
        // Linux's SCHED_IDLE, else `nice`: a thread that waits by sched_yield gives its turn to a niced
        // process (10 us a call instead of 1), and keeps it beside an idle one.
        let lower = [("chrt", &["--idle", "0"][..]), ("nice", &["-n", "19"][..])];
        let found = lower
            .iter()
            .find_map(|(name, words)| on_path(name).map(|path| (path, words)));
        let mut command = match found {
            Some((path, words)) => {
                let mut command = Command::new(path);
                command.args(*words).arg(program);
                command
            }
            None => Command::new(program),
        };
        Self::start_command(name, command.args(words))
    }

    fn start_command(name: &str, command: &mut Command) -> Result<Self, Failure> {
        let folder = target_dir().join("xtask");
        let log = folder.join(format!("{name}.log"));
        let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", log.display()));
        std::fs::create_dir_all(&folder).map_err(failed)?;
        let out = File::create(&log).map_err(failed)?;
        let err = out.try_clone().map_err(failed)?;
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        let child = child.map_err(|error| Failure::new(format!("{name}: {error}")))?;
        println!(
            "{name} runs beside what follows; its log: {}",
            log.display()
        );
        Ok(Self {
            name: name.to_string(),
            child,
            log,
            began: Instant::now(),
        })
    }

    /// Waits for its end. The time is until here, or until its log was last written to if that is earlier.
    pub fn wait(mut self) -> Result<Done, Failure> {
        let name = &self.name;
        let status = self.child.wait();
        let status = status.map_err(|error| Failure::new(format!("{name}: {error}")))?;
        let bytes = std::fs::read(&self.log);
        let bytes = bytes
            .map_err(|error| Failure::new(format!("{name}: {}: {error}", self.log.display())))?;
        let idle = std::fs::metadata(&self.log)
            .and_then(|log| log.modified())
            .ok()
            .and_then(|written| written.elapsed().ok());
        let seconds = self
            .began
            .elapsed()
            .saturating_sub(idle.unwrap_or_default());
        Ok(Done {
            success: status.success(),
            text: String::from_utf8_lossy(&bytes).into_owned(),
            seconds: seconds.as_secs_f64(),
        })
    }
}

/// Seconds of processor time of all children that ended: which stage leaves processors idle.
pub fn children_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    ticks(&text, CHILDREN) as f64 / 100.0
}

/// Seconds of processor time that the running process `pid` has used, its threads together.
pub fn process_seconds(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    ticks(&text, ITSELF) as f64 / 100.0
}

/// The field `utime` of /proc/PID/stat, which `stime` follows.
const ITSELF: usize = 14;
/// The field `cutime`, which `cstime` follows.
const CHILDREN: usize = 16;

/// The sum of two fields of /proc/PID/stat, in ticks of 1/100 s (USER_HZ on every Linux of today).
fn ticks(stat: &str, first: usize) -> u64 {
    // The name of the program, in brackets, may hold blanks; field 3 follows it.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields = fields.split_whitespace().skip(first - 3).take(2);
    fields.filter_map(|field| field.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::{Background, CHILDREN, ITSELF, children_seconds, process_seconds, ticks};
    use std::process::Command;

    #[test]
    fn output_and_status_of_a_process_are_kept() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 3"]);
        let done = Background::start_command("test-of-background", &mut command);
        let done = done.unwrap().wait().unwrap();
        assert!(!done.success);
        assert_eq!(done.text, "out\nerr\n");
        assert!(children_seconds() >= 0.0);
    }

    #[test]
    fn times_are_fields_14_and_15_of_children_16_and_17() {
        let stat = "7 (a b) c) S 4 5 6 7 8 9 10 11 12 13 140 15 160 17 18";
        assert_eq!(ticks(stat, ITSELF), 140 + 15);
        assert_eq!(ticks(stat, CHILDREN), 160 + 17);
        assert_eq!(ticks("", ITSELF), 0);
        assert!(process_seconds(std::process::id()) >= 0.0);
    }
}
